"""Rows files of sealed segments: contents, conditions for building, deletion."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

from shard.archive import block_builder
from shard.archive.block_builder import BlockBuilder
from shard.storage.store import FullError
from tests.unit.shard.archive.logs import (
    WRITER,
    end_of,
    fill,
    log,
    make,
    open_store,
    records,
    unit,
    walk,
)
from tests.waiting import wait_until
from ziplog.core.entries import Origin
from ziplog.segments.block_reader import BlockReader
from ziplog.segments.blocks import Block

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shard.storage.segment_store import SegmentStore
    from tests.unit.shard.archive.processes import Process


def names(directory: Path, suffix: str) -> list[str]:
    return sorted(path.stem for path in directory.glob(f"*.{suffix}"))


def sealed_end(store: SegmentStore) -> int:
    """Return the start of the active segment."""
    return store._segments[-1].base


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_blocks_cover_sealed_segments_without_a_gap(segments: Path) -> None:
    store = open_store(segments)
    entries = log(60)
    fill(store, entries)
    make(segments)
    archive = BlockReader(segments)
    end = sealed_end(store)
    rows, blocks, reached = walk(archive, 1, 2**60)
    assert reached == end < end_of(entries)
    assert rows == records(entries, 1, end)
    assert len(blocks) > len(names(segments, "seg")) > 5
    assert archive.block(end) == 0
    # The newest segment has none.
    assert names(segments, "rows") == names(segments, "seg")[:-1]
    # From the middle of a block on.
    for gsn in range(1, end, 13):
        assert walk(archive, gsn, 2**60)[0] == records(entries, gsn, end)
    store.close()


def test_rows_come_with_time_and_are_noticed(segments: Path) -> None:
    store = open_store(segments)
    entries = log(80)
    fill(store, entries[:30])
    archive = BlockReader(segments)
    assert archive.block(1) == 0
    make(segments)
    first = walk(archive, 1, 2**60)[2]
    fill(store, entries[30:])
    assert walk(archive, 1, 2**60)[2] == first
    make(segments)
    rows, _, reached = walk(archive, 1, 2**60)
    assert reached == sealed_end(store) > first
    assert rows == records(entries, 1, reached)
    store.close()


def test_only_what_is_stable_gets_rows(segments: Path) -> None:
    store = open_store(segments)
    entries = log(40)
    fill(store, entries)
    third = store._segments[2]
    make(segments, stable=third.base_fseq - 2)
    assert len(names(segments, "rows")) == 1
    make(segments, stable=third.base_fseq - 1)
    assert len(names(segments, "rows")) == 2
    store.close()


def test_the_first_entry_without_rows_is_reported_before_each_file_and_at_the_end(
    segments: Path,
) -> None:
    store = open_store(segments)
    fill(store, log(40))
    bases = [segment.base_fseq for segment in store._segments]
    reported: list[int] = []
    BlockBuilder(segments).build(lambda: bases[2] - 1, reported.append)
    assert reported == bases[:3]
    reported.clear()
    BlockBuilder(segments).build(lambda: 2**60, reported.append)
    assert reported == bases[2:]
    store.close()


def test_the_process_reports_it_to_its_server(
    segments: Path, started: Callable[..., Process]
) -> None:
    store = open_store(segments)
    fill(store, log(40))
    archive = started(segments)
    assert archive.shared.archive_next == 0
    archive.notify()
    last = store._segments[-1].base_fseq
    wait_until(lambda: archive.shared.archive_next == last, "all sealed segments have rows")
    store.close()


def test_existing_rows_are_not_built_again(segments: Path) -> None:
    store = open_store(segments)
    fill(store, log(40))
    make(segments)
    before = {path: path.stat().st_ino for path in segments.glob("*.rows")}
    make(segments)
    assert {path: path.stat().st_ino for path in segments.glob("*.rows")} == before
    store.close()


def test_a_trim_takes_rows_along(segments: Path) -> None:
    store = open_store(segments)
    entries = log(60)
    fill(store, entries)
    make(segments)
    archive = BlockReader(segments)
    gone = names(segments, "seg")[:2]
    third = store._segments[2]
    start = third.base
    store.trim(start + 1)
    assert store.flush()
    assert not set(gone) & {*names(segments, "rows"), *names(segments, "seg")}
    assert archive.block(1) == start
    assert walk(archive, start, 2**60)[0] == records(entries, start, sealed_end(store))
    store.close()


def test_a_cut_takes_rows_along(segments: Path) -> None:
    store = open_store(segments)
    entries = log(60)
    for entry in entries:
        store.append(entry)
    assert store.flush()
    make(segments)
    archive = BlockReader(segments)
    assert walk(archive, 1, 2**60)[2] == sealed_end(store)
    segment = store._segments[4]
    kept = segment.base_fseq + 1
    store.truncate(kept)
    assert len(names(segments, "rows")) == 4
    assert walk(archive, 1, 2**60)[2] == segment.base
    # The entries after the cut are another log.
    others = log(30, first=kept + 1, gsn=store.last_end + 100)
    fill(store, others)
    make(segments)
    rows, _, reached = walk(archive, 1, 2**60)
    assert reached == sealed_end(store)
    assert rows == records(entries[:kept] + others, 1, reached)
    store.close()


def test_rows_are_gone_before_a_cut_counts(segments: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(segments)
    for entry in log(60):
        store.append(entry)
    assert store.flush()
    make(segments)
    changing = {segment.block_file_name for segment in store._segments[4:]}
    there: list[set[str]] = []

    def create(*_: Any) -> None:
        there.append({path.name for path in segments.iterdir()})
        raise FullError("no space")

    monkeypatch.setattr("shard.storage.segment_store.create", create)
    with pytest.raises(FullError):
        store.truncate(store._segments[4].base_fseq + 1)
    (names_then,) = there
    assert not changing & names_then
    assert store._segments[3].block_file_name in names_then
    # Nothing was cut, so they are built again.
    make(segments)
    assert walk(BlockReader(segments), 1, 2**60)[2] == sealed_end(store)
    store.close()


def test_rows_of_a_segment_of_another_size_are_none(segments: Path) -> None:
    store = open_store(segments)
    fill(store, log(60))
    make(segments)
    archive = BlockReader(segments)
    third = store._segments[2]
    with (segments / third.name).open("ab") as file:
        file.write(b"?")
    (segments / "touched").touch()
    assert walk(archive, 1, 2**60)[2] == third.base
    store.close()


def test_two_changes_at_the_same_mtime_are_noticed(segments: Path) -> None:
    store = open_store(segments)
    fill(store, log(60))
    archive = BlockReader(segments)
    assert archive.block(1) == 0
    times = segments.stat()
    make(segments)
    os.utime(segments, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert isinstance(archive.block(1), Block)
    store.close()


def test_a_log_after_a_reset_has_no_old_rows(segments: Path) -> None:
    store = open_store(segments)
    fill(store, log(60))
    make(segments)
    archive = BlockReader(segments)
    store.reset(100, 5_000)
    assert names(segments, "rows") == []
    assert archive.block(1) == 0
    entries = log(30, first=101, gsn=5_100)
    fill(store, entries)
    make(segments)
    assert archive.block(1) == 5_000
    assert walk(archive, 5_000, 2**60)[0] == records(entries, 0, sealed_end(store))
    store.close()


def test_void_entries_are_not_served_before_their_deletion(
    segments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(segments)
    entries = log(60)
    for entry in entries:
        store.append(entry)
    assert store.flush()
    make(segments)
    kept = store._segments[4].base_fseq + 1
    end = store._segments[4].base
    # The server dies just after the rename of the new file; rows were built just before.
    rows = {path: path.read_bytes() for path in segments.glob("*.rows")}
    monkeypatch.setattr("shard.storage.segment_store.remove_void", lambda *_: os._exit)
    with pytest.raises(TypeError):
        store.truncate(kept)
    for path, content in rows.items():
        path.write_bytes(content)
    archive = BlockReader(segments)
    assert walk(archive, 1, 2**60)[2] == end
    # They are not built again either.
    make(segments)
    assert walk(BlockReader(segments), 1, 2**60)[2] == end


@pytest.mark.parametrize("how", ["append", "seal"])
def test_what_is_repaired_reaches_to_where_the_next_one_begins(segments: Path, how: str) -> None:
    entries = log(60)
    store = open_store(segments, 40_000)
    for part in (entries[:20], entries[20:40]):
        fill(store, part)
    store.close()
    # The end of the newest file is damaged, headers too; a note records that it was stored.
    (path,) = segments.glob("*.seg")
    content = path.read_bytes()
    path.write_bytes(content[:-6000] + bytes(6000))
    store = open_store(segments, 1_000 if how == "append" else 40_000)
    assert store._active.is_torn
    assert store.mark is not None
    if how == "seal":
        store.seal(2**60)
        assert len(store._segments) == 1, "it waits for the repair"
    fill(store, entries[40:44])
    ((first, last),) = store.damage
    assert store.repair([entry for entry in entries if first <= entry.fseq <= last])
    fill(store, entries[44:])
    store._segment_bytes = 1
    more = [unit(61, end_of(entries)), unit(62, end_of(entries) + 10)]
    fill(store, more)
    make(segments)
    archive = BlockReader(segments)
    end = sealed_end(store)
    for start in range(1, end, 7):
        rows, _, reached = walk(archive, start, end)
        assert reached >= end
        assert rows == records(entries + more, start, end)
    store.close()


def test_damage_is_left_out_until_it_is_repaired(
    segments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(segments)
    entries = log(60, origins=True)
    fill(store, entries)
    third = store._segments[2]
    damage(segments / third.name, 300)
    making = BlockBuilder(segments)
    making.build(lambda: 2**60)
    archive = BlockReader(segments)
    end = sealed_end(store)
    after = store._segments[3].base
    assert walk(archive, 1, 2**60)[2] == third.base
    # The next file begins with its own entries: the end of the file before is unknown.
    begin = archive.block(third.base)
    assert begin == next(row.gsn for row in records(entries) if row.gsn >= after)
    assert walk(archive, begin, 2**60)[0] == records(entries, begin, end)
    # The writer table is unknown after it.
    assert archive.writers(end)[0] == third.base
    # It is not read repeatedly.
    with monkeypatch.context() as patch:
        patch.setattr(making, "_build", lambda task: pytest.fail(f"{task} again"))
        making.build(lambda: 2**60)
    missing = [
        entry for entry in entries if third.base_fseq <= entry.fseq < store._segments[3].base_fseq
    ]
    store.close()
    store = open_store(segments)
    assert store.repair(missing)
    making.build(lambda: 2**60)
    rows, _, reached = walk(archive, 1, 2**60)
    assert reached == end
    assert rows == records(entries, 1, end)
    position, writers = archive.writers(end)
    assert position == end
    assert writers.export() == [expected_writer(entries, end)]
    store.close()


def expected_writer(entries: list[Any], end: int) -> tuple[bytes, int, int]:
    last = max(row.origin[1:] for row in records(entries, 0, end) if row.origin is not None)
    return (WRITER, *last)


def test_a_repair_takes_rows_along(segments: Path) -> None:
    store = open_store(segments)
    entries = log(60)
    fill(store, entries)
    make(segments)
    third = store._segments[2]
    damage(segments / third.name, 300)
    archive = BlockReader(segments)
    # The block's checksum shows the damage.
    rows, _, reached = walk(archive, 1, 2**60)
    assert third.base <= reached < store._segments[3].base
    assert rows == records(entries, 1, reached)
    behind = archive.block(reached)
    assert isinstance(behind, int)
    assert walk(archive, behind, 2**60)[0] == records(entries, behind, sealed_end(store))
    missing = [
        entry for entry in entries if third.base_fseq <= entry.fseq < store._segments[3].base_fseq
    ]
    assert store.repair(missing)
    assert third.block_file_name not in {path.name for path in segments.iterdir()}
    make(segments)
    assert walk(archive, 1, 2**60)[0] == records(entries, 1, sealed_end(store))
    store.close()


def test_a_segment_that_is_missing_is_a_hole(segments: Path) -> None:
    store = open_store(segments)
    entries = log(60)
    fill(store, entries)
    third, fourth = store._segments[2:4]
    (segments / third.name).unlink()
    make(segments)
    archive = BlockReader(segments)
    # The second file's end is not known to be complete.
    second = store._segments[1]
    assert walk(archive, 1, 2**60)[2] == second.base
    begin = archive.block(second.base)
    assert begin == next(row.gsn for row in records(entries) if row.gsn >= fourth.base)
    store.close()


@pytest.mark.parametrize("at", [3, -3, -20, 100])
def test_rows_that_are_damaged_are_none(segments: Path, at: int) -> None:
    store = open_store(segments)
    entries = log(60)
    fill(store, entries)
    make(segments)
    path = segments / store._segments[1].block_file_name
    size = path.stat().st_size
    damage(path, at % size)
    archive = BlockReader(segments)
    rows, _, reached = walk(archive, 1, 2**60)
    assert rows == records(entries, 1, reached)
    if at != 3:  # the magic number at the front is not read
        assert store._segments[1].base <= reached < store._segments[2].base
    if at < 0:
        make(segments)
        assert walk(archive, 1, 2**60)[2] == sealed_end(store)
    store.close()


def test_a_full_disk_leaves_nothing_behind(segments: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(segments)
    entries = log(60)
    fill(store, entries)
    with pytest.raises(OSError, match="remaining space is reserved for records"):
        BlockBuilder(segments, reserve_bytes=2**60).build(lambda: 2**60)

    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(block_builder.os, "fdatasync", full)
        with pytest.raises(OSError, match="no space"):
            make(segments)
    assert {path.suffix for path in segments.iterdir()} == {".seg", ".idx", ""}
    make(segments)
    assert walk(BlockReader(segments), 1, 2**60)[2] == sealed_end(store)
    store.close()


def test_rows_that_become_too_large_for_the_space_that_is_left_are_given_up(
    segments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(segments)
    fill(store, log(60))
    asked = 0

    def shrinking(_path: Path) -> os.statvfs_result:
        nonlocal asked
        asked += 1
        blocks = 3000 if asked == 1 else 2000
        return os.statvfs_result((1, 1_000_000, 0, 0, blocks, 0, 0, 0, 0, 0))

    with monkeypatch.context() as patch:
        patch.setattr(block_builder.os, "statvfs", shrinking)
        with pytest.raises(OSError, match="remaining space is reserved for records"):
            BlockBuilder(segments, reserve_bytes=1_000_000_000).build(lambda: 2**60)
    assert {path.suffix for path in segments.iterdir()} == {".seg", ".idx", ""}
    store.close()


def test_what_changed_while_its_rows_were_made_has_none(
    segments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(segments)
    entries = log(60)
    fill(store, entries)
    third = store._segments[2]
    sync = os.fdatasync

    def meanwhile(fd: int) -> None:
        sync(fd)
        path = segments / third.name
        if path.exists() and len(names(segments, "rows")) == 2:
            content = path.read_bytes()
            path.unlink()
            path.with_suffix(".other").write_bytes(content)
            path.with_suffix(".other").rename(path)

    with monkeypatch.context() as patch:
        patch.setattr(block_builder.os, "fdatasync", meanwhile)
        make(segments)
    assert third.block_file_name not in {path.name for path in segments.iterdir()}
    make(segments)
    assert walk(BlockReader(segments), 1, 2**60)[2] == sealed_end(store)
    store.close()


def test_what_was_left_behind_is_taken_away(segments: Path) -> None:
    store = open_store(segments)
    fill(store, log(60))
    make(segments)
    first = store._segments[0]
    for name in (first.name, first.index_name):
        (segments / name).unlink()
    (segments / f"{first.block_file_name}{block_builder.SUFFIX}").write_bytes(b"half")
    make(segments)
    left = {path.name for path in segments.iterdir()}
    assert first.block_file_name not in left
    assert not any(name.endswith(block_builder.SUFFIX) for name in left)
    store.close()


def test_writers_at_every_position(segments: Path) -> None:
    store = open_store(segments)
    entries = log(60, origins=True)
    fill(store, entries)
    make(segments)
    archive = BlockReader(segments)
    end = sealed_end(store)
    for gsn in range(1, end + 1):
        position, writers = archive.writers(gsn)
        assert position == gsn
        seen = [row.origin for row in records(entries, 0, gsn) if row.origin is not None]
        expected = [max(seen)] if seen else []
        assert writers.export() == expected
    position, writers = archive.writers(2**60)
    assert (position, writers.export()) == (end, [expected_writer(entries, end)])
    # The caller owns the returned table.
    writers.first_new_row(Origin(WRITER, 10**6, 1), 1)
    assert archive.writers(end)[1].export() == [expected_writer(entries, end)]
    store.close()


def test_rows_that_come_while_one_looks_are_not_the_next_ones(
    segments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(segments)
    fill(store, log(60))
    archive = BlockReader(segments)
    listed = archive.listed

    def listed_before_they_come() -> Any:
        found = listed()
        make(segments)
        return found

    monkeypatch.setattr(archive, "listed", listed_before_they_come)
    assert archive.block(1) == 0
    assert isinstance(archive.block(1), Block)
    store.close()


def test_writers_where_nothing_is_known(segments: Path) -> None:
    archive = BlockReader(segments)
    assert archive.writers(50)[0] == 1
    assert not archive.writers(50)[1]
    store = open_store(segments)
    entries = log(60, origins=True)
    fill(store, entries)
    assert archive.writers(50)[0] == 1
    second = store._segments[1].base
    store.trim(second)
    assert store.flush()
    make(segments)
    position, writers = archive.writers(second)
    assert (position, writers.export()) == (second, [])
    store.close()


def test_a_trim_makes_no_writer_unknown(segments: Path) -> None:
    store = open_store(segments)
    entries = log(60, origins=True)
    fill(store, entries)
    make(segments)
    archive = BlockReader(segments)
    end = sealed_end(store)
    for segment in store._segments[1:-1]:
        before = {gsn: archive.writers(gsn)[1].export() for gsn in range(segment.base, end)}
        store.trim(segment.base)
        assert store.flush()
        make(segments)
        for gsn, table in before.items():
            position, writers = archive.writers(gsn)
            assert (position, writers.export()) == (gsn, table)
            assert table
    store.close()


def test_an_unfinished_block_of_a_large_unit(segments: Path) -> None:
    store = open_store(segments, segment_bytes=9_000_000)
    entries = [unit(1, 1), unit(2, 100, size=2_000_000), unit(3, 200, size=2_000_000), unit(4, 300)]
    fill(store, entries)
    make(segments)
    archive = BlockReader(segments)
    for gsn, start, count in ((100, 1, 6), (200, 105, 3)):
        block = archive.block(gsn)
        assert isinstance(block, Block)
        assert (block.start, block.rows) == (start, count)
    rows, _, reached = walk(archive, 1, 2**60)
    assert reached == sealed_end(store) == 205
    assert rows == records(entries, 1, 205)
    store.close()
