"""The forwards of a primary: its decisions, without bodies, on their way to the backups.

The primary forwards the decisions of a batch at its end. A batched shard gathers those of several
batches, while no reader and no backup needs them at once. A forward is repeated until all backups
have reported its entries (docs/protocol.md, sections 4 and 5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shard.ordering.epoch_closer import MAX_UNSTABLE_DECISIONS
from ziplog.core.distance import resend_after_ns
from ziplog.core.entries import Place
from ziplog.core.units import NEVER, NS_PER_MS
from ziplog.wire import Forward

if TYPE_CHECKING:
    from shard.ordering.progress import BackupProgress
    from shard.ordering.waiters import Waiters
    from shard.ordering.watermarks import Watermarks
    from shard.state.replica_state import ReplicaState
    from ziplog.core.entries import Decision

#: Most records and bytes that are decided but unstable; above this, new units wait (D23).
MAX_UNSTABLE_RECORDS: Final = 4096
MAX_UNSTABLE_BYTES: Final = 16 * 1024 * 1024
#: Most bytes of bodies, and most decisions, in one frame.
MAX_FORWARD_BYTES: Final = 4 * 1024 * 1024
MAX_FORWARD_DECISIONS: Final = 4096
#: Retransmission timeout of a forward, doubled each time up to the maximum.
MAX_RESEND_AFTER_NS: Final = 1000 * NS_PER_MS
#: Longest time that decisions of a batched shard wait to be forwarded, and their largest number.
LINGER_NS: Final = 2 * NS_PER_MS
MAX_LINGERING: Final = 64


class Forwards:
    """What the primary forwards to the backups of its view, and when."""

    def __init__(
        self,
        state: ReplicaState,
        backups: BackupProgress,
        watermarks: Watermarks,
        waiters: Waiters,
    ) -> None:
        self._state: Final = state
        self._backups: Final = backups
        self._watermarks: Final = watermarks
        self._waiters: Final = waiters
        #: fseq of the first decision not forwarded yet, and the decisions from there on.
        self._next = state.stream.stable + 1
        self.gathered: list[Decision] = []
        #: The decisions must be forwarded with this batch.
        self._at_once = False
        #: Latest time to forward lingering decisions, in ns; NEVER: none linger.
        self._linger_due = NEVER
        #: Whether the decisions of plain inserts may linger.
        self._may_linger = False
        #: The last forward asked the backups to report at once.
        self.has_requested_reports = False
        #: Time of the next retransmission, in ns; NEVER while the reports are complete.
        self._resend_due = NEVER
        self._resend_after = self._min_resend_ns = resend_after_ns(state.config.limits.rtt_ms)

    @property
    def has_room(self) -> bool:
        """Whether the backups keep up: more records may be decided."""
        stream = self._state.stream
        return (
            stream.window_records < MAX_UNSTABLE_RECORDS
            and stream.window_bytes < MAX_UNSTABLE_BYTES
        )

    def restore(self) -> None:
        """Forward all unstable decisions again, after a restart, and request lost reports."""
        if self._backups.behind(self._next):
            self._resend_due = 0  # A backup may have reported to the former process what it stored.
        self.gathered = self._state.stream.decisions_after(0)
        self._state.round_trips.on_restart(self._state.stream.last)
        self.hasten()

    def hasten(self) -> None:
        """Forward with this batch: a reader or a backup needs the decisions at once."""
        self._at_once, self._may_linger = True, False

    # --- a batch ---

    def linger(self, now: int) -> None:
        """Let the decisions gathered wait for more, for a limited time."""
        if self._linger_due == NEVER:
            self._linger_due = now + LINGER_NS

    def before_plain(self) -> None:
        """Find out whether the decisions of the plain inserts that follow may linger."""
        self._may_linger = self._can_linger()

    @property
    def batch_end_due(self) -> int:
        """When a batch of plain inserts next needs `on_batch_end`, in ns."""
        waiting = len(self.gathered)
        if waiting >= MAX_LINGERING or (waiting and not self._may_linger):
            return 0
        return self._linger_due

    def on_batch_end(self, now: int, *, units_wait: bool) -> None:
        """Forward the decisions gathered, unless they may linger. `units_wait`: for room."""
        if not units_wait and self._can_linger():
            self.linger(now)
            if now < self._linger_due:
                return
        self._linger_due, self._at_once = NEVER, False
        gathered, self.gathered = self.gathered, []
        if not self._backups.held:
            self._next += len(gathered)
            return
        if self._resend_due == NEVER:
            self._resend_due = now + self._resend_after
        for start in range(0, len(gathered), MAX_FORWARD_DECISIONS):
            decisions = gathered[start : start + MAX_FORWARD_DECISIONS]
            first, self._next = self._next, self._next + len(decisions)
            self._broadcast(first, decisions)
        self._state.round_trips.on_forward(self._next - 1, now)

    def _can_linger(self) -> bool:
        """Whether no reader and no backup needs the decisions at once.

        A forward costs as much as an insert, so a batched shard sends several decisions in one.
        """
        return (
            not self._at_once
            and self._backups.may_batch
            and not self._state.is_awaited
            and not self._waiters
            and len(self.gathered) < MAX_LINGERING
        )

    # --- messages ---

    def _broadcast(self, first: int, decisions: list[Decision]) -> None:
        """Send decisions, without bodies, and the watermarks to all backups."""
        decisions = [d.without_body() if type(d) is Place else d for d in decisions]
        self._watermarks.on_sent()
        self._send(self._state.peers, first, decisions, is_repeated=False)

    def _send(
        self, dsts: tuple[bytes, ...], first: int, decisions: list[Decision], *, is_repeated: bool
    ) -> None:
        state, stream = self._state, self._state.stream
        self.has_requested_reports = is_repeated or self._awaits_reports
        forward = Forward(
            state.cluster, state.shard, state.view, state.incarnation, first, decisions,
            stream.stable, stream.durable, self.has_requested_reports, self._watermarks.flushed,
        )  # fmt: skip
        state.broadcast(dsts, forward)

    @property
    def _awaits_reports(self) -> bool:
        """Whether clients or readers wait for decisions to be stable, or soon new units."""
        state, stream = self._state, self._state.stream
        return bool(
            self._waiters
            or state.is_awaited
            or (self._backups.has_subscribers and len(self._backups.held) > 1)
            or 4 * stream.window_records > MAX_UNSTABLE_RECORDS
            or 4 * stream.window_bytes > MAX_UNSTABLE_BYTES
            or 4 * (stream.last - stream.stable) > MAX_UNSTABLE_DECISIONS
        )

    def resend(self, dst: bytes, first: int, bodies: int) -> None:
        """Send one backup decisions again, the first `bodies` records with their bodies.

        Without decisions, only the watermarks are sent.
        """
        if first <= self._state.stream.stable:
            return  # all replicas hold it: the request is old
        decisions: list[Decision] = []
        size = 0
        for decision in self._state.stream.decisions_after(first - 1)[:MAX_FORWARD_DECISIONS]:
            if type(decision) is Place and len(decisions) < bodies:
                size += len(decision.body or b"")
                if decisions and size > MAX_FORWARD_BYTES:
                    break
            decisions.append(
                decision.without_body()
                if type(decision) is Place and len(decisions) >= bodies
                else decision
            )
        self._send((dst,), first, decisions, is_repeated=True)

    def on_progress(self, now: int) -> None:
        """Handle a report that a backup holds more: time the next retransmission from here."""
        self._resend_after = self._min_resend_ns
        is_complete = self._backups.complete_up_to + 1 >= self._next
        self._resend_due = NEVER if is_complete else now + self._resend_after

    # --- time ---

    def tick(self, now: int) -> None:
        """Repeat what no report covers, and send newer watermarks, if they are due."""
        if now >= self._resend_due:
            after = self._resend_after
            self._resend_after = max(after, min(after * 2, MAX_RESEND_AFTER_NS))
            self._resend_due = now + self._resend_after
            self._retransmit()
        if now >= self._watermarks.due:
            self._broadcast(self._next, [])

    def _retransmit(self) -> None:
        """Send each backup the decisions again that it has not reported."""
        for server, held in self._backups.behind(self._next):
            self.resend(self._state.config.replicas[server].name.encode(), held + 1, 0)

    @property
    def due(self) -> int:
        """Time of the next forward, in ns; NEVER: none is due."""
        return min(self._resend_due, self._linger_due, self._watermarks.due)

    def check(self) -> None:
        """Assert that each decision is forwarded, or will be."""
        assert self._next + len(self.gathered) == self._state.stream.last + 1
