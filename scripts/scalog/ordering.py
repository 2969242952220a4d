"""Scalog's ordering of reports into cuts, as a deterministic state machine (T 3.2, S 4.1).

    reported --every T_ord, if a frontier rose--> proposed --consensus--> committed --> sent

Each shard reports its stable frontier. The leader proposes a cut, the frontiers of all shards, at
multiples of T_ord; several proposals may be under way. A proposal may be lost; it is made again if
it is not committed in time. Clients get a cut from the leader once it is committed.

Invariants: the committed cut never decreases, at any shard, whichever leader proposes what; clients
only get committed cuts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from scalog.messages import Cut, Follow
from ziplog.core.node import (
    Broadcast,
    Committed,
    Event,
    LeaderChanged,
    Propose,
    Received,
    Restored,
    Send,
)
from ziplog.core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from ziplog.core.node import Effect

#: The first position of each shard that is not ordered.
Frontiers = dict[int, int]

#: A client gets cuts for this long after its last `Follow`.
FOLLOW_NS: Final = NS_PER_S
#: Time after which a proposal counts as lost.
LOST_AFTER_NS: Final = 200 * NS_PER_MS
#: Number of proposals that may be under way at once.
MAX_OPEN: Final = 16

_decode: Final = msgspec.msgpack.Decoder(Frontiers).decode


class Reported(Event, frozen=True, gc=False):
    """Stable frontiers arrived from some shards."""

    frontiers: Frontiers


def exceeds(one: Frontiers, other: Frontiers) -> bool:
    """Whether `one` has a shard whose frontier is above that in `other`."""
    return any(frontier > other.get(shard, 0) for shard, frontier in one.items())


def raise_to(frontiers: Frontiers, higher: Frontiers) -> None:
    """Raise frontiers to those of `higher` that are above."""
    for shard, frontier in higher.items():
        frontiers[shard] = max(frontier, frontiers.get(shard, 0))


class Cuts:
    """The state that consensus replicates: the committed cut."""

    def __init__(self) -> None:
        """Start with an empty cut."""
        self._cut: Final[Frontiers] = {}

    def apply(self, command: bytes) -> bytes:
        """Raise the cut to a proposed one, and return it; a former leader's is late and lower."""
        raise_to(self._cut, _decode(command))
        return self.snapshot()

    def snapshot(self) -> bytes:
        """Return the cut."""
        return msgspec.msgpack.encode(self._cut)

    def restore(self, snapshot: bytes) -> None:
        """Replace the cut."""
        self._cut.clear()
        self._cut.update(_decode(snapshot))


class Ordering:
    """One node of the ordering layer."""

    def __init__(self, t_ord_ns: int) -> None:
        """Start as a follower; `t_ord_ns`: interval between two cuts."""
        self._t_ord_ns: Final = t_ord_ns
        self._is_leader = False
        self._term = 0
        self._reported: Final[Frontiers] = {}
        #: The last proposal, how many are under way, and when they count as lost.
        self._proposed: Frontiers = {}
        self._open = 0
        self._lost_at = 0
        self._committed: Frontiers = {}
        #: The last cut that clients got from this node.
        self._sent: Frontiers = {}
        #: The route to each client, with the time until which it gets cuts.
        self._clients: dict[bytes, int] = {}
        self._due: int | None = None

    def step(self, event: Event, now: int) -> list[Effect]:
        """Handle one event; see `ziplog.core.node`."""
        effects: list[Effect] = []
        if self._due is not None and now >= self._due:
            effects += self._propose(now)
        match event:
            case Reported():
                raise_to(self._reported, event.frontiers)
            case Received(message=Follow()):
                self._clients[event.src] = now + FOLLOW_NS
                if self._is_leader:
                    effects.append(Send(event.src, self._cut()))
            case Committed():
                self._open = max(self._open - 1, 0)
                effects += self._commit(_decode(event.result), now)
            case Restored():
                effects += self._commit(_decode(event.snapshot), now)
            case LeaderChanged():
                self._is_leader, self._term = event.is_self, event.term
                self._forget_proposals()
                if self._is_leader:
                    effects += self._send_all(now)
        self._due = self._next_due(now)
        return effects

    def next_wakeup(self) -> int | None:
        """Return when to propose next; None: nothing to propose."""
        return self._due

    def _next_due(self, now: int) -> int | None:
        if not self._is_leader:
            return None
        if exceeds(self._reported, self._proposed) and self._open < MAX_OPEN:
            return now - now % self._t_ord_ns + self._t_ord_ns
        return self._lost_at if exceeds(self._proposed, self._committed) else None

    def _propose(self, now: int) -> list[Effect]:
        """Propose what was reported, if a proposal does not contain it or was lost."""
        if now >= self._lost_at and exceeds(self._proposed, self._committed):
            self._forget_proposals()
        if not exceeds(self._reported, self._proposed):
            return []
        self._proposed = dict(self._reported)
        self._open += 1
        self._lost_at = now + LOST_AFTER_NS
        return [Propose(msgspec.msgpack.encode(self._proposed), self._term)]

    def _forget_proposals(self) -> None:
        self._proposed, self._open = dict(self._committed), 0

    def _commit(self, cut: Frontiers, now: int) -> list[Effect]:
        has_risen = exceeds(cut, self._committed)
        self._committed = cut
        return self._send_all(now) if self._is_leader and has_risen else []

    def _send_all(self, now: int) -> list[Effect]:
        """Send the committed cut to all clients."""
        self._clients = {route: until for route, until in self._clients.items() if until > now}
        return [Broadcast(tuple(self._clients), self._cut())] if self._clients else []

    def _cut(self) -> Cut:
        self._sent = self._committed
        return Cut(0, self._committed)

    def check(self) -> None:
        """Assert the invariant."""
        assert not exceeds(self._sent, self._committed), "clients got what is not committed"
        assert self._open <= MAX_OPEN
