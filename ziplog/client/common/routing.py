"""Which shards there are, in which view, and where their replicas listen.

Learned from the membership service (`Hello`), again when a server's answer does not fit what is
known; that a shard leaves, its servers tell, too. Rules: a view only ever grows; who has left never
comes back. Invariant: `live` names just the routes in state "live".
See docs/protocol.md, sections 3, 4 (rule 7) and 13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from ziplog.core.view import ShardState
from ziplog.wire import ClusterInfo, Hello, LeaseQuery, Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ziplog.client.common.membership_client import Service
    from ziplog.client.common.step_context import Turn
    from ziplog.core.view import Lease, Placement, Replica
    from ziplog.wire import LeaseHistory, Leaving

_MS: Final = 1_000_000
#: The service is not asked for the placements more often.
_MIN_AGE_NS: Final = 100 * _MS
#: While something waits, placements are no older than this, or so many times what the service
#: takes for an answer: a busy service is asked less often.
_MAX_AGE_NS: Final = 1_000 * _MS
_AGE_PER_ANSWER: Final = 20
_LAST_MAX_AGE_NS: Final = 10_000 * _MS
_AWAY: Final = frozenset({"recovering", "parked"})
#: What a shard never becomes again once it leaves.
_BEFORE: Final = frozenset({"joining", "live", "parked"})
_LEFT: Final = frozenset({"leaving", "finalized"})


class Route(msgspec.Struct, frozen=True, gc=False):
    """Where a shard is."""

    shard: int
    view: int
    state: ShardState
    #: Its replicas' connections, the primary's first.
    names: tuple[bytes, ...]
    #: Its servers take nothing, until it is back in this view or a later one.
    is_away: bool


class Routing:
    """The cluster as this client knows it."""

    def __init__(self, turn: Turn, service: Service) -> None:
        self._turn: Final = turn
        self._service: Final = service
        #: Empty until the first answer.
        self.cluster_name = ""
        self.limits = Limits()
        #: The shards that take new records, in order.
        self.live: tuple[int, ...] = ()
        #: The newest lease known.
        self.lease: Lease | None = None
        #: Called with the shards whose routes have changed.
        self.on_change: list[Callable[[list[int]], None]] = []
        #: Called once after the next answer of the service.
        self._once_fresh: list[Callable[[], None]] = []
        self._placements: dict[int, Placement] = {}
        #: By shard: all of its positions below are stable.
        self.frontiers: dict[int, int] = {}
        #: The shards that have left, or are about to.
        self._left: set[int] = set()
        #: The routes in use: their replicas are connected.
        self._open: dict[int, Route] = {}
        self._asking = False
        self._asked_at = 0
        self._max_age = _MAX_AGE_NS
        self._fresh_at = -_MIN_AGE_NS
        self._refresh_due = False

    def __str__(self) -> str:
        endpoints = ", ".join(self._service.endpoints)
        return f"cluster {self.cluster_name!r} at {endpoints}" if self.cluster_name else endpoints

    @property
    def cluster(self) -> int:
        """The cluster's number; 0 while it is not known."""
        return self._service.cluster

    def describe(self, shard: int) -> str:
        """Return how an error names a shard: its state, if it is not live, and the cluster."""
        state = self.state(shard)
        return (
            f"shard {shard} of {self}" if state == "live" else f"shard {shard} ({state}) of {self}"
        )

    def state(self, shard: int) -> ShardState | Literal["unknown"]:
        """Return a shard's state as it was last told."""
        placement = self._placements.get(shard)
        return placement.state if placement is not None else "unknown"

    def has_left(self, shard: int) -> bool:
        """Whether a shard takes no new records any more, ever."""
        return shard in self._left

    def servers(self, shard: int) -> tuple[Replica, ...]:
        """Return a shard's replicas, the primary first; none if it is unknown."""
        placement = self._placements.get(shard)
        return placement.replicas if placement is not None else ()

    # --- asking ---

    def refresh(self, then: Callable[[], None] | None = None) -> None:
        """Ask for the placements soon; `then` is called when a newer answer is here."""
        if then is not None:
            self._once_fresh.append(then)
        if self._asking:
            return
        due = self._fresh_at + _MIN_AGE_NS
        if self._turn.now < due:
            self._refresh_due = True
            self._turn.wake_at(due)
            return
        self._asking = True
        self._asked_at = self._turn.now
        self._refresh_due = False
        self._service.ask(Hello, self.inform)

    def tick(self, *, waiting: bool) -> None:
        """Ask again if that is due; `waiting`: some call is under way."""
        if self._asking:
            return
        if self._refresh_due or (waiting and self._turn.now >= self._fresh_at + self._max_age):
            self.refresh()
        elif waiting:
            self._turn.wake_at(self._fresh_at + self._max_age)

    def find_owner(self, gsn: int, then: Callable[[int], None]) -> None:
        """Ask which shard owns `gsn`; `then` gets it, or 0: nobody does, or its lease is gone."""

        def answer(history: LeaseHistory) -> None:
            runs = (run for run in history.runs if run.first.base <= gsn < run.last.stop)
            lease = next((run.lease_at(gsn) for run in runs), None)
            then(lease.owner(gsn) if lease is not None and lease.members else 0)

        self._service.ask(lambda cluster, request: LeaseQuery(cluster, request, gsn), answer)

    # --- learning ---

    def inform(self, info: ClusterInfo) -> None:
        """Take the cluster as the service has it."""
        service = self._service
        if self._asking:
            took = self._turn.now - self._asked_at
            self._max_age = min(max(_MAX_AGE_NS, _AGE_PER_ANSWER * took), _LAST_MAX_AGE_NS)
        self._asking = False
        self._fresh_at = self._turn.now
        service.cluster = service.cluster or info.cluster
        service.learn(info.mms)
        self.cluster_name = info.name
        self.limits = info.limits
        self._turn.forgotten_ns = info.limits.session_timeout_s * 1_000_000_000 * 2 // 3
        if info.leases:
            self.lease = info.leases[-1].last
        for placement, frontier in zip(info.placements, info.frontiers, strict=False):
            self.frontiers[placement.shard] = frontier
        self.learn(info.placements)
        then, self._once_fresh = self._once_fresh, []
        for call in then:
            call()

    def on_leaving(self, leaving: Leaving) -> None:
        """Take a server's word that its shard takes records for a little while only."""
        known = self._placements.get(leaving.shard)
        if known is not None and known.state in _BEFORE and known.view <= leaving.view:
            self.learn([msgspec.structs.replace(known, state="leaving")])
            self.refresh()

    def learn(self, placements: Iterable[Placement]) -> None:
        """Take placements; those of older views than the known ones are passed over."""
        changed: list[int] = []
        for placement in placements:
            known = self._placements.get(placement.shard)
            if placement == known or (known is not None and self._is_late(placement, known)):
                continue
            self._placements[placement.shard] = placement
            if placement.state in _LEFT:
                self._left.add(placement.shard)
            changed.append(placement.shard)
        if not changed:
            return
        states = self._placements
        self.live = tuple(s for s in sorted(states) if states[s].state == "live")
        self._close([route for s in changed if (route := self._open.pop(s, None)) is not None])
        for listener in self.on_change:
            listener(changed)

    def _is_late(self, placement: Placement, known: Placement) -> bool:
        """Whether a placement is older than what is known."""
        has_left = placement.shard in self._left and placement.state in _BEFORE
        return has_left or placement.view < known.view

    def _close(self, former: list[Route]) -> None:
        """Forget the connections to endpoints where no replica is any more."""
        still = {
            replica.endpoint.encode()
            for placement in self._placements.values()
            for replica in placement.replicas
        }
        for route in former:
            for name in route.names:
                if name not in still:
                    self._turn.disconnect(name)

    def route(self, shard: int) -> Route | None:
        """Return where a shard is, and see that its replicas are connected; None: unknown."""
        route = self._open.get(shard)
        if route is None:
            placement = self._placements.get(shard)
            if placement is None:
                return None
            names = tuple(self._turn.connect(replica.endpoint) for replica in placement.replicas)
            state = placement.state
            route = Route(shard, placement.view, state, names, state in _AWAY)
            self._open[shard] = route
        return route

    @property
    def shards(self) -> list[int]:
        """All shards that ever were, in order."""
        return sorted(self._placements)

    def check(self) -> None:
        """Assert the invariant."""
        assert all(self._placements[shard].state == "live" for shard in self.live)
        for shard, route in self._open.items():
            assert route.view == self._placements[shard].view, "an outdated route"
