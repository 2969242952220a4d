"""Where the log ends, and which record is the last that no reader will see change.

    members asked --> replicas asked --all of one view answered--> (last stable asked) --> done

Rule: the shards that ever had positions come from the service's read barrier, and a shard's answer
counts when all its replicas gave it in one view, the known one or a later one (D50); every
completed insert is on all of them, so the highest filled position bounds all of them. A shard that
recovers is waited for, one that has left is asked like any other.
See docs/protocol.md, sections 7, 11 and 13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from ziplog.client.common.requests import NEVER
from ziplog.errors import DeadlineError
from ziplog.types import RID_GENESIS, RecordId
from ziplog.wire import LeaseQuery, Tail, TailReply

if TYPE_CHECKING:
    from ziplog.client.common.membership_client import Service
    from ziplog.client.common.routing import Route, Routing
    from ziplog.client.common.step_context import Turn
    from ziplog.core.view import Placement
    from ziplog.wire import LeaseHistory, Refused

_MS: Final = 1_000_000
#: A silent replica is asked again after so long, doubling up to the last.
_PATIENCE_NS: Final = 50 * _MS
_LAST_PAUSE_NS: Final = 500 * _MS


class Tails(msgspec.Struct, frozen=True, gc=False):
    """Where the log ends."""

    #: The last record; RID_GENESIS if there is none.
    last: RecordId
    #: The last stable record below every shard's frontier; None if it was not asked for.
    recent: RecordId | None


class Survey(msgspec.Struct):
    """One question to all shards."""

    deadline: int
    with_recent: bool
    then: Callable[[Tails | DeadlineError], None]
    #: Number of the present round: every round has its own.
    number: int = 0
    #: Number of the question to the service; 0 once it is answered.
    question: int = 0
    #: Below which position the last stable record is asked for; 0 in the first round.
    below: int = 0
    last: RecordId = RID_GENESIS
    #: The shards asked, and each one's replies by server.
    replies: dict[int, dict[int, TailReply]] = msgspec.field(default_factory=dict)
    retry_at: int = NEVER
    pause: int = _PATIENCE_NS


class Surveys:
    """All questions about the tail."""

    def __init__(self, turn: Turn, service: Service, routing: Routing) -> None:
        self._turn: Final = turn
        self._service: Final = service
        self._routing: Final = routing
        self._surveys: dict[int, Survey] = {}
        routing.on_change.append(self._rerouted)

    @property
    def waiting(self) -> bool:
        """Whether a question is open."""
        return bool(self._surveys)

    def awaited(self) -> list[str]:
        """Return the shards that have not told for a while where they end, each with its state."""
        shards: set[int] = set()
        for survey in self._surveys.values():
            if survey.pause > _PATIENCE_NS:
                shards.update(self._open(survey))
        states = {shard: self._routing.state(shard) for shard in sorted(shards)}
        return [
            f"shard {shard} ({'silent' if state == 'live' else state})"
            for shard, state in states.items()
        ]

    def _open(self, survey: Survey) -> list[int]:
        """Return the shards that have not answered."""
        routes = {shard: self._routing.route(shard) for shard in survey.replies}
        return [
            shard
            for shard, replies in survey.replies.items()
            if (route := routes[shard]) is not None and missing(replies, route)
        ]

    def start(
        self, deadline: int, then: Callable[[Tails | DeadlineError], None], *, with_recent: bool
    ) -> Survey:
        """Ask, and give `then` the answer."""
        survey = Survey(deadline, with_recent, then)
        self._turn.wake_at(deadline)
        self._ask_members(survey)
        return survey

    def cancel(self, survey: Survey) -> None:
        """Stop asking."""
        self._surveys.pop(survey.number, None)
        self._service.forget(survey.question)

    def _begin_round(self, survey: Survey) -> None:
        self._surveys.pop(survey.number, None)
        survey.number = self._turn.request()
        self._surveys[survey.number] = survey
        survey.retry_at = NEVER

    def _ask_members(self, survey: Survey) -> None:
        self._begin_round(survey)
        lease = self._routing.lease
        gsn = lease.base if lease is not None else 1

        def answered(history: LeaseHistory) -> None:
            survey.question = 0
            self._routing.learn(history.placements)
            survey.replies = {p.shard: {} for p in history.placements if _was_member(p)}
            self._ask(survey)
            self._conclude(survey)

        survey.question = self._service.ask(
            lambda cluster, request: LeaseQuery(cluster, request, gsn), answered
        )

    def _ask(self, survey: Survey) -> None:
        """Ask the replicas whose answers are missing."""
        turn, routing = self._turn, self._routing
        for shard, replies in survey.replies.items():
            route = routing.route(shard)
            assert route is not None, "a member without a placement"
            message = Tail(routing.cluster, shard, route.view, survey.number, survey.below)
            for server in missing(replies, route):
                turn.send(route.names[server], message)
        survey.retry_at = turn.now + survey.pause
        turn.wake_at(survey.retry_at)

    # --- answers ---

    def on_reply(self, reply: TailReply) -> None:
        """Take a replica's answer."""
        survey = self._surveys.get(reply.request)
        route = self._routing.route(reply.shard)
        if survey is None or route is None or reply.shard not in survey.replies:
            return
        if reply.view >= route.view:
            survey.replies[reply.shard][reply.server] = reply
            self._conclude(survey)
        if reply.view > route.view:
            self._routing.refresh()

    def on_refused(self, refused: Refused) -> bool:
        """Take a refusal: the shard may have another view; False if it is of no survey."""
        if refused.request not in self._surveys:
            return False
        self._routing.refresh()
        return True

    def _rerouted(self, _shards: list[int]) -> None:
        """Shards have another view or state: what is missing is asked for at once."""
        for survey in self._surveys.values():
            if survey.retry_at != NEVER:
                survey.pause = _PATIENCE_NS
                survey.retry_at = self._turn.now
                self._turn.wake_at(self._turn.now)

    def _missing(self, survey: Survey) -> list[str]:
        """Return which replicas have not answered in their shard's newest view."""
        silent: list[str] = []
        for shard, replies in survey.replies.items():
            route = self._routing.route(shard)
            assert route is not None, "a member without a placement"
            state = "" if route.state == "live" else f", {route.state}"
            silent += [
                f"{route.names[server].decode()} (shard {shard}{state})"
                for server in missing(replies, route)
            ]
        return silent

    def _conclude(self, survey: Survey) -> None:
        """If all answers are here, answer, or ask for the last stable record below them."""
        if self._missing(survey):
            return
        if survey.below:
            self._finish(survey, Tails(survey.last, self._recent(survey)))
            return
        # Of a shard, too, the highest counts: a server may not be able to read its last record.
        highest = [
            (max(reply.filled for reply in replies.values()), shard)
            for shard, replies in survey.replies.items()
        ]
        filled, shard = max(highest, default=(0, 0))
        survey.last = RecordId(filled, shard) if filled else RID_GENESIS
        if not survey.with_recent or not survey.replies:
            self._finish(survey, Tails(survey.last, RID_GENESIS if survey.with_recent else None))
            return
        survey.below = min(
            max(reply.frontier for reply in replies.values()) for replies in survey.replies.values()
        )
        survey.replies = {shard: {} for shard in survey.replies}
        self._begin_round(survey)
        self._ask(survey)

    def _recent(self, survey: Survey) -> RecordId:
        highest, shard = max(
            (max(reply.last_below for reply in replies.values()), shard)
            for shard, replies in survey.replies.items()
        )
        return RecordId(highest, shard) if highest else RID_GENESIS

    def _finish(self, survey: Survey, result: Tails | DeadlineError) -> None:
        self.cancel(survey)
        survey.then(result)

    # --- time ---

    def tick(self) -> None:
        """Ask again what is due; end what is late."""
        turn = self._turn
        for survey in list(self._surveys.values()):
            if turn.now >= survey.deadline:
                who = ", ".join(self._missing(survey)) or "the membership service"
                what = f"{who} of {self._routing} did not tell where the log ends"
                self._finish(survey, DeadlineError(f"{what} before the deadline"))
                continue
            if turn.now >= survey.retry_at:
                turn.counters.retries += 1
                survey.pause = min(survey.pause * 2, _LAST_PAUSE_NS)
                self._routing.refresh()
                self._ask(survey)
            turn.wake_at(min(survey.retry_at, survey.deadline))

    def check(self) -> None:
        """Assert the invariant."""
        for number, survey in self._surveys.items():
            assert survey.number == number
            assert self._turn.alarm <= min(survey.retry_at, survey.deadline)


def _was_member(placement: Placement) -> bool:
    """Whether a shard ever had positions; if not, its servers may never have been there.

    With the first lease that has it in, its servers' data directories are known.
    """
    if placement.state in {"finalized", "recovering"}:
        return any(replica.fingerprint for replica in placement.replicas)
    return placement.state != "joining"


def missing(replies: Mapping[int, TailReply], route: Route) -> list[int]:
    """Return the replicas that have not answered in the newest view that is known of the shard."""
    view = max((reply.view for reply in replies.values()), default=0)
    view = max(view, route.view)
    return [s for s in range(len(route.names)) if s not in replies or replies[s].view != view]
