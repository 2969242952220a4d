"""Reading units directly from segment files, with and without a running server."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from shard.archive.block_builder import BlockBuilder
from shard.storage.data_directory import DataDirectory
from tests.properties import examples
from tests.unit.shard.archive.logs import (
    end_of,
    fill,
    log,
    make,
    mark,
    open_store,
    records,
    walk,
)
from tests.unit.ziplog.segments.blocks import rows_in
from ziplog.errors import UnavailableError
from ziplog.segments import block_reader
from ziplog.segments.block_reader import BlockReader
from ziplog.segments.blocks import block_of_units
from ziplog.segments.directory import SegmentDirectory
from ziplog.segments.entry import BusyError, UnreadableError

if TYPE_CHECKING:
    from tests.unit.ziplog.segments.blocks import Row


def read(directory: SegmentDirectory, start: int, stop: int) -> tuple[list[Row], int]:
    """Read a range; check its order and that there is no gap."""
    rows: list[Row] = []
    reached = start
    for units, end in directory.units(start, stop):
        assert end > reached
        part = [row for row in rows_in(block_of_units(units, reached, end)) if row.gsn < end]
        rows += [row for row in part if row.gsn >= reached]
        reached = end
    return rows, reached


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 500), st.integers(1, 500), st.sampled_from([500, 64 * 1024]))
def test_any_range(
    monkeypatch: pytest.MonkeyPatch, filled: Any, start: int, stop: int, block_bytes: int
) -> None:
    directory, entries = filled(block_bytes)
    end = end_of(entries)
    if start < min(stop, end):
        rows, reached = read(directory, start, stop)
        assert reached == min(stop, end)
        assert rows == records(entries, start, stop)
    else:
        assert list(directory.units(start, stop)) == []


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Logs of several segments, by the length of a block in their index."""
    made: dict[int, Any] = {}

    def get(block_bytes: int) -> Any:
        if block_bytes not in made:
            path = tmp_path / str(block_bytes)
            with monkeypatch.context() as patch:
                patch.setattr("ziplog.segments.segment.BLOCK_BYTES", block_bytes)
                store = open_store(path)
                entries = log(60)
                fill(store, entries)
                store.close()
            made[block_bytes] = SegmentDirectory(path), entries
        return made[block_bytes]

    return get


def test_nothing_is_read_above_what_is_known_to_be_stable(segments: Path) -> None:
    store = open_store(segments)
    entries = log(60)
    for entry in entries[:50]:
        store.append(entry)
    end = end_of(entries[:30])
    store.append(mark(30, end, trim=1))
    for entry in entries[50:]:
        store.append(entry)
    assert store.flush()
    directory = SegmentDirectory(segments)
    assert directory.stable_end == end
    assert directory.trim == 1
    rows, reached = read(directory, 1, 2**60)
    assert reached == end
    assert rows == records(entries, 1, end)
    store.append(mark(40, end_of(entries[:40]), trim=20))
    assert store.flush()
    assert directory.stable_end == end_of(entries[:40])
    assert directory.trim == 20
    assert read(directory, end, 2**60)[0] == records(entries[:40], end)
    store.close()


def refuse(*_: object) -> NoReturn:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_directory_that_cannot_be_listed_now_is_not_empty(
    segments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (segments.parent / "lock").touch()
    store = open_store(segments)
    entries = log(10)
    fill(store, entries)
    store.close()
    archive = BlockReader(segments)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", refuse)
        for request in (
            lambda: archive.stable_end,
            lambda: archive.trim,
            lambda: list(archive.units(1, 2)),
        ):
            with pytest.raises(BusyError, match="Too many open files"):
                request()
        assert archive.start == archive.writers(1)[0] == 1
        assert archive.block(1) == 0
        patch.setattr(os, "open", refuse)
        assert archive.is_locked, "its files may change"
    assert not archive.is_locked
    assert read(archive, 1, 2**60)[0] == records(entries)


def test_a_block_file_that_cannot_be_read_now_is_read_later(
    segments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing changes in the directory meanwhile."""
    store = open_store(segments)
    entries = log(60)
    fill(store, entries)
    make(segments)
    os.utime(segments, (0, 0))
    archive = BlockReader(segments)
    with monkeypatch.context() as patch:
        patch.setattr(block_reader, "read_index", refuse)
        assert archive.block(1) == 0
    assert walk(archive, 1, 2**60)[2] == archive.sealed_end > 1
    store.close()


def test_a_read_error_that_has_passed_costs_no_block_file(
    segments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(segments)
    fill(store, log(60))
    builder, second = BlockBuilder(segments), segments / store._segments[1].name
    real = os.pread

    def pread(fd: int, size: int, offset: int) -> bytes:
        if os.fstat(fd).st_ino == second.stat().st_ino:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, size, offset)

    archive = BlockReader(segments)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", pread)
        builder.build(lambda: 2**60)
    assert walk(archive, 1, 2**60)[2] < archive.sealed_end
    builder.build(lambda: 2**60)
    assert walk(archive, 1, 2**60)[2] == archive.sealed_end
    store.close()


def test_an_empty_directory_holds_nothing(tmp_path: Path) -> None:
    directory = SegmentDirectory(tmp_path / "none")
    assert (directory.start, directory.stable_end, directory.trim) == (1, 1, 1)
    assert list(directory.units(1, 100)) == []
    assert not directory.is_locked


def test_a_torn_end_is_not_given_out(segments: Path) -> None:
    store = open_store(segments, segment_bytes=10**6)
    entries = log(20)
    fill(store, entries)
    store.close()
    (path,) = segments.glob("*.seg")
    content = path.read_bytes()
    directory = SegmentDirectory(segments)
    assert directory.stable_end == end_of(entries)
    path.write_bytes(content[:-5])
    assert directory.stable_end == 1
    assert path.read_bytes() == content[:-5], "no file is deleted"


def test_damage_is_reported_and_the_entries_around_it_are_read(segments: Path) -> None:
    store = open_store(segments)
    entries = log(60)
    fill(store, entries)
    third, fourth = store._segments[2:4]
    store.close()
    path = segments / third.name
    content = bytearray(path.read_bytes())
    content[700] ^= 1
    path.write_bytes(content)
    directory = SegmentDirectory(segments)
    with pytest.raises(UnreadableError, match="damaged"):
        read(directory, 1, 2**60)
    assert read(directory, 1, third.base) == (records(entries, 1, third.base), third.base)
    rows, _ = read(directory, fourth.base, 2**60)
    assert rows == records(entries, fourth.base)


def test_a_missing_file_is_reported(segments: Path) -> None:
    store = open_store(segments)
    entries = log(60)
    fill(store, entries)
    third, fourth = store._segments[2:4]
    store.close()
    (segments / third.name).unlink()
    directory = SegmentDirectory(segments)
    with pytest.raises(UnreadableError, match="missing segment"):
        read(directory, 1, 2**60)
    assert read(directory, 1, third.base)[1] == third.base
    assert read(directory, fourth.base, 2**60)[0] == records(entries, fourth.base)


@pytest.mark.parametrize("tidied", [False, True])
def test_a_cut_log(segments: Path, tidied: bool) -> None:
    store = open_store(segments)
    entries = log(60)
    for entry in entries:
        store.append(entry)
    kept = store._segments[4].base_fseq + 1
    assert store.flush()
    before = {path: path.read_bytes() for path in segments.iterdir()}
    store.truncate(kept)
    others = log(30, first=kept + 1, gsn=end_of(entries[:kept]) + 1)
    fill(store, others)
    if not tidied:  # as after a crash just after the rename of the new file
        for path, content in before.items():
            path.write_bytes(content)
    directory = SegmentDirectory(segments)
    expected = entries[:kept] + others
    assert read(directory, 1, 2**60) == (records(expected), end_of(expected))
    for start in range(1, end_of(expected), 17):
        assert read(directory, start, 2**60)[0] == records(expected, start)
    store.close()


def test_a_log_begun_anew(segments: Path) -> None:
    store = open_store(segments)
    fill(store, log(60))
    store.reset(100, 5_000)
    directory = SegmentDirectory(segments)
    assert (directory.start, directory.trim) == (5_000, 5_000)
    entries = log(30, first=101, gsn=5_100)
    fill(store, entries)
    assert read(directory, 5_000, 2**60) == (records(entries), end_of(entries))
    store.close()


def test_a_check_for_a_running_server_does_not_block_it(tmp_path: Path) -> None:
    path = tmp_path / "shard-0-0"
    directory = SegmentDirectory(path / "segments")
    assert not directory.is_locked
    server = DataDirectory(path, "demo", "shard-0-0")
    assert directory.is_locked
    with pytest.raises(UnavailableError, match="in use"):
        DataDirectory(path, "demo", "shard-0-0")
    server.close()
    assert not directory.is_locked
    DataDirectory(path, "demo", "shard-0-0").close()
