"""The shards of the cluster: their views, states, and the endpoints of their replicas.

The client gets them from the membership service (`Hello`), and again when a server's reply does not
match them. Servers also announce that their shard leaves. Rules: a view only grows; a removed shard
never comes back.

Invariant: `live` contains exactly the shards in state "live". See docs/protocol.md, sections 3, 4
(rule 7) and 13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from ziplog.core.node import SHORTAGE, FailCalls
from ziplog.core.units import NS_PER_MS, NS_PER_S
from ziplog.core.view import ShardState
from ziplog.errors import VersionError
from ziplog.wire import ClusterInfo, Hello, LeaseQuery, Limits
from ziplog.wire.node_info import VERSIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ziplog.client.common.membership_client import MembershipClient
    from ziplog.client.common.step_context import StepContext
    from ziplog.core.view import Lease, Placement, Replica
    from ziplog.wire import LeaseHistory, Leaving

#: Minimum interval between requests for the placements.
_MIN_AGE_NS: Final = 100 * NS_PER_MS
#: Maximum age of the placements while a call is pending, and while a shard does not answer one. A
#: busy service gets fewer requests: it is at least `_AGE_PER_DELAY` times the latency of the last
#: reply, less a round trip.
_MAX_AGE_NS: Final = NS_PER_S
_SILENT_AGE_NS: Final = 250 * NS_PER_MS
_AGE_PER_DELAY: Final = 20
_BUSY_AGE_NS: Final = 10 * NS_PER_S
_AWAY: Final = frozenset({"recovering", "parked"})
#: The states that a shard never has again after it leaves.
_NOT_REMOVED: Final = frozenset({"joining", "live", "parked"})
_REMOVED: Final = frozenset({"leaving", "finalized"})
_PAIR: Final = 2


class Route(msgspec.Struct, frozen=True, gc=False):
    """The view, state and connections of a shard."""

    shard: int
    view: int
    state: ShardState
    #: The connections of its replicas, the primary's first.
    names: tuple[bytes, ...]
    #: Its servers accept no inserts until it is back, in this view or a later one.
    is_unavailable: bool


class Routing:
    """The client's knowledge of the cluster."""

    def __init__(self, context: StepContext, membership: MembershipClient) -> None:
        self._context: Final = context
        self.membership: Final = membership
        self.proximity: Final = membership.proximity
        #: Empty until the first reply.
        self.cluster_name = ""
        self.limits = Limits()
        #: The wire version that the cluster uses: the client sends no newer forms.
        self.wire = VERSIONS.first
        #: The shards that accept new records, in order.
        self.live: tuple[int, ...] = ()
        #: The newest known lease.
        self.lease: Lease | None = None
        #: Called with the shards that have a new route.
        self.on_change: list[Callable[[list[int]], None]] = []
        #: Called once after the next reply of the service.
        self._on_refreshed: list[Callable[[], None]] = []
        self._placements: dict[int, Placement] = {}
        #: By number of regions: the live shards that span as many.
        self._wide: dict[int, tuple[int, ...]] = {}
        #: By shard: all of its positions below this gsn are stable.
        self.frontiers: dict[int, int] = {}
        #: The shards that are leaving or finalized.
        self._removed: set[int] = set()
        #: The routes with connected replicas.
        self._open: dict[int, Route] = {}
        #: By connection: why this process cannot open it, if it lacks descriptors or memory.
        self._shortages: Final[dict[bytes, str]] = {}
        self._is_refreshing = False
        #: The number of the last request for placements, and when it was sent.
        self._refresh_request = 0
        self._refresh_sent_at = 0
        #: The minimum of that age, for a busy service.
        self._least_age = 0
        #: Until then, a shard is silent.
        self._silent_until = 0
        self._refreshed_at = -_MIN_AGE_NS
        #: When the request of the last reply was sent: the placements are at least that new.
        self._asked_at = -_MAX_AGE_NS
        self._refresh_due = False

    def __str__(self) -> str:
        endpoints = ", ".join(self.membership.endpoints)
        return f"cluster {self.cluster_name!r} at {endpoints}" if self.cluster_name else endpoints

    @property
    def cluster(self) -> int:
        """The cluster's number; 0 while it is unknown."""
        return self.membership.cluster

    def describe(self, shard: int) -> str:
        """Return a shard's name for errors: its number, its state unless live, and the cluster.

        If this process lacks descriptors for connections to it, the text says so.
        """
        state, route = self.state(shard), self._open.get(shard)
        name = f"shard {shard}" if state == "live" else f"shard {shard} ({state})"
        causes = (self._shortages.get(one) for one in (route.names if route is not None else ()))
        cause = next(filter(None, causes), None)
        return f"{name} of {self}" if cause is None else f"{name} of {self} ({cause})"

    def on_connection_changed(self, name: bytes, problem: str) -> None:
        """Record whether this process lacks what a connection needs."""
        if problem.startswith(SHORTAGE):
            self._shortages[name] = problem
        else:
            self._shortages.pop(name, None)

    def state(self, shard: int) -> ShardState | Literal["unknown"]:
        """Return the last known state of a shard."""
        placement = self._placements.get(shard)
        return placement.state if placement is not None else "unknown"

    def describe_silent(self, shards: Iterable[int]) -> list[str]:
        """Return the name of each shard without a reply, with its state."""
        states = ((shard, self.state(shard)) for shard in shards)
        return [
            f"shard {shard} ({'silent' if state == 'live' else state})" for shard, state in states
        ]

    @property
    def is_current(self) -> bool:
        """Whether the placements are as new as those of a waiting call."""
        return self._context.now - self._asked_at <= _MAX_AGE_NS

    def is_removed(self, shard: int) -> bool:
        """Whether a shard will never accept new records again."""
        return shard in self._removed

    def servers(self, shard: int) -> tuple[Replica, ...]:
        """Return a shard's replicas, the primary first; none if it is unknown."""
        placement = self._placements.get(shard)
        return placement.replicas if placement is not None else ()

    def regions(self, shard: int) -> tuple[str, ...]:
        """Return the regions of a shard's replicas, the primary's first; none if it is unknown."""
        return tuple(replica.region for replica in self.servers(shard))

    def read_order(self, route: Route) -> list[int]:
        """Return the order in which to read from a shard's replicas; none: it has no regions."""
        regions, proximity = self.regions(route.shard), self.proximity
        return proximity.order(route.names, regions) if proximity.has_order(regions) else []

    def stream_order(self, route: Route) -> list[int]:
        """Return the order in which to open a stream at a shard's replicas."""
        first, count = _first_to_know(route), len(route.names)
        regions, proximity = self.regions(route.shard), self.proximity
        if proximity.has_order(regions):
            return proximity.stream_order(route.names, regions, first)
        return [(first + i) % count for i in range(count)]

    def spans(self, shard: int, count: int) -> bool:
        """Whether a shard spans at least `count` regions."""
        return len(set(self.regions(shard))) >= count

    def live_in(self, count: int) -> tuple[int, ...]:
        """Return the live shards that span at least `count` regions, in order."""
        if count <= 1:
            return self.live
        found = self._wide.get(count)
        if found is None:
            found = self._wide[count] = tuple(s for s in self.live if self.spans(s, count))
        return found

    # --- requests ---

    def refresh(self, callback: Callable[[], None] | None = None) -> None:
        """Request the placements soon; call `callback` after the next reply.

        A request with a callback goes to the leader: the nearest node may not know a new shard.
        """
        if callback is not None:
            self._on_refreshed.append(callback)
            if self.membership.is_near(self._refresh_request):
                self.membership.cancel(self._refresh_request)
                self._is_refreshing = False
        if self._is_refreshing:
            return
        due = self._refreshed_at + _MIN_AGE_NS
        if self._context.now < due:
            self._refresh_due = True
            self._context.set_timer(due)
            return
        self._is_refreshing = True
        self._refresh_sent_at = self._context.now
        self._refresh_due = False
        self._refresh_request = self.membership.send_request(
            Hello, self.update, may_be_near=not self._on_refreshed
        )

    def look_up(self, callback: Callable[[], None]) -> int:
        """Request the placements as of this call or later; return the number of the request.

        `callback` is called after the reply. `refresh` may use a reply that was sent before this
        call, or that of a node that lags, so it cannot prove that there is no such shard.
        """

        def on_reply(history: LeaseHistory) -> None:
            self.update_placements(history.placements)
            callback()

        gsn = self.lease.base if self.lease is not None else 1
        return self.membership.send_request(
            lambda cluster, request: LeaseQuery(cluster, request, gsn), on_reply
        )

    def refresh_often(self, until: int) -> None:
        """Request the placements now, and often until then: a shard does not answer a call."""
        self._silent_until = max(self._silent_until, until)
        self.refresh()

    def tick(self, *, waiting: bool) -> None:
        """Request the placements if they are due; `waiting`: a call is pending."""
        if self._is_refreshing:
            return
        now = self._context.now
        age = _SILENT_AGE_NS if now < self._silent_until else _MAX_AGE_NS
        due = self._refreshed_at + max(age, self._least_age)
        if self._refresh_due or (waiting and now >= due):
            self.refresh()
        elif waiting:
            self._context.set_timer(due)

    def find_owner(self, gsn: int, callback: Callable[[int], None]) -> int:
        """Request the owner of `gsn`; return the number of the request.

        `callback` gets the shard, or 0 if it has no known owner.
        """
        return self.membership.send_request(
            lambda cluster, request: LeaseQuery(cluster, request, gsn),
            lambda history: callback(owner_in(history, gsn)),
        )

    # --- replies ---

    def update(self, info: ClusterInfo) -> None:
        """Update everything from a `ClusterInfo`."""
        membership = self.membership
        if self._is_refreshing:
            delay = self._context.now - self._refresh_sent_at - info.limits.rtt_ms * NS_PER_MS
            self._least_age = min(max(_AGE_PER_DELAY * delay, 0), _BUSY_AGE_NS)
            self._asked_at = self._refresh_sent_at
        self._is_refreshing = False
        self._refreshed_at = self._context.now
        membership.cluster = membership.cluster or info.cluster
        membership.update_endpoints(info.mms, info.regions)
        self.cluster_name = info.name
        self.wire = info.wire
        if not VERSIONS.has(info.wire):
            self._context.effects.append(FailCalls(self._version_error()))
            return
        self.limits = info.limits
        self._context.session_expiry_ns = info.limits.session_timeout_s * NS_PER_S * 2 // 3
        self._context.rtt_ms = info.limits.rtt_ms
        if info.leases and (self.lease is None or info.leases[-1].last.stop >= self.lease.stop):
            self.lease = info.leases[-1].last
        for placement, frontier in zip(info.placements, info.frontiers, strict=False):
            known = self.frontiers.get(placement.shard, 0)
            self.frontiers[placement.shard] = max(known, frontier)
        self.update_placements(info.placements)
        callbacks, self._on_refreshed = self._on_refreshed, []
        for callback in callbacks:
            callback()

    def _version_error(self) -> VersionError:
        return VersionError(
            f"{self} uses wire version {self.wire}, but this client knows {VERSIONS}: install a"
            f" release that knows {self.wire}"
        )

    def on_leaving(self, leaving: Leaving) -> None:
        """Handle a server's announcement that its shard is leaving."""
        known = self._placements.get(leaving.shard)
        if known is not None and known.state in _NOT_REMOVED and known.view <= leaving.view:
            self.update_placements([msgspec.structs.replace(known, state="leaving")])
            self.refresh()

    def update_placements(self, placements: Iterable[Placement]) -> None:
        """Update the placements; ignore those of older views."""
        changed: list[int] = []
        for placement in placements:
            known = self._placements.get(placement.shard)
            if placement == known or (known is not None and self._is_outdated(placement, known)):
                continue
            self._placements[placement.shard] = placement
            if placement.state in _REMOVED:
                self._removed.add(placement.shard)
            changed.append(placement.shard)
        if not changed:
            return
        states = self._placements
        self.live = tuple(s for s in sorted(states) if states[s].state == "live")
        self._wide.clear()
        self._close([route for s in changed if (route := self._open.pop(s, None)) is not None])
        for listener in self.on_change:
            listener(changed)

    def _is_outdated(self, placement: Placement, known: Placement) -> bool:
        """Whether a placement is older than the known one."""
        is_removed = placement.shard in self._removed and placement.state in _NOT_REMOVED
        return is_removed or placement.view < known.view

    def _close(self, former: list[Route]) -> None:
        """Close the connections to endpoints without a replica."""
        in_use = {
            replica.endpoint.encode()
            for placement in self._placements.values()
            for replica in placement.replicas
        }
        for route in former:
            for name in route.names:
                if name not in in_use:
                    self._shortages.pop(name, None)
                    self._context.disconnect(name)

    def route(self, shard: int) -> Route | None:
        """Return a shard's route, and connect to its replicas; None if the shard is unknown."""
        route = self._open.get(shard)
        if route is None:
            placement = self._placements.get(shard)
            if placement is None:
                return None
            names = tuple(self._context.connect(replica.endpoint) for replica in placement.replicas)
            state = placement.state
            route = Route(shard, placement.view, state, names, state in _AWAY)
            self._open[shard] = route
        return route

    @property
    def shards(self) -> list[int]:
        """All shards, in order, including removed ones."""
        return sorted(self._placements)

    def check(self) -> None:
        """Assert the invariant."""
        assert all(self._placements[shard].state == "live" for shard in self.live)
        for shard, route in self._open.items():
            assert route.view == self._placements[shard].view, "an outdated route"


def _first_to_know(route: Route) -> int:
    """Return the replica that is the first to know what is stable.

    With two replicas that is the backup: both have what it has applied. With more it is the
    primary, because the others report to it (docs/protocol.md, section 13).
    """
    return 1 if len(route.names) == _PAIR else 0


def owner_in(history: LeaseHistory, gsn: int) -> int:
    """Return the shard that owns a position by these leases; 0: none of them has it."""
    runs = (run for run in history.runs if run.first.base <= gsn < run.last.stop)
    lease = next((run.lease_at(gsn) for run in runs), None)
    return lease.owner(gsn) if lease is not None and lease.members else 0
