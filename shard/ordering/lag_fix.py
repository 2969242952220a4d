"""Lag-fix: a shard that is ahead has the others give up what its readers wait for (S 4.3).

At the end of a batch, a primary whose shard is read along tells the primaries of the other members
the last position that it has filled, if it told or heard of none above: at once, and then at most
twice a millisecond and member. Rule: it is a hint. Nobody relies on it, and whoever gets it decides
alone (docs/protocol.md, section 13).

Invariant: nobody is connected to but primaries of members of the last lease.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core.node import Connect, Disconnect
from ziplog.wire import Ahead

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shard.state.replica_state import ReplicaState
    from ziplog.core.view import Placement, Replica
    from ziplog.types import Gsn, ShardId

#: Among more members nobody tells.
MAX_MEMBERS: Final = 16
#: Time between two hints, for each member that they go to.
HINT_INTERVAL_NS: Final = 500_000


class LagFix:
    """What one primary tells those of the other shards."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        #: Where the primary of every shard is.
        self._primaries: Final[dict[ShardId, Replica]] = {}
        #: The primaries of the other members, if they are to be told.
        self._others: tuple[Replica, ...] = ()
        self._connected: tuple[Replica, ...] = ()
        #: The highest position of a record that was told or heard of.
        self._highest_known: Gsn = 0
        #: When the next hint may go, and when one has to because it was held back.
        self._next_hint_at = -(2**62)
        self.due: int | None = None

    def on_lease_announced(self, placements: Iterable[Placement]) -> None:
        """Take the news of a lease, or of where shards are."""
        for placement in placements:
            self._primaries[placement.shard] = placement.replicas[0]
        state, last = self._state, self._state.clock.last
        members = [member.shard for member in last.members] if last is not None else []
        others = [shard for shard in members if shard != state.shard]
        if len(members) == len(others) or len(members) > MAX_MEMBERS or not state.config.lag_fix:
            others = []
        self._others = tuple(self._primaries[shard] for shard in others if shard in self._primaries)
        if not self._others:
            self.due = None
        for gone in self._connected:
            if gone not in self._others:
                state.effects.append(Disconnect(gone.name.encode()))
        self._connected = tuple(other for other in self._connected if other in self._others)

    def on_hint(self, gsn: Gsn) -> None:
        """Take a hint: its sender is ahead of this shard up to there."""
        self._highest_known = max(self._highest_known, gsn)

    def on_batch_end(self, now: int) -> None:
        """At the end of a batch: tell the others if this shard is ahead, and is read along."""
        if not self._others:
            return
        state, last = self._state, self._state.stream.last_record
        if last <= self._highest_known or not state.has_readers(now):
            self.due = None
            return
        if now < self._next_hint_at:
            self.due = self._next_hint_at
            return
        self._highest_known, self.due = last, None
        self._next_hint_at = now + HINT_INTERVAL_NS * len(self._others)
        for other in self._others:
            if other not in self._connected:
                state.effects.append(Connect(other.name.encode(), other.endpoint))
        self._connected = self._others
        names = tuple(other.name.encode() for other in self._others)
        state.broadcast(names, Ahead(state.cluster, state.shard, last))

    def check(self) -> None:
        """Assert the invariant."""
        assert set(self._connected) <= set(self._others)
        assert len(self._others) < MAX_MEMBERS
