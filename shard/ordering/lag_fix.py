"""Lag-fix: a shard that is ahead has the others give up positions its readers wait for (S 4.3).

At the end of a batch, the primary of a shard with readers sends its last filled position to the
servers of the other members, unless it sent or received a higher one. It sends at most one hint
per member and half millisecond. The message is a hint: correctness does not depend on it. A primary
that receives it decides alone, and its backups guess what it decides (docs/protocol.md, section
13).

Invariant: a primary connects only to servers of members of the last lease.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core.node import Connect, Disconnect
from ziplog.core.units import NEVER
from ziplog.wire import Ahead

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shard.state.replica_state import ReplicaState
    from ziplog.core.view import Placement, Replica
    from ziplog.types import Gsn, ShardId

#: Most members of a lease for which hints are sent.
MAX_MEMBERS: Final = 16
#: Interval between two hints, for each member that receives them.
HINT_INTERVAL_NS: Final = 500_000


class LagFix:
    """The hints of one primary to the servers of the other shards."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        #: The servers of each shard.
        self._servers: Final[dict[ShardId, tuple[Replica, ...]]] = {}
        #: The servers of the other members, and the shortest interval between two hints to them.
        self._others: tuple[Replica, ...] = ()
        self._interval_ns = 0
        self._connected: tuple[Replica, ...] = ()
        #: The highest position in a hint that was sent or received.
        self._highest_known: Gsn = 0
        #: Earliest time of the next hint, and the time at which a delayed hint is due.
        self._next_hint_at = -(2**62)
        self.due = NEVER
        #: An append was placed since the last hint.
        self._is_append_ahead = False

    def on_lease_announced(self, placements: Iterable[Placement]) -> None:
        """Update the members and their servers after an announcement."""
        for placement in placements:
            self._servers[placement.shard] = tuple(placement.replicas)
        state, last = self._state, self._state.clock.last
        members = [member.shard for member in last.members] if last is not None else []
        others = [shard for shard in members if shard != state.shard]
        if len(members) == len(others) or len(members) > MAX_MEMBERS or not state.config.lag_fix:
            others = []
        self._others = tuple(each for shard in others for each in self._servers.get(shard, ()))
        self._interval_ns = HINT_INTERVAL_NS * len(others)
        if not self._others:
            self.due = NEVER
        for gone in self._connected:
            if gone not in self._others:
                state.effects.append(Disconnect(gone.name.encode()))
        self._connected = tuple(other for other in self._connected if other in self._others)

    def on_hint(self, gsn: Gsn) -> None:
        """Record a received hint: its sender has filled this position."""
        self._highest_known = max(self._highest_known, gsn)

    def on_append(self) -> None:
        """Record that an append was placed: its client waits for the other shards."""
        self._is_append_ahead = True

    def on_batch_end(self, now: int, *, is_followed: bool) -> None:
        """Send a hint to the others if this shard is ahead and has readers.

        `is_followed`: its readers wait for each record, not only for those of appends.
        """
        if not self._others:
            return
        state, last = self._state, self._state.stream.last_record
        is_needed = (is_followed or self._is_append_ahead) and state.has_readers(now)
        if last <= self._highest_known or not is_needed:
            self.due, self._is_append_ahead = NEVER, False
            return
        if now < self._next_hint_at:
            self.due = self._next_hint_at
            return
        self._highest_known, self.due, self._is_append_ahead = last, NEVER, False
        self._next_hint_at = now + self._interval_ns
        for other in self._others:
            if other not in self._connected:
                state.effects.append(Connect(other.name.encode(), other.endpoint))
        self._connected = self._others
        names = tuple(other.name.encode() for other in self._others)
        state.broadcast(names, Ahead(state.cluster, state.shard, last))

    def check(self) -> None:
        """Assert the invariant."""
        assert set(self._connected) <= set(self._others)
        assert self._interval_ns < MAX_MEMBERS * HINT_INTERVAL_NS
