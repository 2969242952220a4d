"""Workload of a run: writers that insert, chain, read and trim; readers that follow the log.

Every call is recorded before it is made and when it returns. A killed client restarts under a new
name; its open calls never return.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

from tests.sim.programs import ClientProgram
from tests.simulator.kernel import MS, US, S
from ziplog.client.common.requests import (
    BarrierRequest,
    ConnectRequest,
    FetchRequest,
    InsertRequest,
    ReadRequest,
    SealRequest,
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
#: Limit of a reader's fetch.
FETCH_NS: Final = 1 * S
FETCH_RECORDS: Final = 100
#: Number of the last known records that a chain or a recent reader selects from.
_RECENT: Final = 20
#: Probability that a sleeping client sleeps between two calls.
_NAP: Final = 0.1
#: Probability and maximum of a reader's pause before a fetch.
_DAWDLE: Final = 0.1
_DAWDLE_NS: Final = 700 * MS
#: Probability of a reader's barrier before a fetch, in a plan with appends.
BARRIER: Final = 0.05
#: Number of records in a call, with one common key or a key each.
_OF_ONE_KEY: Final = 2
_OF_MANY_KEYS: Final = 3


class Shared:
    """State shared by the clients of a run."""

    def __init__(self, cluster: SimCluster, history: History) -> None:
        self.cluster: Final = cluster
        self.history: Final = history
        #: Known records, in the order of the results.
        self.known: Final[list[RecordId]] = [RID_GENESIS]
        self.payloads = 0
        #: No new calls of writers; readers continue.
        self.is_over = False

    def payload(self) -> bytes:
        """Return a new payload."""
        self.payloads += 1
        return b"record %d" % self.payloads


class Client(ABC):
    """A client's process, with its restarts."""

    def __init__(self, shared: Shared, name: str) -> None:
        self.shared: Final = shared
        self.process: Final = self.make_process(name)
        self.random: Final = shared.cluster.kernel.random
        #: Its machine is lost for good.
        self.is_lost = False

    @property
    def name(self) -> str:
        """The name of this incarnation in the history."""
        return f"{self.process.name}.{self.process.starts}"

    def make_process(self, name: str) -> Process:
        """Return its process."""
        return self.shared.cluster.client(name)

    def connecting(self) -> Request:
        """Return the first call of an incarnation."""
        return ConnectRequest(self.deadline(_CONNECT_NS))

    def start(self) -> None:
        """Start the process, and connect; do nothing if its machine is lost."""
        if self.is_lost:
            return
        self.process.start()
        self.program().call(self.connecting(), lambda _limits: self.begin())

    def kill(self) -> None:
        """Kill the process, and restart it soon."""
        self.process.kill()
        self.shared.cluster.kernel.after(100 * MS, self.start)

    def lose(self) -> None:
        """Kill the process for good, with its machine."""
        self.is_lost = True
        if self.process.is_up:
            self.process.kill()

    def begin(self) -> None:
        """Start to work; called once connected."""
        self.next_call()

    @abstractmethod
    def next_call(self) -> None:
        """Make the next call; called when the last one has ended."""

    def deadline(self, timeout_ns: int) -> int:
        """Return the deadline of a call, by this machine's clock."""
        return self.process.clock() + timeout_ns

    def unless_killed(self, action: Callable[[], None]) -> Callable[[], None]:
        """Return a function that acts unless the client was killed meanwhile."""
        life = self.process.starts

        def act() -> None:
            if self.process.is_up and self.process.starts == life:
                action()

        return act

    def program(self) -> ClientProgram:
        """Return its program."""
        program = self.process.program
        assert isinstance(program, ClientProgram)
        return program

    def call(self, request: Request, then: Callable[[Any], None]) -> None:
        """Make a call and record it; `then` receives its result or exception."""
        history, kernel = self.shared.history, self.shared.cluster.kernel
        operation = history.call(self.name, kernel.now, request)

        def answered(result: Any) -> None:
            history.returned(operation, kernel.now, result)
            then(result)

        self.program().call(request, answered)


class Writer(Client):
    """A client that makes calls, one after the other or concurrently."""

    def __init__(self, shared: Shared, name: str, plan: Plan) -> None:
        super().__init__(shared, name)
        self.left = plan.calls
        self._lanes = plan.lanes
        self._think_us, self._naps = plan.think_us, plan.naps
        self._appends = plan.appends
        #: The numbers of regions that inserts request.
        self._spans = (0,) if plan.regions is None else (0, 1, 2)
        #: `seal` is called in plans with appends only.
        self._weights = (*self._WEIGHTS, 4 if plan.appends else 0)
        self._counts = (_OF_ONE_KEY, _OF_MANY_KEYS, 8) + (plan.bulk,) * bool(plan.bulk)

    def begin(self) -> None:
        for _ in range(self._lanes):
            self.next_call()

    def next_call(self) -> None:
        if self.left and not self.shared.is_over:
            self.left -= 1
            pause = self.random.randrange(self._think_us + 1) * US
            if self._naps and self.random.random() < _NAP:
                pause += self.random.choice((1, 7, 12, 25)) * S
            self.shared.cluster.kernel.after(pause, self.unless_killed(self._act))

    def _act(self) -> None:
        if not self.shared.is_over:
            chosen = self.random.choices(self._ACTS, self._weights)[0]
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
        # Some calls have one common key; in others each record has its own, except the second.
        key = b"key" if count == _OF_ONE_KEY else None
        keys = [payloads[0], None, payloads[2]] if count == _OF_MANY_KEYS else None
        request = InsertRequest(
            self.deadline(timeout), payloads, after, key, 0, count > 1, keys,
            sealed=self._is_sealed(), min_regions=self._span(),
        )  # fmt: skip
        self.call(request, self._inserted)

    def _span(self) -> int:
        """Return the least number of regions of the next insert; 0: the cluster's."""
        return self.random.choice(self._spans) if len(self._spans) > 1 else 0

    def _is_sealed(self) -> bool:
        """Return whether the next call is an append, or a sealed tail query."""
        return bool(self._appends) and self.random.random() < self._appends

    def _inserted(self, result: Any) -> None:
        if isinstance(result, OutcomeUnknownError) and self.random.random() < 0.7:
            request = ResolveRequest(self.deadline(30 * S), result.doubt)
            self.call(request, self._resolved)
            return
        if not isinstance(result, BaseException):
            self.shared.known += result
        self.next_call()

    def _resolved(self, result: Any) -> None:
        if not isinstance(result, BaseException):
            self.shared.known += [rid for rid in result if rid is not None]
        self.next_call()

    def _read(self) -> None:
        rid = self.random.choice(self.shared.known)
        if self.random.random() < 0.3:  # a record, or none yet, or none for ever
            rid = self.random.choice(self.shared.known[-3:])  # at the end, servers still differ
            rid = RecordId(rid.gsn + self.random.choice((1, 2)), rid.shard)
        if rid == RID_GENESIS:
            self.next_call()
            return
        self.call(ReadRequest(self.deadline(10 * S), rid), lambda _: self.next_call())

    def _tail(self) -> None:
        request = TailRequest(self.deadline(10 * S), self._is_sealed())
        self.call(request, lambda _: self.next_call())

    def _seal(self) -> None:
        rid = self.random.choice(self.shared.known[-_RECENT:])
        self.call(SealRequest(self.deadline(10 * S), rid), lambda _: self.next_call())

    def _sync(self) -> None:
        self.call(SyncRequest(self.deadline(10 * S)), lambda _: self.next_call())

    def _trim(self) -> None:
        rid = self.random.choice(self.shared.known[: max(len(self.shared.known) // 2, 1)])
        if rid == RID_GENESIS:
            self.next_call()
            return
        self.call(TrimRequest(self.deadline(10 * S), rid), lambda _: self.next_call())

    _ACTS: Final = (_insert, _insert_many, _read, _tail, _sync, _trim, _seal)
    _WEIGHTS: Final = (60, 10, 14, 6, 6, 1)


class LastWriter(Client):
    """A client that inserts one record at the end of a run, in as many regions as it is given."""

    def __init__(self, shared: Shared, name: str) -> None:
        super().__init__(shared, name)
        self.min_regions = 0
        #: The result of the insert, or its exception.
        self.result: Any = None

    def next_call(self) -> None:
        request = InsertRequest(
            self.deadline(60 * S), [self.shared.payload()], RID_GENESIS, None, 0,
            min_regions=self.min_regions,
        )  # fmt: skip
        self.call(request, lambda result: setattr(self, "result", result))


class Reader(Client):
    """A client that follows the log from its beginning, middle or end, with restarts.

    `shards`: it reads these only; None: all. `barriers`: the probability of a barrier before a
    fetch. `known_rows`: as for a subscription.
    """

    def __init__(
        self,
        shared: Shared,
        name: str,
        *,
        follow: bool = True,
        shards: frozenset[int] | None = None,
        barriers: float = 0.0,
        known_rows: bool = False,
    ) -> None:
        super().__init__(shared, name)
        self._follow, self._barriers = follow, barriers
        self._known_rows: Final = known_rows
        self.shards: Final = shards
        self._subscription = 0
        #: Where its subscription begins, and the end of its passed positions.
        self.first = self.delivered = RID_GENESIS
        self.is_done = False
        #: Number of received records.
        self.records = 0

    def next_call(self) -> None:
        self._subscribe(self._where())

    def _where(self) -> RecordId:
        known = self.shared.known
        starts = (RID_GENESIS, known[-1], known[len(known) // 2])
        return self.random.choice(starts) if self._follow else RID_GENESIS

    def _subscribe(self, start: RecordId) -> None:
        self.first = start
        request = SubscribeRequest(
            self.deadline(_CONNECT_NS), start, self._follow, self.shards, self._known_rows
        )
        self.call(request, self._subscribed)

    def _subscribed(self, result: Any) -> None:
        if isinstance(result, TrimmedError):
            self._subscribe(result.first)
        elif isinstance(result, BaseException):
            self.next_call()
        else:
            self._subscription = result
            self._fetch()

    def _fetch(self) -> None:
        if self._barriers and self.random.random() < self._barriers:
            request = BarrierRequest(self.deadline(10 * S), self._subscription)
            self.call(request, lambda _: None)
        deadline = self.deadline(FETCH_NS)
        self.call(FetchRequest(deadline, self._subscription, FETCH_RECORDS), self._fetched)

    def _fetched(self, result: Fetched | BaseException) -> None:
        if isinstance(result, TrimmedError):
            self._restart(result.first)
            return
        assert not isinstance(result, BaseException), f"a fetch raised {result!r}"
        if result.records:
            self.delivered = result.records[-1].rid
            self.shared.known += [r.rid for r in result.records if r.rid > self.shared.known[-1]]
        self.records += len(result.records)
        if result.ended:
            self.is_done = True
        elif self._follow and not self.shared.is_over and self.random.random() < 0.02:
            self._restart(self._where())
        elif self._follow and not self.shared.is_over and self.random.random() < _DAWDLE:
            pause = self.random.randrange(_DAWDLE_NS)
            self.shared.cluster.kernel.after(pause, self.unless_killed(self._fetch))
        else:
            self._fetch()

    def _restart(self, start: RecordId) -> None:
        end = UnsubscribeRequest(self.deadline(FETCH_NS), self._subscription)
        self.program().call(end, lambda _: None)
        self._subscribe(start)
