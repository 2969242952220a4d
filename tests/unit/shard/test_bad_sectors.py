"""Sectors that a disk cannot read: what they held counts as damage, and is repaired."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shard.archive.block_builder import BlockBuilder
from tests.unit.shard.archive.logs import fill, log, open_store
from tests.unit.shard.logs import Oracle, apply, reopen
from tests.unit.shard.test_segment_rewrite import SMALL, check_whole, grown, mend, unknown
from ziplog.segments import segment
from ziplog.segments.entry import BusyError
from ziplog.segments.entry_codec import walk

if TYPE_CHECKING:
    from collections.abc import Callable


class BadSector:
    """A sector of a file that the disk cannot read; a new file under the same name is elsewhere."""

    BYTES = 100

    def __init__(self, path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._inode, self._start = path.stat().st_ino, number * self.BYTES
        self._read_bytes, self._pread = Path.read_bytes, os.pread
        monkeypatch.setattr(segment, "SECTOR_BYTES", self.BYTES)
        monkeypatch.setattr(Path, "read_bytes", self.reader())
        monkeypatch.setattr(os, "pread", self.pread)

    def reader(self) -> Callable[[Path], bytes]:
        def read_bytes(path: Path) -> bytes:
            facts = path.stat()
            if facts.st_ino == self._inode and facts.st_size > self._start:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return self._read_bytes(path)

        return read_bytes

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        stop = self._start + self.BYTES
        if os.fstat(fd).st_ino == self._inode and offset < stop and offset + size > self._start:
            if offset >= self._start:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            size = self._start - offset  # As the kernel: what is before it.
        return self._pread(fd, size, offset)


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize("number", range(9))
def test_what_a_disk_cannot_read_is_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, has_index: bool
) -> None:
    directory = tmp_path / "segments"
    oracle = grown(directory)
    path = sorted(directory.glob("*.seg"))[1]
    if not has_index:
        path.with_suffix(".idx").unlink()
    BadSector(path, number, monkeypatch)
    store = reopen(directory, segment_bytes=SMALL)
    assert 0 < len(unknown(store, oracle)) < oracle.last_gsn // 2
    assert mend(store, oracle) > 0
    assert store.close()
    check_whole(reopen(directory, segment_bytes=SMALL), oracle)


def damage_last_entry(path: Path) -> None:
    """Change a byte of a segment's last entry with a number."""
    contents, named = bytearray(path.read_bytes()), segment.Segment.named(path.name)
    assert named is not None
    last = [found for found in walk(contents, named.salt) if found.is_numbered][-1]
    contents[last.stop - 1] ^= 1
    path.write_bytes(contents)


def test_a_read_error_that_passes_makes_no_hole_of_good_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk cannot read other entries of the file while one of its entries is repaired."""
    directory = tmp_path / "segments"
    oracle = grown(directory)
    path = sorted(directory.glob("*.seg"))[1]
    damage_last_entry(path)
    contents = path.read_bytes()
    store = reopen(directory, segment_bytes=SMALL)
    (gsn, *_) = unknown(store, oracle)
    first, last = store.damaged_range(gsn) or (0, 0)
    copies = [entry for entry in oracle.numbered if first <= entry.fseq <= last]
    with monkeypatch.context() as error:
        BadSector(path, 3, error)
        with pytest.raises(BusyError, match="the disk cannot read entry"):
            store.repair(copies)
    assert path.read_bytes() == contents
    assert store.repair(copies)
    assert unknown(store, oracle) == []
    assert store.close()


def test_two_sectors_that_stay_bad_are_both_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "segments"
    oracle = grown(directory)
    path = sorted(directory.glob("*.seg"))[1]
    damage_last_entry(path)
    BadSector(path, 3, monkeypatch)
    store = reopen(directory, segment_bytes=SMALL)
    first, last = store.damaged_range(unknown(store, oracle)[-1]) or (0, 0)
    copies = [entry for entry in oracle.numbered if first <= entry.fseq <= last]
    with pytest.raises(BusyError):
        store.repair(copies)
    assert store.repair(copies)
    assert mend(store, oracle) > 0
    assert store.close()
    check_whole(reopen(directory, segment_bytes=SMALL), oracle)


@pytest.mark.parametrize("number", range(4))
def test_newest_segment_is_repaired_while_the_store_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    directory = tmp_path / "segments"
    oracle = grown(directory)
    store = reopen(directory, segment_bytes=10 * SMALL)
    for _ in range(3):
        apply(store, oracle, ("place", 1, [1, 2], 60))
    assert store.flush()
    BadSector(max(directory.glob("*.seg")), number, monkeypatch)
    store._continue_with(store._segments)  # Nothing is cached any more.
    assert unknown(store, oracle)
    assert mend(store, oracle) > 0
    apply(store, oracle, ("place", 1, [1, 2], 60))
    assert store.close()
    check_whole(reopen(directory, segment_bytes=SMALL), oracle)


def test_index_that_a_disk_cannot_read_is_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "segments"
    oracle = grown(directory)
    BadSector(sorted(directory.glob("*.idx"))[1], 0, monkeypatch)
    check_whole(reopen(directory, segment_bytes=SMALL), oracle)


def test_newest_segment_is_not_cut_where_a_disk_cannot_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "segments"
    grown(directory)
    path = max(directory.glob("*.seg"))
    size = path.stat().st_size
    BadSector(path, 0, monkeypatch)
    with pytest.raises(OSError, match="Input/output error; move the server's directory away"):
        reopen(directory, segment_bytes=SMALL)
    assert path.stat().st_size == size


def test_log_is_cut_in_a_segment_that_a_disk_cannot_read_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "segments"
    store, oracle = reopen(directory), Oracle()
    for _ in range(20):
        apply(store, oracle, ("place", 0, [1], 60))
    assert store.flush()
    BadSector(max(directory.glob("*.seg")), 2, monkeypatch)
    apply(store, oracle, ("truncate", 2))
    assert store.last_fseq == 18
    lost = unknown(store, oracle)
    assert 0 < len(lost) < 5
    assert store.close()
    assert unknown(reopen(directory), oracle) == lost


@pytest.mark.parametrize("number", [0, 1])
def test_archive_leaves_out_a_segment_that_a_disk_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    directory = tmp_path / "segments"
    store = open_store(directory)
    fill(store, log(60))
    assert store.close()
    sealed = sorted(directory.glob("*.seg"))[:-1]
    BadSector(sealed[2], number, monkeypatch)
    BlockBuilder(directory).build(lambda: 2**60)
    built = {path.stem for path in directory.glob("*.rows")}
    assert built == {path.stem for path in sealed} - {sealed[2].stem}
