"""The Raft node: replaces the library's receive path for appends, snapshots and voting rights.

The library deletes entries without a conflict, counts acknowledgements of other terms, goes back to
older snapshots, commits unverified entries, and lets a node vote that lost its directory. Each of
these can lose acknowledged commands. It also keeps commands of a former leader for the next one.
Rule: Raft as published (sections 5.2-5.4 and 7), with the voting rights of `voting_rights`
(docs/protocol.md, section 12).

Invariants: a committed entry is never deleted, an entry is acknowledged only once it is on disk,
and only a leader takes commands.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import pysyncobj.config
import pysyncobj.syncobj

from ziplog.raft import codec, voting_rights
from ziplog.raft.connections import Introduction, Transport
from ziplog.raft.journal import Entry, Journal, JournalError
from ziplog.raft.log_matching import compare
from ziplog.raft.snapshot import Snapshot, store
from ziplog.raft.voting_rights import PendingVoter, VoterStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ziplog.raft.state_machine import Consumer

log = logging.getLogger(__name__)

_FOLLOWER: Final = 0
#: The entries of the library: without a command, and the first byte of one with a command.
NO_OP: Final = b"\1"
REGULAR: Final = b"\0"
#: Size of the commands that are appended at once, in bytes, from which on others wait.
_MAX_APPEND: Final = 1 << 20
#: Maximum size of a received snapshot, in bytes; it is kept in memory until it is complete.
_MAX_SNAPSHOT: Final = 1 << 30
#: Interval between status messages of a node without and with a vote. The latter also keeps
#: connections alive on which nothing else is sent before an election.
_STATUS_INTERVAL_S: Final = 0.2
_VOTER_STATUS_INTERVAL_S: Final = 1.0
#: A node hears its leader if it sent something within this many intervals of its heartbeats: less
#: than the shortest silence after which a node stands for election.
_HEARD_INTERVALS: Final = 3
#: Time without a request for another copy of a snapshot that could not be written.
_SNAPSHOT_RETRY_S: Final = 10.0
#: Interval between log lines about a node that does not vote yet.
_NON_VOTER_LOG_INTERVAL_S: Final = 10.0

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_EntryTuple = tuple[bytes, _Number, _Number]
_Proposal = tuple[bytes, int, "Callable[[bytes | None, int], None]"]


class _Append(msgspec.Struct):
    """Entries after `previous`, or a piece of a long entry or of a snapshot; or a heartbeat."""

    term: _Number
    commit_index: _Number
    entries: tuple[_EntryTuple, ...] = ()
    previous: _Number | None = msgspec.field(default=None, name="prevLogIdx")
    previous_term: _Number | None = msgspec.field(default=None, name="prevLogTerm")
    transmission: Literal["start", "process", "finish"] | None = None
    data: bytes = b""
    #: A piece of a snapshot: its bytes, whether it is the first, whether it is the last.
    serialized: tuple[bytes, bool, bool] | None = None


class _Answer(msgspec.Struct):
    """A follower's answer to the leader: how much of the leader's log it holds."""

    term: _Number
    next_node_idx: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    #: All entries before `next_node_idx` are held, durably.
    success: bool
    #: The leader is to send entries from `next_node_idx` on.
    reset: bool
    #: The identity of a follower without voting rights; None for a voter.
    joining: str | None


class _Admitted(msgspec.Struct):
    """Grants voting rights to the node with this identity, if it holds the leader's `index`."""

    term: _Number
    identity: str
    index: _Number


class _VoteRequest(msgspec.Struct):
    term: _Number
    last_log_index: _Number
    last_log_term: _Number


class _Vote(msgspec.Struct):
    term: _Number


#: Messages that the library handles, once they are checked. Nodes forward no commands.
_LIBRARY_MESSAGES: Final = {"request_vote": _VoteRequest, "response_vote": _Vote}


class RaftNode(pysyncobj.syncobj.SyncObj):  # type: ignore[misc] # it has no types
    """The library's node with our receive path. Its name-mangled methods are overridden here only.

    Args:
        own: this node's endpoint.
        others: the endpoints of the group's other nodes.
        conf: the library's configuration; its journal writes to `journal`.
        consumer: receives every committed command, in order, and snapshots.
        journal: the node's journal.
        snapshot: the snapshot file's path.

    """

    #: The reply to a client of the log that connects to this node's port.
    introduction: Introduction | None = None

    def __init__(
        self,
        own: str,
        others: Sequence[str],
        conf: Any,
        consumer: Consumer,
        journal: Journal,
        snapshot: Path,
    ) -> None:
        self._own: Final = own
        self._consumer: Final = consumer
        self._journal: Final = journal
        self._snapshot: Final = snapshot
        self._voter_statuses: dict[str, VoterStatus | None] = dict.fromkeys(others)
        self._pending_voters: dict[str, PendingVoter] = {}
        self._pieces = bytearray()
        #: When to request the entries again that only a snapshot has.
        self._snapshot_retry_at = 0.0
        #: Proposed commands that are not appended: with the term that they count in.
        self._proposed: queue.SimpleQueue[_Proposal] = queue.SimpleQueue()
        #: Time until which this node hears its leader, if no other message comes from it.
        self._hears_until = 0.0
        self._next_status_at = 0.0
        self._next_non_voter_log_at = time.monotonic() + _NON_VOTER_LOG_INTERVAL_S
        super().__init__(own, others, conf, transportClass=Transport)
        self._check_founders()

    # --- the interface for `raft` ---

    @property
    def is_voter(self) -> bool:
        """Whether this node's votes and acknowledgements count."""
        return self._journal.is_voter

    def leads(self) -> bool:
        """Whether this node leads and has applied the no-op that started its term."""
        noop: int | None = self._SyncObj__noopIDx
        return bool(self._isLeader()) and noop is not None and self.raftLastApplied >= noop

    def leader_id(self) -> str:
        """Return the leader's endpoint, or "" while none is known."""
        leader = self._getLeader()
        return leader.id if leader is not None else ""

    def connected_nodes(self) -> list[Any]:
        """Return the other nodes that are connected."""
        return [node for node in self.otherNodes if self.isNodeConnected(node)]

    def propose_command(
        self, command: bytes, term: int, done: Callable[[bytes | None, int], None]
    ) -> None:
        """Propose a command, if this node leads in `term`. From any thread.

        `done` receives its result and a failure code.
        """
        self._proposed.put((command, term, done))
        self.wake()

    def wake(self) -> None:
        """End the tick's sleep."""
        self._SyncObj__pipeNotifier.notify()

    def close(self) -> None:
        """Close all connections; the node must not be used afterwards."""
        self.destroy()
        notifier = self._SyncObj__pipeNotifier
        os.close(notifier._PipeNotifier__pipeR)  # noqa: SLF001 - the library leaks them
        os.close(notifier._PipeNotifier__pipeW)  # noqa: SLF001

    # --- the library's hooks ---

    def _SyncObj__onMessageReceived(self, peer: Any, message: dict[str, Any]) -> None:  # noqa: N802
        """Handle a message; an invalid one raises, and the connection logs and drops it."""
        match message["type"]:
            case "append_entries":
                self._on_append(peer, msgspec.convert(message, _Append), "prevLogIdx" in message)
            case "next_node_idx":
                self._on_answer(peer, msgspec.convert(message, _Answer))
            case "standing":
                self._voter_statuses[peer.id] = msgspec.convert(message, VoterStatus)
                self._check_founders()
            case "admitted":
                self._on_admitted(peer, msgspec.convert(message, _Admitted))
            case "request_vote" if not self.is_voter:
                pass  # an earlier directory of this node may have voted in that term
            case "request_vote" if self._reaches_leader_for(peer):
                self._stand_for(msgspec.convert(message, _VoteRequest))
            case kind:
                msgspec.convert(message, _LIBRARY_MESSAGES[kind])
                super()._SyncObj__onMessageReceived(peer, message)

    def _SyncObj__connectedToAnyone(self) -> bool:  # noqa: N802 - called before an election
        return self.is_voter and bool(super()._SyncObj__connectedToAnyone())

    def _SyncObj__onBecomeLeader(self) -> None:  # noqa: N802
        assert self.is_voter, "a leader is a voter"
        self._pending_voters.clear()
        super()._SyncObj__onBecomeLeader()

    def _SyncObj__onNodeConnected(self, node: Any) -> None:  # noqa: N802
        super()._SyncObj__onNodeConnected(node)
        self._next_status_at = 0.0

    def _SyncObj__onNodeDisconnected(self, node: Any) -> None:  # noqa: N802
        super()._SyncObj__onNodeDisconnected(node)
        self._voter_statuses[node.id] = None

    def _checkCommandsToApply(self) -> None:  # noqa: N802 - called in every tick
        before = self._getRaftLogSize()
        self._append_proposals()
        if not self.otherNodes and self._getRaftLogSize() != before:
            self.wake()  # without peers, nothing else would end the sleep before the commit
        self._forget_lost_leader()
        self._send_status()

    def _SyncObj__doApplyCommand(self, command: bytes) -> Any:  # noqa: N802
        """Apply a committed entry; an exception is fatal (the library would retry for ever)."""
        if command == NO_OP:
            return None
        assert command.startswith(REGULAR), "an entry of an unknown kind"
        try:
            return self._consumer.apply(command[len(REGULAR) :])
        except Exception as error:
            raise JournalError(
                f"consensus: a committed command of {len(command)} bytes raised {error!r}"
            ) from error

    def _SyncObj__loadDumpFile(self, clearJournal: bool) -> None:  # noqa: N802, N803, ARG002
        """Load the snapshot file; an error is fatal (the library would ignore it)."""
        self._load(Snapshot.read(self._snapshot))

    def _append_proposals(self) -> None:
        """Append the proposed commands with one sync, and send them; fail those of another term.

        All of them, if this node does not lead. (The library would hold them while no leader is
        known, and forward them to the next one. They would count much later, after newer decisions
        that they do not know.)
        """
        term = self.raftCurrentTerm if self.leads() else None
        entries: list[Entry] = []
        index, size = self._journal.entries[-1].index, 0
        waiting = self._SyncObj__commandsWaitingCommit
        with contextlib.suppress(queue.Empty):
            while size < _MAX_APPEND:
                command, proposed_in, done = self._proposed.get_nowait()
                if proposed_in != term:
                    done(None, pysyncobj.config.FAIL_REASON.NOT_LEADER)
                    continue
                index += 1
                size += len(command)
                entries.append(Entry(REGULAR + command, index, term))
                waiting[index].append((term, done))
        if entries:
            self._journal.extend(entries)
            self._SyncObj__sendAppendEntries()
        if size >= _MAX_APPEND:
            self.wake()

    def _forget_lost_leader(self) -> None:
        """Forget a disconnected leader if no election of this node would."""
        leader = self._getLeader()
        if leader is None or leader == self.selfNode or self.isNodeConnected(leader):
            return
        if not self.is_voter:
            self._SyncObj__raftLeader = None

    # --- elections ---

    def _reaches_leader_for(self, candidate: Any) -> bool:
        """Whether this node hears the leader, and is to stand in the candidate's place.

        Of several such nodes, the first one that is connected stands.
        """
        leader = self._getLeader()
        if leader in {None, self.selfNode, candidate} or time.monotonic() >= self._hears_until:
            return False
        between = [node.id for node in self.connected_nodes() if node not in {leader, candidate}]
        return self.isNodeConnected(leader) and all(self._own < other for other in between)

    def _stand_for(self, request: _VoteRequest) -> None:
        """Stand for election: the candidate does not hear the leader, and this node reaches both.

        Otherwise the two would replace each other for as long as the link between them is cut.
        """
        if request.term > self.raftCurrentTerm:
            self._SyncObj__setCurrentTerm(request.term, None)
            self._SyncObj__raftElectionDeadline = 0.0

    # --- voting rights ---

    def _own_status(self) -> VoterStatus:
        held = self._journal
        is_new = not held.is_voter and held.entries[-1].index == 1 and self.raftCurrentTerm == 0
        return VoterStatus(held.identity, held.is_voter, is_new, held.founders)

    def _send_status(self) -> None:
        now = time.monotonic()
        if self._voter_statuses and now >= self._next_status_at:
            self._next_status_at = now + (
                _VOTER_STATUS_INTERVAL_S if self.is_voter else _STATUS_INTERVAL_S
            )
            message = {"type": "standing"} | msgspec.structs.asdict(self._own_status())
            for node in self.otherNodes:
                self._send(node, message)
        if not self.is_voter and now >= self._next_non_voter_log_at:
            self._next_non_voter_log_at = now + _NON_VOTER_LOG_INTERVAL_S
            log.warning(
                "consensus directory %s %s", self._journal.directory, self._non_voter_reason()
            )

    def _non_voter_reason(self) -> str:
        silent = [name for name, status in self._voter_statuses.items() if status is None]
        if silent:
            return f"is new, and its node does not vote yet: start {' and '.join(sorted(silent))}"
        voting = sum(
            status is not None and status.is_voter for status in self._voter_statuses.values()
        )
        if voting > len(self._voter_statuses) // 2:
            return "is new, and its node does not vote yet: it copies the log from the other nodes"
        return (
            "is new, as too many others are: no majority has its old directories. Stop all nodes,"
            " and replace each new directory by a copy of an old one (or empty all directories, to"
            " start a new group)"
        )

    def _check_founders(self) -> None:
        if not self.is_voter:
            found = voting_rights.founders(self._own, self._own_status(), self._voter_statuses)
            if found:
                self._become_voter(found)

    def _become_voter(self, founders: Mapping[str, str]) -> None:
        self._journal.set_voter(founders)
        self._wait_for_leader()
        self._next_status_at = 0.0
        log.info("this node votes from now on")

    def _on_admitted(self, leader: Any, message: _Admitted) -> None:
        if (
            self.is_voter
            or message.identity != self._journal.identity
            or message.term != self.raftCurrentTerm
            or leader != self._getLeader()
            or not self._has_barrier(message.index, message.term)
        ):
            return
        # The lost directory may have voted in this term.
        self._SyncObj__setCurrentTerm(message.term, leader.id)
        self._become_voter({})

    def _has_barrier(self, barrier: int, term: int) -> bool:
        """Whether this node holds a barrier of that term's leader, and so all entries before it."""
        if self._committed >= barrier:  # it may be in a snapshot only
            return True
        held = self._journal.since(barrier, 1)
        return bool(held) and held[0].term == term

    def _on_pending_voter(self, peer: Any, answer: _Answer) -> None:
        """Send the log to a node without voting rights; admit it once that is safe."""
        pending = self._pending_voters.get(peer.id)
        if pending is None or pending.identity != answer.joining:
            pending = PendingVoter(str(answer.joining), self._journal.entries[-1].index + 1)
            self._pending_voters[peer.id] = pending
            self._journal.append(Entry(NO_OP, pending.barrier, self.raftCurrentTerm))
            log.warning("node %s does not vote: it gets the whole log first", peer.id)
        self._SyncObj__raftMatchIndex[peer] = 0  # the known value is of the lost directory
        if answer.reset:
            self._send_from(peer, answer.next_node_idx)
        match = {node.id: index for node, index in self._SyncObj__raftMatchIndex.items()}
        if voting_rights.is_admitted(pending, self._committed, match, self._pending_voters):
            admitted = _Admitted(self.raftCurrentTerm, pending.identity, pending.barrier)
            self._send(peer, {"type": "admitted"} | msgspec.structs.asdict(admitted))

    # --- as the leader: answers of the followers ---

    def _on_answer(self, peer: Any, answer: _Answer) -> None:
        if answer.term > self.raftCurrentTerm:
            self._SyncObj__setCurrentTerm(answer.term, None)
            self._SyncObj__setState(_FOLLOWER)
            self._SyncObj__raftLeader = None
            return
        if answer.term < self.raftCurrentTerm or not self._isLeader():
            return
        if answer.next_node_idx > self._journal.entries[-1].index + 1 and answer.success:
            raise ValueError("it acknowledges entries that it was not sent")
        if answer.joining is not None:
            self._on_pending_voter(peer, answer)
            return
        self._pending_voters.pop(peer.id, None)
        self._SyncObj__lastResponseTime[peer] = time.monotonic()
        match, following = self._SyncObj__raftMatchIndex, self._SyncObj__raftNextIndex
        if answer.success:
            match[peer] = max(match[peer], answer.next_node_idx - 1)
            following[peer] = max(following[peer], answer.next_node_idx)
        elif answer.reset:
            self._send_from(peer, answer.next_node_idx)

    def _send_from(self, peer: Any, index: int) -> None:
        """Send entries from `index` on, except those that the peer is known to hold."""
        lowest = self._SyncObj__raftMatchIndex[peer] + 1
        last = self._journal.entries[-1].index
        self._SyncObj__raftNextIndex[peer] = min(max(index, lowest), last + 1)

    # --- as a follower: messages of the leader ---

    def _on_append(self, leader: Any, append: _Append, has_entries: bool) -> None:
        if append.term < self.raftCurrentTerm:
            self._answer(leader, self._committed + 1)  # the term in it makes the sender step down
            return
        self._accept_leader(leader, append)
        if not has_entries:
            self._on_snapshot(leader, append.serialized)
        elif append.transmission is None:
            self._on_entries(leader, append, append.entries)
        else:
            self._on_piece(leader, append)

    def _accept_leader(self, leader: Any, append: _Append) -> None:
        if append.term > self.raftCurrentTerm:
            self._SyncObj__setCurrentTerm(append.term, None)
        elif self._isLeader():
            raise JournalError(
                f"consensus: node {leader.id} leads in term {append.term}, and so does this one:"
                " two nodes use one endpoint, or a directory was copied. Stop all nodes and check"
            )
        self._wait_for_leader()
        if self._getLeader() != leader:
            self._SyncObj__raftLeader = leader
            self._pieces.clear()
            self._snapshot_retry_at = 0.0
        self._SyncObj__setState(_FOLLOWER)
        self._hears_until = time.monotonic() + _HEARD_INTERVALS * self.conf.appendEntriesPeriod

    def _wait_for_leader(self) -> None:
        timeout = self._SyncObj__generateRaftTimeout()
        self._SyncObj__raftElectionDeadline = time.monotonic() + timeout

    @property
    def _committed(self) -> int:
        """The last entry known to be committed; the journal or a snapshot holds all up to it."""
        return max(int(self.raftCommitIndex), int(self.raftLastApplied))

    def _on_entries(
        self, leader: Any, append: _Append, plain_entries: Sequence[tuple[bytes, int, int]]
    ) -> None:
        came = [Entry(*entry) for entry in plain_entries]
        previous = append.previous if append.previous is not None else -1
        if any(entry.index != previous + n for n, entry in enumerate(came, 1)):
            raise ValueError("entries that do not follow each other")
        journal = self._journal
        own = journal.since(append.previous, len(came) + 1)
        found = compare(own, append.previous_term, came)
        if found is None:
            if own:
                self._check_not_committed(leader, previous)
            end = journal.entries[-1].index
            resume = end if previous > end else self._committed
            self._answer(leader, resume + 1, reset=time.monotonic() >= self._snapshot_retry_at)
            return
        if found.contradicts:
            first = previous + found.known + 1
            self._check_not_committed(leader, first)
            journal.delete_from(first)
        journal.extend(came[found.known :])
        verified = previous + len(came)
        self._commit(min(append.commit_index, verified))
        self._answer(leader, verified + 1, success=True)

    def _check_not_committed(self, leader: Any, index: int) -> None:
        if index <= self._committed:
            raise JournalError(
                f"consensus: the leader {leader.id} contradicts entry {index}, which is committed"
                " here. Stop this node, keep a copy of its directory, empty it, and start the node"
                " again: it copies everything from the other nodes"
            )

    def _commit(self, index: int) -> None:
        self._SyncObj__raftCommitIndex = max(self.raftCommitIndex, index)
        self._journal.commit_index = self.raftCommitIndex

    def _on_piece(self, leader: Any, append: _Append) -> None:
        """Assemble a long entry. The library may send "finish" twice."""
        if append.transmission == "start":
            self._pieces.clear()
        self._collect(append.data, codec.MAX_FRAME)
        if append.transmission == "finish":
            try:
                entry = msgspec.convert(codec.loads(bytes(self._pieces)), _EntryTuple)
            except ValueError:
                pass  # pieces are missing, or one is still to come
            else:
                self._pieces.clear()
                self._on_entries(leader, append, [entry])
                return
        self._answer(leader, self._committed + 1)

    def _on_snapshot(self, leader: Any, piece: tuple[bytes, bool, bool] | None) -> None:
        if piece is None:  # the leader is still writing the snapshot
            self._answer(leader, self._committed + 1)
            return
        data, is_first, is_last = piece
        if is_first:
            self._pieces.clear()
        self._collect(data, _MAX_SNAPSHOT)
        if not is_last:
            self._answer(leader, self._committed + 1)
            return
        whole = bytes(self._pieces)
        self._pieces.clear()
        try:
            found = Snapshot.decode(whole)
        except ValueError:  # the connection broke in the meantime
            self._answer(leader, self._committed + 1, reset=True)
            return
        if found.last.index > self._committed:
            self._install(whole, found)
        # Committed entries are the same on all nodes.
        self._answer(leader, self._committed + 1, success=True)

    def _collect(self, data: bytes, limit: int) -> None:
        if len(self._pieces) + len(data) > limit:
            self._pieces.clear()
            raise ValueError(f"more than {limit} bytes in pieces")
        self._pieces += data

    def _install(self, data: bytes, found: Snapshot) -> None:
        """Replace the log up to the snapshot's end by the snapshot; keep the entries after it."""
        fresh = self._snapshot.with_suffix(".received")
        try:
            store(data, fresh)
            fresh.replace(self._snapshot)
        except OSError as error:
            log.warning("cannot write the leader's snapshot (%s); trying again", error)
            self._snapshot_retry_at = time.monotonic() + _SNAPSHOT_RETRY_S
            return
        self._load(found)
        waiting = self._SyncObj__commandsWaitingCommit
        for index in [index for index in waiting if index <= found.last.index]:
            for _, callback in waiting.pop(index):
                callback(None, pysyncobj.config.FAIL_REASON.UNKNOWN_OUTCOME)

    def _load(self, found: Snapshot) -> None:
        self._journal.begin_with(found.previous, found.last)
        try:
            self._consumer.restore(found.state)
        except Exception as error:
            raise JournalError(
                f"consensus: the snapshot {self._snapshot} cannot be restored: {error!r}"
            ) from error
        self._SyncObj__raftLastApplied = found.last.index
        self._commit(found.last.index)

    def _answer(
        self, leader: Any, next_index: int, *, success: bool = False, reset: bool = False
    ) -> None:
        joining = None if self.is_voter else self._journal.identity
        answer = _Answer(self.raftCurrentTerm, next_index, success, reset, joining)
        self._send(leader, {"type": "next_node_idx"} | msgspec.structs.asdict(answer))

    def _send(self, node: Any, message: dict[str, Any]) -> None:
        self._SyncObj__transport.send(node, message)
