"""Lease proposals of the leader: when the next lease is due, and its members and their weights.

    heartbeats and rates -> weights, stragglers -> member changes -> a lease, once it is due

Rule: a lease is proposed from committed state and recent reports only. What is lost with a leader
costs time, never a position. See docs/protocol.md, sections 3, 5 and 7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mms import membership_rules
from mms.commands import GrantLease, SetFinalized
from mms.stragglers import Stragglers
from mms.weights import Weights
from ziplog.core.node import Propose
from ziplog.core.units import NS_PER_MS
from ziplog.core.view import Member

if TYPE_CHECKING:
    from mms.leases import LeasePlan
    from mms.reconfiguration import Reconfiguration
    from mms.recoveries import Recoveries
    from mms.servers import Server, Servers
    from mms.state import ClusterState
    from ziplog.core.node import Effect
    from ziplog.core.view import Lease, Placement
    from ziplog.wire import Heartbeat

#: Interval between checks of silence, weights and finalized epochs.
CHECK_NS: Final = 500 * NS_PER_MS
#: Time that the cluster stays active after an active server's heartbeat.
ACTIVE_NS: Final = 2000 * NS_PER_MS
#: Time that the first lease waits for all shards; then it omits those that are missing.
FIRST_LEASE_NS: Final = 2000 * NS_PER_MS
#: Minimum interval between changes of the members at heartbeats, for each shard of the cluster: a
#: change looks at all of them.
_CHANGE_NS_PER_SHARD: Final = 25_000


class LeaseProposals:
    """Decides about the next lease."""

    def __init__(
        self,
        state: ClusterState,
        servers: Servers,
        plan: LeasePlan,
        recoveries: Recoveries,
        reconfiguration: Reconfiguration,
        rtt_ms: int,
    ) -> None:
        self._state: Final = state
        self._servers: Final = servers
        self._plan: Final = plan
        self._recoveries: Final = recoveries
        self._reconfiguration: Final = reconfiguration
        self._weights: Final = Weights()
        self._stragglers: Final = Stragglers(rtt_ms)
        #: The live shards.
        self.live: set[int] = set()
        #: The placements that change with the next lease, beside those of recoveries.
        self._changes: list[Placement] = []
        #: When a heartbeat may change the members again, in ns.
        self._change_at = 0
        self._has_other_weights = False
        #: The weights of the last lease were compared with the rates: after its announcement.
        self._is_compared = True
        self._active_until = 0
        self._leading_since = 0
        #: When the next check and the next `SetFinalized` are due, in ns.
        self.check_at = 0
        self._finalize_at = 0

    def start_leading(self, now: int) -> None:
        """Start to lead: only reports from now on count."""
        self._leading_since = self.check_at = now
        self._plan.start_leading(now)
        self._weights.forget_rates()
        self._stragglers.clear()

    # --- committed state ---

    def on_placements(self) -> None:
        """Handle changed placements."""
        placements = self._state.placements.values()
        self.live = {placement.shard for placement in placements if placement.state == "live"}
        self._changes = []

    def on_granted(self, lease: Lease, now: int, *, leading: bool) -> None:
        """Handle a committed lease."""
        self._plan.on_committed(lease, now, leading=leading)
        self._plan.set_history_size(self._state.history_bytes, now)
        self._stragglers.on_lease(lease, self._plan.starts)
        self._weights.on_granted(lease.members)
        self._has_other_weights, self._is_compared = False, False

    def on_restored(self, now: int) -> None:
        """Handle a snapshot."""
        self._plan.on_restored(self._state.last, now)
        self._plan.set_history_size(self._state.history_bytes, now)
        self._weights.on_granted(self._plan.members)

    def on_removed(self, shard: int) -> None:
        """Handle a shard's removal from the leases."""
        self._stragglers.on_removed(shard)

    # --- reports ---

    def on_heartbeat(self, message: Heartbeat, now: int) -> None:
        """Handle any server's heartbeat."""
        if message.active:
            self._active_until = now + max(ACTIVE_NS, self._plan.weights_interval_ns)
        if self._state.last is None and not self._servers.missing and not self._changes:
            self._plan_first_lease()

    def on_member(self, message: Heartbeat, now: int) -> None:
        """Record the rate of a live shard's primary, and how late it is."""
        shard = message.shard
        if self._is_active(now):
            self._weights.observe(shard, message.rate_per_s)
            self._check_weights()
        if self._stragglers.on_heartbeat(
            shard, message.frontier, now, has_readers=message.has_readers
        ):
            self._change_members(now)

    def on_rate(self, shard: int, per_s: int, now: int) -> list[Effect]:
        """Handle a changed rate, which a shard's primary reports at once."""
        if shard not in self.live:
            return []
        self._weights.set_rate(shard, per_s)
        self._check_weights()
        return self.propose(now)

    def check_shard(self, server: Server, now: int) -> None:
        """Change the members at once if a server's heartbeat lets its shard join or return.

        The same if the server is stopping; other changes wait for the next regular check. So does
        a change just after another one: servers of many shards may start or stop at once.
        """
        shard = server.shard
        placement = self._state.placements.get(shard)
        if placement is None or self._state.last is None or now < self._change_at:
            return
        if placement.state == "live":
            is_due = server.is_stopping
        else:
            is_due = membership_rules.may_be_live(
                placement, self._servers, now
            ) and not self._stragglers.is_parked(shard, now)
        if is_due and all(changed.shard != shard for changed in self._changes):
            self._change_at = now + len(self._state.placements) * _CHANGE_NS_PER_SHARD
            self._change_members(now)

    def _check_weights(self) -> None:
        self._is_compared = True
        self._has_other_weights = self._has_other_weights or self._weights.are_outdated()

    # --- regular checks ---

    def was_paused(self, now: int) -> bool:
        """Whether this process, or its machine, was paused before `now`."""
        return now - self.check_at > CHECK_NS * 2

    def check_members(self, now: int) -> list[Effect]:
        """Look for silent and slow shards, and for finalized epochs."""
        if self.was_paused(now):
            self._stragglers.forget_checks()
        self.check_at = now + CHECK_NS
        if self._state.last is None:
            if not self._servers.missing or now >= self._leading_since + FIRST_LEASE_NS:
                self._plan_first_lease()
            return []
        self._stragglers.check_silent(self.live, now)
        self._change_members(now)
        return self._finalize(now)

    def _plan_first_lease(self) -> None:
        self._changes = membership_rules.first_changes(self._state, self._servers)

    def _change_members(self, now: int) -> None:
        self._stragglers.park(now, len(self.live))
        self._changes = membership_rules.member_changes(
            self._state, self._servers, self._stragglers, now
        )

    def _finalize(self, now: int) -> list[Effect]:
        if not self._is_active(now) or now < self._finalize_at:
            return []
        self._finalize_at = now + 2 * CHECK_NS
        finalized = membership_rules.finalized(self._state, self._servers)
        if finalized <= self._state.finalized:
            return []
        return [Propose(SetFinalized(finalized).encode())]

    # --- the next lease ---

    def _is_active(self, now: int) -> bool:
        return now < self._active_until

    def due_at(self, now: int) -> int:
        """Return when to propose the next lease, in ns; `now` or earlier means at once."""
        if not self._is_compared:
            return now
        if not self.live:
            changes = (*self._changes, *self._recoveries.changes())
            if all(changed.state != "live" for changed in changes):
                return self.check_at  # no shard is ready
        return self._plan.due_at(
            now,
            active=self._is_active(now),
            other_members=bool(self._changes),
            other_weights=self._has_other_weights,
        )

    def propose_at_once(self, now: int) -> list[Effect]:
        """Propose a lease that starts at once."""
        self._plan.propose_at_once()
        return self.propose(now)

    def propose(self, now: int) -> list[Effect]:
        """Propose the next lease, if it is due."""
        if not self._is_compared:
            self._check_weights()
        if now < self.due_at(now):
            return []
        changes = [*self._changes, *self._recoveries.changes()]
        members = self._members(changes, now)
        if not members:
            return []
        if self._has_other_weights and members == self._plan.members:
            self._has_other_weights = False  # the weights fit again
            if now < self.due_at(now):
                return []
        shards = {member.shard for member in self._plan.members}
        others = bool(changes) or shards != {member.shard for member in members}
        lease = self._plan.propose(members, now, active=self._is_active(now), other_members=others)
        return [Propose(GrantLease(lease, changes).encode(), is_urgent=True)]

    def _members(self, changes: list[Placement], now: int) -> tuple[Member, ...]:
        dropped = self._reconfiguration.shards_to_drop(now)
        placements = membership_rules.members(self._state, changes, dropped)
        weights = self._weights.for_shards(list(placements))
        return tuple(
            Member(shard, placement.view, weight)
            for (shard, placement), weight in zip(placements.items(), weights, strict=True)
        )

    def check(self) -> None:
        """Assert the invariants of the parts."""
        self._stragglers.check()
        self._weights.check(self._plan.members)
