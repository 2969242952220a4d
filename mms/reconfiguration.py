"""Reconfiguration: operators add, remove and finalize shards.

    add      -- `PlaceShard` committed --> joining -- a lease has it --> reply
    remove   -- `RetireShard` committed --> leaving -- no insert waits there, or 2 s passed:
                a lease without it --> its limit -- all below is stable --> reply
    finalize -- the same, and all replicas are sealed: `FinalizeShard` committed --> reply

Rule: a reply that could still change follows a committed or refused command; a final one comes from
the local state. Clients repeat requests: one that is lost with a leader costs time only, and a
repeated one gets the same reply.

Invariant: only shards that are still in the leases are draining. See docs/protocol.md, sections
13.6, 13.7 and 13.9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from mms.commands import FinalizeShard, PlaceShard, RetireShard
from mms.proposals import RETRY_NS, Proposals
from mms.servers import UP_NS
from ziplog.core.node import Send
from ziplog.core.units import NS_PER_S
from ziplog.core.view import Placement, Replica
from ziplog.wire import Refused, ShardChanged, Want

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mms.commands import Refusal
    from mms.servers import Server, Servers
    from mms.state import ClusterState
    from ziplog.config import NodeConfig
    from ziplog.core.node import Effect
    from ziplog.wire import ChangeShard

#: Time limit for a leaving shard to report that no insert waits there.
LEAVE_NS: Final = 2 * NS_PER_S
#: Time after which a request that the client no longer repeats is forgotten.
FORGET_NS: Final = 30 * NS_PER_S
#: Maximum number of waiting requests; more are refused.
MAX_CHANGES: Final = 64
#: Maximum number of replies kept for repeated requests.
_KEPT_ANSWERS: Final = 4 * MAX_CHANGES
#: Interval between repeated `Want` messages.
_WANT_NS: Final = NS_PER_S // 4

_Error = Literal["", "no-such-shard", "exists", "last-shard", "wrong-size", "retired", "too-many"]
_ERRORS: Final[dict[Refusal, _Error]] = {
    "no-such-shard": "no-such-shard", "exists": "exists", "last-shard": "last-shard",
    "wrong-size": "wrong-size", "retired": "retired", "too-many": "too-many",
}  # fmt: skip


AnyChange = PlaceShard | RetireShard | FinalizeShard


class _Change:
    __slots__ = ("message", "repeated_at", "route", "wanted_at")

    def __init__(self, route: bytes, message: ChangeShard, now: int) -> None:
        self.route, self.message, self.repeated_at = route, message, now
        self.wanted_at: int | None = None


class Reconfiguration:
    """All shards that join or leave."""

    def __init__(
        self,
        state: ClusterState,
        servers: Servers,
        services: Iterable[NodeConfig],
        min_regions: int = 1,
    ) -> None:
        """Start empty.

        Args:
            state: the committed state.
            servers: what the storage servers reported.
            services: nodes whose names and endpoints no server may have.
            min_regions: least number of regions of a new shard.

        """
        self._state: Final = state
        self._min_regions: Final = min_regions
        self._reserved: Final = {part for node in services for part in (node.name, node.endpoint)}
        self._servers: Final = servers
        self._changes: dict[tuple[bytes, int], _Change] = {}
        #: The latest replies: a repeated request that arrives late must change nothing.
        self._answered: dict[tuple[bytes, int], _Error] = {}
        #: Leaving shards that are still in the leases: since when this leader knows it.
        self._leaving: dict[int, int] = {}
        #: Those of them that reported no waiting insert.
        self._drained: set[int] = set()
        #: The shards that have left and are not finalized.
        self._not_finalized: list[int] = []
        self._proposals: Final = Proposals()
        #: When a lease without leaving shards was last claimed.
        self._leased_at: int | None = None
        self._advance_at = 0
        self._want_requests = 0

    def __len__(self) -> int:
        return len(self._changes)

    # --- events ---

    def start_leading(self, now: int) -> None:
        """Start to lead: leaving shards get their full time from now on."""
        self._leaving = dict.fromkeys(self._leaving, now)
        self._drained.clear()
        self._leased_at = None

    def on_placements(self, now: int) -> None:
        """Handle changed placements or leases."""
        state = self._state
        leaving = [shard for shard in state.retired if state.may_stay(shard)]
        if not self._leaving.keys() <= set(leaving):
            self._leased_at = None  # the claimed lease was granted
        self._leaving = {shard: self._leaving.get(shard, now) for shard in leaving}
        self._drained.intersection_update(leaving)
        self._not_finalized = [
            shard
            for shard, retired in state.retired.items()
            if retired.limit and not retired.is_finalized
        ]

    def submit(self, src: bytes, message: ChangeShard, now: int) -> list[Effect]:
        """Accept an operator's request; the reply may have to wait."""
        key, cluster = (src, message.request), self._state.cluster
        if key in self._answered:
            return [self._reply(src, message, self._answered[key])]
        if message.change == "add" and not message.replicas:
            return [self._reply(src, message, "wrong-size")]
        if any(r.name in self._reserved or r.endpoint in self._reserved for r in message.replicas):
            return [self._reply(src, message, "exists")]
        if message.change == "add" and message.shard not in self._state.placements:
            regions = _new(message).regions
            if len(regions) < self._min_regions:
                return [self._reply(src, message, "wrong-size", self._too_few(regions))]
        if key not in self._changes and len(self._changes) >= MAX_CHANGES:
            why = f"{MAX_CHANGES} shard changes are already waiting"
            refused = Refused(cluster, message.shard, 0, 0, message.request, "full", why)
            return [Send(src, refused)]
        change = self._changes.setdefault(key, _Change(src, message, now))
        change.repeated_at = now
        return []

    def _too_few(self, regions: frozenset[str]) -> str:
        named = ", ".join(region or "(no region)" for region in sorted(regions))
        return (
            f"its servers are in {len(regions)} of the {self._min_regions} regions that min_regions"
            f" in the cluster file requires ({named})"
        )

    def on_drained(self, shard: int) -> None:
        """Handle a shard's report that it has no more inserts, new or waiting."""
        if shard in self._leaving:
            self._drained.add(shard)

    def on_applied(self, command: AnyChange) -> int:
        """Forget a proposal that consensus applied or refused; return its shard."""
        shard = _shard_of(command)
        self._proposals.on_decided(shard, type(command))
        return shard

    def on_refused(self, command: AnyChange, why: Refusal) -> list[Effect]:
        """Answer the requests that led to a refused command."""
        self.on_applied(command)
        error = _ERRORS.get(why)
        if error is None:
            return []
        waiting = [
            key for key, change in self._changes.items() if self._needs(change.message, command)
        ]
        return [self._finish(key, error) for key in waiting]

    def abandon(self) -> list[tuple[bytes, int]]:
        """Forget all requests; return their routes and numbers."""
        abandoned = list(self._changes)
        self._changes.clear()
        self._proposals.clear()
        return abandoned

    # --- progress ---

    def advance(self, now: int) -> list[Effect]:
        """Take the next step of every request, as far as possible now."""
        if not (self._changes or self._leaving or self._not_finalized):
            return []
        self._advance_at = now + _WANT_NS
        effects: list[Effect] = []
        #: The shards of requests to add. Another one with other servers waits for the outcome: the
        #: two would take turns, each with a new proposal every time.
        adding: set[int] = set()
        for key, change in list(self._changes.items()):
            error, shard = self._error(change.message), change.message.shard
            if error is not None:
                effects.append(self._finish(key, error))
            elif now >= change.repeated_at + FORGET_NS:
                del self._changes[key]
            elif change.message.change != "add":
                effects += self._continue(change, now)
            elif shard not in adding:
                adding.add(shard)
                effects += self._continue(change, now)
        for shard in self._not_finalized:
            if self._is_sealed(shard, now):
                effects += self._proposals.propose(shard, FinalizeShard(shard), now)
        return effects

    def next_wakeup(self) -> list[int]:
        """Return the latest time of the next `advance`, if time alone may change something."""
        return [self._advance_at] if self._changes or self._leaving else []

    def shards_to_drop(self, now: int) -> set[int]:
        """Return the leaving shards that the next lease omits."""
        return {
            shard
            for shard, since in self._leaving.items()
            if shard in self._drained or now >= since + LEAVE_NS
        }

    def claim_lease(self, now: int) -> bool:
        """Return whether to propose a lease now, so that a shard can leave; remember the claim."""
        if not self._leaving or not self.shards_to_drop(now):
            return False
        if self._leased_at is not None and now < self._leased_at + RETRY_NS:
            return False
        self._leased_at = now
        return True

    # --- one request ---

    def _error(self, message: ChangeShard) -> _Error | None:
        """Return the reply that is due by now; None: not yet."""
        placement = self._state.placements.get(message.shard)
        retired = self._state.retired.get(message.shard)
        if placement is None:
            return None
        if message.change == "add":
            if retired is not None:
                return "retired"
            if not placement.has_servers_of(_new(message)):
                return "exists"
            is_placed = placement.state not in {"joining", "recovering"}
            return "" if is_placed and self._servers.holds_leases(message.shard) else None
        if retired is None:
            return None
        if retired.is_finalized:
            return ""
        has_left = retired.limit and self._servers.frontier(message.shard) >= retired.limit
        return "" if message.change == "remove" and has_left else None

    def _continue(self, change: _Change, now: int) -> list[Effect]:
        command = self._command(change.message)
        if command is not None:
            return self._proposals.propose(change.message.shard, command, now)
        return self._want(change, now)

    def _command(self, message: ChangeShard) -> PlaceShard | RetireShard | None:
        """Return the command that must be committed first for this request."""
        if message.change == "add":
            is_placed = message.shard in self._state.placements
            return None if is_placed else PlaceShard(_new(message))
        state = self._state
        if message.shard in state.retired:
            return None
        return RetireShard(message.shard, state.retirements)

    def _needs(self, message: ChangeShard, command: AnyChange) -> bool:
        """Whether a request waits for a command, proposed in whichever turn."""
        if isinstance(command, RetireShard):
            command = RetireShard(command.shard, self._state.retirements)
        return self._command(message) == command

    def _want(self, change: _Change, now: int) -> list[Effect]:
        """Request a removed shard's last positions at once; its heartbeat may take a second."""
        shard, cluster = change.message.shard, self._state.cluster
        retired = self._state.retired.get(shard)
        if retired is None or not retired.limit:
            return []
        primary = self._servers.replicas(shard)[0]
        if self._servers.frontier(shard) >= retired.limit or not primary.route:
            return []
        if change.wanted_at is not None and now < change.wanted_at + _WANT_NS:
            return []
        change.wanted_at = now
        self._want_requests += 1
        return [Send(primary.route, Want(cluster, shard, self._want_requests, retired.limit - 1))]

    def _finish(self, key: tuple[bytes, int], error: _Error) -> Effect:
        change = self._changes.pop(key)
        self._answered[key] = error
        if len(self._answered) > _KEPT_ANSWERS:
            del self._answered[next(iter(self._answered))]
        return self._reply(change.route, change.message, error)

    def _reply(self, route: bytes, message: ChangeShard, error: _Error, detail: str = "") -> Effect:
        cluster = self._state.cluster
        return Send(route, ShardChanged(cluster, message.request, message.shard, error, detail))

    # --- finalization ---

    def _is_sealed(self, shard: int, now: int) -> bool:
        """Whether all replicas of a shard that has left report that they hold all its positions."""
        return self._state.placements[shard].state == "leaving" and all(
            self._reports_sealed(server, self._state.retired[shard].limit, now)
            for server in self._servers.replicas(shard)
        )

    def _reports_sealed(self, server: Server, limit: int, now: int) -> bool:
        """Whether a server reported so just now, in this view, and knew the end of its shard."""
        heartbeat = server.heartbeat
        if heartbeat is None or not heartbeat.is_sealed or server.is_in_limbo:
            return False
        if (
            now - server.last_heard_at >= UP_NS
            or heartbeat.view != server.view
            or not heartbeat.lease
        ):
            return False
        return self._state.numbered(heartbeat.lease).base >= limit

    def check(self) -> None:
        """Assert the invariant."""
        state = self._state
        assert len(self._changes) <= MAX_CHANGES
        assert len(self._answered) <= _KEPT_ANSWERS
        assert self._answered.keys().isdisjoint(self._changes)
        assert self._leaving.keys() == {shard for shard in state.retired if state.may_stay(shard)}
        assert self._drained <= self._leaving.keys()


def _shard_of(command: AnyChange) -> int:
    return command.placement.shard if isinstance(command, PlaceShard) else command.shard


def _new(message: ChangeShard) -> Placement:
    """Return the requested placement, before any data directory is known."""
    replicas = tuple(
        Replica(replica.name, replica.endpoint, region=replica.region)
        for replica in message.replicas
    )
    return Placement(message.shard, 1, "joining", replicas)
