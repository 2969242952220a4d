"""Storage servers and failure handlers, as their heartbeats show them: routes, states, frontiers.

Rule: time only serves to guess which servers are up, never to decide the content of a position.
Invariant: a stored frontier never decreases, because all positions below it stay stable.

See docs/protocol.md, sections 3, 5 and 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from ziplog.core.units import NS_PER_MS, NS_PER_S
from ziplog.core.view import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ziplog.config import NodeConfig
    from ziplog.core.view import NodeState, Placement
    from ziplog.wire import HandlerHeartbeat, Heartbeat, NodeInfo

#: A server is up for this time after a heartbeat, then suspect, then down.
UP_NS: Final = 5 * NS_PER_S // 2
SUSPECT_NS: Final = 5 * NS_PER_S
#: Silence of a replica after which its shard is parked.
SILENT_NS: Final = 3 * NS_PER_S


class Server:
    """One replica of one shard."""

    __slots__ = (
        "announced",
        "announced_alone_at",
        "announced_at",
        "announced_placement",
        "fingerprint",
        "heartbeat",
        "in_view_since",
        "index",
        "is_in_limbo",
        "last_heard_at",
        "name",
        "placement_announced_at",
        "route",
        "shard",
        "view",
    )  # fmt: skip

    def __init__(self, name: str, shard: int, index: int, now: int) -> None:
        self.name: Final = name
        self.shard: Final = shard
        #: Its index among the shard's replicas; 0 is the primary.
        self.index: Final = index
        #: The route to it: the source of its last heartbeat.
        self.route = b""
        self.heartbeat: Heartbeat | None = None
        #: It reported limbo, or has another data directory.
        self.is_in_limbo = False
        #: Of the data directory that it must have; "": any, while it is not part of its shard.
        self.fingerprint = ""
        #: The view of its shard, and when the shard entered it.
        self.view = 0
        self.in_view_since = now
        #: When its last heartbeat came, in ns; before the first, since when one is awaited.
        self.last_heard_at = now
        #: The number of the last lease that was announced to it, and when.
        self.announced = 0
        self.announced_at = 0
        #: When it last got an announcement of its own, for its own gap.
        self.announced_alone_at = -(2**62)
        #: The last placement of its shard that was announced to it, and when.
        self.announced_placement: Placement | None = None
        self.placement_announced_at = 0

    def has_forgotten(self, heartbeat: Heartbeat) -> bool:
        """Whether its data directory is not the one that this server is known with."""
        return bool(self.fingerprint) and self.fingerprint != fingerprint(heartbeat.identity)

    def update_limbo(self) -> None:
        """Update `is_in_limbo` after a heartbeat or a placement."""
        self.is_in_limbo = self._shows_limbo()

    def _shows_limbo(self) -> bool:
        heartbeat = self.heartbeat
        return heartbeat is not None and (
            heartbeat.state == "limbo" or self.has_forgotten(heartbeat)
        )

    def check(self) -> None:
        """Assert that `is_in_limbo` is up to date."""
        assert self.is_in_limbo == self._shows_limbo()

    @property
    def is_behind(self) -> bool:
        """Whether it reported an older view than its shard's."""
        return self.heartbeat is not None and 0 < self.heartbeat.view < self.view

    @property
    def is_stopping(self) -> bool:
        """Whether its process is to end, and waits until its shard is out of the leases."""
        return self.heartbeat is not None and self.heartbeat.is_stopping

    def is_unfit(self, now: int) -> bool:
        """Whether it cannot serve. In a new view, it has some time to report that it can."""
        if self.is_stopping:
            return True
        return (self.is_in_limbo or self.is_behind) and now - self.in_view_since >= SILENT_NS

    def region(self, placed: str) -> str:
        """Return the region that it reports; `placed` if it reports none as a part of its shard."""
        if self.heartbeat is None or self.is_in_limbo:
            return placed
        return self.heartbeat.region

    def is_heard(self, now: int) -> bool:
        """Whether its last heartbeat describes the present: it is not down."""
        return self.heartbeat is not None and now - self.last_heard_at < SUSPECT_NS

    def heartbeat_age_ms(self, now: int) -> int | None:
        """Return the age of its last heartbeat; None if none came."""
        return None if self.heartbeat is None else (now - self.last_heard_at) // NS_PER_MS

    @property
    def full(self) -> str:
        """Why it refuses new records for lack of disk space; "": it does not."""
        return self.heartbeat.full if self.heartbeat is not None else ""

    def state(self, now: int) -> NodeState | Literal["full"]:
        """Return its state for the status document."""
        silence = now - self.last_heard_at
        if self.heartbeat is None:
            return "starting" if silence < SUSPECT_NS else "down"
        if silence < UP_NS:
            if self.is_in_limbo:
                return "limbo"
            return "full" if self.full and self.heartbeat.state == "up" else self.heartbeat.state
        return "suspect" if silence < SUSPECT_NS else "down"


class Servers:
    """All storage servers of the cluster."""

    def __init__(self, publisher: str = "") -> None:
        """Start without servers.

        Args:
            publisher: the endpoint at which this node publishes leases; "": it does not.

        """
        self._publisher: Final = publisher
        self._by_name: dict[str, Server] = {}
        #: By name: those that this node's publications do not serve, by their last heartbeats.
        self._unserved: dict[str, Server] = {}
        self._by_shard: dict[int, list[Server]] = {}
        self._frontiers: dict[int, int] = {}
        #: Names of servers that sent no heartbeat, or reported limbo.
        self.missing: set[str] = set()
        #: Silence counts from here on at the earliest: before, this node received nothing.
        self._listening_since = 0

    def __iter__(self) -> Iterator[Server]:
        return iter(self._by_name.values())

    @property
    def unserved(self) -> Iterable[Server]:
        """Those that sent heartbeats, and did not get their last leases as publications."""
        return self._unserved.values()

    def place(self, placements: Iterable[Placement], now: int) -> None:
        """Store the replicas of these shards."""
        for placement in placements:
            names = [replica.name for replica in placement.replicas]
            old = self._by_shard.get(placement.shard, [])
            if [server.name for server in old] == names:
                self._set_view(old, placement, now)
                continue
            for server in old:
                self._by_name.pop(server.name, None)
                self._unserved.pop(server.name, None)
                self.missing.discard(server.name)
            new = [Server(name, placement.shard, index, now) for index, name in enumerate(names)]
            self._by_shard[placement.shard] = new
            self._set_view(new, placement, now - SILENT_NS)
            self._by_name.update((server.name, server) for server in new)
            self.missing.update(names)
            self._frontiers.setdefault(placement.shard, 0)

    def _set_view(self, servers: list[Server], placement: Placement, now: int) -> None:
        for server, replica in zip(servers, placement.replicas, strict=True):
            if server.fingerprint != replica.fingerprint:
                server.fingerprint = replica.fingerprint
                server.update_limbo()
            if server.view != placement.view:
                server.view, server.in_view_since = placement.view, now

    def on_heartbeat(self, route: bytes, heartbeat: Heartbeat, now: int) -> Server | None:
        """Store a heartbeat; return its server, or None if that shard has no such server.

        A server with another data directory than the known one has lost its promises. It counts as
        being in limbo, and is ignored while the known one is up.
        """
        server = self._by_name.get(heartbeat.node)
        if server is None or server.shard != heartbeat.shard:
            return None
        before = server.heartbeat
        has_forgotten = server.has_forgotten(heartbeat)
        is_up = before is not None and now - server.last_heard_at < UP_NS
        if has_forgotten and is_up and not server.is_in_limbo:
            return None
        if route != server.route or (
            before is not None and before.incarnation != heartbeat.incarnation
        ):
            server.announced = 0  # A new process or connection: it may have missed announcements.
        server.route, server.heartbeat, server.last_heard_at = route, heartbeat, now
        server.update_limbo()
        if self.receives_publications(heartbeat):
            self._unserved.pop(server.name, None)
        else:
            self._unserved[server.name] = server
        if server.is_in_limbo:
            self.missing.add(server.name)
        else:
            self.missing.discard(server.name)
        if not has_forgotten:
            self.raise_frontier(heartbeat.shard, heartbeat.frontier)
        return server

    def receives_publications(self, heartbeat: Heartbeat) -> bool:
        """Whether the last lease of a server came as a publication of this node."""
        return heartbeat.publisher == self._publisher != ""

    def forgive_silence_before(self, now: int) -> None:
        """Ignore silence before `now`: this node received nothing."""
        self._listening_since = now

    def silence(self, server: Server, now: int) -> int:
        """Return how long a server was silent while this node listened, in ns."""
        return now - max(server.last_heard_at, self._listening_since)

    def is_listening_anew(self, now: int) -> bool:
        """Whether nodes that are up may not have been heard yet: before, nothing was received."""
        return now - self._listening_since < UP_NS

    def raise_frontier(self, shard: int, frontier: int) -> None:
        """Store that all of a shard's positions below `frontier` are stable."""
        if frontier > self._frontiers.get(shard, frontier):
            self._frontiers[shard] = frontier

    def is_route_of(self, route: bytes, shard: int) -> bool:
        """Whether a route leads to a server of the shard."""
        return any(server.route == route for server in self._by_shard.get(shard, ()))

    def is_primary(self, route: bytes, shard: int, view: int) -> bool:
        """Whether a route leads to the shard's primary, and this is its view."""
        replicas = self._by_shard.get(shard)
        return replicas is not None and (replicas[0].route, replicas[0].view) == (route, view)

    def frontier(self, shard: int) -> int:
        """Return the highest frontier that a shard reported; 0: none."""
        return self._frontiers.get(shard, 0)

    def replicas(self, shard: int) -> list[Server]:
        """Return a shard's servers, the primary first."""
        return self._by_shard[shard]

    def has_reported(self, shard: int) -> bool:
        """Whether every replica of the shard sent a heartbeat and is fit to serve."""
        return all(server.name not in self.missing for server in self._by_shard[shard])

    def held_no_lease(self, shard: int) -> bool:
        """Whether every replica of the shard reported that it never was part of a cluster."""
        return all(
            server.heartbeat is not None and not server.heartbeat.cluster
            for server in self._by_shard[shard]
        )

    def holds_leases(self, shard: int) -> bool:
        """Whether every replica of the shard reported a lease, so that it can start."""
        return all(
            server.heartbeat is not None and server.heartbeat.lease > 0
            for server in self._by_shard[shard]
        )

    def is_fit(self, shard: int, now: int) -> bool:
        """Whether the shard can serve: no replica is silent, in limbo, or in an older view."""
        for server in self._by_shard[shard]:
            if self.silence(server, now) >= SILENT_NS or server.is_unfit(now):
                return False
        return True

    def is_relabelled(self, placement: Placement) -> bool:
        """Whether a server of a shard reports another region than the placement's."""
        return any(
            server.region(replica.region) != replica.region
            for server, replica in zip(
                self._by_shard[placement.shard], placement.replicas, strict=True
            )
        )

    def check(self) -> None:
        """Assert that what is derived from heartbeats and placements is up to date."""
        for server in self:
            server.check()
            heartbeat = server.heartbeat
            is_unserved = heartbeat is not None and not self.receives_publications(heartbeat)
            assert (server.name in self._unserved) == is_unserved
        assert self._unserved.keys() <= self._by_name.keys()


class FailureHandlers:
    """All nodes of the failure handler: their last heartbeats, for the status document."""

    def __init__(self, nodes: Sequence[NodeConfig]) -> None:
        self._nodes: Final = nodes
        self._names: Final = {node.name for node in nodes}
        #: By name: the last heartbeat, and when it came.
        self._last_heartbeats: dict[str, tuple[HandlerHeartbeat, int]] = {}
        #: By name: the source of the last heartbeat.
        self._routes: dict[str, bytes] = {}

    def on_heartbeat(self, src: bytes, heartbeat: HandlerHeartbeat, now: int) -> bool:
        """Store a heartbeat; return whether the cluster file has its node."""
        if heartbeat.node not in self._names:
            return False
        self._last_heartbeats[heartbeat.node] = (heartbeat, now)
        self._routes[heartbeat.node] = src
        return True

    def is_route(self, src: bytes) -> bool:
        """Whether a node of the failure handler sent its last heartbeat from there."""
        return src in self._routes.values()

    def heartbeat(self, name: str, now: int) -> HandlerHeartbeat | None:
        """Return a node's last heartbeat, if the node is up."""
        heartbeat, last_at = self._last_heartbeats.get(name, (None, 0))
        return heartbeat if now - last_at < UP_NS else None

    def obstacles(self, now: int) -> dict[int, str] | None:
        """Return what the leader waits for, by shard; None: no node that is up leads."""
        for node in self._nodes:
            heartbeat = self.heartbeat(node.name, now)
            if heartbeat is not None and heartbeat.leader:
                return {one.shard: one.text for one in heartbeat.obstacles}
        return None

    def status(self, now: int) -> list[dict[str, Any]]:
        """Return their part of the status document."""
        return [self._status(node, now) for node in self._nodes]

    def _status(self, node: NodeConfig, now: int) -> dict[str, Any]:
        heartbeat, last_at = self._last_heartbeats.get(node.name, (None, now - SUSPECT_NS))
        silence = now - last_at
        state = "up" if silence < UP_NS else "suspect" if silence < SUSPECT_NS else "down"
        free = heartbeat.free_bytes if heartbeat is not None and state != "down" else None
        return {
            "name": node.name,
            "endpoint": node.endpoint,
            "region": node.region or "",
            "pid": heartbeat.pid if heartbeat is not None and state != "down" else None,
            "state": state,
            "leader": heartbeat is not None and heartbeat.leader and state != "down",
            "heartbeat_age_ms": silence // NS_PER_MS if heartbeat is not None else None,
            "version": (heartbeat.version or None) if heartbeat is not None else None,
            "wire_versions": wire_versions(heartbeat),
            "disk": service_disk(free),
        }


def service_disk(free_bytes: int | None) -> dict[str, Any] | None:
    """Return the disk of a node of the services for the status document; None: unknown.

    Nothing is reserved: such a node halts when the disk refuses its journal.
    """
    if free_bytes is None:
        return None
    return {"free_bytes": free_bytes, "reserve_bytes": 0, "full": not free_bytes}


def wire_versions(report: Heartbeat | HandlerHeartbeat | NodeInfo | None) -> list[int] | None:
    """Return the first and the last wire version that a node knows, for the status document."""
    return None if report is None else [report.first_wire, report.last_wire]
