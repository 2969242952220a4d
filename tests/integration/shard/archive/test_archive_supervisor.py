"""The archive's supervisor: it starts, notifies, restarts and stops the archive."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import pytest

from shard.archive import supervisor as supervisor_module
from shard.archive.shared_state import SharedState
from shard.archive.supervisor import ArchiveFacts, ArchiveSupervisor
from tests.unit.shard.archive.logs import fill, log, open_store, walk
from tests.waiting import wait_until
from ziplog.archive.client import ArchiveClient
from ziplog.core.entries import Place
from ziplog.segments.block_reader import BlockReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CLUSTER: Final = 77


class Kept:
    """A supervisor, with its server's facts and the reported ports."""

    def __init__(self, directory: Path, known: ArchiveFacts) -> None:
        self.known = known
        self.looks = 0
        self.ports: list[int] = []
        self.shared = SharedState()
        arguments = [
            *("--directory", str(directory), "--node", "n", "--host", "127.0.0.1", "--shard", "0"),
        ]
        self.supervisor = ArchiveSupervisor(arguments, self.shared, self.look, self.ports.append)

    def look(self) -> ArchiveFacts:
        self.looks += 1
        return self.known

    def children(self) -> list[int]:
        """Return the running archives."""
        tasks = Path("/proc/self/task").iterdir()
        found = [pid for task in tasks for pid in _read(task / "children").split()]
        command = f"--shared-fd\0{self.shared.fd}\0"
        return [int(pid) for pid in found if command in _read(Path("/proc", pid, "cmdline"))]

    def client(self) -> ArchiveClient:
        return ArchiveClient("127.0.0.1", self.ports[-1], CLUSTER, 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@pytest.fixture
def kept(segments: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Kept]]:
    monkeypatch.setattr(supervisor_module, "_PAUSE_S", 0.01)
    for name in ("_CHECK_S", "_MAX_CHECK_S"):
        monkeypatch.setattr(supervisor_module, name, 0.01)
    made: list[Kept] = []

    def start(known: ArchiveFacts, **options: Any) -> Kept:
        made.append(Kept(segments, known, **options))
        made[-1].supervisor.start()
        return made[-1]

    yield start
    for one in made:
        one.supervisor.stop()
        assert not one.supervisor._thread.is_alive()
        assert one.children() == []
        one.shared.close()


def test_archive_starts_at_the_first_seal_and_learns_the_stable_entry(
    segments: Path, kept: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []
    ready = supervisor_module._ready
    monkeypatch.setattr(
        supervisor_module, "_ready", lambda files, wait: (waits.append(wait), ready(files, wait))[1]
    )
    store = open_store(segments)
    one = kept(ArchiveFacts(0, 0, 5))
    assert (one.children(), one.looks) == ([], 0)
    fill(store, log(40))
    last = store._segments[-2].last_fseq
    assert store.sealed_fseq == last
    one.supervisor.on_sealed(last)
    wait_until(lambda: one.ports, "it listens")
    assert len(one.children()) == 1
    assert one.shared.trim == 5
    # It polls until the cluster's number and the stable entry are known.
    looks = one.looks
    wait_until(lambda: one.looks > looks + 2, "it looks again")
    assert list(segments.glob("*.rows")) == []
    one.known = ArchiveFacts(CLUSTER, last - 1, 5)
    looks = one.looks
    wait_until(lambda: one.looks > looks + 2, "it looks again")
    assert list(segments.glob("*.rows")) == []
    one.known = ArchiveFacts(CLUSTER, last, 5)
    end = store._segments[-1].base
    wait_until(lambda: walk(BlockReader(segments), 1, end)[2] == end, "rows are made")
    # Then it sleeps until another thread wakes it.
    wait_until(lambda: waits[-1] is None, "it sleeps")
    with one.client() as client:
        assert client.block(end) == 0
    store.close()


def test_archive_learns_of_segments_that_are_sealed_faster_than_stable(
    segments: Path, kept: Callable[..., Kept]
) -> None:
    store = open_store(segments)
    fill(store, log(60))
    store.close()
    (first, *_, last) = [segment.last_fseq for segment in store._segments]
    one = kept(ArchiveFacts(CLUSTER, 0, 1))

    def look() -> ArchiveFacts:
        # At every check one more segment is sealed, and the last three are not stable yet.
        sealed = one.supervisor._sealed
        one.supervisor.on_sealed(sealed + 1)
        return ArchiveFacts(CLUSTER, min(max(sealed - 3, 0), last), 1)

    one.supervisor._read_facts = look
    one.supervisor.on_sealed(first)
    wait_until(
        lambda: walk(BlockReader(segments), 1, 2**60)[2] > 1, "rows are built of stable entries"
    )


def test_after_one_segment_it_waits_for_the_next(segments: Path, kept: Callable[..., Kept]) -> None:
    store = open_store(segments)
    fill(store, log(60))
    store.close()
    first, second = store._segments[:2]
    one = kept(ArchiveFacts(CLUSTER, 0, 1))
    for segment in (first, second):
        one.supervisor.on_sealed(segment.last_fseq)
        looks = one.looks
        wait_until(lambda looks=looks: one.looks > looks + 2, "it looks")
    wait_until(lambda: one.ports, "it listens")
    # No other thread wakes it again.
    for segment, end in ((first, second.base), (second, store._segments[2].base)):
        one.known = ArchiveFacts(CLUSTER, segment.last_fseq, 1)
        wait_until(lambda end=end: walk(BlockReader(segments), 1, 2**60)[2] == end, "rows are made")


def test_after_a_repair_block_files_are_made_again(
    segments: Path, kept: Callable[..., Kept]
) -> None:
    store = open_store(segments)
    fill(store, log(60))
    store.close()
    store = open_store(segments)
    one = kept(ArchiveFacts(CLUSTER, store.sealed_fseq, 1))
    store.on_repair = one.supervisor.on_repaired
    one.supervisor.on_sealed(store.sealed_fseq)
    end = store._segments[-1].base
    wait_until(lambda: walk(BlockReader(segments), 1, end)[2] == end, "rows are made")
    damaged, fseq = store._segments[1], store._segments[1].base_fseq
    (entry, *_) = store.read_after(fseq - 1, 1)
    assert isinstance(entry.decision, Place)
    body = entry.decision.body
    assert body is not None
    path = segments / damaged.name
    path.write_bytes(path.read_bytes().replace(body, bytes(len(body))))
    assert store.damaged_after(fseq - 1) == (fseq, fseq)
    assert store.repair([entry])
    wait_until(lambda: walk(BlockReader(segments), 1, end)[2] == end, "rows are made again")
    store.close()


def test_an_archive_that_dies_is_started_again(kept: Callable[..., Kept]) -> None:
    one = kept(ArchiveFacts(CLUSTER, 10, 1))
    one.supervisor.on_sealed(10)
    for _ in range(2):
        wait_until(lambda: one.ports and one.ports[-1], "it listens")
        count = len(one.ports)
        (child,) = one.children()
        os.kill(child, signal.SIGKILL)
        wait_until(lambda count=count: len(one.ports) > count, "its end is reported")
        assert one.ports[count] == 0
    wait_until(lambda: one.ports[-1], "it listens")
    assert len(one.children()) == 1


def test_one_that_cannot_start_is_left_alone_ever_longer(
    kept: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "_PAUSE_S", 1.0)
    monkeypatch.setattr(supervisor_module, "_MAX_PAUSE_S", 10.0)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        one.supervisor._drain_wakeups()

    one = kept(ArchiveFacts(CLUSTER, 10, 1))
    one.supervisor._command = ["/nonexistent"]
    # Time passes only while the supervisor sleeps.
    monkeypatch.setattr(supervisor_module, "time", SimpleNamespace(monotonic=lambda: sum(pauses)))
    monkeypatch.setattr(one.supervisor, "_sleep", sleep)
    one.supervisor.on_sealed(10)
    wait_until(lambda: len(pauses) > 5, "the pauses grow")
    monkeypatch.undo()
    assert pauses[:6] == [1, 2, 4, 8, 10, 10]


def test_it_checks_ever_less_often_whether_a_segment_is_stable(
    kept: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "_MAX_CHECK_S", 0.03)
    waits: list[float] = []
    ready = supervisor_module._ready

    def record(files: list[int], wait: float | None) -> set[int]:
        if wait is not None:
            waits.append(wait)
        return ready(files, wait)

    monkeypatch.setattr(supervisor_module, "_ready", record)
    one = kept(ArchiveFacts(CLUSTER, 0, 1))
    one.supervisor.on_sealed(10)
    wait_until(lambda: waits[-1:] == [0.03], "the intervals grow")
    assert waits[0] == 0.01
    assert waits[-3:] == [0.01, 0.02, 0.03]


def test_a_port_that_comes_in_parts(kept: Callable[..., Kept]) -> None:
    one = kept(ArchiveFacts(CLUSTER, 10, 1))
    # It continues after a notification.
    source = (
        "import os, sys\n"
        "os.write(1, b'12')\n"
        "os.read(0, 1)\n"
        "os.write(1, b'34')\n"
        "os.read(0, 1)\n"
        "os.write(1, b'\\n')\n"
        "while os.read(0, 9): pass"
    )
    one.supervisor._command = [sys.executable, "-c", source]
    looks = 0
    for fseq in (10, 11, 12):
        one.known = ArchiveFacts(CLUSTER, fseq, 1)
        one.supervisor.on_sealed(fseq)
        wait_until(lambda looks=looks: one.looks > looks, "it is notified")
        looks = one.looks
    wait_until(lambda: one.ports, "it listens")
    assert one.ports == [1234]


def test_an_invalid_port_ends_the_archive(kept: Callable[..., Kept]) -> None:
    one = kept(ArchiveFacts(CLUSTER, 10, 1))
    one.supervisor._command = [sys.executable, "-c", "print('12x'); input()"]
    one.supervisor.on_sealed(10)
    wait_until(lambda: len(one.ports) > 1, "it is started again")
    assert set(one.ports) == {0}


def test_a_stop_waits_for_no_archive(
    kept: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "_END_TIMEOUT_S", 0.5)
    one = kept(ArchiveFacts(CLUSTER, 10, 1))
    one.supervisor.on_sealed(10)
    wait_until(lambda: one.ports, "it listens")
    (child,) = one.children()
    os.kill(child, signal.SIGSTOP)
    # See `kept`: the supervisor stops, and no process is left.


def test_shared_state_is_equal_in_both_processes() -> None:
    mine = SharedState()
    its = SharedState(os.dup(mine.fd))
    mine.trim, mine.stable, mine.cluster = 2**40, 2**62, 2**63 - 1
    assert (its.trim, its.stable, its.cluster) == (2**40, 2**62, 2**63 - 1)
    mine.trim = 7
    assert its.trim == 2**40
    its.close()
    mine.close()
