"""Test data: units with keys, origins, duplicates, and holes between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hypothesis import strategies as st

from ziplog.core.entries import Body, Origin, Unit, encode_body
from ziplog.segments.blocks import Block, block_of_units

if TYPE_CHECKING:
    from tests.unit.ziplog.segments.blocks import Row

WRITERS = (b"a" * 16, b"b" * 16)
EPOCH_GSNS = 10


class Draft(NamedTuple):
    """A unit without positions."""

    #: Number of positions before it, and between its records.
    gap: int
    payloads: list[bytes]
    key: bytes | None
    timestamp_us: int
    #: Writer, batch and row.
    origin: tuple[int, int, int] | None
    #: Instead of the key: one for each of the first records, again and again.
    keys: list[bytes | None] | None = None


texts = st.text(max_size=6).map(str.encode)
drafts = st.builds(
    Draft,
    gap=st.integers(1, 3),
    payloads=st.lists(st.binary(max_size=12) | texts, min_size=1, max_size=5),
    key=st.none() | st.binary(max_size=4),
    timestamp_us=st.integers(-3, 3),
    origin=st.none() | st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 6)),
    keys=st.none() | st.lists(st.none() | st.binary(max_size=4), min_size=1, max_size=5),
)


def placed(found: list[Draft]) -> list[Unit]:
    """Return the units at ascending positions."""
    units: list[Unit] = []
    gsn = 0
    for draft in found:
        gsns = []
        for _ in draft.payloads:
            gsn += draft.gap
            gsns.append(gsn)
        origin = None
        if draft.origin is not None:
            writer, batch, row = draft.origin
            origin = Origin(WRITERS[writer], batch, row)
        key, keys = draft.key, draft.keys
        if keys is not None:
            key, keys = None, (keys * len(gsns))[: len(gsns)]
        body = encode_body(Body(draft.timestamp_us, key, draft.payloads, origin, keys))
        units.append(Unit(gsns[0] // EPOCH_GSNS, gsns, body))
    return units


def once(rows: list[Row]) -> list[Row]:
    """Return the records without duplicates, computed directly from the definition."""
    last: dict[bytes, list[int]] = {}
    kept = []
    for row in rows:
        if row.origin is not None:
            writer, *place = row.origin
            if place <= last.get(writer, [-1, -1]):
                continue
            last[writer] = place
        kept.append(row)
    return kept


def cut(units: list[Unit], sizes: list[int], start: int = 1) -> list[Block]:
    """Return the units in blocks of the given sizes, the rest in the last one; none overlaps."""
    blocks: list[Block] = []
    for size in [*sizes, len(units)]:
        taken, units = units[:size], units[size:]
        if taken:
            stop = taken[-1].gsns[-1] + 1
            blocks.append(block_of_units(taken, start, stop))
            start = stop
    return blocks
