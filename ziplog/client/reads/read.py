"""Reading one position.

    asked the primary --silent--> asked the others --silent--> asked all replicas, ever less often
                      --unstable, damaged, refused--> asked all replicas
    asked all --all of one view say the same--> done;  --they differ--> asked all again

Rules: a stable answer counts from any replica; an unstable one only if all replicas of one view,
the primary among them, say the same (D42). That a position is not decided yet is the primary's to
say; but it may be the last to learn that its shard has gone on without it, so that counts once all
replicas have answered in its view. Who cannot tell yet, as the shard recovers, is asked again until
the deadline. Invariant: the replies kept are of one view. See docs/protocol.md, sections 6 and 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core.node import Broadcast
from ziplog.errors import DeadlineError, NoSuchRecordError, TrimmedError, UnavailableError
from ziplog.types import Record, RecordId
from ziplog.wire import Read, ReadReply

if TYPE_CHECKING:
    from ziplog.client.common.requests import ReadRequest
    from ziplog.client.common.routing import Route, Routing
    from ziplog.client.common.step_context import Turn
    from ziplog.wire import Refused

_MS: Final = 1_000_000
#: A silent replica is given so long, then twice that, up to the last: it may have been asked more
#: than it can answer in that time, and it will answer every repetition, too.
_PATIENCE_NS: Final = 50 * _MS
_LAST_PATIENCE_NS: Final = 800 * _MS
#: Replicas that differ are asked again after so long, doubling up to `_PATIENCE_NS`, or, while
#: their shard is away, up to the last.
_FIRST_PAUSE_NS: Final = 2 * _MS
_LAST_PAUSE_NS: Final = 500 * _MS


class Reading:
    """One read under way."""

    __slots__ = (
        "asks_all", "call", "damaged", "patience", "pause", "replies", "request", "retry_at",
        "view",
    )  # fmt: skip

    def __init__(self, call: int, request: ReadRequest) -> None:
        self.call: Final = call
        self.request: Final = request
        self.asks_all = False
        #: The newest reply of each replica, all of `view`.
        self.replies: dict[int, ReadReply] = {}
        self.view = 0
        #: Replicas that cannot read their own copy.
        self.damaged: set[int] = set()
        self.pause = _FIRST_PAUSE_NS
        self.patience = _PATIENCE_NS
        self.retry_at = 0


class Reads:
    """All reads of a client."""

    def __init__(self, turn: Turn, routing: Routing) -> None:
        self._turn: Final = turn
        self._routing: Final = routing
        self._readings: dict[int, Reading] = {}
        self._requests: dict[int, int] = {}
        routing.on_change.append(self._rerouted)

    @property
    def waiting(self) -> bool:
        """Whether a read is under way."""
        return bool(self._readings)

    def start(self, call: int, request: ReadRequest) -> None:
        """Take a call."""
        turn, rid = self._turn, request.rid
        if rid.gsn < 1:
            turn.complete(call, NoSuchRecordError(rid, "it is before every record"))
            return
        number = turn.request()
        reading = self._readings[number] = Reading(call, request)
        self._requests[call] = number
        turn.wake_at(request.deadline)
        if self._routing.route(rid.shard) is None:
            self._routing.refresh(lambda: self._ask_known(number))
        else:
            self._ask(number, reading)

    def cancel(self, call: int) -> None:
        """The user waits no longer."""
        self._readings.pop(self._requests.pop(call, 0), None)

    def _ask_known(self, number: int) -> None:
        reading = self._readings.get(number)
        if reading is not None and not reading.retry_at:
            if self._routing.route(reading.request.rid.shard) is None:
                shards = self._routing.shards
                self._fail_missing(number, reading, f"there is no such shard, only {shards}")
            else:
                self._ask(number, reading)

    def _ask(self, number: int, reading: Reading, *, is_primary_silent: bool = False) -> None:
        """Ask the primary first, the others if it is silent, everyone if that was not enough."""
        turn, routing, rid = self._turn, self._routing, reading.request.rid
        route = routing.route(rid.shard)
        assert route is not None, "a reading of an unknown shard"
        message = Read(routing.cluster, rid.shard, route.view, number, rid.gsn)
        if reading.asks_all:
            others = route.names[1:] if is_primary_silent else ()
            turn.effects.append(Broadcast(others or route.names, message))
        else:
            turn.send(route.names[0], message)
        reading.retry_at = turn.now + max(reading.pause, reading.patience)
        reading.patience = min(reading.patience * 2, _LAST_PATIENCE_NS)
        turn.wake_at(reading.retry_at)

    def _grow(self, reading: Reading, route: Route) -> None:
        """Make the next pause longer."""
        longest = _LAST_PAUSE_NS if route.is_away else _PATIENCE_NS
        reading.pause = min(reading.pause * 2, longest)

    def _rerouted(self, shards: list[int]) -> None:
        """The shards have another view or state: who waits for them asks again at once."""
        for reading in self._readings.values():
            if reading.request.rid.shard in shards and reading.retry_at:
                reading.asks_all = True
                reading.pause, reading.patience = _FIRST_PAUSE_NS, _PATIENCE_NS
                reading.retry_at = self._turn.now
                self._turn.wake_at(self._turn.now)

    # --- answers ---

    def on_reply(self, reply: ReadReply) -> None:
        """Take a replica's answer."""
        reading = self._readings.get(reply.request)
        route = self._routing.route(reply.shard)
        if reading is None or route is None or reply.gsn != reading.request.rid.gsn:
            return
        reading.patience = _PATIENCE_NS
        match reply.answer:
            case "record" if reply.stable:
                self._finish(reply.request, reading, _record(reading.request.rid, reply))
            case "no-op":
                self._fail_missing(reply.request, reading, "the position is a no-op")
            case "wrong-shard":
                what = f"shard {reply.shard} does not own the position"
                self._fail_missing(reply.request, reading, what)
            case "trimmed":
                self._find_first(reply.request, reply.first)
            case "unknown" if reply.stable:
                self._note_damage(reply, reading, route)
            case _:
                self._compare(reply, reading, route)

    def _compare(self, reply: ReadReply, reading: Reading, route: Route) -> None:
        """Take an answer that counts only if all others are equal."""
        if reply.view != reading.view:
            if reply.view < reading.view:
                return
            reading.replies.clear()
            reading.view = reply.view
        if reply.view > route.view:
            self._routing.refresh()
        reading.replies[reply.server] = reply
        if not reading.asks_all:
            reading.asks_all = True
            self._ask(reply.request, reading)
            return
        if len(reading.replies) < len(route.names) or reply.view != route.view:
            return
        replies = list(reading.replies.values())
        record = _record(reading.request.rid, reply)
        if all(r.answer == "record" and _record(reading.request.rid, r) == record for r in replies):
            self._finish(reply.request, reading, record)
            return
        is_in_view = all(r.answer in {"record", "not-yet"} for r in replies)
        if is_in_view and reading.replies[0].answer == "not-yet" and not route.is_away:
            self._fail_missing(reply.request, reading, "nothing was inserted there yet")
            return
        reading.replies.clear()
        reading.retry_at = self._turn.now + reading.pause
        self._grow(reading, route)
        self._turn.wake_at(reading.retry_at)

    def _note_damage(self, reply: ReadReply, reading: Reading, route: Route) -> None:
        """A replica cannot tell: another one may; if none can, nobody will."""
        reading.damaged.add(reply.server)
        if len(reading.damaged) >= len(route.names):
            what = f"no replica of shard {reply.shard} of {self._routing} can tell what is at"
            self._finish(
                reply.request, reading,
                UnavailableError(f"{what} {reading.request.rid}: lost, or not recovered yet"),
            )  # fmt: skip
        elif not reading.asks_all:
            reading.asks_all = True
            self._ask(reply.request, reading)

    def on_refused(self, refused: Refused) -> bool:
        """Take a refusal: ask everyone, soon; False if it is of no read."""
        reading = self._readings.get(refused.request)
        if reading is None:
            return False
        self._turn.counters.redirects += refused.code == "redirect"
        self._routing.refresh()
        reading.asks_all = True
        reading.patience = _PATIENCE_NS
        reading.retry_at = min(reading.retry_at, self._turn.now + reading.pause)
        reading.pause = min(reading.pause * 2, _PATIENCE_NS)
        self._turn.wake_at(reading.retry_at)
        return True

    def _find_first(self, number: int, first: int) -> None:
        def found(shard: int) -> None:
            reading = self._readings.get(number)
            if reading is not None:
                self._finish(number, reading, TrimmedError(RecordId(first, shard)))

        self._routing.find_owner(first, found)

    def _fail_missing(self, number: int, reading: Reading, reason: str) -> None:
        self._finish(number, reading, NoSuchRecordError(reading.request.rid, reason))

    def _finish(self, number: int, reading: Reading, result: Record | Exception) -> None:
        del self._readings[number], self._requests[reading.call]
        self._turn.counters.reads += not isinstance(result, Exception)
        self._turn.complete(reading.call, result)

    # --- time ---

    def tick(self) -> None:
        """Ask again what is due; end what is late."""
        turn = self._turn
        for number, reading in list(self._readings.items()):
            rid, deadline = reading.request.rid, reading.request.deadline
            if turn.now >= deadline:
                answers = dict.fromkeys(reading.damaged, "unknown")
                answers |= {reply.server: reply.answer for reply in reading.replies.values()}
                heard = ", ".join(f"{server}: {answer}" for server, answer in answers.items())
                what = f"{self._routing.describe(rid.shard)} did not tell what is at {rid}"
                what += f" (replicas said: {heard or 'nothing'})"
                self._finish(number, reading, DeadlineError(f"{what} before the deadline"))
                continue
            turn.wake_at(deadline)
            if reading.retry_at:
                if turn.now >= reading.retry_at:
                    is_first, reading.asks_all = not reading.asks_all, True
                    turn.counters.retries += 1
                    route = self._routing.route(rid.shard)
                    assert route is not None, "a reading of an unknown shard"
                    self._grow(reading, route)
                    self._ask(number, reading, is_primary_silent=is_first)
                turn.wake_at(reading.retry_at)

    def check(self) -> None:
        """Assert the invariant."""
        for number, reading in self._readings.items():
            assert self._requests[reading.call] == number
            assert all(reply.view == reading.view for reply in reading.replies.values())
            assert self._turn.alarm <= reading.request.deadline, "a deadline would be missed"


def _record(rid: RecordId, reply: ReadReply) -> Record:
    return Record(rid, reply.payload, reply.key, reply.timestamp_us, reply.epoch)
