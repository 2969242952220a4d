"""The storage servers as their heartbeats show them: routes, states, frontiers.

Rule: time is only ever used to guess who is up, never to decide what a position holds. Invariant: a
frontier noted here never goes back, because what is below it is stable for ever.

See docs/protocol.md, sections 3 and 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core.view import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ziplog.core.view import NodeState, Placement
    from ziplog.wire import Heartbeat

_S: Final = 1_000_000_000
#: A server that was heard within this time is up; within the next one, suspect; then down.
UP_NS: Final = 5 * _S // 2
SUSPECT_NS: Final = 5 * _S
#: A shard with a replica that is silent for so long is parked.
SILENT_NS: Final = 3 * _S


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
        #: Its place among the shard's replicas; 0 is the primary.
        self.index: Final = index
        #: The way to it: where its last heartbeat came from.
        self.route = b""
        self.heartbeat: Heartbeat | None = None
        #: Of the data directory that it must have; "": any, as it is not part of its shard yet.
        self.fingerprint = ""
        #: The view of its shard, and since when it has that one.
        self.view = 0
        self.in_view_since = now
        #: When it was heard last, in ns; before that, since when it is waited for.
        self.last_heard_at = now
        #: The number of the last lease that was announced to it, and when.
        self.announced = 0
        self.announced_at = 0
        #: When it was last told by itself what it said that it lacks.
        self.announced_alone_at = -(2**62)
        #: How its shard was placed when it was told so last, and when that was.
        self.announced_placement: Placement | None = None
        self.placement_announced_at = 0

    def has_forgotten(self, heartbeat: Heartbeat) -> bool:
        """Whether it does not have the data directory that this server is known with."""
        return self.fingerprint not in {"", fingerprint(heartbeat.identity)}

    @property
    def is_in_limbo(self) -> bool:
        """Whether it said that it may have forgotten something, or has."""
        heartbeat = self.heartbeat
        return heartbeat is not None and (
            heartbeat.state == "limbo" or self.has_forgotten(heartbeat)
        )

    @property
    def is_behind(self) -> bool:
        """Whether it said that it is in an older view than its shard."""
        return self.heartbeat is not None and 0 < self.heartbeat.view < self.view

    def is_unfit(self, now: int) -> bool:
        """Whether it cannot serve. In a new view it has some time to say that it can."""
        return now - self.in_view_since >= SILENT_NS and (self.is_in_limbo or self.is_behind)

    def heartbeat_age_ms(self, now: int) -> int | None:
        """Return how long ago its last heartbeat came; None if none did."""
        return None if self.heartbeat is None else (now - self.last_heard_at) // 1_000_000

    def state(self, now: int) -> NodeState:
        """Return its state as the status document has it."""
        silence = now - self.last_heard_at
        if self.heartbeat is None:
            return "starting" if silence < SUSPECT_NS else "down"
        if silence < UP_NS:
            return "limbo" if self.is_in_limbo else self.heartbeat.state
        return "suspect" if silence < SUSPECT_NS else "down"


class Servers:
    """All storage servers of the cluster."""

    def __init__(self) -> None:
        self._by_name: dict[str, Server] = {}
        self._by_shard: dict[int, list[Server]] = {}
        self._frontiers: dict[int, int] = {}
        #: Names of servers that were never heard, or said that they are in limbo.
        self.missing: set[str] = set()
        #: Silence counts from here on at the earliest: we heard nobody before.
        self._listening_since = 0

    def __iter__(self) -> Iterator[Server]:
        return iter(self._by_name.values())

    def place(self, placements: Iterable[Placement], now: int) -> None:
        """Know the replicas of these shards."""
        for placement in placements:
            names = [replica.name for replica in placement.replicas]
            old = self._by_shard.get(placement.shard, [])
            if [server.name for server in old] == names:
                self._set_view(old, placement, now)
                continue
            for server in old:
                self._by_name.pop(server.name, None)
                self.missing.discard(server.name)
            new = [Server(name, placement.shard, index, now) for index, name in enumerate(names)]
            self._by_shard[placement.shard] = new
            self._set_view(new, placement, now - SILENT_NS)
            self._by_name.update((server.name, server) for server in new)
            self.missing.update(names)
            self._frontiers.setdefault(placement.shard, 0)

    def _set_view(self, servers: list[Server], placement: Placement, now: int) -> None:
        for server, replica in zip(servers, placement.replicas, strict=True):
            server.fingerprint = replica.fingerprint
            if server.view != placement.view:
                server.view, server.in_view_since = placement.view, now

    def on_heartbeat(self, route: bytes, heartbeat: Heartbeat, now: int) -> Server | None:
        """Note a heartbeat; None if it is of nobody that is placed at that shard.

        A server with another data directory than the one that it is known with has forgotten what
        it promised: it counts as being in limbo, and as nobody while the known one is heard.
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
            server.announced = (
                0  # a new process, or a new connection of it: it may have missed things
            )
        server.route, server.heartbeat, server.last_heard_at = route, heartbeat, now
        if server.is_in_limbo:
            self.missing.add(server.name)
        else:
            self.missing.discard(server.name)
        if not has_forgotten:
            self.raise_frontier(heartbeat.shard, heartbeat.frontier)
        return server

    def forgive_silence_before(self, now: int) -> None:
        """Forgive silence before `now`: we did not listen."""
        self._listening_since = now

    def silence(self, server: Server, now: int) -> int:
        """Return for how long, in ns, a server was silent while we listened."""
        return now - max(server.last_heard_at, self._listening_since)

    def raise_frontier(self, shard: int, frontier: int) -> None:
        """Note that all that a shard owns below `frontier` is stable."""
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
        """Return the highest frontier that a shard reported; 0: none was heard."""
        return self._frontiers.get(shard, 0)

    def replicas(self, shard: int) -> list[Server]:
        """Return a shard's servers, the primary first."""
        return self._by_shard[shard]

    def has_reported(self, shard: int) -> bool:
        """Whether every replica of the shard was heard and is fit to serve."""
        return all(server.name not in self.missing for server in self._by_shard[shard])

    def holds_leases(self, shard: int) -> bool:
        """Whether every replica of the shard said that it holds a lease, so that it can begin."""
        return all(
            server.heartbeat is not None and server.heartbeat.lease > 0
            for server in self._by_shard[shard]
        )

    def is_fit(self, shard: int, now: int) -> bool:
        """Whether the shard can serve: no replica is silent, in limbo, or in an older view."""
        return all(
            self.silence(server, now) < SILENT_NS and not server.is_unfit(now)
            for server in self._by_shard[shard]
        )
