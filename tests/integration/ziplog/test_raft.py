"""Raft on real sockets: groups of one and three, restarts, snapshots, and fatal errors."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pysyncobj.config
import pytest

from tests.unit.ziplog.bench import Words, free_endpoints
from tests.waiting import wait_until
from ziplog.core.node import Committed, Event, LeaderChanged, PeersChanged, Restored
from ziplog.errors import ConfigError, UnavailableError
from ziplog.raft import pysyncobj_adapter
from ziplog.raft import raft as raft_module
from ziplog.raft.journal import JournalError
from ziplog.raft.raft import Raft


class Running:
    """One node, and all its events."""

    def __init__(self, name: str, nodes: dict[str, str], directory: Path) -> None:
        self.machine = Words()
        self.events: list[Event] = []
        self.fatal: list[str] = []
        self.changed = threading.Condition()
        self.raft = Raft(
            name,
            nodes,
            directory / name,
            self.machine,
            on_event=self._tell,
            on_fatal=self._tell_fatal,
        )
        self.raft.start()

    def _tell(self, event: Event) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def _tell_fatal(self, reason: str) -> None:
        with self.changed:
            self.fatal.append(reason)
            self.changed.notify_all()

    def wait(self, condition: Callable[[], object], timeout: float = 20.0) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout), (self.raft.status(), self.events)

    def wait_leader(self) -> None:
        self.wait(lambda: any(isinstance(e, LeaderChanged) and e.leader for e in self.events))

    def wait_committed(self, count: int) -> None:
        self.wait(lambda: len(self.committed) == count)

    def wait_connected(self, count: int) -> None:
        self.wait(lambda: any(
            isinstance(e, PeersChanged) and len(e.connected) == count for e in self.events
        ))  # fmt: skip

    def wait_other_leader(self, former: str) -> None:
        self.wait(lambda: [e.leader for e in self.events if isinstance(e, LeaderChanged)][-1]
                  not in {"", former})  # fmt: skip

    def wait_trimmed(self) -> None:
        wait_until(lambda: self.raft.status().entries < 5, "the log is compacted")

    @property
    def committed(self) -> list[bytes]:
        return [event.command for event in self.events if isinstance(event, Committed)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def starter(name: str, nodes: dict[str, str]) -> Running:
        running.append(Running(name, nodes, tmp_path))
        return running[-1]

    yield starter
    for one in running:
        one.raft.stop()


def single() -> dict[str, str]:
    return {"a": free_endpoints(1)[0]}


def group() -> dict[str, str]:
    return dict(zip("abc", free_endpoints(3), strict=True))


def propose(node: Running, command: bytes) -> None:
    """Propose a command in the current term."""
    node.raft.propose(command, node.raft.status().term)


def test_one_node_commits_in_order_and_posts_events(start: Callable[..., Running]) -> None:
    node = start("a", single())
    node.wait_leader()
    for index in range(50):
        propose(node, b"%d" % index)
    node.wait_committed(50)
    assert node.machine.words == node.committed == [b"%d" % index for index in range(50)]
    results = [event.result for event in node.events if isinstance(event, Committed)]
    assert results == [b"%d" % index for index in range(1, 51)]


def test_a_lone_commit_does_not_wait_for_the_tick(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    # With ticks of ten seconds, these end in time only by wake-ups.
    node = start("a", single())
    node.wait_leader()
    monkeypatch.setattr(raft_module, "_LONE_TICK_S", 10.0)
    for index in range(20):
        propose(node, b"%d" % index)
        node.wait_committed(index + 1)
    assert len(node.committed) == 20


def test_a_restart_applies_everything_again(start: Callable[..., Running]) -> None:
    nodes = single()
    first = start("a", nodes)
    first.wait_leader()
    propose(first, b"one")
    propose(first, b"two")
    first.wait_committed(2)
    first.raft.stop()
    second = start("a", nodes)
    second.wait_leader()
    propose(second, b"three")
    second.wait_committed(3)
    assert second.machine.words == [b"one", b"two", b"three"]


def test_snapshot_replaces_the_trimmed_entries(start: Callable[..., Running]) -> None:
    nodes = single()
    first = start("a", nodes)
    first.wait_leader()
    for index in range(30):
        propose(first, b"%d" % index)
    first.wait_committed(30)
    first.raft.snapshot()
    first.wait_trimmed()
    propose(first, b"after")
    first.wait_committed(31)
    first.raft.stop()
    second = start("a", nodes)
    second.wait(lambda: second.committed == [b"after"])
    assert second.machine.words == first.machine.words
    assert isinstance(second.events[0], Restored)


def test_a_crash_between_snapshot_and_trim_loses_nothing(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = single()
    first = start("a", nodes)
    first.wait_leader()
    for index in range(20):
        propose(first, b"%d" % index)
    first.wait_committed(20)
    with monkeypatch.context() as patch:
        patch.setattr("ziplog.raft.journal.Journal.drop_first", lambda *_: None)
        first.raft.snapshot()
        wait_until((first.raft._journal.directory / "snapshot").exists, "a snapshot")
        for index in range(20, 40):
            propose(first, b"%d" % index)
        first.wait_committed(40)
        first.raft.stop()
    second = start("a", nodes)
    second.wait(lambda: len(second.machine.words) == 40)
    assert second.machine.words == first.machine.words


def test_three_nodes_agree_and_continue_without_their_leader(start: Callable[..., Running]) -> None:
    nodes = group()
    running = {name: start(name, nodes) for name in nodes}
    for node in running.values():
        node.wait_leader()
    leader = leader_of(running)
    commit([b"one"], running.values())
    for node in running.values():
        node.wait_connected(2)
    running.pop(leader).raft.stop()
    for node in running.values():
        node.wait_other_leader(leader)
    commit([b"without it"], running.values())
    wait_until(
        lambda: len({tuple(node.machine.words) for node in running.values()}) == 1, "all agree"
    )


# The library does not close the snapshot file that it sends.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO")
def test_node_that_was_down_gets_the_snapshot(start: Callable[..., Running]) -> None:
    nodes = group()
    away, *present = [start(name, nodes) for name in "cab"]
    away.wait_leader()
    away.raft.stop()
    wait_until(lambda: present[0].raft.status().leader in {"a", "b"}, "one leads")
    words = [b"%d" % index for index in range(20)]
    commit(words, present)
    for node in present:
        node.raft.snapshot()
    for node in present:
        node.wait_trimmed()
    late = start("c", nodes)
    wait_until(lambda: late.machine.words == present[0].machine.words, "it has all of them")
    assert set(late.machine.words) == set(words)
    assert any(isinstance(event, Restored) for event in late.events)


def test_a_leader_leads_once_the_entry_that_began_its_term_is_applied(
    tmp_path: Path,
) -> None:
    node = Raft(
        "a", group(), tmp_path, Words(), on_event=lambda _: None, on_fatal=lambda _: None
    )  # fmt: skip
    sync = node._sync
    sync._SyncObj__raftState = 2  # elected
    sync._SyncObj__noopIDx = 2
    assert not sync.leads()
    sync._SyncObj__raftLastApplied = 2
    assert sync.leads()
    node.stop()


def test_a_command_does_not_wait_for_the_tick(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = group()
    running = [start(name, nodes) for name in nodes]
    for node in running:
        node.wait_leader()
    # With ticks of two seconds, thirty of these end in time only by wake-ups.
    monkeypatch.setattr(raft_module, "_TICK_S", 2.0)
    leader = leader_of(dict(zip(nodes, running, strict=True)))
    asked = iter([running[list(nodes).index(leader)]] * 30)
    done: list[bool] = []

    def ask() -> None:
        if (node := next(asked, None)) is not None:
            arguments = (b"word", node.raft.status().term, answer)
            threading.Thread(target=node.raft._sync.propose_command, args=arguments).start()

    def answer(_result: object, failure: int) -> None:
        done.append(failure == pysyncobj.config.FAIL_REASON.SUCCESS)
        ask()

    ask()
    wait_until(lambda: len(done) == 30, "all are answered")
    assert sum(done) > 20


def test_a_machine_that_raises_stops_the_node(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start("a", single())
    node.wait_leader()

    def fail(_self: Words, _command: bytes) -> bytes:
        raise ValueError("broken")

    monkeypatch.setattr(Words, "apply", fail)
    propose(node, b"one")
    node.wait(lambda: node.fatal)
    assert "broken" in node.fatal[0]


def test_a_failing_disk_stops_the_node(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start("a", single())
    node.wait_leader()

    def fail(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ziplog.raft.journal.os.fdatasync", fail)
    propose(node, b"one")
    node.wait(lambda: node.fatal)
    assert "No space left on device" in node.fatal[0]
    assert node.committed == []


def test_a_damaged_snapshot_stops_the_start(start: Callable[..., Running], tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "snapshot").write_bytes(b"ZIPSNAP1" + b"nonsense")
    with pytest.raises(JournalError, match="is damaged"):
        start("a", single())


def test_a_lost_snapshot_stops_the_start(start: Callable[..., Running], tmp_path: Path) -> None:
    nodes = single()
    first = start("a", nodes)
    first.wait_leader()
    for index in range(20):
        propose(first, b"%d" % index)
    first.wait_committed(20)
    first.raft.snapshot()
    first.wait_trimmed()
    first.raft.stop()
    (tmp_path / "a" / "snapshot").unlink()
    with pytest.raises(JournalError, match="snapshot is missing"):
        start("a", nodes)


def test_failed_tick_is_followed_by_others(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start("a", single())
    node.wait_leader()
    failures: list[int] = []

    def fail(_self: object) -> None:
        failures.append(1)
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("ziplog.raft.raft_node.RaftNode._send_status", fail)
        wait_until(lambda: len(failures) > 3, "it fails several times")
    propose(node, b"one")
    node.wait_committed(1)
    assert not node.fatal


def test_node_that_stopped_itself_accepts_no_commands(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start("a", single())
    node.wait_leader()
    monkeypatch.setattr(Words, "apply", lambda *_: 1 / 0)
    propose(node, b"one")
    node.wait(lambda: node.fatal)
    propose(node, b"two")  # it must not write to a pipe that is closed


def test_a_taken_port_is_named(start: Callable[..., Running]) -> None:
    nodes = single()
    start("a", nodes)
    with pytest.raises(UnavailableError, match=nodes["a"]):
        start("b", {"b": nodes["a"]})


def test_random_bytes_at_the_port_do_no_harm(start: Callable[..., Running]) -> None:
    nodes = single()
    node = start("a", nodes)
    node.wait_leader()
    host, port = nodes["a"].split(":")
    with socket.create_connection((host, int(port))) as peer:
        peer.sendall(b"\x08\x00\x00\x00garbage!" * 20)
    propose(node, b"one")
    node.wait(lambda: node.committed == [b"one"])
    assert not node.fatal


def test_outside_loopback_a_password_is_required(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="raft_password"):
        Raft(
            "a", {"a": "192.0.2.1:7000"}, tmp_path, Words(),
            on_event=lambda _: None, on_fatal=lambda _: None,
        )  # fmt: skip


def test_unknown_configuration_names_are_detected() -> None:
    with pytest.raises(AssertionError, match="raftMinTimeot"):
        pysyncobj_adapter.configuration("127.0.0.1:1", index=0, count=1, raftMinTimeot=1)


def test_the_import_leaves_the_socket_module_alone() -> None:
    program = "import ziplog.raft.raft, socket; print(socket.inet_ntop.__module__)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "_socket"


def test_idle_node_uses_little_cpu(start: Callable[..., Running]) -> None:
    node = start("a", single())
    node.wait_leader()
    assert node.raft._thread.ident is not None
    clock = time.pthread_getcpuclockid(node.raft._thread.ident)
    started, before = time.monotonic(), time.clock_gettime(clock)
    wait_until(lambda: time.monotonic() - started > 1.0, "a second has passed")
    used, passed = time.clock_gettime(clock) - before, time.monotonic() - started
    assert used < 0.1 * passed


def leader_of(running: dict[str, Running]) -> str:
    """Wait for a leader, and return it."""
    found: list[str] = []

    def is_led() -> bool:
        found[:] = [name for name, node in running.items() if node.raft.status().is_leader]
        return bool(found)

    wait_until(is_led, "one leads")
    return found[0]


def commit(commands: list[bytes], nodes: Collection[Running]) -> None:
    """Propose commands until all nodes have applied them.

    When the leader changes, some may be lost, and others come twice.
    """
    due = 0.0

    def is_done() -> bool:
        nonlocal due
        if all(set(commands) <= set(node.machine.words) for node in nodes):
            return True
        if time.monotonic() >= due:
            due = time.monotonic() + 2.0
            for node in nodes:  # the leader takes them
                for command in commands:
                    if command not in node.machine.words:
                        propose(node, command)
        return False

    wait_until(is_done, "all have applied them")
