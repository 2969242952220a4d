"""The workload of a database's clients: transactions on lists, registers, rows and a bank.

It also runs single reads and writes, snapshots, scans and watches. A lane does one thing at a time;
its task is a generator that yields requests, and pauses in nanoseconds. No value is written twice.
Reads and results are recorded (`tests.sim.database.deeds`), also of aborted transactions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logdb.client import arguments
from logdb.client.core import DatabaseCore
from logdb.client.requests import (
    CompareAndPutRequest,
    DropRequest,
    GetRequest,
    OpenRequest,
    PutRequest,
    ResolveCommitRequest,
    ScanRequest,
    SnapshotRequest,
    WatchRequest,
)
from logdb.client.transaction import TransactionSets
from logdb.errors import SnapshotExpired, TransactionAborted
from logdb.values import decode_value, encode_value
from tests.sim.database.programs import add_client
from tests.sim.workload import Client
from tests.simulator.kernel import MS, US, S
from ziplog.errors import DeadlineError, OutcomeUnknownError, UnavailableError, ZiplogError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from logdb.client.requests import KeyState, Page, SnapshotId, Values
    from tests.sim.database.deeds import Deed, Deeds
    from tests.sim.plan import Plan
    from tests.sim.workload import Shared
    from tests.simulator.process import Process
    from ziplog.client.common.requests import Request

    Task = Generator[Request | int, Any, Any]
    Body = Callable[["Transaction"], Task]

_OPEN_NS: Final = 120 * S
LISTS: Final = [b"list/%d" % i for i in range(4)]
REGISTERS: Final = [b"register/%d" % i for i in range(6)]
ROWS: Final = [b"row/%d" % i for i in range(8)]
ACCOUNTS: Final = [b"account/%d" % i for i in range(5)]
#: The initial balance of an account.
BALANCE: Final = 100
#: Errors after which nothing was written, and nothing ever will be.
NOTHING: Final = (TransactionAborted, SnapshotExpired, UnavailableError, DeadlineError)
#: Maximum elements of a list.
_LIST_ELEMENTS: Final = 30
#: Rows of one page of a scan.
PAGE: Final = 3
#: Probability that a client resolves an unknown commit, and that a client naps.
_RESOLVE: Final = 0.7
_NAP: Final = 0.1


class Transaction:
    """A transaction's sets, with its operations recorded."""

    def __init__(self, deed: Deed, largest: int, until: int) -> None:
        self.deed: Final = deed
        self.sets: Final = TransactionSets(largest)
        self.until: Final = until

    def get(self, *keys: bytes) -> Task:
        """Return the values of keys; None: absent."""
        values = yield from self.sets.get(keys, self.until)
        for key, value in zip(keys, values, strict=True):
            self.deed.read(key, value)
        return [None if value is None else decode_value(value) for value in values]

    def scan(self, keys: Sequence[bytes]) -> Task:
        """Read all keys of a table, in pages."""
        bounds = arguments.bounds(None, None, keys[0].split(b"/")[0] + b"/", None)
        start: bytes | None = bounds.start
        found: dict[bytes, bytes] = {}
        while start is not None:
            rows, start = yield from self.sets.page(bounds, start, None, self.until)
            found.update(rows)
        for key in keys:
            self.deed.read(key, found.get(key))

    def put(self, key: bytes, value: Any) -> None:
        """Write; None: delete."""
        encoded = None if value is None else encode_value(value)
        self.sets.write(key, encoded)
        self.deed.write(key, encoded)


class DatabaseClient(Client):
    """A client's process, over several lives."""

    def __init__(
        self, shared: Shared, name: str, deeds: Deeds, coordinators: Sequence[str]
    ) -> None:
        self._coordinators: Final = coordinators
        self.deeds: Final = deeds
        super().__init__(shared, name)

    def make_process(self, name: str) -> Process:
        return add_client(self.shared.cluster, name, self._coordinators)

    def connecting(self) -> Request:
        return OpenRequest(self.deadline(_OPEN_NS))

    def run(self, task: Task, result: Any = None) -> None:
        """Resume a task, while this life lasts."""
        try:
            wanted = task.throw(result) if isinstance(result, BaseException) else task.send(result)
        except StopIteration:
            return
        if isinstance(wanted, int):
            self.shared.cluster.kernel.after(wanted, self.unless_killed(lambda: self.run(task)))
        else:
            self.program().call(wanted, lambda answer: self.run(task, answer))

    @property
    def core(self) -> DatabaseCore:
        """The client's core."""
        core = self.program().engine.core
        assert isinstance(core, DatabaseCore)
        return core

    def read_all(self, snapshot: SnapshotId | None, prefix: bytes, until: int) -> Task:
        """Return all rows with a prefix, in pages."""
        bounds = arguments.bounds(None, None, prefix, None)
        start: bytes | None = bounds.start
        rows: dict[bytes, bytes] = {}
        while start is not None:
            page: Page = yield ScanRequest(
                until, start, bounds.stop, PAGE, snapshot=snapshot, fresh=snapshot is None
            )
            rows.update(page.rows)
            start = None if page.is_end else page.range.stop
        return rows


class Transactor(DatabaseClient):
    """Does a number of things, one after the other or several at a time."""

    def __init__(
        self, shared: Shared, name: str, deeds: Deeds, coordinators: Sequence[str], plan: Plan
    ) -> None:
        super().__init__(shared, name, deeds, coordinators)
        self.left = plan.calls
        self._lanes: Final = plan.lanes
        self._think_us, self._naps = plan.think_us, plan.naps
        #: Of values and of transfers, in all lives.
        self._number = 0

    def begin(self) -> None:
        for lane in range(self._lanes):
            self.run(self._lane(lane))

    def next_call(self) -> None:
        """Nothing: each lane goes on by itself."""

    def _lane(self, lane: int) -> Task:
        while self.left and not self.shared.is_over:
            self.left -= 1
            pause = self.random.randrange(self._think_us + 1) * US
            if self._naps and self.random.random() < _NAP:
                pause += self.random.choice((1, 7, 12, 25)) * S
            yield pause
            if not self.shared.is_over:
                (name,) = self.random.choices(list(self._ACTS), list(self._ACTS.values()))
                yield from getattr(self, f"_{name}")(lane)

    def _until(self) -> int:
        return self.deadline(self.random.choice((50 * MS, 1 * S, 5 * S, 30 * S)))

    def _new(self) -> int:
        """Return a unique number."""
        self._number += 1
        return int(self.process.name.rpartition("-")[2]) * 1_000_000 + self._number

    def _dawdle(self) -> Task:
        """Pause at random, so that other clients act in between."""
        if self.random.random() < 0.3:
            yield self.random.choice((100 * US, 5 * MS, 50 * MS))

    # --- what happens to a deed ---

    def _record_result(self, deed: Deed, task: Task) -> Task:
        """Run a task, which returns a position or 0, and record its result."""
        try:
            gsn = yield from task
        except OutcomeUnknownError as error:
            yield from self._resolve(deed, error)
        except NOTHING as error:
            self.deeds.not_committed(deed, error, is_known=True)
        else:
            self.deeds.committed(deed, gsn)

    def _resolve(self, deed: Deed, error: OutcomeUnknownError) -> Task:
        if self.random.random() < _RESOLVE:
            doubt: Any = error.doubt
            try:
                rid = yield ResolveCommitRequest(self.deadline(30 * S), doubt)
            except ZiplogError:
                pass
            else:
                if rid is not None:
                    self.deeds.committed(deed, rid.gsn)
                else:
                    self.deeds.not_committed(deed, TransactionAborted([]), is_known=True)
                return
        self.deeds.not_committed(deed, error, is_known=False)

    def _transact(self, lane: int, kind: str, body: Body) -> Task:
        """Do a transaction; its body reads and writes."""
        deed = self.deeds.begin(self.name, lane, kind)

        def whole() -> Task:
            until = self._until()
            if not self.core._coordinators.cluster:
                yield OpenRequest(until)
            transaction = Transaction(deed, self.core.limits.max_payload_bytes, until)
            yield from body(transaction)
            yield from self._dawdle()
            yield from transaction.sets.commit(until)
            position = transaction.sets.position
            return position.gsn if position is not None else 0

        yield from self._record_result(deed, whole())

    # --- what it does ---

    def _append(self, lane: int) -> Task:
        """Read some lists, and append to some of them."""
        chosen = self.random.sample(LISTS, self.random.choice((1, 1, 2, 3)))
        written = [key for key in chosen if self.random.random() < 0.7]

        def body(t: Transaction) -> Task:
            for key in chosen:
                (elements,) = yield from t.get(key)
                yield from self._dawdle()
                if key in written and len(elements or []) < _LIST_ELEMENTS:
                    t.put(key, [*(elements or []), self._new()])

        yield from self._transact(lane, "append", body)

    def _register(self, lane: int) -> Task:
        """Read some registers, and write some, which may be others."""
        read = self.random.sample(REGISTERS, self.random.choice((0, 1, 2)))
        written = self.random.sample(REGISTERS, self.random.choice((0, 1, 1, 2)))

        def body(t: Transaction) -> Task:
            if read:
                yield from t.get(*read)
            yield from self._dawdle()
            for key in written:
                t.put(key, self._new())

        yield from self._transact(lane, "register", body)

    def _rows(self, lane: int) -> Task:
        """Read all rows, and let one appear, change or vanish."""

        def body(t: Transaction) -> Task:
            if self.random.random() < 0.3:
                t.put(self.random.choice(ROWS), self._new())
            yield from t.scan(ROWS)
            yield from self._dawdle()
            if self.random.random() < 0.7:
                t.put(self.random.choice(ROWS), self.random.choice((None, self._new())))

        yield from self._transact(lane, "rows", body)

    def _transfer(self, lane: int) -> Task:
        """Move money, and leave a line in the ledger, in one transaction."""
        number = b"ledger/%d" % self._new()
        source, target = self.random.sample(range(len(ACCOUNTS)), 2)
        amount = self.random.randrange(1, 20)

        def body(t: Transaction) -> Task:
            t.deed.steps.append(("transfer", number.decode(), [source, target, amount]))
            has, gets = yield from t.get(ACCOUNTS[source], ACCOUNTS[target])
            (line,) = yield from t.get(number)
            times = line[3] if line is not None else 0
            # (All balances differ, so a read identifies its state.)
            t.put(ACCOUNTS[source], [(has or [BALANCE])[0] - amount, self._new()])
            t.put(ACCOUNTS[target], [(gets or [BALANCE])[0] + amount, self._new()])
            t.put(number, [source, target, amount, times + 1])

        yield from self._transact(lane, "transfer", body)

    def _put(self, lane: int) -> Task:
        """Write without having read; with a long value now and then."""
        deed = self.deeds.begin(self.name, lane, "put")
        writes: dict[bytes, bytes | None] = {}
        for key in self.random.sample(REGISTERS, self.random.choice((1, 1, 2))):
            writes[key] = encode_value(self._new())
        if self.random.random() < 0.3:
            long = [self._new(), "x" * self.random.randrange(400)]
            writes[self.random.choice(ROWS)] = encode_value(long)
        for key, value in writes.items():
            deed.write(key, value)

        def whole() -> Task:
            rid = yield PutRequest(self._until(), writes)
            return rid.gsn

        yield from self._record_result(deed, whole())

    def _test_and_put(self, lane: int) -> Task:
        """Write if a register is what it was."""
        key, other = self.random.sample(REGISTERS, 2)
        looked = self.deeds.begin(self.name, lane, "look")
        found: Values | None = None

        def look() -> Task:
            nonlocal found
            found = yield GetRequest(self._until(), [key], fresh=True)
            looked.read(key, found.values[0])
            return 0

        yield from self._record_result(looked, look())
        if found is None:
            return
        yield from self._dawdle()
        deed = self.deeds.begin(self.name, lane, "test-and-put")
        value = found.values[0]
        written = encode_value(self._new())
        deed.write(other, written)

        def whole() -> Task:
            expected = {key: None if value is None else decode_value(value)}
            is_done = yield CompareAndPutRequest(self._until(), expected, {other: written})
            if not is_done:
                raise TransactionAborted([key])
            deed.read(key, value)
            return 0

        yield from self._record_result(deed, whole())

    def _get(self, lane: int) -> Task:
        """Read some keys at once."""
        keys = self.random.sample([*LISTS, *REGISTERS, *ROWS], self.random.choice((1, 1, 3)))
        deed = self.deeds.begin(self.name, lane, "get")

        def whole() -> Task:
            found: Values = yield GetRequest(self._until(), keys, fresh=True)
            for key, value in zip(keys, found.values, strict=True):
                deed.read(key, value)
            return 0

        yield from self._record_result(deed, whole())

    def _snapshot(self, lane: int) -> Task:
        """Take a snapshot, and read it for a while."""
        deed = self.deeds.begin(self.name, lane, "snapshot")
        yield from self._record_result(deed, self._whole_snapshot(deed))

    def _whole_snapshot(self, deed: Deed) -> Task:
        until = self.deadline(self.random.choice((1 * S, 30 * S)))
        snapshot, position = yield SnapshotRequest(until)
        for key in self.random.sample([*LISTS, *REGISTERS, *ROWS], 4):
            found: Values = yield GetRequest(until, [key], snapshot=snapshot)
            deed.read(key, found.values[0])
            yield from self._dawdle()
        accounts = yield from self.read_all(snapshot, b"account/", until)
        for key in ACCOUNTS:
            deed.read(key, accounts.get(key))
        deed.steps.append(("balances", "", [_balance(accounts.get(key)) for key in ACCOUNTS]))
        if self.random.random() < 0.3:
            ledger = yield from self.read_all(snapshot, b"ledger/", until)
            lines = {key.decode(): decode_value(line) for key, line in ledger.items()}
            deed.steps.append(("ledger", "", lines))
            deed.reads.update(ledger)
        yield DropRequest(until, snapshot)
        return position.gsn

    #: How often each is done.
    _ACTS: Final = {
        "append": 20, "register": 20, "rows": 15, "transfer": 20, "put": 15, "test_and_put": 8,
        "get": 15, "snapshot": 6,
    }  # fmt: skip


def _balance(value: bytes | None) -> int:
    balance: int = BALANCE if value is None else decode_value(value)[0]
    return balance


class Watcher(DatabaseClient):
    """Watches a key, as long as the run lasts."""

    def __init__(
        self, shared: Shared, name: str, deeds: Deeds, coordinators: Sequence[str]
    ) -> None:
        super().__init__(shared, name, deeds, coordinators)
        self.key: bytes = b""
        #: Of each life: what it watched, and what it was given.
        self.seen: Final[list[tuple[bytes, list[KeyState]]]] = []

    def begin(self) -> None:
        self.key = self.random.choice([*LISTS, *REGISTERS, *ROWS, *ACCOUNTS])
        self.seen.append((self.key, []))
        self.run(self._watch())

    def next_call(self) -> None:
        """Nothing: it watches on by itself."""

    def _watch(self) -> Task:
        states, version = self.seen[-1][1], -1
        while True:
            timeout = self.random.choice((300 * MS, 5 * S, 30 * S))
            try:
                state = yield WatchRequest(self.deadline(timeout), self.key, version)
            except (DeadlineError, UnavailableError):
                # (It may fail immediately, because no coordinator replies.)
                yield 10 * MS
                continue
            states.append(state)
            version = state.version


class Auditor(DatabaseClient):
    """Reads all that there is, at the end."""

    def __init__(self, shared: Shared, name: str, deeds: Deeds, coordinator: str) -> None:
        super().__init__(shared, name, deeds, [coordinator])
        #: All keys and values; None: it has not read them yet.
        self.rows: dict[bytes, bytes] | None = None
        self.gsn = 0

    def next_call(self) -> None:
        self.run(self._audit())

    def _audit(self) -> Task:
        deed = self.deeds.begin(self.name, 0, "audit")
        until = self.deadline(_OPEN_NS)
        snapshot, position = yield SnapshotRequest(until)
        rows = yield from self.read_all(snapshot, b"", until)
        for key in [*LISTS, *REGISTERS, *ROWS, *ACCOUNTS]:
            deed.read(key, rows.get(key))
        deed.steps.append(("balances", "", [_balance(rows.get(key)) for key in ACCOUNTS]))
        ledger = {k.decode(): decode_value(v) for k, v in rows.items() if k[:7] == b"ledger/"}
        deed.steps.append(("ledger", "", ledger))
        self.deeds.committed(deed, position.gsn)
        self.rows, self.gsn = rows, position.gsn
