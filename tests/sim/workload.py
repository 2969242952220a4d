"""What clients do in a run: writers that insert, chain, read, trim; readers that follow the log.

Every call is recorded before it is made and when it returns. A client that is killed begins anew
as another one; what it had under way never returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

from tests.sim.programs import ClientProgram
from tests.simulator.kernel import MS, US, S
from ziplog.client.common.requests import (
    ConnectRequest,
    FetchRequest,
    InsertRequest,
    ReadRequest,
    SubscribeRequest,
    SyncRequest,
    TailRequest,
    TrimRequest,
    UnsubscribeRequest,
)
from ziplog.client.common.unknown_outcome import ResolveRequest
from ziplog.errors import OutcomeUnknownError, TrimmedError
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.cluster import SimCluster
    from tests.sim.history import History
    from tests.sim.plan import Plan
    from tests.simulator.process import Process
    from ziplog.client.common.requests import Fetched, Request

_CONNECT_NS: Final = 120 * S
#: What a reader asks for at once.
_FETCH_NS: Final = 1 * S
_FETCH_RECORDS: Final = 100
#: Of the known records, those that a chain goes on from and a recent reader begins with.
_RECENT: Final = 20
#: How likely a client that naps does so between two calls.
_NAP: Final = 0.1
#: How likely a reader waits before it fetches again, and for how long at most.
_DAWDLE: Final = 0.1
_DAWDLE_NS: Final = 700 * MS
#: Of so many records that are inserted together, all have one key, or each its own.
_OF_ONE_KEY: Final = 2
_OF_MANY_KEYS: Final = 3


class Shared:
    """What the clients of a run tell each other, beside the log."""

    def __init__(self, cluster: SimCluster, history: History) -> None:
        self.cluster: Final = cluster
        self.history: Final = history
        #: Records that somebody was told of, in that order.
        self.known: Final[list[RecordId]] = [RID_GENESIS]
        self.payloads = 0
        #: No new calls any more; readers go on.
        self.is_over = False

    def payload(self) -> bytes:
        """Return bytes that nobody inserted before."""
        self.payloads += 1
        return b"record %d" % self.payloads


class Client(ABC):
    """A client's process, and its life after life."""

    def __init__(self, shared: Shared, name: str) -> None:
        self.shared: Final = shared
        self.process: Final = self.make_process(name)
        self.random: Final = shared.cluster.kernel.random

    @property
    def name(self) -> str:
        """The name of this life in the history."""
        return f"{self.process.name}.{self.process.starts}"

    def make_process(self, name: str) -> Process:
        """Return where it lives."""
        return self.shared.cluster.client(name)

    def connecting(self) -> Request:
        """Return the first call of a life."""
        return ConnectRequest(self.deadline(_CONNECT_NS))

    def start(self) -> None:
        """Start the process, connect, and go on from there."""
        self.process.start()
        self.program().call(self.connecting(), lambda _limits: self.begin())

    def kill(self) -> None:
        """Kill the process, and start another one soon."""
        self.process.kill()
        self.shared.cluster.kernel.after(100 * MS, self.start)

    def begin(self) -> None:
        """Begin to work; called once connected."""
        self.go_on()

    @abstractmethod
    def go_on(self) -> None:
        """Do the next thing; called when the last one has ended."""

    def deadline(self, timeout_ns: int) -> int:
        """Return when a call of now has to end, by this machine's clock."""
        return self.process.clock() + timeout_ns

    def in_this_life(self, action: Callable[[], None]) -> Callable[[], None]:
        """Return what does something unless the client was killed meanwhile."""
        life = self.process.starts

        def act() -> None:
            if self.process.is_up and self.process.starts == life:
                action()

        return act

    def program(self) -> ClientProgram:
        """Return what it runs."""
        program = self.process.program
        assert isinstance(program, ClientProgram)
        return program

    def call(self, request: Request, then: Callable[[Any], None]) -> None:
        """Make a call and record it; `then` gets its result or exception."""
        history, kernel = self.shared.history, self.shared.cluster.kernel
        operation = history.call(self.name, kernel.now, request)

        def answered(result: Any) -> None:
            history.returned(operation, kernel.now, result)
            then(result)

        self.program().call(request, answered)


class Writer(Client):
    """Makes a number of calls, one after the other or several at a time."""

    def __init__(self, shared: Shared, name: str, plan: Plan) -> None:
        super().__init__(shared, name)
        self.left = plan.calls
        self._lanes = plan.lanes
        self._think_us, self._naps = plan.think_us, plan.naps
        self._counts = (_OF_ONE_KEY, _OF_MANY_KEYS, 8) + (plan.bulk,) * bool(plan.bulk)

    def begin(self) -> None:
        for _ in range(self._lanes):
            self.go_on()

    def go_on(self) -> None:
        if self.left and not self.shared.is_over:
            self.left -= 1
            pause = self.random.randrange(self._think_us + 1) * US
            if self._naps and self.random.random() < _NAP:
                pause += self.random.choice((1, 7, 12, 25)) * S
            self.shared.cluster.kernel.after(pause, self.in_this_life(self._act))

    def _act(self) -> None:
        if not self.shared.is_over:
            chosen = self.random.choices(self._ACTS, self._WEIGHTS)[0]
            chosen(self)

    def _insert(self) -> None:
        self._insert_records(1)

    def _insert_many(self) -> None:
        self._insert_records(self.random.choice(self._counts))

    def _insert_records(self, count: int) -> None:
        payloads = [self.shared.payload() for _ in range(count)]
        is_chained = self.random.random() < 0.5
        after = self.random.choice(self.shared.known[-_RECENT:]) if is_chained else RID_GENESIS
        timeout = self.random.choice((50 * MS, 1 * S, 5 * S, 30 * S))
        # Some have one key in common; of three, each has its own, but the second.
        key = b"key" if count == _OF_ONE_KEY else None
        keys = [payloads[0], None, payloads[2]] if count == _OF_MANY_KEYS else None
        request = InsertRequest(self.deadline(timeout), payloads, after, key, 0, count > 1, keys)
        self.call(request, self._inserted)

    def _inserted(self, result: Any) -> None:
        if isinstance(result, OutcomeUnknownError) and self.random.random() < 0.7:
            request = ResolveRequest(self.deadline(30 * S), result.doubt)
            self.call(request, self._resolved)
            return
        if not isinstance(result, BaseException):
            self.shared.known += result
        self.go_on()

    def _resolved(self, result: Any) -> None:
        if not isinstance(result, BaseException):
            self.shared.known += [rid for rid in result if rid is not None]
        self.go_on()

    def _read(self) -> None:
        rid = self.random.choice(self.shared.known)
        if self.random.random() < 0.3:  # there may be a record, or nothing yet, or for ever
            rid = self.random.choice(self.shared.known[-3:])  # just there, servers still differ
            rid = RecordId(rid.gsn + self.random.choice((1, 2)), rid.shard)
        if rid == RID_GENESIS:
            self.go_on()
            return
        self.call(ReadRequest(self.deadline(10 * S), rid), lambda _: self.go_on())

    def _tail(self) -> None:
        self.call(TailRequest(self.deadline(10 * S)), lambda _: self.go_on())

    def _sync(self) -> None:
        self.call(SyncRequest(self.deadline(10 * S)), lambda _: self.go_on())

    def _trim(self) -> None:
        rid = self.random.choice(self.shared.known[: max(len(self.shared.known) // 2, 1)])
        if rid == RID_GENESIS:
            self.go_on()
            return
        self.call(TrimRequest(self.deadline(10 * S), rid), lambda _: self.go_on())

    _ACTS: Final = (_insert, _insert_many, _read, _tail, _sync, _trim)
    _WEIGHTS: Final = (60, 10, 14, 6, 6, 1)


class Reader(Client):
    """Follows the log from its beginning, its middle or its end; now and then anew."""

    def __init__(self, shared: Shared, name: str, *, follow: bool = True) -> None:
        super().__init__(shared, name)
        self._follow = follow
        self._subscription = 0
        #: Positions that it was given, or knows to be empty, end here.
        self.delivered = RID_GENESIS
        self.is_done = False
        #: How many records it was given.
        self.records = 0

    def go_on(self) -> None:
        self._subscribe(self._where())

    def _where(self) -> RecordId:
        known = self.shared.known
        starts = (RID_GENESIS, known[-1], known[len(known) // 2])
        return self.random.choice(starts) if self._follow else RID_GENESIS

    def _subscribe(self, start: RecordId) -> None:
        request = SubscribeRequest(self.deadline(_CONNECT_NS), start, self._follow)
        self.call(request, self._subscribed)

    def _subscribed(self, result: Any) -> None:
        if isinstance(result, TrimmedError):
            self._subscribe(result.first)
        elif isinstance(result, BaseException):
            self.go_on()
        else:
            self._subscription = result
            self._fetch()

    def _fetch(self) -> None:
        deadline = self.deadline(_FETCH_NS)
        self.call(FetchRequest(deadline, self._subscription, _FETCH_RECORDS), self._fetched)

    def _fetched(self, result: Fetched | BaseException) -> None:
        if isinstance(result, TrimmedError):
            self._begin_again(result.first)
            return
        assert not isinstance(result, BaseException), f"a fetch raised {result!r}"
        if result.records:
            self.delivered = result.records[-1].rid
            self.shared.known += [r.rid for r in result.records if r.rid > self.shared.known[-1]]
        self.records += len(result.records)
        if result.ended:
            self.is_done = True
        elif self._follow and not self.shared.is_over and self.random.random() < 0.02:
            self._begin_again(self._where())
        elif self._follow and not self.shared.is_over and self.random.random() < _DAWDLE:
            pause = self.random.randrange(_DAWDLE_NS)
            self.shared.cluster.kernel.after(pause, self.in_this_life(self._fetch))
        else:
            self._fetch()

    def _begin_again(self, start: RecordId) -> None:
        end = UnsubscribeRequest(self.deadline(_FETCH_NS), self._subscription)
        self.program().call(end, lambda _: None)
        self._subscribe(start)
