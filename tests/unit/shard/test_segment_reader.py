"""Lookup of single positions in a stored block, without reading the rest of the block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tests.unit.shard.logs import expire, mark, place, reopen, skip
from ziplog.segments import entry_codec
from ziplog.segments.entry import UnreadableError
from ziplog.segments.entry_codec import EXPIRE, decode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shard.storage.segment_store import SegmentStore
    from ziplog.segments.entry import Entry
    from ziplog.segments.segment import Segment

    Opened = Callable[..., SegmentStore]

SALT = 0x5A17C0DE

#: An entry's kind, its distance to the one before, and its length (positions, or body bytes).
kinds = st.tuples(
    st.sampled_from(["place", "unit", "skip", "expire", "mark"]),
    st.integers(1, 3),
    st.integers(0, 40),
)
#: A kind of damage, its offset (in thousandths), and its size.
harms = st.tuples(
    st.sampled_from(["flip", "zero", "cut", "copy"]),
    st.integers(0, 999),
    st.integers(1, 400),
)


def entries_of(wanted: list[tuple[str, int, int]]) -> list[Entry]:
    entries, fseq, gsn = [], 0, 0
    for kind, gap, size in wanted:
        if kind == "mark":
            entries.append(mark(fseq))
            continue
        fseq, first = fseq + 1, gsn + gap
        match kind:
            case "place":
                gsn, entry = first, place(fseq, [first], b"b" * size)
            case "unit":
                gsn, entry = first + 4, place(fseq, [first, first + 1, first + 4], b"u" * size)
            case "skip":
                gsn, entry = first + size, skip(fseq, first, first + size + 1)
            case _:
                entry = expire(fseq)
        entries.append(entry)
    return entries


def written(entries: list[Entry]) -> bytes:
    """Return the file contents of entries."""
    pieces: list[bytes] = []
    fseq = 0
    for entry in entries:
        fseq = entry.fseq or fseq
        pieces.append(entry_codec.encode(entry, SALT, fseq, 0))
    return b"".join(pieces)


def harmed(data: bytes, harm: tuple[str, int, int]) -> bytes:
    kind, where, size = harm
    at = len(data) * where // 1000
    match kind:
        case "flip":
            return data[:at] + bytes([data[at] ^ 1 << size % 8]) + data[at + 1 :]
        case "zero":
            hole = bytes(len(data[at : at + size]))
            return data[:at] + hole + data[at + size :]
        case "cut":
            return data[:at] + data[at + size :]
        case _:  # a piece of the same file at a wrong offset
            piece = data[:size][: len(data) - at]
            return data[:at] + piece + data[at + len(piece) :]


def by_all(data: bytes, gsn: int) -> Entry | None:
    """Return the complete entry with a position, by a scan of all entries."""
    for found in entry_codec.walk(data, SALT):
        if found.is_whole and found.kind < EXPIRE and found.first <= gsn <= found.last:
            return decode(data, found, "")
    return None


@examples(200)
@given(wanted=st.lists(kinds, min_size=1, max_size=25))
def test_what_is_whole_is_found_at_once(wanted: list[tuple[str, int, int]]) -> None:
    data = written(entries_of(wanted))
    for gsn in range(1, 200):
        found = entry_codec.seek(data, gsn, SALT)
        assert (found and decode(data, found, "")) == by_all(data, gsn), gsn


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 300_000])
def test_a_long_unit_is_stored_in_the_same_form_as_a_short_one(size: int) -> None:
    entry = place(7, [3, 4, 9], bytes(range(256)) * (size // 256) + b"b" * (size % 256))
    data = written([entry])
    assert data[entry_codec.HEADER_BYTES :] == msgspec.msgpack.encode(entry)
    (found,) = entry_codec.walk(data, SALT)
    assert (found.is_whole, found.first, found.last) == (True, 3, 9)
    assert decode(data, found, "") == entry


@examples(400)
@given(
    wanted=st.lists(kinds, min_size=1, max_size=25),
    harm=st.lists(harms, min_size=1, max_size=3),
)
def test_in_damaged_bytes_it_finds_what_was_written_or_nothing(
    wanted: list[tuple[str, int, int]], harm: list[tuple[str, int, int]]
) -> None:
    data = good = written(entries_of(wanted))
    for one in harm:
        data = harmed(data, one) if data else data
    for gsn in range(1, 200):
        found = entry_codec.seek(data, gsn, SALT)
        assert found is None or decode(data, found, "") == by_all(good, gsn), gsn


def answer(ask: Callable[[int], Entry | None], gsn: int) -> Entry | str | None:
    try:
        return ask(gsn)
    except UnreadableError:
        return "unreadable"


def in_full(store: SegmentStore, gsn: int) -> Entry | None:
    """Do the same as `find`, by a scan of the whole block."""
    segment: Segment = store._segments[0]
    if gsn > segment.last:
        store._check_torn(segment, gsn)
        return None
    data, entries = segment.read(store._directory, segment.block_at(gsn))
    found = next((found for found in entries if found.last >= gsn), None)
    if found is None or found.first > gsn:
        return None
    entry = decode(data, found, segment.name)
    gsns = getattr(entry.decision, "gsns", None)
    return entry if gsns is None or gsn in gsns else None


@examples(100)
@given(
    wanted=st.lists(kinds, min_size=1, max_size=25),
    harm=st.lists(harms.filter(lambda one: one[0] != "copy"), max_size=2),
)
def test_damage_and_absence_are_distinguished_by_the_whole_block(
    tmp_path_factory: pytest.TempPathFactory,
    wanted: list[tuple[str, int, int]],
    harm: list[tuple[str, int, int]],
) -> None:
    """If the lookup finds nothing, the answer is that of the whole block."""
    directory: Path = tmp_path_factory.mktemp("seek") / "segments"
    store = reopen(directory)
    entries = entries_of(wanted)
    for entry in entries:
        store.append(entry)
    right = {gsn: store.find(gsn) for gsn in range(1, 200)}
    assert store.close()
    (path,) = directory.glob("*.seg")
    data = path.read_bytes()
    for one in harm:
        data = harmed(data, one) if data else data
    path.write_bytes(data)
    store = reopen(directory)
    for gsn, entry in right.items():
        full = answer(lambda gsn: in_full(store, gsn), gsn)
        # The lookup may find an entry after damage that a scan of the block cannot reach.
        assert answer(store.find, gsn) in ([full] if full != "unreadable" else [full, entry]), gsn
        assert full in (["unreadable", entry] if harm else [entry]), gsn
    store.close()


def test_a_read_checks_what_it_wants_and_no_more(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two checksums each, regardless of the number of entries in the block."""
    store = opened()
    for fseq in range(1, 401):
        store.append(place(fseq, [fseq * 2]) if fseq % 2 else skip(fseq, fseq * 2, fseq * 2 + 1))
    assert store.close()
    store = opened()
    assert not store._active.ends, "there is more than one block"
    sums = 0

    def counted(data: bytes | memoryview) -> int:
        nonlocal sums
        sums += 1
        return real(data)

    real = entry_codec.crc32c
    monkeypatch.setattr(entry_codec, "crc32c", counted)
    for fseq in (1, 2, 200, 399, 400):
        sums = 0
        entry = store.find(fseq * 2)
        assert entry is not None
        assert entry.fseq == fseq
        assert sums == 2
