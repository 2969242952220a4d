"""Client requests to the membership service: cluster information, leases, trims, status, cursors.

    Hello, StatusQuery -- state of this node --> reply at once
    LeaseQuery, CursorQuery -- a read barrier --> reply
    Trim -- a read barrier --> a pending trim (`Trims`) --> reply
    ChangeRegion, FinishUpgrade, CursorClaim that this state would decide -- a read barrier -->
    handled again

Rule: a linearizable read waits for a barrier that was proposed after the request arrived.
Invariant: at most `MAX_PENDING` requests wait. See docs/protocol.md, sections 3 and 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mms import epochs, membership_rules, status
from mms.cursors import Cursors
from mms.read_barriers import MAX_PENDING, ReadBarriers
from mms.trims import Trims
from ziplog.core.node import Propose, Send
from ziplog.core.view import run_of
from ziplog.wire import (
    ChangeRegion,
    ClusterInfo,
    CursorClaim,
    CursorQuery,
    FinishUpgrade,
    LeaseHistory,
    LeaseQuery,
    Limits,
    Refused,
    StatusReply,
    TrimReply,
)
from ziplog.wire.service import Finalized

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mms.commands import Barrier, SetTrim
    from mms.leases import LeasePlan
    from mms.read_barriers import DecidedRequest, PendingRead, QueuedRead
    from mms.servers import FailureHandlers, Servers
    from mms.state import ClusterState
    from mms.upgrades import Peers
    from ziplog.config import ClusterConfig
    from ziplog.core.node import Effect
    from ziplog.core.wire_use import Release
    from ziplog.raft.service_node import Leadership
    from ziplog.wire import Hello, StatusQuery


class ClientRequests:
    """Handles the client requests of one node of the membership service."""

    def __init__(
        self,
        config: ClusterConfig,
        name: str,
        state: ClusterState,
        servers: Servers,
        plan: LeasePlan,
        failure_handlers: FailureHandlers,
        leadership: Leadership,
        peers: Peers,
        *,
        pid: int,
        release: Release,
        incarnation: int,
        wall_offset_ns: Callable[[], int],
        free_bytes: Callable[[], int | None],
        handle: Callable[[bytes, DecidedRequest, int], list[Effect]],
    ) -> None:
        """Keep these parts; see `MembershipService` for the other arguments.

        `handle` handles such a request again after a barrier.
        """
        self._handle: Final = handle
        self._config: Final = config
        self._name: Final = name
        self._pid: Final = pid
        self._release: Final = release
        self._free_bytes: Final = free_bytes
        self._peers: Final = peers
        self._state: Final = state
        self._servers: Final = servers
        self._plan: Final = plan
        self._failure_handlers: Final = failure_handlers
        self._leadership: Final = leadership
        self._read_barriers: Final = ReadBarriers(incarnation)
        self._trims: Final = Trims(state, servers)
        self.cursors: Final = Cursors(state, wall_offset_ns)

    # --- immediate replies ---

    def not_leader(self, src: bytes, request: int) -> Effect:
        """Return a `NotLeader` reply with the leader's endpoint."""
        return self._leadership.redirect(src, self._state.cluster, request)

    def hello(self, src: bytes, message: Hello, now: int) -> Effect:
        """Return the cluster information; any node that knows the cluster may answer."""
        state, config = self._state, self._config
        if not state.cluster:
            return self.not_leader(src, message.request)
        endpoints = self._leadership.endpoints()
        regions = {node.endpoint: node.region or "" for node in config.mms}
        return Send(
            src,
            ClusterInfo(
                state.cluster, message.request, state.name, state.durability,
                endpoints, list(state.placements.values()),
                [run_of(lease) for lease in self._plan.current(now)], state.trim,
                Limits(
                    config.max_payload_bytes, config.max_key_bytes, config.max_unsettled_units,
                    config.session_timeout_s, config.rtt_ms,
                    membership_rules.default_min_regions(state, config),
                ),
                [self._servers.frontier(shard) for shard in state.placements], state.wire,
                [regions[endpoint] for endpoint in endpoints], state.lost_regions,
            ),
        )  # fmt: skip

    def status(
        self, src: bytes, message: StatusQuery, durability: Mapping[str, Any], now: int
    ) -> Effect:
        """Return the status document, as the leader sees the cluster, or a part of the history.

        `durability`: from `DurabilityLevel.status`.
        """
        if message.part == "events":
            found = self._state.history.document(message.start)
            return Send(src, StatusReply(self._state.cluster, message.request, found))
        if message.part == "epochs":
            found = epochs.document(self._state, self._servers, message.start, message.stop)
            return Send(src, StatusReply(self._state.cluster, message.request, found))
        found = status.document(
            self._config, self._state, self._servers, self._failure_handlers, self._peers,
            name=self._name, pid=self._pid, release=self._release, free_bytes=self._free_bytes(),
            connected=self._leadership.connected,
            lease=next(iter(self._plan.current(now)), None), epoch=self._plan.epoch(now),
            finalized=membership_rules.finalized(self._state, self._servers),
            durability=durability, now=now,
        )  # fmt: skip
        return Send(src, StatusReply(self._state.cluster, message.request, found))

    # --- replies after a barrier ---

    def __len__(self) -> int:
        return len(self._read_barriers) + len(self._trims)

    def submit(self, src: bytes, message: QueuedRead, now: int) -> list[Effect]:
        """Queue a request that needs a read barrier, unless a copy waits, or refuse it.

        A client repeats a request while a commit is slow: its copies would fill the queue, and one
        would be handled after another one was answered.
        """
        if self._read_barriers.has(src, message):
            return []
        if len(self) >= MAX_PENDING:
            why = f"{MAX_PENDING} requests are already waiting"
            refused = Refused(self._state.cluster, 0, 0, 0, message.request, "full", why)
            return [Send(src, refused)]
        self._read_barriers.add(src, message)
        return self.propose_barrier(now)

    def propose_barrier(self, now: int) -> list[Effect]:
        """Propose a barrier for the queued requests, if one is due."""
        barrier = self._read_barriers.propose_barrier(now)
        return [] if barrier is None else [Propose(barrier.encode())]

    def on_barrier(self, barrier: Barrier, now: int) -> list[Effect]:
        """Answer the requests of a committed barrier; start their trims."""
        return [
            effect
            for request in self._read_barriers.on_committed(barrier)
            for effect in self._answer(request, now)
        ]

    def _answer(self, pending: PendingRead, now: int) -> list[Effect]:
        src, request = pending
        state, last = self._state, self._state.last
        if isinstance(request, LeaseQuery):
            runs = state.runs_from(request.gsn)
            placements = list(state.placements.values())
            over = [shard for shard in state.retired if membership_rules.is_over(state, shard)]
            finalized = [
                Finalized(shard, retired.limit)
                for shard, retired in state.retired.items()
                if retired.is_finalized and shard not in over
            ]
            history = LeaseHistory(
                state.cluster, request.request, runs, placements, state.trim, over, finalized
            )
            return [Send(src, history)]
        if isinstance(request, CursorQuery):
            return [self.cursors.answer_query(src, request, now)]
        if isinstance(request, ChangeRegion | FinishUpgrade | CursorClaim):
            return self._handle(src, request, now)
        if last is None or request.gsn >= last.stop:
            refused = TrimReply(state.cluster, request.request, state.trim, "no-such-position")
            return [Send(src, refused)]
        return self._trims.start(src, request, now)

    def advance(self, now: int) -> list[Effect]:
        """Advance the pending trims."""
        return self._trims.advance(now) if self._trims else []

    def on_trim_refused(self, command: SetTrim, now: int) -> list[Effect]:
        """Answer the trims that consensus refused."""
        self._trims.on_refused(command)
        return self.advance(now)

    def next_wakeup(self, now: int) -> list[int]:
        """Return the latest times of the next barrier, `advance` and command with moves."""
        due = (
            self._read_barriers.next_wakeup(), self._trims.next_wakeup(now),
            self.cursors.next_wakeup(),
        )  # fmt: skip
        return [at for at in due if at is not None]

    def reject_lost(self, now: int) -> list[Effect]:
        """Redirect the requests of barriers that were not committed in time."""
        lost = self._read_barriers.pop_lost(now)
        return [self.not_leader(src, request.request) for src, request in lost]

    def abandon(self) -> list[Effect]:
        """Redirect all waiting requests: this node no longer leads."""
        requests = [(src, request.request) for src, request in self._read_barriers.abandon()]
        requests += self._trims.abandon() + self.cursors.abandon()
        return [self.not_leader(src, request) for src, request in requests]
