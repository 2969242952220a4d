"""What clients are answered: where everything is, leases, trims, the status document.

    Hello, StatusQuery -- what this node knows --> answered at once
    LeaseQuery -- a read barrier --> answered
    Trim -- a read barrier --> a trim under way (`Trims`) --> answered

Rule: an answer that may not be old waits for a barrier that was proposed after the question came.
Invariant: no more than `MAX_PENDING` wait. See docs/protocol.md, sections 3 and 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mms import membership_rules, status
from mms.read_barriers import MAX_PENDING, ReadBarriers
from mms.trims import Trims
from ziplog.core.node import Propose, Send
from ziplog.core.view import run_of
from ziplog.wire import (
    ClusterInfo,
    LeaseHistory,
    LeaseQuery,
    Limits,
    NotLeader,
    Refused,
    StatusReply,
    TrimReply,
)

if TYPE_CHECKING:
    from mms.commands import Barrier
    from mms.failure_handlers import FailureHandlers
    from mms.leases import LeasePlan
    from mms.read_barriers import PendingRead
    from mms.servers import Servers
    from mms.state import ClusterState
    from ziplog.config import ClusterConfig
    from ziplog.core.node import Effect
    from ziplog.wire import Hello, StatusQuery, Trim


class ClientRequests:
    """All that one node of the service says to clients."""

    def __init__(
        self,
        config: ClusterConfig,
        name: str,
        state: ClusterState,
        servers: Servers,
        plan: LeasePlan,
        failure_handlers: FailureHandlers,
        *,
        pid: int,
        incarnation: int,
    ) -> None:
        """Answer from these; see `MembershipService` for `name`, `pid` and `incarnation`."""
        self._config: Final = config
        self._name: Final = name
        self._pid: Final = pid
        self._state: Final = state
        self._servers: Final = servers
        self._plan: Final = plan
        self._failure_handlers: Final = failure_handlers
        self._read_barriers: Final = ReadBarriers(incarnation)
        self._trims: Final = Trims(state, servers)
        #: The node that leads, as far as this one knows; "" while there is none.
        self.leader = ""
        #: The other nodes of the service that this one can reach.
        self.connected: tuple[str, ...] = ()

    # --- at once ---

    def not_leader(self, src: bytes, request: int) -> Effect:
        """Say who leads."""
        nodes = self._config.mms
        endpoint = next((node.endpoint for node in nodes if node.name == self.leader), "")
        return Send(src, NotLeader(self._state.cluster, request, endpoint))

    def hello(self, src: bytes, message: Hello, now: int) -> Effect:
        """Say what the cluster is; any node may, once it knows."""
        state, config = self._state, self._config
        if not state.cluster:
            return self.not_leader(src, message.request)
        nodes = sorted(config.mms, key=lambda node: node.name != self.leader)
        return Send(
            src,
            ClusterInfo(
                state.cluster, message.request, state.name, config.durability,
                [node.endpoint for node in nodes], list(state.placements.values()),
                [run_of(lease) for lease in self._plan.current(now)], state.trim,
                Limits(
                    config.max_payload_bytes, config.max_key_bytes, config.max_unsettled_units,
                    config.session_timeout_s,
                ),
                [self._servers.frontier(shard) for shard in state.placements],
            ),
        )  # fmt: skip

    def status(self, src: bytes, message: StatusQuery, now: int) -> Effect:
        """Say how the leader sees the cluster."""
        found = status.document(
            self._config, self._state, self._servers, self._failure_handlers,
            name=self._name, pid=self._pid, connected=self.connected,
            lease=next(iter(self._plan.current(now)), None), epoch=self._plan.epoch(now),
            finalized=membership_rules.finalized(self._state, self._servers), now=now,
        )  # fmt: skip
        return Send(src, StatusReply(self._state.cluster, message.request, found))

    # --- behind a barrier ---

    def __len__(self) -> int:
        return len(self._read_barriers) + len(self._trims)

    def submit(self, src: bytes, message: LeaseQuery | Trim, now: int) -> list[Effect]:
        """Take a question that is answered behind a read barrier."""
        if len(self) >= MAX_PENDING:
            why = f"{MAX_PENDING} questions wait already"
            refused = Refused(self._state.cluster, 0, 0, 0, message.request, "full", why)
            return [Send(src, refused)]
        self._read_barriers.add(src, message)
        return self.propose_barrier(now)

    def propose_barrier(self, now: int) -> list[Effect]:
        """Propose a barrier for the new questions, if one is due."""
        barrier = self._read_barriers.propose_barrier(now)
        return [] if barrier is None else [Propose(barrier.encode())]

    def on_barrier(self, barrier: Barrier, now: int) -> list[Effect]:
        """Answer the questions that a committed barrier lets through; begin their trims."""
        effects = (
            self._answer(request, now) for request in self._read_barriers.on_committed(barrier)
        )
        return [effect for effect in effects if effect is not None]

    def _answer(self, pending: PendingRead, now: int) -> Effect | None:
        src, request = pending
        state, last = self._state, self._state.last
        if isinstance(request, LeaseQuery):
            runs = state.runs_from(request.gsn)
            placements = list(state.placements.values())
            return Send(
                src, LeaseHistory(state.cluster, request.request, runs, placements, state.trim)
            )
        if last is None or request.gsn >= last.stop:
            return Send(
                src, TrimReply(state.cluster, request.request, state.trim, "no-such-position")
            )
        self._trims.start(src, request.request, request.gsn, now)
        return None

    def advance(self, now: int) -> list[Effect]:
        """Do what can be done now for the trims under way."""
        return self._trims.advance(now) if self._trims else []

    def next_wakeup(self, now: int) -> list[int]:
        """Return when to raise a barrier, and when to advance, at the latest."""
        due = (self._read_barriers.next_wakeup(), self._trims.next_wakeup(now))
        return [at for at in due if at is not None]

    def reject_lost(self, now: int) -> list[Effect]:
        """Send those away whose barrier did not come."""
        lost = self._read_barriers.pop_lost(now)
        return [self.not_leader(src, request.request) for src, request in lost]

    def abandon(self) -> list[Effect]:
        """Send everybody away: this node does not lead any more."""
        requests = [(src, request.request) for src, request in self._read_barriers.abandon()]
        return [self.not_leader(src, request) for src, request in requests + self._trims.abandon()]
