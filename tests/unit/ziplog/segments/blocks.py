"""Segments of generated units, and the records that their blocks must hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgpack
from hypothesis import strategies as st

from ziplog.core.entries import Body, Expire, Origin, Place, Skip, Unit, decode_body, encode_body
from ziplog.segments.blocks import layout
from ziplog.segments.entry import Entry
from ziplog.segments.entry_codec import encode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ziplog.segments.blocks import Block

SALT = 0x5A5A5A5B
CLIENT = b"c" * 16


class Row(NamedTuple):
    """A record, decoded on its own."""

    gsn: int
    epoch: int
    timestamp_us: int
    key: bytes | None
    payload: bytes
    #: Writer, batch and row.
    origin: tuple[bytes, int, int] | None


def body_of(contents: Body, form: str) -> bytes:
    """Encode a body as this version does, as an older one did, or as another client may."""
    is_old = contents.origin is None and contents.keys is None
    if form == "ours" or (form == "old" and not is_old):
        return encode_body(contents)
    fields = [contents.timestamp_us, contents.key, contents.payloads]
    if form == "old":
        return msgpack.packb(fields)
    # Every payload with the longest possible header, and a field of a later version.
    origin = contents.origin and [
        contents.origin.writer,
        contents.origin.batch,
        contents.origin.row,
    ]
    payloads = b"".join(b"\xc6" + len(p).to_bytes(4, "big") + p for p in contents.payloads)
    head = b"\xdd" + len(contents.payloads).to_bytes(4, "big")
    parts = [msgpack.packb(field) for field in fields[:2]]
    ends = [msgpack.packb(origin), msgpack.packb(contents.keys), b"\x07"]
    return b"\x96" + b"".join(parts) + head + payloads + b"".join(ends)


sizes = st.one_of(st.integers(0, 40), st.sampled_from([255, 256, 300, 65535, 65536]))
payloads = st.lists(
    st.tuples(sizes, st.integers(0, 3)).map(lambda pair: bytes([pair[1]]) * pair[0]),
    min_size=1,
    max_size=20,
) | st.builds(lambda size, count: [b"e" * size] * count, sizes, st.integers(1, 20))
origins = st.builds(
    Origin, st.sampled_from([b"v" * 16, b"w" * 16]), st.integers(0, 300), st.integers(0, 70000)
)
keys = st.none() | st.binary(max_size=300)
timestamps = st.integers(-(2**62), 2**62 - 1)


def with_keys(drawn: tuple[int, list[bytes], Origin | None, list[bytes | None]]) -> Body:
    """Return a body with a key for each record."""
    timestamp_us, held, origin, named = drawn
    return Body(timestamp_us, None, held, origin, (named * len(held))[: len(held)])


bodies = st.builds(Body, timestamps, keys, payloads, st.none() | origins) | st.tuples(
    timestamps, payloads, st.none() | origins, st.lists(keys, min_size=1, max_size=20)
).map(with_keys)
#: For each unit: positions skipped before it, its contents, its encoding, the entry after it.
units = st.lists(
    st.tuples(
        st.integers(0, 3),
        bodies,
        st.sampled_from(["ours", "ours", "old", "foreign"]),
        st.sampled_from(["", "", "skip", "expire"]),
    ),
    max_size=12,
)


def entries_of(parts: Iterable[tuple[int, Body, str, str]], base: int = 1) -> list[Entry]:
    """Return the entries of a log with these units, from position `base` and number 1 on."""
    entries: list[Entry] = []
    gsn = base
    for gap, contents, form, after in parts:
        gsn += gap
        gsns = list(range(gsn, gsn + 2 * len(contents.payloads), 2))
        gsn = gsns[-1] + 1
        fseq = len(entries) + 1
        body = body_of(contents, form)
        entries.append(Entry(fseq, 1, Place(CLIENT, fseq, 1, gsn // 50, gsns, 7, body)))
        if after == "skip":
            entries.append(Entry(fseq + 1, 1, Skip(gsn, gsn + 4)))
            gsn += 4
        elif after == "expire":
            entries.append(Entry(fseq + 1, 1, Expire(CLIENT)))
    return entries


def stored(entries: Iterable[Entry], salt: int = SALT) -> bytes:
    """Return a segment's bytes."""
    parts: list[bytes] = []
    place = 0
    for entry in entries:
        place = entry.fseq or place
        parts.append(encode(entry, salt, place, 0))
    return b"".join(parts)


def rows_of(entries: Iterable[Entry]) -> list[Row]:
    """Decode record by record."""
    places = [entry.decision for entry in entries if isinstance(entry.decision, Place)]
    return rows_of_units(Unit(place.epoch, place.gsns, place.body or b"") for place in places)


def rows_of_units(units: Iterable[Unit]) -> list[Row]:
    """Decode record by record."""
    rows: list[Row] = []
    for unit in units:
        body = decode_body(unit.body, len(unit.gsns))
        for index, (gsn, payload) in enumerate(zip(unit.gsns, body.payloads, strict=True)):
            origin = body.origin and (
                body.origin.writer, body.origin.batch, body.origin.row + index,
            )  # fmt: skip
            key = body.key if body.keys is None else body.keys[index]
            rows.append(Row(gsn, unit.epoch, body.timestamp_us, key, payload, origin))
    return rows


def rows_in(block: Block) -> list[Row]:
    """Read a block's columns, one record after the other."""
    columns, data = memoryview(block.columns), memoryview(block.data)
    where = layout(block.rows, has_keys=block.has_keys)
    assert len(columns) == where.size
    assert where.size % 8 == 0
    gsns, epochs, timestamps = (columns[part].cast("q") for part in where[:3])
    values, keys = columns[where.values].cast("i"), columns[where.keys].cast("i")
    bits = int.from_bytes(columns[where.key_bits], "little")
    origins: dict[int, tuple[bytes, int, int]] = {}
    for run in block.origins:
        for index in range(run.count):
            origin = run.origin
            assert run.at + index not in origins
            origins[run.at + index] = (origin.writer, origin.batch, origin.row + index)
    rows: list[Row] = []
    for index in range(block.rows):
        start, end = values[2 * index], values[2 * index + 1]
        key = None
        if bits >> index & 1:
            key = bytes(data[keys[2 * index] : keys[2 * index + 1]])
        rows.append(
            Row(
                gsns[index], epochs[index], timestamps[index], key, bytes(data[start:end]),
                origins.get(index),
            )
        )  # fmt: skip
        if key is None and len(keys):
            assert (keys[2 * index], keys[2 * index + 1]) == (0, 0)
    # A variable-length array of all bounds requires it.
    assert list(values) == sorted(values)
    return rows
