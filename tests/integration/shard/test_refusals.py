"""Refuses each system call of the store once: no acknowledged entry is lost."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shard.storage.data_directory import DataDirectory
from shard.storage.segment_store import SegmentStore
from shard.storage.store import FullError
from tests import refusing
from tests.checkpoints import consume
from tests.refusing import System
from tests.unit.shard.logs import Oracle, apply, compare, compare_numbers, mark, place, table
from ziplog.core.node import StorageChanged
from ziplog.segments.entry import BusyError, UnreadableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.core.node import Event

    Opened = Callable[..., SegmentStore]

SMALL = 600
#: Error numbers of a system without descriptors, without memory, or with a full disk.
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Halt(BaseException):
    """The process halted."""


def halt(reason: str) -> None:
    raise Halt(reason)


class Run:
    """Inserts, a trim, a cut and further inserts; flushed entries count as acknowledged."""

    def __init__(self, directory: Path, system: System) -> None:
        self._directory, self._system = directory, system
        self.oracle = Oracle()
        #: The entries that the store reported as flushed.
        self.acknowledged: list[Any] = []
        self.outcome = "continues"
        self.store: SegmentStore | None = None

    def all(self) -> None:
        """Run all steps; retry a refused step after the system's refusals have ended."""
        try:
            self._open()
            for _ in range(12):
                self._place()
            self._trim()
            self._cut()
            for _ in range(6):
                self._place()
            self._read()
            assert self.store is not None
            if not self.store.close():
                self._system.end()
                self.outcome = "full, then continues"
                assert self.store.close()
        except Halt:
            self.outcome = "halts"
        except OSError:
            self.outcome = "does not start" if self.store is None else "ends"
        finally:
            self._close_files()

    def _close_files(self) -> None:
        """Close the files of a halted store, as the end of its process does."""
        directory = os.path.realpath(self._directory)
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if f"{link.readlink()}/".startswith(f"{directory}/"):
                    os.close(int(link.name))

    def _open(self) -> None:
        self.store = SegmentStore.open(
            self._directory, flush_interval_ms=0, segment_bytes=SMALL, cache_bytes=0, on_halt=halt
        )
        self.store.flusher.set_listener(self._changed)

    def _changed(self, event: Event) -> None:
        if isinstance(event, StorageChanged) and event.full:
            self.outcome = "full, then continues"

    def _place(self) -> None:
        assert self.store is not None
        apply(self.store, self.oracle, ("place", 0, [1], 150))
        self._flush()

    def _flush(self) -> None:
        assert self.store is not None
        if not self.store.flush():
            assert self.store.is_full
            self._system.end()
            assert self.store.flush()
            assert not self.store.is_full
        self.acknowledged = list(self.oracle.numbered)

    def _trim(self) -> None:
        assert self.store is not None
        for entry in (mark(self.oracle.last_fseq - 2, 5), table(700)):
            self.store.append(entry)
            self.oracle.append(entry)
        self._flush()
        self.store.trim(5)
        self._flush()

    def _cut(self) -> None:
        """Drop the last two entries, as a recovery does; before, they count as acknowledged."""
        assert self.store is not None
        fseq = self.oracle.last_fseq - 2
        self.acknowledged = [entry for entry in self.acknowledged if entry.fseq <= fseq]
        try:
            self.store.truncate(fseq)
        except (FullError, UnreadableError):
            self.outcome = "full, then continues"
            self._system.end()
            self.store.truncate(fseq)
        self.oracle.truncate(fseq)

    def _read(self) -> None:
        """Read everything; a refused read succeeds later, and is not damage."""
        assert self.store is not None
        for entry in self.acknowledged:
            gsn = entry.decision.gsns[0]
            if gsn < 5:
                continue
            try:
                assert self.store.find(gsn) == entry
            except UnreadableError:
                self.outcome = "unreadable, then continues"
                self._system.end()
                assert self.store.find(gsn) == entry
        assert self.store.damage == []


def check(directory: Path, run: Run) -> None:
    """Restart without refusals, and check that all acknowledged entries are present."""
    again = SegmentStore.open(directory, segment_bytes=SMALL, cache_bytes=0)
    try:
        assert again.damage == []
        first = again.first_fseq
        assert first <= 5
        kept = {entry.fseq: entry for entry in again.read_after(first - 1, 1 << 30)}
        for entry in run.acknowledged:
            if entry.fseq >= first:
                assert kept.get(entry.fseq) == entry
    finally:
        again.close()


def enumerate_refusals(
    tmp_path: Path, names: tuple[str, ...], error: int, *, lasts: bool
) -> Counter[tuple[str, str]]:
    """Refuse each call in turn, until a run makes no more calls; count the results."""
    outcomes: Counter[tuple[str, str]] = Counter()
    for number in range(1, 1000):
        directory = tmp_path / f"{'-'.join(names)}-{error}-{number}-{lasts}"
        system = System(number, error, lasts=lasts)
        run = Run(directory, system)
        with system.installed(names):
            run.all()
        check(directory, run)
        if not system.refused:
            assert run.outcome == "continues"
            return outcomes
        outcomes[system.refused, run.outcome] += 1
    raise AssertionError("it never ends")


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "for a while"])
@pytest.mark.parametrize("error", SCARCE, ids=errno.errorcode.get)
def test_a_refused_open_halts_nothing_once_the_store_is_open(
    tmp_path: Path, error: int, lasts: bool
) -> None:
    outcomes = enumerate_refusals(tmp_path, refusing.OPENS, error, lasts=lasts)
    assert sum(outcomes.values()) > 20
    # Without its files a store does not open, and acknowledges nothing.
    assert {outcome for _, outcome in outcomes} <= {
        "continues", "full, then continues", "unreadable, then continues", "does not start", "ends",
    }  # fmt: skip
    assert outcomes["open", "full, then continues"] > 5
    # Only at the deletion of the void end: the cut itself is complete by then.
    assert outcomes["open", "ends"] <= 1 + lasts


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "for a while"])
@pytest.mark.parametrize("error", [*SCARCE, *FULL], ids=errno.errorcode.get)
def test_a_refused_write_halts_nothing(tmp_path: Path, error: int, lasts: bool) -> None:
    outcomes = enumerate_refusals(tmp_path, refusing.WRITES, error, lasts=lasts)
    assert outcomes["pwritev", "full, then continues"] > 10
    assert not {outcome for _, outcome in outcomes} & {"halts"}


@pytest.mark.parametrize("error", [*SCARCE, *FULL, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize(
    "names", [refusing.SYNCS, refusing.NAMES, refusing.READS], ids=lambda names: names[0]
)
def test_whatever_is_refused_nothing_acknowledged_is_lost(
    tmp_path: Path, names: tuple[str, ...], error: int
) -> None:
    outcomes = enumerate_refusals(tmp_path, names, error, lasts=False)
    if names == refusing.SYNCS:
        assert outcomes["fdatasync", "halts"] > 10


def test_a_rotation_without_descriptors_is_full_and_goes_on(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    store, oracle = opened(segment_bytes=SMALL, flush_interval_ms=0, on_halt=halt), Oracle()
    store.flusher.set_listener(events.append)
    apply(store, oracle, ("place", 0, [1], 100))
    assert store.flush()
    real = os.open

    def refuse(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, flags, *mode)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        for _ in range(10):
            apply(store, oracle, ("place", 0, [1], 100))
        assert not store.flush()
        assert store.is_full
        assert [event.full for event in events] == [True]
        flushed = store.flushed_fseq
        assert 0 < flushed < store.last_fseq
        compare(store, oracle)
    assert store.flush()
    assert [event.full for event in events] == [True, False]
    assert store.flushed_fseq == store.last_fseq
    compare(store, oracle)
    store.close()
    compare_numbers(opened(segment_bytes=SMALL), oracle)


def test_a_read_without_descriptors_is_no_damage(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(segment_bytes=SMALL, cache_bytes=0)
    for fseq in range(1, 20):
        store.append(place(fseq, [fseq], bytes(100)))
    assert store.flush()
    store.append(place(20, [20], bytes(100)))  # flushed entries leave the cache
    for error, kind in ((errno.EMFILE, BusyError), (errno.EIO, UnreadableError)):

        def refuse(*_: Any, number: int = error) -> int:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patched:
            patched.setattr(os, "open", refuse)
            with pytest.raises(UnreadableError) as caught:
                store.find(2)
            assert type(caught.value) is kind
            if kind is BusyError:
                with pytest.raises(BusyError):
                    store.last_record_below(2)
    assert store.find(2) == place(2, [2], bytes(100))
    assert store.last_record_below(3) == 2


def test_a_removal_that_is_refused_is_repeated(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(segment_bytes=SMALL, flush_interval_ms=0, on_halt=halt)
    for fseq in range(1, 20):
        store.append(place(fseq, [fseq], bytes(100)))
    store.append(mark(19, 15))
    store.append(table(700))
    assert store.flush()
    files = len(list(store._directory.glob("*.seg")))
    real = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name.endswith(".seg"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, missing_ok=missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        store.trim(15)
        assert not store.flush()
    assert len(list(store._directory.glob("*.seg"))) == files
    assert store.flush()
    assert len(list(store._directory.glob("*.seg"))) < files


def test_damage_is_not_taken_for_a_torn_end_while_the_note_is_unreadable(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    for fseq in range(1, 4):
        store.append(place(fseq, [fseq], bytes(100)))
    store.close()
    (path,) = store._directory.glob("*.seg")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    real = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "flushed":
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", refuse)
        with pytest.raises(OSError, match="Too many"):
            opened()
    assert opened().damage == [(3, 3)]


@pytest.mark.parametrize("error", SCARCE, ids=errno.errorcode.get)
def test_a_start_that_is_refused_leaves_the_checkpoint_or_takes_it(
    tmp_path: Path, error: int
) -> None:
    outcomes = []
    for number in range(1, 100):
        path = tmp_path / str(number)
        first = DataDirectory(path, "demo", "shard-0-0")
        first.write_checkpoint(b"state")
        first.close()
        second = DataDirectory(path, "demo", "shard-0-0")
        system = System(number, error)
        taken = None
        with system.installed(refusing.OPENS), contextlib.suppress(OSError):
            taken = consume(second)
        second.close()
        third = DataDirectory(path, "demo", "shard-0-0")
        assert {taken, consume(third)} == {b"state", None}
        third.close()
        outcomes.append(taken)
        if not system.refused:
            break
    assert outcomes[:2] == [None, None]
    assert outcomes[-1] == b"state"
