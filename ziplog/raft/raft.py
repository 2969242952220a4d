"""Raft for replicated services: the only interface to PySyncObj, release 0.3.17.

Operations: `propose`, `status`, `snapshot`; commits and leader changes are events
(`on_event`). The library's journal, snapshot file, thread and decoding are replaced: writes are on
disk before they return, the process ends if the log is damaged, and no code of a peer is run.
Callbacks run on the tick thread: they must only put events into a queue.

Invariant: `Committed` is posted exactly once for every command, in log order, from the last
`Restored` on. See docs/protocol.md, section 12.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import pysyncobj.syncobj

from ziplog.core.node import LeaderChanged, PeersChanged
from ziplog.errors import ConfigError, UnavailableError
from ziplog.raft.journal import Journal, JournalError
from ziplog.raft.pysyncobj_adapter import MAX_PROPOSALS, URGENT_PROPOSALS, join
from ziplog.raft.state_machine import Consumer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from ziplog.core.node import Event
    from ziplog.raft.connections import Introduction
    from ziplog.raft.state_machine import Machine

log = logging.getLogger(__name__)

#: Longest sleep of the tick thread; commands and messages wake it at once.
_TICK_S: Final = 0.05
#: The same for a leader without other nodes, which has no timeouts.
_LONE_TICK_S: Final = 0.25
#: Pause after a failed tick: the next one may fail as well.
_FAILED_TICK_S: Final = 0.01
#: Maximum size of a command, in bytes; a journal record is a little larger.
MAX_COMMAND: Final = 16 * 1024 * 1024


class Status(NamedTuple):
    """The state of the Raft group as this node sees it."""

    #: The leader's name, or "" while there is none.
    leader: str
    #: This node leads, and has applied everything that was committed before its term.
    is_leader: bool
    #: Names of the other nodes that are connected, sorted.
    connected: tuple[str, ...]
    term: int
    #: Index of the last entry applied.
    applied: int
    #: Number of entries in the journal.
    entries: int
    #: This node's votes and acknowledgements count. A node with a new directory becomes a voter
    #: once it has copied the log, or once it has met all other nodes in a new group.
    is_voter: bool


class Raft:
    """One node of a replicated state machine.

    Args:
        name: this node's.
        nodes: all nodes of the group: name to Raft endpoint ("host:port").
        directory: holds the journal and the snapshot; no other process may use it.
        machine: the state machine to replicate.
        bind: where this node listens ("host:port"); None: at its endpoint.
        on_event: receives `Restored`, `Committed`, `LeaderChanged`, `PeersChanged`; any thread.
        on_fatal: called with the reason why this node cannot continue; the process must stop.
        password: authenticates the nodes; required outside loopback.
        introduction: the reply to clients of the log that connect to the port; None: none.

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
        bind: str | None = None,
        rtt_ms: int = 0,
        on_event: Callable[[Event], None],
        on_fatal: Callable[[str], None],
        password: str | None = None,
        introduction: Introduction | None = None,
    ) -> None:
        check_password(nodes.values(), password)
        self._name: Final = name
        self._names: Final = {endpoint: node for node, endpoint in nodes.items()}
        self._on_event: Final = on_event
        self._on_fatal: Final = on_fatal
        self._journal: Final = Journal(directory)
        # Guards the wake-up pipe: no thread may write to it after it was closed.
        self._open_or_closed = threading.Lock()
        self._is_closed = False
        self._stopping = False
        self._reason = ""
        self._status = Status(
            "", is_leader=False, connected=(), term=0, applied=0, entries=0, is_voter=False
        )
        self._proposals = threading.BoundedSemaphore(MAX_PROPOSALS - URGENT_PROPOSALS)
        self._urgent_proposals = threading.BoundedSemaphore(URGENT_PROPOSALS)
        consumer = Consumer(machine, on_event)
        try:
            _check_port_free(bind or nodes[name])
            self._sync: Final = join(
                nodes, name, self._journal, consumer, password, bind=bind, rtt_ms=rtt_ms
            )
            self._sync.introduction = introduction
        except BaseException:
            self._journal.close()
            raise
        self._sync.addOnTickCallback(self._publish)  # before the tick sleeps
        self._thread: Final = threading.Thread(target=self._run, name="raft", daemon=True)

    # --- the operations ---

    def start(self) -> None:
        """Join the group. Events come from now on."""
        self._thread.start()

    def propose(self, command: bytes, term: int, *, is_urgent: bool = False) -> None:
        """Propose a command, if this node leads. `Committed` reports when it was applied, if ever.

        `term`: of the last `LeaderChanged` that the node has handled. A command of another term is
        dropped, as is one of a node that does not lead: it may rest on an old state.

        `is_urgent`: the command may use the places that are reserved for such commands.
        """
        assert command, "a command has at least one byte"
        assert len(command) <= MAX_COMMAND, "a command is too long"
        places = self._urgent_proposals if is_urgent else self._proposals
        if self._stopping or not places.acquire(blocking=False):
            return
        with self._open_or_closed:
            if not self._is_closed:
                self._sync.propose_command(command, term, lambda *_: places.release())
                return
        places.release()

    def status(self) -> Status:
        """Return the state of the group, at most one tick old."""
        return self._status

    @property
    def journal_bytes(self) -> int:
        """Size of the journal's file, in bytes."""
        return self._journal.size

    def snapshot(self) -> None:
        """Write a snapshot and trim the journal soon, instead of when it is due."""
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

    # --- the tick thread ---

    def _run(self) -> None:
        while self.run_once():
            pass

    def run_once(self) -> bool:
        """Tick once; return whether to continue, and close everything if not.

        For callers that run the node in a loop of their own, instead of `start`.
        """
        try:
            if not self._stopping:
                self._tick()
        except JournalError as error:
            self._fail(str(error))
        except BaseException as error:  # any end of this thread must be reported
            log.critical("the consensus thread ended", exc_info=True)
            self._fail(f"the consensus thread ended: {error!r}")
        if not self._stopping and not self._reason:
            return True
        self._close()
        if self._reason and not self._stopping:
            self._on_fatal(self._reason)
        return False

    def _tick(self) -> None:
        alone = len(self._names) == 1 and self._status.is_leader
        try:
            self._sync.doTick(_LONE_TICK_S if alone else _TICK_S)
        except (AssertionError, JournalError):
            raise
        except Exception:
            # The library cannot handle a peer's message, or the system lacks a resource for now.
            log.warning("a consensus tick failed", exc_info=True)
            time.sleep(_FAILED_TICK_S)

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
            is_voter=sync.is_voter,
        )
        if status.leader == self._name and not status.is_leader:
            status = status._replace(leader="")  # elected, but its log is not applied yet
        self._status = status
        has_new_term = status.is_leader and status.term != before.term
        if status[:2] != before[:2] or has_new_term:
            self._on_event(LeaderChanged(status.leader, status.is_leader, status.term))
        if status.connected != before.connected:
            self._on_event(PeersChanged(status.connected))

    def _wake(self) -> None:
        with self._open_or_closed:
            if not self._is_closed:
                self._sync.wake()

    def _fail(self, reason: str) -> None:
        self._reason = self._reason or reason

    def _close(self) -> None:
        with self._open_or_closed:
            if self._is_closed:
                return
            self._is_closed = True
            self._sync.close()
        self._journal.close()


def _check_port_free(endpoint: str) -> None:
    """Check that the port is free (the library would only log a traceback, and leak the socket)."""
    host, _, port = endpoint.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            raise UnavailableError(
                f"cannot listen at {endpoint} for consensus ({error.strerror}): stop the process"
                " that listens there, or change host or raft_port in the cluster file"
            ) from error


def check_password(endpoints: Iterable[str], password: str | None) -> None:
    """Refuse endpoints outside loopback without a password, and a password without its package.

    Raises:
        ConfigError: consensus cannot run there.

    """
    exposed = [endpoint for endpoint in endpoints if not _is_loopback(endpoint)]
    if exposed and password is None:
        raise ConfigError(
            "raft_password",
            None,
            "given",
            message=f"raft_password is required, because {exposed[0]} is not a loopback address",
        )
    if password is not None and not pysyncobj.syncobj.HAS_CRYPTO:
        raise ConfigError(
            "raft_password",
            "(not shown)",
            "left out, or `pip install 'ziplog[raft-password]'` is needed",
            message="raft_password needs the package cryptography:"
            " run `pip install 'ziplog[raft-password]'`",
        )


def _is_loopback(endpoint: str) -> bool:
    host = endpoint.rpartition(":")[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
