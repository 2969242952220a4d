"""How much the replicas of a shard hold of a range, and which of them serve it in bulk.

    all replicas asked --the first answered, then the others or a grace--> answered

Rules: answers of the shard's present view count; who refuses is left out once somebody answered,
and is asked again while nobody has; of the answers, the one that reaches farthest tells the
stretches. Invariant: whatever is open is asked again, or ends, in time.
See docs/protocol.md, section 14.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec

from ziplog.client.common.requests import NEVER, OutlineRequest
from ziplog.errors import ConfigError, DeadlineError
from ziplog.wire import Outline, Outlined

if TYPE_CHECKING:
    from ziplog.client.common.routing import Route, Routing
    from ziplog.client.common.step_context import Turn
    from ziplog.wire import Refused

_MS: Final = 1_000_000
#: Who has not answered so long after the first one is left out.
GRACE_NS: Final = 200 * _MS
#: While nobody has answered, all are asked again after so long, doubling up to the last.
_FIRST_PAUSE_NS: Final = 50 * _MS
_LAST_PAUSE_NS: Final = 500 * _MS


class ShardOutline(msgspec.Struct, frozen=True):
    """A shard's part of a range, in stretches of about equal size."""

    shard: int
    #: All before it was trimmed.
    trim: int
    #: (stop, bytes) of each stretch: from where the one before ends up to `stop`.
    steps: list[tuple[int, int]]
    #: The archives of the replicas that have one: (host, port).
    archives: list[tuple[str, int]]


class Outlining(msgspec.Struct):
    """One question under way."""

    call: int
    request: OutlineRequest
    #: Its number at the servers.
    number: int
    #: By server.
    replies: dict[int, Outlined] = msgspec.field(default_factory=dict)
    refused: set[int] = msgspec.field(default_factory=set)
    #: When it is answered whoever is missing; `NEVER` while nobody has answered.
    done_at: int = NEVER
    #: When to ask again; `NEVER` while it is not known where the shard is.
    retry_at: int = NEVER
    pause: int = _FIRST_PAUSE_NS


class Outlinings:
    """All such questions of a client."""

    def __init__(self, turn: Turn, routing: Routing) -> None:
        self._turn: Final = turn
        self._routing: Final = routing
        #: By number.
        self._open: Final[dict[int, Outlining]] = {}
        routing.on_change.append(self._rerouted)

    @property
    def waiting(self) -> bool:
        """Whether a question is open."""
        return bool(self._open)

    def start(self, call: int, request: OutlineRequest) -> None:
        """Take a call."""
        number = self._turn.request()
        outlining = self._open[number] = Outlining(call, request, number)
        self._turn.wake_at(request.deadline)
        if self._routing.route(request.shard) is not None:
            self._ask(outlining)
        else:
            self._routing.refresh(lambda: self._routed(outlining))

    def _routed(self, outlining: Outlining) -> None:
        """All shards that there are have been told."""
        if outlining.number not in self._open:
            return
        shard, known = outlining.request.shard, self._routing.shards
        if self._routing.route(shard) is None:
            self._finish(outlining, ConfigError("shard", shard, f"one of {known}"))
        elif outlining.retry_at == NEVER:
            self._ask(outlining)

    def cancel(self, call: int) -> None:
        """The user waits no longer."""
        for number in [n for n, outlining in self._open.items() if outlining.call == call]:
            del self._open[number]

    def _ask(self, outlining: Outlining) -> None:
        """Ask those that have not answered."""
        turn, routing, request = self._turn, self._routing, outlining.request
        route = routing.route(request.shard)
        assert route is not None, "who is asked has a place"
        message = Outline(
            routing.cluster, route.shard, route.view, outlining.number, request.start, request.stop
        )
        outlining.refused.clear()
        for server, name in enumerate(route.names):
            if server not in outlining.replies:
                turn.send(name, message)
        outlining.retry_at = turn.now + outlining.pause
        turn.wake_at(outlining.retry_at)

    # --- answers ---

    def on_reply(self, reply: Outlined) -> None:
        """Take a replica's answer."""
        outlining = self._open.get(reply.request)
        route = self._routing.route(reply.shard)
        if outlining is None or route is None or reply.shard != outlining.request.shard:
            return
        if reply.view != route.view or reply.server >= len(route.names):
            self._routing.refresh()
        elif _is_sound(reply):
            outlining.replies[reply.server] = reply
            outlining.done_at = min(outlining.done_at, self._turn.now + GRACE_NS)
            self._turn.wake_at(outlining.done_at)
            self._conclude(outlining, route)
        else:
            self._turn.counters.protocol_errors += 1

    def on_refused(self, refused: Refused) -> bool:
        """Take a refusal: the shard may have another view; False if it is of no question here."""
        outlining = self._open.get(refused.request)
        if outlining is None:
            return False
        self._routing.refresh()
        route = self._routing.route(refused.shard)
        if route is not None and refused.shard == outlining.request.shard:
            outlining.refused.add(refused.server)
            self._conclude(outlining, route)
        return True

    def _conclude(self, outlining: Outlining, route: Route) -> None:
        """Answer, if somebody has and nobody is waited for."""
        heard = outlining.replies.keys() | outlining.refused
        is_due = len(heard) >= len(route.names) or self._turn.now >= outlining.done_at
        if outlining.replies and is_due:
            self._finish(outlining, _outline(outlining, route))

    def _rerouted(self, shards: list[int]) -> None:
        """A shard's servers have other places, or another view: ask them anew."""
        for outlining in [o for o in self._open.values() if o.request.shard in shards]:
            outlining.replies.clear()
            outlining.done_at = NEVER
            outlining.retry_at = self._turn.now
            self._turn.wake_at(self._turn.now)

    def _finish(self, outlining: Outlining, result: ShardOutline | Exception) -> None:
        del self._open[outlining.number]
        self._turn.complete(outlining.call, result)

    # --- time ---

    def tick(self) -> None:
        """Ask again what is due; end what is late, or has waited long enough."""
        turn, routing = self._turn, self._routing
        for outlining in list(self._open.values()):
            request = outlining.request
            if outlining.replies and turn.now >= min(outlining.done_at, request.deadline):
                route = routing.route(request.shard)
                assert route is not None, "who answered has a place"
                self._finish(outlining, _outline(outlining, route))
                continue
            if turn.now >= request.deadline:
                where = routing.describe(request.shard)
                what = f"no server of {where} told in time what it holds of"
                error = DeadlineError(f"{what} [{request.start}, {request.stop})")
                self._finish(outlining, error)
                continue
            if turn.now >= outlining.retry_at:
                turn.counters.retries += 1
                outlining.pause = min(outlining.pause * 2, _LAST_PAUSE_NS)
                routing.refresh()
                self._ask(outlining)
            turn.wake_at(min(outlining.retry_at, outlining.done_at, request.deadline))

    def check(self) -> None:
        """Assert the invariant."""
        for number, outlining in self._open.items():
            assert outlining.number == number
            assert bool(outlining.replies) is (outlining.done_at != NEVER)
            due = min(outlining.retry_at, outlining.done_at, outlining.request.deadline)
            assert self._turn.alarm <= due, "a deadline would be missed"


def _outline(outlining: Outlining, route: Route) -> ShardOutline:
    replies = outlining.replies
    best = max(replies.values(), key=_reach)
    archives = [
        (_host(route.names[server].decode()), reply.archive_port)
        for server, reply in sorted(replies.items())
        if reply.archive_port
    ]
    trim = max(reply.trim for reply in replies.values())
    return ShardOutline(
        outlining.request.shard, trim, [(step.stop, step.size) for step in best.steps], archives
    )


def _reach(reply: Outlined) -> tuple[int, int]:
    return reply.steps[-1].stop if reply.steps else 0, len(reply.steps)


def _is_sound(reply: Outlined) -> bool:
    return all(before.stop < step.stop for before, step in pairwise(reply.steps))


def _host(endpoint: str) -> str:
    return endpoint.rpartition(":")[0].strip("[]")
