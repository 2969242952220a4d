"""Announcements of the membership service to a server: leases, placements, the wire version.

An announcement counts only over this server's own connection to the service. A server starts with
its first lease, and its next view with a placement of that view (docs/protocol.md, sections 3, 8
and 11).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from shard.membership.publications import Publications
from shard.membership.stopping import Stopping
from shard.state.epoch_clock import LeaseConflictError
from ziplog.core.node import Halt, LogWarning, ReportBadMessage
from ziplog.core.view import fingerprint
from ziplog.types import cluster_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shard.state.replica_state import ReplicaState
    from ziplog.core.message import Message
    from ziplog.core.view import LeaseRun, Placement
    from ziplog.wire import Echo, LeaseAnnounced, NodeInfo, Refused


class LeaseUpdate(NamedTuple):
    """The consequences of an announcement for a server."""

    #: The announcement has new leases.
    has_leases: bool = False
    #: The view in which the shard continues without this server; 0: none.
    left_for: int = 0
    #: The view that this server joined begins.
    view_begins: bool = False


#: Shard states in which the view has begun.
_IN_VIEW: Final = {"live", "parked", "leaving", "finalized"}
#: Shard states in which a shard without a lease has no more positions, or none now.
_WITHOUT_LEASE: Final = {"parked", "leaving", "finalized"}


class LeaseUpdates:
    """Applies the membership service's announcements to one server."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        #: The shard is being recovered, by the last announcement.
        self.is_recovering = False
        self.publications: Final = Publications(state)
        self.stopping: Final = Stopping(state)
        self._has_warned_of_cluster = False
        #: Time at which the shard has no more positions, in ns; None: it has some.
        self._positions_end_at: int | None = None

    def check_sender(self, route: bytes, message: Message) -> bool:
        """Return whether a message came over this server's own connection to the service.

        Report any other: processes that reach the server's port must not be able to make it halt.
        """
        if route in self._state.service:
            return True
        why = f"{type(message).__name__}: it did not come from the membership service"
        self._state.effects.append(ReportBadMessage(route, why))
        return False

    def on_node_info(self, route: bytes, message: NodeInfo) -> None:
        """Handle the service's report of the wire version in use."""
        if self.check_sender(route, message) and message.wire:
            self._state.effects += self._state.wire_use.on_report(message.wire)

    def on_echo(self, route: bytes, message: Echo, now: int) -> None:
        """Handle the answer to a heartbeat of this server."""
        state = self._state
        if self.check_sender(route, message) and state.cluster in (0, message.cluster):
            state.round_trips.on_echo(route, message.sent_us, now)
            self._check_round_trip(route)

    def _check_round_trip(self, route: bytes) -> None:
        """Warn once if the round trip to a membership node is above `rtt_ms`."""
        found, rtt_ms = self._state.round_trips.too_long_ms(route), self._state.config.limits.rtt_ms
        if found:
            self._state.effects.append(LogWarning(
                f"the round trip to {route.decode()} takes at least {found} ms, but rtt_ms in the"
                f" cluster file is {rtt_ms}, so time-outs are too short. Set rtt_ms to the longest"
                " round trip between two machines, and suspicion_ms to at least four times that"
            ))  # fmt: skip

    def on_refused(self, route: bytes, message: Refused) -> None:
        """Warn once if a membership node belongs to another cluster than the data directory."""
        state = self._state
        if not self.check_sender(route, message) or message.code != "wrong-cluster":
            return
        if not self._has_warned_of_cluster:
            self._has_warned_of_cluster = True
            state.effects.append(LogWarning(self._foreign(route, message)))

    def _foreign(self, route: bytes, message: Message) -> str:
        """Return what is wrong if the service belongs to another cluster, and what to do."""
        state = self._state
        return (
            f"{state.config.name} has the data of cluster {cluster_id(state.cluster)}, but"
            f" {route.decode()} belongs to cluster {cluster_id(message.cluster)}. Stop the server,"
            " and restore the data directory of that cluster; or move this directory away, and the"
            " server copies the log from the other replicas of its shard"
        )

    def on_lease_announced(
        self, route: bytes, message: LeaseAnnounced, now: int
    ) -> LeaseUpdate | None:
        """Apply an announcement; return None if this server must halt."""
        state = self._state
        if state.cluster not in (0, message.cluster):
            state.effects.append(Halt(self._foreign(route, message)))
            return None
        state.cluster = message.cluster
        self.stopping.on_announcement(now)
        if message.is_publication and state.clock.last is None:
            return LeaseUpdate()  # The leases before these are still to come.
        # Count from the sending of the announcement, as all servers of the cluster do.
        begins = now + message.starts_in_us * 1000 - state.round_trips.one_way_ns(route)
        try:
            runs = message.runs or state.clock.unfold(message.after, message.steps, message.digest)
            if not self._ensure_recorded(runs):
                return LeaseUpdate()
            if message.starts_in_us:  # Otherwise it cuts the lease before short.
                begins = state.clock.begin_of(runs, begins)
            skip_to = runs[0].first.base if runs and message.is_cut else message.trim
            news = state.clock.announce(runs, begins, now, skip_to, head_start=self._head_start_ns)
        except LeaseConflictError as error:
            state.effects.append(Halt(str(error)))
            return None
        state.clock.left_at = max(state.clock.left_at, message.limit)
        held = state.clock.last
        if message.runs or message.after:
            state.has_gap = message.after > (held.number if held is not None else 0)
        self.publications.on_lease_announced(route, message, now, has_leases=news)
        update = LeaseUpdate(news)
        placement = next((p for p in message.placements if p.shard == state.shard), None)
        if placement is not None and state.clock.lease is not None:
            update = self._on_placement(placement, update)
        self._positions_end_at = (
            state.clock.positions_end_at if state.shard_state in _WITHOUT_LEASE else None
        )
        self.tick(now)
        return update

    @property
    def _head_start_ns(self) -> int:
        """Begin leases early by this: a primary's positions reach its backups on schedule."""
        state = self._state
        if state.server != 0:
            return 0
        return max(map(state.round_trips.one_way_ns, state.peers), default=0)

    def _ensure_recorded(self, runs: Sequence[LeaseRun]) -> bool:
        """Record announced leases before they are used; return whether they may be used now.

        If not, the service repeats the announcement.
        """
        state, held = self._state, self._state.clock.last
        last = runs[-1].last if runs else held
        if last is None or state.recorded_leases.may_hold(last.number):
            return True
        state.record_watermark(runs)
        return False

    def tick(self, now: int) -> bool:
        """Update and return whether the shard's last lease is over."""
        self._state.has_no_positions = (
            self._positions_end_at is not None and now >= self._positions_end_at
        )
        return self._state.has_no_positions

    def next_wakeup(self) -> int | None:
        """Return when the shard's positions end, a lease is overdue or the process may end."""
        end = None if self._state.has_no_positions else self._positions_end_at
        # A lease is overdue when the last one ends, and the positions do not end later.
        due = self.publications.overdue_at if end is None else end
        stop = self.stopping.next_wakeup()
        return due if stop is None else stop if due is None else min(due, stop)

    def _on_placement(self, placement: Placement, update: LeaseUpdate) -> LeaseUpdate:
        """Apply the committed placement of this shard."""
        state = self._state
        state.shard_state, state.placement = placement.state, placement
        self.is_recovering = placement.state == "recovering"
        if state.server_state == "starting":
            self._begin(placement)
        elif state.server_state != "limbo" and placement.view > state.view:
            return update._replace(left_for=placement.view)
        elif (
            state.server_state == "joined"
            and placement.state in _IN_VIEW
            and placement.view == state.view
        ):  # fmt: skip
            return update._replace(view_begins=True)
        return update

    def _begin(self, placement: Placement) -> None:
        """Join the shard; enter limbo if the shard knows this server by another data directory."""
        state, config = self._state, self._state.config
        known = next((r.fingerprint for r in placement.replicas if r.name == config.name), "")
        if known in {"", fingerprint(config.identity)}:
            state.view = state.view or placement.view
            state.server_state = "up"
            return
        state.server_state = "limbo"
        state.effects.append(LogWarning(
            f"{config.name} is in limbo: shard {state.shard} knows it with another data directory."
            " The records in that one are missing here. Stop the server, restore that directory,"
            " and start it again"
        ))  # fmt: skip
