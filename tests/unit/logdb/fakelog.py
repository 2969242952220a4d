"""A log in memory that answers `ziplog.client.common.requests` like a client's core.

`FakeLog` is the log itself: shards whose positions interleave with holes, one sealed frontier and
one trim point. Like the real one it does not respect real time: an insert takes any free position
above what it names and above all that a subscription has passed. `FakeCore` is one client of it,
and stands where a `ClientCore` does: inside `ziplog.client.log_tasks.LogTasks`, or stepped by hand.

    log = FakeLog(seed=1, shards=3)
    log.insert(b"payload")                           # another client's record
    calls = LogTasks(log.core(), now=0)              # results come immediately
    calls = LogTasks(log.core(at_once=False), now=0) # some open results with each `Wakeup`
    log.faults.append(fail_inserts(OUTCOME_UNKNOWN_IN))
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any, Final

import msgspec

from ziplog.client.common.requests import (
    BarrierRequest,
    ConnectRequest,
    Counters,
    Fetched,
    FetchRequest,
    InsertRequest,
    Policy,
    Progress,
    ProgressRequest,
    ReadRequest,
    Request,
    StatusRequest,
    SubscribeRequest,
    SyncRequest,
    TailRequest,
    TrimRequest,
    UnsubscribeRequest,
)
from ziplog.client.common.unknown_outcome import ResolveRequest
from ziplog.core.node import Call, Cancelled, Complete, Effect, Event, Wakeup
from ziplog.errors import (
    ClosedError,
    DeadlineError,
    NoSuchRecordError,
    OutcomeUnknownError,
    RecordTooLargeError,
    TrimmedError,
    UnavailableError,
    ZiplogError,
)
from ziplog.types import RID_GENESIS, Record, RecordId
from ziplog.wire import Limits

#: Faults: nothing was done; it is not known, and the records are in the log, or are not; no answer
#: ever comes, whether it was done or not.
UNAVAILABLE: Final = "unavailable"
OUTCOME_UNKNOWN_IN: Final = "outcome unknown, in"
OUTCOME_UNKNOWN_OUT: Final = "outcome unknown, out"
SILENT_IN: Final = "silent, in"
SILENT_OUT: Final = "silent, out"

#: Says what is to happen to a request; None: nothing in particular.
Fault = Callable[[Request], str | None]

_POSITIONS_OF_AN_EPOCH: Final = 1 << 12


def fail(kind: type[Request], fault: str, times: int = 1, after: int = 0) -> Fault:
    """Return a fault that befalls requests of a kind: so often, after so many went well."""
    seen = 0

    def chooses(request: Request) -> str | None:
        nonlocal seen
        if not isinstance(request, kind):
            return None
        seen += 1
        return fault if after < seen <= after + times else None

    return chooses


def fail_inserts(fault: str, times: int = 1, after: int = 0) -> Fault:
    """Return a fault of inserts."""
    return fail(InsertRequest, fault, times, after)


class FakeDoubt(msgspec.Struct):
    """What became of an insert that ended in doubt."""

    rids: list[RecordId | None]


class FakeLog:
    """The log, as all its clients see it."""

    def __init__(self, *, seed: int = 0, shards: int = 3, holes: int = 4, step: int = 1) -> None:
        """Make an empty log.

        Args:
            seed: of the random choices.
            shards: their number.
            holes: maximum positions left out before a record.
            step: distance between two positions; large ones resemble a log's epochs.

        """
        self.random: Final = random.Random(seed)
        self.shards: Final = shards
        self.holes: Final = holes
        self.step: Final = step
        self.records: Final[dict[int, Record]] = {}
        #: Their gsns, in order.
        self.gsns: Final[list[int]] = []
        #: Gsns that were ever assigned; none is assigned again, whatever became of its record.
        self._given: Final[set[int]] = set()
        #: What is below it was trimmed.
        self.first = 1
        #: Nothing is inserted at or below it any more.
        self.sealed = 0
        #: Gsns that no server can read.
        self.lost: Final[set[int]] = set()
        #: Everything is unavailable while it is set.
        self.is_down = False
        self.faults: Final[list[Fault]] = []
        self.limits = Limits()
        #: Payload bytes that were ever inserted; records ever read one by one.
        self.inserted_bytes = 0
        self.reads = 0
        #: Gsns that were durable when asked last (`SyncRequest`).
        self.synced = 0

    def core(self, *, at_once: bool = True) -> FakeCore:
        """Return a new client of the log."""
        return FakeCore(self, at_once=at_once)

    def insert(
        self,
        *payloads: bytes,
        after: RecordId = RID_GENESIS,
        shard: int | None = None,
        key: bytes | None = None,
        timestamp_us: int = 0,
    ) -> list[RecordId]:
        """Put records at free positions of one shard, in order."""
        shard = self.random.randrange(self.shards) if shard is None else shard
        # Somewhere above; mostly not far below the last one, as on servers that share epochs.
        tail = self.gsns[-1] if self.gsns else 0
        low = max(
            after.gsn, self.sealed, tail - self.random.randint(0, 3 * self.step * self.shards)
        )
        rids = []
        for payload in payloads:
            gsn = self._free(low, shard)
            rids.append(RecordId(gsn, shard))
            epoch = gsn // _POSITIONS_OF_AN_EPOCH
            self.records[gsn] = Record(rids[-1], payload, key, timestamp_us, epoch)
            insort(self.gsns, gsn)
            self.inserted_bytes += len(payload)
            low = gsn
        return rids

    def _free(self, low: int, shard: int) -> int:
        """Return a free position of a shard: they take turns, `step` apart."""
        turn = low // self.step + 1 + self.random.randint(0, self.holes) * self.shards
        turn += (shard - turn) % self.shards
        while turn * self.step in self._given:
            turn += self.shards
        self._given.add(turn * self.step)
        return turn * self.step

    def forget(self, gsn: int) -> None:
        """Make a no-op of a position, as a shard does that lost its memory."""
        if self.records.pop(gsn, None) is not None:
            self.gsns.remove(gsn)

    def trim(self, gsn: int) -> None:
        """Delete what is before a gsn."""
        if gsn > self.first:
            self.first = gsn
            at = bisect_left(self.gsns, gsn)
            for trimmed in self.gsns[:at]:
                del self.records[trimmed]
            del self.gsns[:at]
            self.sealed = max(self.sealed, gsn - 1)

    @property
    def tail(self) -> RecordId:
        """The last record's rid."""
        return self.records[self.gsns[-1]].rid if self.gsns else RID_GENESIS

    @property
    def bytes(self) -> int:
        """How many bytes of payloads are in the log now."""
        return sum(len(record.payload) for record in self.records.values())

    def owner(self, gsn: int) -> RecordId:
        """Return the rid of a position."""
        return RecordId(gsn, gsn // self.step % self.shards)

    def read(self, rid: RecordId) -> Record | ZiplogError:
        """Return what is at a position."""
        self.reads += 1
        if rid.gsn < 1:
            return NoSuchRecordError(rid, "it is before every record")
        if rid.gsn < self.first:
            return TrimmedError(self.owner(self.first))
        if rid.gsn in self.lost:
            return UnavailableError(f"no replica can read {rid}")
        record = self.records.get(rid.gsn)
        if record is None or record.rid != rid:
            return NoSuchRecordError(rid, "the position is a no-op")
        return record

    def between(self, start: int, stop: int, count: int) -> list[Record]:
        """Return up to `count` records of [start, stop) that can be read."""
        at = bisect_left(self.gsns, start)
        found: list[Record] = []
        while at < len(self.gsns) and self.gsns[at] < stop and len(found) < count:
            if self.gsns[at] not in self.lost:
                found.append(self.records[self.gsns[at]])
            at += 1
        return found

    def fault(self, request: Request) -> str | None:
        """Return what is to happen to a request."""
        if self.is_down:
            return UNAVAILABLE
        return next((found for fault in self.faults if (found := fault(request))), None)


class Subscription(msgspec.Struct):
    """A reader of the log; `position` and what follows is still to come."""

    position: int
    #: It ends after this gsn; None: it follows.
    last: int | None


class FakeCore:
    """One client of a `FakeLog`: events in, effects out, like a `ClientCore`."""

    def __init__(self, log: FakeLog, *, at_once: bool) -> None:
        self.log: Final = log
        self.at_once: Final = at_once
        self.now = 0
        #: Calls that were not answered yet, in order.
        self.pending: dict[int, Request] = {}
        self.counters = Counters()
        #: All requests ever made.
        self.requests: Final[list[Request]] = []
        #: The last record that it inserted.
        self.last_rid = RID_GENESIS
        self.subscriptions: Final[dict[int, Subscription]] = {}
        self.description = "fake log"
        #: Shards reported as awaited.
        self.waiting_for: list[str] = []
        self.policy: Policy | None = None
        self._silent: Final[set[int]] = set()
        #: Fetches of subscriptions that were ended while they waited.
        self._ended: Final[set[int]] = set()
        self._answer: Final[dict[type[Request], Callable[[int, Any], Any]]] = {
            ConnectRequest: lambda _call, _request: log.limits,
            InsertRequest: self._insert,
            ResolveRequest: self._resolve,
            SyncRequest: self._sync,
            ReadRequest: lambda _call, request: log.read(request.rid),
            TailRequest: lambda _call, _request: log.tail,
            BarrierRequest: self._barrier,
            TrimRequest: self._trim,
            StatusRequest: lambda _call, _request: b"{}",
            SubscribeRequest: self._subscribe,
            FetchRequest: self._fetch,
            ProgressRequest: self._progress,
            UnsubscribeRequest: self._unsubscribe,
        }

    def _barrier(self, _call: int, request: BarrierRequest) -> RecordId | ClosedError:
        is_open = request.subscription in self.subscriptions
        return RecordId(self.log.tail.gsn + 1, 0) if is_open else ClosedError("this subscription")

    @property
    def limits(self) -> Limits:
        """What the cluster allows."""
        return self.log.limits

    def backlog(self, subscription: int) -> tuple[int, int]:
        """Return what is in the log and was not fetched by a subscription."""
        sub = self.subscriptions.get(subscription)
        if sub is None:
            return 0, 0
        return sub.position, max(self.log.tail.gsn + 1, sub.position)

    def set_policy(self, policy: Policy) -> None:
        """Choose the shards of later inserts by `policy`."""
        self.policy = policy

    def step_call(self, number: int, request: Request, now: int) -> list[Effect]:
        """Take a call."""
        return self.step(Call(number, request), now)

    def step(self, event: Event, now: int) -> list[Effect]:
        """Take one event."""
        self.now = max(now, self.now)
        if isinstance(event, Call):
            self.pending[event.id] = event.request
            self.requests.append(event.request)
            return self._settle([event.id]) if self.at_once else []
        if isinstance(event, Cancelled):
            self.pending.pop(event.id, None)
            self._silent.discard(event.id)
            return []
        calls = list(self.pending)
        if not self.at_once and isinstance(event, Wakeup) and calls:
            # Answers come in any order, and not all of them together.
            calls = self.log.random.sample(calls, self.log.random.randint(1, len(calls)))
        return self._settle(calls)

    def next_wakeup(self) -> int | None:
        """Return when a step may have answers."""
        if any(self._is_due(call) for call in self.pending if call not in self._silent):
            return self.now
        return min((request.deadline for request in self.pending.values()), default=None)

    def check(self) -> None:
        """Assert that nothing is answered that was not asked."""
        assert self._silent <= self.pending.keys()

    def _is_due(self, call: int) -> bool:
        request = self.pending[call]
        if not isinstance(request, FetchRequest):
            return True
        sub = self.subscriptions.get(request.subscription)
        return sub is None or self._has_news(sub)

    def _has_news(self, sub: Subscription) -> bool:
        if sub.position < self.log.first or (sub.last is not None and sub.position > sub.last):
            return True
        stop = 2**63 if sub.last is None else sub.last + 1
        return bool(self.log.between(sub.position, stop, 1))

    def _settle(self, calls: list[int]) -> list[Effect]:
        effects: list[Effect] = []
        for call in calls:
            request = self.pending.get(call)
            if request is None:
                continue
            result = self._try(call, request)
            if result is not _WAITS:
                del self.pending[call]
                self._silent.discard(call)
                effects.append(Complete(call, result))
        return effects

    def _try(self, call: int, request: Request) -> Any:
        if call not in self._silent:
            match self.log.fault(request):
                case "unavailable":
                    return UnavailableError("the log is away; nothing was done")
                case "outcome unknown, in":
                    return self._in_doubt(request, is_in=True)
                case "outcome unknown, out":
                    return self._in_doubt(request, is_in=False)
                case "silent, in":
                    self._answer[type(request)](call, request)
                    self._silent.add(call)
                case "silent, out":
                    self._silent.add(call)
                case None:
                    return self._last_reply(call, request)
        if self.now < request.deadline:
            return _WAITS
        if isinstance(request, InsertRequest):
            return OutcomeUnknownError("the deadline passed", shard=0, seq=1, doubt=FakeDoubt([]))
        return DeadlineError("the deadline passed")

    def _last_reply(self, call: int, request: Request) -> Any:
        result = self._answer[type(request)](call, request)
        if isinstance(request, FetchRequest) and result is None:
            return Fetched([], ended=False) if self.now >= request.deadline else _WAITS
        return result

    # --- requests ---

    def _insert(self, _call: int, request: InsertRequest) -> list[RecordId] | ZiplogError:
        limit = self.log.limits.max_payload_bytes
        for payload in request.payloads:
            if len(payload) > limit:
                return RecordTooLargeError(len(payload), limit)
        shard = None
        if self.policy is not None:
            live = list(range(self.log.shards))
            shard = self.policy(request.payloads[0], request.key, live)
        rids = self.log.insert(
            *request.payloads, after=request.after, shard=shard, key=request.key,
            timestamp_us=request.timestamp_us,
        )  # fmt: skip
        self.counters.inserts += len(rids)
        self.last_rid = max(self.last_rid, *rids)
        return rids

    def _in_doubt(self, request: Request, *, is_in: bool) -> ZiplogError:
        assert isinstance(request, InsertRequest), "only inserts can end in doubt"
        rids: list[RecordId | None] = [None] * len(request.payloads)
        if is_in:
            inserted = self._insert(0, request)
            assert isinstance(inserted, list), inserted
            rids = list(inserted)
        return OutcomeUnknownError(
            "the deadline passed; it may have happened", shard=0, seq=1, doubt=FakeDoubt(rids)
        )

    def _resolve(self, _call: int, request: ResolveRequest) -> list[RecordId | None]:
        doubt: Any = request.outcome
        assert isinstance(doubt, FakeDoubt)
        return doubt.rids

    def _sync(self, _call: int, request: SyncRequest) -> RecordId:
        gsns = [rid.gsn for rid in (self.last_rid, *request.others)]
        self.log.synced = max(self.log.synced, *gsns)
        return self.last_rid

    def _trim(self, _call: int, request: TrimRequest) -> None:
        self.log.trim(request.rid.gsn)

    def _subscribe(self, call: int, request: SubscribeRequest) -> int | ZiplogError:
        start = max(request.start.gsn, 1)
        if request.start.gsn < 0:
            start = max(self.log.tail.gsn, 1)
        if start < self.log.first:
            return TrimmedError(self.log.owner(self.log.first))
        last = None if request.follow else self.log.tail.gsn
        self.subscriptions[call] = Subscription(start, last)
        return call

    def _fetch(self, call: int, request: FetchRequest) -> Fetched | ZiplogError | None:
        if call in self._ended:
            self._ended.discard(call)
            return Fetched([], ended=True)
        sub = self.subscriptions.get(request.subscription)
        if sub is None:
            return ClosedError("this subscription")
        if sub.position < self.log.first:
            return TrimmedError(self.log.owner(self.log.first))
        stop = 2**63 if sub.last is None else sub.last + 1
        found = self.log.between(sub.position, stop, request.max_records)
        if found:
            sub.position = found[-1].rid.gsn + 1
            self.log.sealed = max(self.log.sealed, found[-1].rid.gsn)
            self.counters.delivered += len(found)
            return Fetched(found, ended=False)
        if sub.last is not None:
            sub.position = max(sub.position, sub.last + 1)
            self.log.sealed = max(self.log.sealed, sub.last)
            return Fetched([], ended=True)
        return None

    def _progress(self, _call: int, request: ProgressRequest) -> Progress | ZiplogError:
        sub = self.subscriptions.get(request.subscription)
        if sub is None:
            return ClosedError("this subscription")
        # What is below the tail is stable here: an idle reader passes the positions up to it.
        has_news = self._has_news(sub)
        if not has_news:
            sub.position = max(sub.position, self.log.tail.gsn + 1)
            self.log.sealed = max(self.log.sealed, sub.position - 1)
        return Progress(self.log.owner(sub.position), not has_news, None)

    def _unsubscribe(self, _call: int, request: UnsubscribeRequest) -> None:
        self.subscriptions.pop(request.subscription, None)
        self._ended.update(
            call
            for call, pending in self.pending.items()
            if isinstance(pending, FetchRequest) and pending.subscription == request.subscription
        )


class _Waits:
    """The answer is still to come."""


_WAITS: Final = _Waits()
