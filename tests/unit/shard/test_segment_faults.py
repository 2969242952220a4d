"""The segment store when the system refuses a cut, or a sync fails, at a bad moment."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from shard.storage import segment_files, segment_store
from tests.unit.shard.logs import Oracle, apply, compare, reopen
from ziplog.segments.entry import BusyError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ziplog.segments.segment import Segment


def refuse(*_: object) -> NoReturn:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_cut_that_took_effect_is_not_reported_as_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An archive finishes a block file during the cut, and no descriptor is left to delete it."""
    directory = tmp_path / "segments"
    store, oracle = reopen(directory), Oracle()
    for _ in range(20):
        apply(store, oracle, ("place", 0, [1], 60))
    assert store.flush()
    (path,) = directory.glob("*.seg")
    real = segment_store.create

    def create(where: Path, segment: Segment, contents: bytes) -> None:
        real(where, segment, contents)
        path.with_suffix(".rows").touch()
        monkeypatch.setattr(segment_files, "synced_names", refuse)

    monkeypatch.setattr(segment_store, "create", create)
    apply(store, oracle, ("truncate", 2))
    monkeypatch.undo()
    apply(store, oracle, ("place", 0, [1], 60))
    compare(store, oracle)
    assert store.close()
    compare(reopen(directory), oracle)


def test_cut_that_took_effect_opens_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections have taken all descriptors meanwhile. The process would end otherwise."""
    directory = tmp_path / "segments"
    store, oracle = reopen(directory), Oracle()
    for _ in range(20):
        apply(store, oracle, ("place", 0, [1], 60))
    assert store.flush()
    real = segment_store.create

    def create(where: Path, segment: Segment, contents: bytes) -> None:
        real(where, segment, contents)
        monkeypatch.setattr(segment_files, "read_file", refuse)

    monkeypatch.setattr(segment_store, "create", create)
    apply(store, oracle, ("truncate", 2))
    monkeypatch.undo()
    compare(store, oracle)
    with monkeypatch.context() as patch:
        patch.setattr(segment_store, "read_file", refuse)
        with pytest.raises(BusyError):
            store.truncate(1)
    compare(store, oracle)
    assert store.close()
    compare(reopen(directory), oracle)


class PageCache:
    """Pages that reach the disk at a sync only; a failed sync drops what it could not write."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path, self._on_disk = path, bytearray(path.read_bytes())
        self._dirty: list[tuple[int, int]] = []
        self.is_broken = False
        for name in ("pwrite", "pwritev"):
            monkeypatch.setattr(os, name, self._writer(getattr(os, name)))
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._syncer(getattr(os, name)))

    def _is_it(self, fd: int) -> bool:
        return os.fstat(fd).st_ino == self._path.stat().st_ino

    def _writer(self, real: Callable[..., int]) -> Callable[..., int]:
        def write(fd: int, data: Any, offset: int) -> int:
            written = real(fd, data, offset)
            if self._is_it(fd):
                self._dirty.append((offset, offset + written))
            return written

        return write

    def _syncer(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def sync(fd: int) -> None:
            real(fd)
            if not self._is_it(fd):
                return
            dirty, self._dirty = self._dirty, []
            if self.is_broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            contents = self._path.read_bytes()
            self._on_disk.extend(bytes(max(len(contents) - len(self._on_disk), 0)))
            for start, stop in dirty:
                self._on_disk[start:stop] = contents[start:stop]

        return sync

    def cut_power(self) -> None:
        self._path.write_bytes(self._on_disk)


def test_start_after_a_failed_sync_writes_the_entries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system reports a failed write once, and then takes the page for written."""
    directory = tmp_path / "segments"
    halted: list[str] = []
    store, oracle = reopen(directory, on_halt=halted.append), Oracle()
    apply(store, oracle, ("place", 0, [1], 60))
    assert store.flush()
    cache = PageCache(max(directory.glob("*.seg")), monkeypatch)
    apply(store, oracle, ("place", 0, [1], 60))
    cache.is_broken = True
    with pytest.raises(OSError, match="Input/output"):
        store.flush()
    assert halted
    cache.is_broken = False
    again = reopen(directory)
    assert again.flushed_fseq == 2
    cache.cut_power()
    compare(reopen(directory), oracle)
