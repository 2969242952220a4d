"""Consensus: the one door to PySyncObj, of which exactly release 0.3.17 is used.

Six operations: `propose`, `read_barrier`, `on_event` (what was applied, who leads), the machine's
`snapshot` and `restore`, and `status`. The library's own journal, snapshot file, thread and
decoding are replaced: ours are on disk before they return, ours ends the process when the log can
no longer be trusted, and ours runs no code that a peer sent. Callbacks come on the tick thread:
they must only put something into a queue.

Invariant: an event `Committed` is given once for every command, in log order, from the last
`Restored` on. See docs/protocol.md, section 3.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import pysyncobj.config
import pysyncobj.syncobj

from ziplog.errors import ConfigError, UnavailableError
from ziplog.node import Committed, LeaderChanged, PeersChanged, Restored
from ziplog.runtime.conflict import news
from ziplog.runtime.journal import Entry, Journal, JournalError
from ziplog.runtime.links import Transport
from ziplog.runtime.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ziplog.node import Event

log = logging.getLogger(__name__)
_library_log = logging.getLogger("pysyncobj.syncobj")

#: Longest sleep of the tick thread; commands and messages wake it at once.
_TICK_S: Final = 0.05
#: The same for a leader without other nodes: no time-out of its own can come.
_LONE_TICK_S: Final = 0.25
#: Commands handed over and not applied yet.
MAX_PROPOSALS: Final = 1000
#: A command, in bytes; a journal record holds it and a little more.
MAX_COMMAND: Final = 16 * 1024 * 1024
#: The journal is trimmed behind a snapshot when it is that long, or so old (seconds).
_COMPACT_ENTRIES: Final = 4096
_COMPACT_S: Final = 600


class Machine(Protocol):
    """What is replicated: total and deterministic; used on the tick thread only."""

    def apply(self, command: bytes) -> bytes:
        """Take a command and return its result; never raises."""
        ...

    def snapshot(self) -> bytes:
        """Return the whole state."""
        ...

    def restore(self, snapshot: bytes) -> None:
        """Replace the whole state."""
        ...


class Status(NamedTuple):
    """Consensus as this node sees it."""

    #: The leader's name, or "" while there is none.
    leader: str
    #: This node leads, and has applied everything that was committed before it did.
    is_leader: bool
    #: Names of the other nodes that are connected, sorted.
    connected: tuple[str, ...]
    term: int
    #: Index of the last entry applied.
    applied: int
    #: Entries in the journal.
    entries: int


class Raft:
    """One node of a replicated state machine.

    Args:
        name: this node's.
        nodes: all nodes of the group: name to consensus endpoint ("host:port").
        directory: where the journal and the snapshot are; used by nobody else.
        machine: what is replicated.
        on_event: told `Restored`, `Committed`, `LeaderChanged`, `PeersChanged`; any thread.
        on_fatal: told why this node may not go on; the process must stop.
        password: guards the endpoint; required outside loopback.

    Raises:
        ConfigError: an endpoint is reachable from outside and there is no password.
        UnavailableError: the endpoint's port is taken.
        JournalError: the directory is in use, or damaged.

    """

    def __init__(
        self,
        name: str,
        nodes: Mapping[str, str],
        directory: Path,
        machine: Machine,
        *,
        on_event: Callable[[Event], None],
        on_fatal: Callable[[str], None],
        password: str | None = None,
    ) -> None:
        _check_password(nodes.values(), password)
        self._name: Final = name
        self._names: Final = {endpoint: node for node, endpoint in nodes.items()}
        self._on_event: Final = on_event
        self._on_fatal: Final = on_fatal
        self._journal: Final = Journal(directory)
        # Whoever wakes the thread must not write to a pipe that it has just closed.
        self._open_or_closed = threading.Lock()
        self._is_closed = False
        self._stopping = False
        self._reason = ""
        self._status = Status("", is_leader=False, connected=(), term=0, applied=0, entries=0)
        self._proposals = threading.BoundedSemaphore(MAX_PROPOSALS)
        self._consumer: Final = _Consumer(machine, on_event, self._die)
        self._fatal_lines: Final = _FatalLines(self._die)
        try:
            _refuse_taken(nodes[name])
            path = directory / "snapshot"
            if path.exists():  # finish what a crash between snapshot and trim left undone
                self._journal.align(Snapshot.read(path).previous)
            self._sync: Final = _join(nodes, name, self._journal, path, self._consumer, password)
        except BaseException:
            self._journal.close()
            raise
        _library_log.addHandler(self._fatal_lines)
        self._thread: Final = threading.Thread(target=self._run, name="raft", daemon=True)

    # --- the operations ---

    def start(self) -> None:
        """Join the group. Events come from now on."""
        self._thread.start()

    def propose(self, command: bytes) -> None:
        """Hand a command to the leader. `Committed` tells when it was applied, if it ever is."""
        assert command, "a command has at least one byte"
        assert len(command) <= MAX_COMMAND, "a command is too long"
        self._submit(command, lambda _done: None)

    def read_barrier(self, done: Callable[[bool], None]) -> None:
        """Call `done(True)`, on the tick thread, once this node has applied what was committed.

        That is all that was committed, by anybody, before this call. `done(False)`: try again.
        """
        self._submit(b"", done)

    def status(self) -> Status:
        """Return how consensus stands; at most a tick old."""
        return self._status

    def snapshot(self) -> None:
        """Write a snapshot and trim the journal behind it soon, instead of when it is due."""
        self._sync.forceLogCompaction()
        self._wake()

    def stop(self, timeout: float = 10.0) -> None:
        """Leave the group and close everything; waits up to `timeout` seconds. Idempotent."""
        self._stopping = True
        if self._thread.is_alive():
            self._wake()
            self._thread.join(timeout)
        elif self._thread.ident is None:
            self._close()

    def _submit(self, command: bytes, done: Callable[[bool], None]) -> None:
        if self._stopping or not self._proposals.acquire(blocking=False):
            done(False)
            return

        def applied(_result: bytes | None, failure: int) -> None:
            self._proposals.release()
            done(failure == pysyncobj.config.FAIL_REASON.SUCCESS)

        self._consumer.apply(command, callback=applied)

    # --- the tick thread ---

    def _run(self) -> None:
        try:
            while not self._stopping and not self._reason:
                self._tick()
                self._publish()
        except JournalError as error:
            self._die(str(error))
        except BaseException as error:  # whatever ends this thread must be told
            log.critical("consensus thread ended", exc_info=True)
            self._die(f"the consensus thread ended: {error!r}")
        finally:
            self._close()
        if self._reason and not self._stopping:
            self._on_fatal(self._reason)

    def _tick(self) -> None:
        alone = len(self._names) == 1 and self._status.is_leader
        try:
            self._sync.doTick(_LONE_TICK_S if alone else _TICK_S)
        except (AssertionError, JournalError):
            raise
        except Exception:
            # A peer sent what the library cannot handle; it has dropped the message.
            log.warning("a consensus tick failed", exc_info=True)

    def _publish(self) -> None:
        sync, before = self._sync, self._status
        leader = sync.leader_id()
        status = Status(
            leader=self._names[leader] if leader else "",
            is_leader=sync.leads(),
            connected=tuple(sorted(self._names[node.id] for node in sync.connected_nodes())),
            term=sync.raftCurrentTerm,
            applied=sync.raftLastApplied,
            entries=len(self._journal.entries),
        )
        if status.leader == self._name and not status.is_leader:
            status = status._replace(leader="")  # elected, but not up to date yet
        self._status = status
        if status[:2] != before[:2]:
            self._on_event(LeaderChanged(status.leader, status.is_leader))
        if status.connected != before.connected:
            self._on_event(PeersChanged(status.connected))

    def _wake(self) -> None:
        with self._open_or_closed:
            if not self._is_closed:
                self._sync.wake()

    def _die(self, reason: str) -> None:
        self._reason = self._reason or reason

    def _close(self) -> None:
        _library_log.removeHandler(self._fatal_lines)
        with self._open_or_closed:
            self._is_closed = True
            self._sync.close()
        self._journal.close()


# --- how the library is dressed ---------------------------------------------------------------


class _Consumer(pysyncobj.syncobj.SyncObjConsumer):  # type: ignore[misc] # it has no types
    """The one replicated method."""

    def __init__(
        self, machine: Machine, on_event: Callable[[Event], None], die: Callable[[str], None]
    ) -> None:
        super().__init__()
        self._machine, self._on_event, self.die = machine, on_event, die

    @pysyncobj.syncobj.replicated  # type: ignore[untyped-decorator]
    def apply(self, command: bytes) -> bytes:
        if not command:  # a read barrier
            return b""
        try:
            result = self._machine.apply(command)
        except BaseException as error:
            self.die(f"a committed command of {len(command)} bytes raised {error!r}")
            raise
        self._on_event(Committed(command, result))
        return result

    def take_snapshot(self) -> bytes:
        return self._machine.snapshot()

    def restore(self, state: bytes) -> None:
        self._machine.restore(state)
        self._on_event(Restored(state))


class _LibrarySnapshot:
    """Our snapshot file under the library's names."""

    def __init__(self, consumer: _Consumer) -> None:
        self._consumer: Final = consumer

    def write(self, path: str, entries: tuple[Any, ...]) -> None:
        """Write a snapshot that ends with `entries`: (last, the one before, _)."""
        last, previous = Entry(*entries[0]), Entry(*entries[1])
        Snapshot(previous, last, self._consumer.take_snapshot()).write(Path(path))

    def read(self, path: str) -> tuple[Any, ...]:
        """Restore the machine; return (last, the one before, the group) for the library."""
        try:
            found = Snapshot.read(Path(path))
            self._consumer.restore(found.state)
        except Exception as error:  # the library would go on with an empty machine
            self._consumer.die(f"the snapshot {path} cannot be restored: {error}")
            raise
        return _plain(found.last), _plain(found.previous), set[Any]()


class _LibraryJournal:
    """Our journal under the library's names."""

    def __init__(self, journal: Journal) -> None:
        self._journal: Final = journal

    def add(self, command: bytes, idx: int, term: int) -> None:
        self._journal.append(Entry(command, idx, term))

    def clear(self) -> None:
        self._journal.clear()

    def deleteEntriesFrom(self, entryFrom: int) -> None:  # noqa: N802, N803
        self._journal.keep_first(entryFrom)

    def deleteEntriesTo(self, entryTo: int) -> None:  # noqa: N802, N803
        self._journal.drop_first(entryTo)

    def __getitem__(self, item: int | slice) -> Any:
        found = self._journal.entries[item]
        return [_plain(entry) for entry in found] if isinstance(found, list) else _plain(found)

    def __len__(self) -> int:
        return len(self._journal.entries)

    def _destroy(self) -> None:
        """Nothing: its owner closes the journal."""

    def setRaftCommitIndex(self, raftCommitIndex: int) -> None:  # noqa: N802, N803
        self._journal.commit_index = raftCommitIndex

    def getRaftCommitIndex(self) -> int:  # noqa: N802
        return self._journal.commit_index

    def setCurrentTerm(self, term: int, votedForNodeId: str | None) -> None:  # noqa: N802, N803
        self._journal.set_vote(term, votedForNodeId)

    def getCurrentTerm(self) -> int:  # noqa: N802
        return self._journal.term

    def getVotedForNodeId(self) -> str | None:  # noqa: N802
        return self._journal.voted_for

    def onOneSecondTimer(self) -> None:  # noqa: N802
        self._journal.flush_commit()


class _Sync(pysyncobj.syncobj.SyncObj):  # type: ignore[misc] # it has no types
    """The library's node. Its name-mangled methods can be replaced here, and only here."""

    #: The message under way contradicts nothing that is held behind its entries.
    _keeps_tail = False

    def _SyncObj__onMessageReceived(self, node: Any, message: dict[str, Any]) -> None:  # noqa: N802
        """Take a message; the library would delete all behind `prevLogIdx`, equal or not."""
        if (
            message["type"] == "append_entries"
            and message["term"] >= self._SyncObj__raftCurrentTerm
            and "prevLogIdx" in message
            and message.get("transmission") is None
        ):
            count = len(message.get("entries", [])) + 1
            own = super()._SyncObj__getEntries(message["prevLogIdx"], count)
            message, self._keeps_tail = news(own, message)
        try:
            super()._SyncObj__onMessageReceived(node, message)
        finally:
            self._keeps_tail = False

    def _SyncObj__getEntries(  # noqa: N802
        self, first: int | None, count: int | None = None, size: int | None = None
    ) -> list[Any]:
        """Return entries held; to who asks which ones to delete, none behind those that stay."""
        if self._keeps_tail and count is None:
            count = 1
        entries: list[Any] = super()._SyncObj__getEntries(first, count, size)
        return entries

    def _checkCommandsToApply(self) -> None:  # noqa: N802 - the library's hook in every tick
        before = self._getRaftLogSize()
        super()._checkCommandsToApply()
        if not self.otherNodes and self._getRaftLogSize() != before:
            self.wake()  # alone, nothing else would end the sleep before the commit

    def leads(self) -> bool:
        """Whether this node leads and has applied the no-op that began its term."""
        noop: int | None = self._SyncObj__noopIDx
        return bool(self._isLeader()) and noop is not None and self.raftLastApplied >= noop

    def leader_id(self) -> str:
        leader = self._getLeader()
        return leader.id if leader is not None else ""

    def connected_nodes(self) -> list[Any]:
        return [node for node in self.otherNodes if self.isNodeConnected(node)]

    def wake(self) -> None:
        self._SyncObj__pipeNotifier.notify()

    def close(self) -> None:
        self.destroy()
        notifier = self._SyncObj__pipeNotifier
        os.close(notifier._PipeNotifier__pipeR)  # noqa: SLF001 - the library leaks them
        os.close(notifier._PipeNotifier__pipeW)  # noqa: SLF001


def _given_journal(journal: _LibraryJournal) -> _LibraryJournal:
    """Stand in for the library's `createJournal`: the configured journal is the journal."""
    return journal


pysyncobj.syncobj.createJournal = _given_journal


class _FatalLines(logging.Handler):
    """Turns the library's worst news into a stop: the machines may have diverged."""

    def __init__(self, die: Callable[[str], None]) -> None:
        super().__init__(logging.CRITICAL)
        self._die = die

    def emit(self, record: logging.LogRecord) -> None:
        self._die(
            f"consensus: {record.getMessage()}. Stop, keep a copy of this node's directory, empty"
            " it, and start the node again: it learns everything from the other nodes"
        )


def _join(
    nodes: Mapping[str, str],
    name: str,
    journal: Journal,
    path: Path,
    consumer: _Consumer,
    password: str | None,
) -> _Sync:
    others = [endpoint for node, endpoint in nodes.items() if node != name]
    snapshot = _LibrarySnapshot(consumer)
    conf = _configuration(
        nodes[name],
        alone=not others,
        journalFile=_LibraryJournal(journal),
        fullDumpFile=str(path),
        serializer=snapshot.write,
        deserializer=snapshot.read,
        password=password,
    )
    return _Sync(nodes[name], others, conf, consumers=[consumer], transportClass=Transport)


def _refuse_taken(endpoint: str) -> None:
    """Find out before the library does, which reports it by a traceback and leaks the socket."""
    host, _, port = endpoint.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            raise UnavailableError(
                f"cannot listen at {endpoint} for consensus ({error.strerror}): stop the process"
                " that does, or change host or raft_port in the cluster file"
            ) from error


def _configuration(bind: str, *, alone: bool, **given: Any) -> pysyncobj.config.SyncObjConf:
    """Return the library's configuration, whose unknown names it would take in silence."""
    options = {
        **given,
        "autoTick": False,  # our own thread ticks, and its death is noticed
        "bindAddress": bind,
        "maxBindRetries": 1,
        "bindRetryTime": 1.0,
        "dynamicMembershipChange": False,
        "useFork": False,
        "appendEntriesUseBatch": False,
        "commandsQueueSize": MAX_PROPOSALS,
        "connectionRetryTime": 0.2,
        "leaderFallbackTimeout": 1.0,
        "logCompactionMinEntries": _COMPACT_ENTRIES,
        "logCompactionMinTime": _COMPACT_S,
        # Alone there is nobody to wait for.
        "appendEntriesPeriod": 0.01 if alone else 0.1,
        "raftMinTimeout": 0.05 if alone else 0.5,
        "raftMaxTimeout": 0.06 if alone else 1.2,
    }
    conf = pysyncobj.config.SyncObjConf(**options)
    unknown = set(options) - set(vars(conf))
    assert not unknown, f"pysyncobj knows no {unknown}"
    return conf


def _check_password(endpoints: Any, password: str | None) -> None:
    exposed = [endpoint for endpoint in endpoints if not _is_loopback(endpoint)]
    if exposed and password is None:
        raise ConfigError("raft_password", None, f"given, because {exposed[0]} is not loopback")
    if password is not None and not pysyncobj.syncobj.HAS_CRYPTO:
        raise ConfigError(
            "raft_password", "(not shown)", "left out, or `pip install cryptography` is needed"
        )


def _is_loopback(endpoint: str) -> bool:
    host = endpoint.rpartition(":")[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _plain(entry: Entry) -> tuple[bytes, int, int]:
    """Return an entry as the library keeps them."""
    return entry.command, entry.index, entry.term
