"""Database clients of a recorded history: threads of one process that run transactions.

Rule: a call is recorded before it is made, and every result after its return. A transaction in
doubt is resolved, and its outcome recorded when it is known. Only the public API of `logdb` is
used. Each element and value is a unique number, so a read identifies its writer.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import logdb
from logdb import SnapshotExpired, TransactionAborted
from tests.history import events
from tests.history.events import now
from tests.history.processes import Pace, Plan, Stopped
from ziplog.errors import (
    ConfigError,
    DeadlineError,
    OutcomeUnknownError,
    RecordTooLargeError,
    UnavailableError,
    ZiplogError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from logdb import Database, Transaction
    from tests.history.events import Recorder, Step

    #: Runs a transaction and appends its steps; returns the gsn of its commit, or 0.
    Act = Callable[[list[Step]], int]

#: Weights of a thread's operations, by the names of `Transactor`'s methods.
BANK: Final = {"transfer": 8, "audit": 2}
KEYS: Final = {
    "lists": 5, "registers": 5, "put": 1, "read": 2, "scan": 1, "echo": 3, "guarded": 1, "test": 1,
}  # fmt: skip
#: Errors after which nothing was written.
_NOTHING: Final = (
    TransactionAborted,
    SnapshotExpired,
    UnavailableError,
    DeadlineError,
    ConfigError,
    RecordTooLargeError,
)
_LISTS, _REGISTERS = 6, 10
#: Maximum length of a list; a longer one is replaced by a new key.
_LIST_ELEMENTS: Final = 40
#: Size of each thread's own range of numbers.
_PER_THREAD: Final = 10**9
#: Size of a large value in bytes: too large for the commit record.
_LARGE: Final = 20_000
_OPENED: Final = 100
_RESOLVE_S: Final = 2.0
_RESOLVE_TIMES: Final = 10
_RETRY_S: Final = 0.2
#: Time limit of the last reads, in seconds.
_FINAL_S: Final = 30.0
_TEXT: Final = 300

ACCOUNT, LEDGER, LIST, REGISTER = "account/", "ledger/", "list/", "register/"


class TransactPlan(Plan, frozen=True, kw_only=True):
    """Settings of the processes that use a database; a client is a thread."""

    #: "host:port", several with commas.
    coordinators: str
    threads: int = 4
    accounts: int = 8


def run_transactors(plan: TransactPlan, number: int) -> None:
    """Be process `number`, several threads on one client, until SIGTERM."""
    stopped = Stopped()
    with plan.recorder(f"process-{number}") as recorder, contextlib.ExitStack() as stack:
        databases = []
        for first in range(len(plan.coordinators.split(","))):
            database = _connected(plan, first, stopped)
            if database is None:
                return
            databases.append(stack.enter_context(database))
        threads = [
            threading.Thread(
                target=Transactor(plan, number * 100 + thread, databases, recorder).run,
                args=(stopped,),
            )
            for thread in range(plan.threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _connected(plan: TransactPlan, first: int, stopped: Stopped) -> Database | None:
    """Return a client that prefers one coordinator; None if it was stopped before."""
    endpoints = plan.coordinators.split(",")
    while not stopped:
        try:
            return logdb.connect(endpoints[first:] + endpoints[:first], timeout=plan.timeout_s)
        except ZiplogError:
            time.sleep(_RETRY_S)
    return None


class Transactor:
    """Runs one thread's transactions in sequence, at alternating coordinators.

    It therefore reads its own latest writes from a coordinator that may not know them yet.
    """

    def __init__(
        self, plan: TransactPlan, process: int, databases: list[Database], recorder: Recorder
    ) -> None:
        """Prepare the thread.

        Args:
            plan: the workload.
            process: the number of this thread, unique in the history.
            databases: independent clients.
            recorder: records calls and results.

        """
        self._plan: Final = plan
        self._process: Final = process
        self._databases: Final = databases
        self._db = databases[0]
        self._recorder: Final = recorder
        self._random: Final = random.Random(f"{plan.seed} {process}")
        self._numbers: Final = count((process + 1) * _PER_THREAD)
        #: From a list's number to which one of its line is used by now.
        self._generations: Final = [0] * _LISTS
        #: Values of registers at this thread's last read, for `test`.
        self._known: Final[dict[str, Any]] = {}

    def run(self, stopped: Stopped) -> None:
        """Act until stopped."""
        names, weights = list(self._plan.mix), list(self._plan.mix.values())
        pace = Pace(self._plan.rate_per_s)
        while not stopped:
            self._db = self._random.choice(self._databases)
            getattr(self, f"_{self._random.choices(names, weights)[0]}")()
            pace.wait()

    # --- writing it down ---

    def record(self, asked: list[Step], act: Act) -> bool:
        """Run one transaction, and record its outcome; return whether it was committed.

        Args:
            asked: its planned steps, with all possible writes.
            act: runs it.

        """
        op = self._recorder.next_op()
        self._recorder.call(events.Invoke(op, now(), self._process, asked))
        steps: list[Step] = []
        try:
            position = act(steps)
        except OutcomeUnknownError as error:
            return self._resolve(op, steps, error)
        except _NOTHING as error:
            self._recorder.result(events.Fail(op, now(), *_failure(error, steps)))
            return False
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what the client saw
            self._recorder.result(events.Info(op, now(), *_failure(error, steps)))
            return False
        self._recorder.result(events.Ok(op, now(), steps, position))
        return True

    def _resolve(self, op: int, steps: list[Step], error: OutcomeUnknownError) -> bool:
        for _ in range(_RESOLVE_TIMES):
            try:
                rid = error.resolve(_RESOLVE_S)
            except (OutcomeUnknownError, *_NOTHING):
                continue
            except Exception as other:  # noqa: BLE001
                self._recorder.result(events.Info(op, now(), *_failure(other, steps)))
                return False
            if rid is None:
                self._recorder.result(events.Fail(op, now(), *_failure(error, steps)))
            else:
                self._recorder.result(events.Ok(op, now(), steps, rid.gsn))
            return rid is not None
        self._recorder.result(events.Info(op, now(), *_failure(error, steps)))
        return False

    # --- the bank ---

    def _transfer(self) -> None:
        """Move some money, by `run`; leave a line in the ledger that says how often."""
        chance = self._random
        source, target = chance.sample(range(self._plan.accounts), 2)
        amount = chance.randint(1, 10)
        number = f"{next(self._numbers)}"
        terms = [source, target, amount]

        def move(t: Transaction) -> Transaction:
            line = t.get(LEDGER + number)
            there, here = t.multi_get([f"{ACCOUNT}{source}", f"{ACCOUNT}{target}"])
            t.put(f"{ACCOUNT}{source}", there - amount)
            t.put(f"{ACCOUNT}{target}", here + amount)
            t.put(LEDGER + number, [*terms, 1 if line is None else line[3] + 1])
            return t

        def act(steps: list[Step]) -> int:
            steps.append(("transfer", number, terms))
            return _gsn(self._db.run(move, retries=20))

        self.record([("transfer", number, terms)], act)

    def _audit(self) -> None:
        """Read all balances at once: by one call, by a snapshot, or by a transaction."""
        keys = [f"{ACCOUNT}{account}" for account in range(self._plan.accounts)]
        half = len(keys) // 2
        kind = self._random.randrange(3)

        def act(steps: list[Step]) -> int:
            if kind == 0:
                balances = self._db.multi_get(keys)
            elif kind == 1:
                with self._db.snapshot() as snapshot:
                    balances = snapshot.multi_get(keys[:half]) + snapshot.multi_get(keys[half:])
            else:
                with self._db.transaction() as t:
                    balances = [t.get(key) for key in keys]
            steps.append(("balances", "", balances))
            return 0

        self.record([("balances", "", None)], act)

    # --- lists and registers ---

    def _list(self) -> str:
        number = self._random.randrange(_LISTS)
        return f"{LIST}{number}/{self._generations[number]}"

    def _register(self) -> str:
        return f"{REGISTER}{self._random.randrange(_REGISTERS)}"

    def _written(self, number: int) -> Any:
        return [number, "x" * _LARGE] if self._random.random() < 0.05 else number

    def _lists(self) -> None:
        """Read lists, and append to some: all in one transaction."""
        asked: list[Step] = []
        for _ in range(self._random.randint(1, 4)):
            appends = self._random.random() < 0.6
            asked.append(
                ("append", self._list(), next(self._numbers))
                if appends
                else ("r", self._list(), None)
            )

        def act(steps: list[Step]) -> int:
            with self._db.transaction() as t:
                for kind, key, element in asked:
                    elements = t.get(key, [])
                    steps.append(("r", key, elements))
                    if kind == "append":
                        t.put(key, [*elements, element])
                        steps.append((kind, key, element))
                    self._leave(key, len(elements))
            return _gsn(t) if any(kind == "append" for kind, _, _ in asked) else 0

        self.record(asked, act)

    def _leave(self, key: str, elements: int) -> None:
        """Switch to the next list if this one is long."""
        if elements >= _LIST_ELEMENTS:
            number, generation = map(int, key.removeprefix(LIST).split("/"))
            self._generations[number] = max(self._generations[number], generation + 1)

    def _registers(self) -> None:
        """Read registers, and write some without having looked: all in one transaction."""
        asked: list[Step] = [
            ("w", self._register(), next(self._numbers))
            if self._random.random() < 0.5
            else ("r", self._register(), None)
            for _ in range(self._random.randint(1, 4))
        ]

        def act(steps: list[Step]) -> int:
            with self._db.transaction() as t:
                for kind, key, value in asked:
                    if kind == "w":
                        t.put(key, self._written(value))
                        steps.append((kind, key, value))
                    else:
                        steps.append((kind, key, self._seen(key, t.get(key))))
            return _gsn(t) if any(kind == "w" for kind, _, _ in asked) else 0

        self.record(asked, act)

    def _seen(self, key: str, value: Any) -> int | None:
        """Return the number of a register's value."""
        self._known[key] = value
        number: int | None = value[0] if isinstance(value, list) else value
        return number

    def _put(self) -> None:
        """Write one register or several, whatever they are."""
        keys = {self._register() for _ in range(self._random.choice([1, 1, 2, 3]))}
        asked: list[Step] = [("w", key, next(self._numbers)) for key in sorted(keys)]

        def act(steps: list[Step]) -> int:
            steps.extend(asked)
            values = {key: self._written(value) for _, key, value in asked}
            if len(values) == 1:
                ((key, value),) = values.items()
                return self._db.put(key, value).gsn
            rid = self._db.multi_put(values)
            return 0 if rid is None else rid.gsn

        self.record(asked, act)

    def _read(self) -> None:
        """Read some of both kinds at once: by one call, or by two of a snapshot."""
        lists = list({self._list() for _ in range(2)})
        registers = list({self._register() for _ in range(3)})
        by_snapshot = self._random.random() < 0.5

        def act(steps: list[Step]) -> int:
            if by_snapshot:
                with self._db.snapshot() as snapshot:
                    values = snapshot.multi_get(lists) + snapshot.multi_get(registers)
            else:
                values = self._db.multi_get(lists + registers)
            for key, value in zip(lists, values, strict=False):
                steps.append(("r", key, value or []))
            for key, value in zip(registers, values[len(lists) :], strict=True):
                steps.append(("r", key, self._seen(key, value)))
            return 0

        self.record([("r", key, None) for key in lists + registers], act)

    def _scan(self) -> None:
        """Read all registers by a scan; a register that is not in the result is absent."""

        def act(steps: list[Step]) -> int:
            steps.extend(self._all(dict(self._db.scan(prefix=REGISTER))))
            return 0

        self.record([("r", key, None) for key in _ALL_REGISTERS], act)

    def _echo(self) -> None:
        """Write, and look at once by all other coordinators."""
        mine = self._db
        self._put()
        for database in self._databases:
            if database is not mine:
                self._db = database
                self._random.choice([self._read, self._scan])()

    def _all(self, rows: dict[str, Any]) -> list[Step]:
        return [("r", key, self._seen(key, rows.get(key))) for key in _ALL_REGISTERS]

    def _guarded(self) -> None:
        """Scan all registers, and write one: the commit validates the whole scan."""
        key, number = self._register(), next(self._numbers)

        def act(steps: list[Step]) -> int:
            with self._db.transaction() as t:
                steps.extend(self._all(dict(t.scan(prefix=REGISTER))))
                t.put(key, number)
                steps.append(("w", key, number))
            return _gsn(t)

        self.record([*(("r", one, None) for one in _ALL_REGISTERS), ("w", key, number)], act)

    def _test(self) -> None:
        """Write a register if it is still what this thread saw last."""
        key, number = self._register(), next(self._numbers)
        if key not in self._known:
            return
        known = self._known.pop(key)

        def act(steps: list[Step]) -> int:
            if not self._db.test_and_multi_put({key: known}, {key: number}):
                raise TransactionAborted([key.encode()])
            steps.append(("r", key, self._seen(key, known)))
            steps.append(("w", key, number))
            self._known[key] = number
            return 0

        self.record([("r", key, None), ("w", key, number)], act)


_ALL_REGISTERS: Final = [f"{REGISTER}{number}" for number in range(_REGISTERS)]


def _gsn(transaction: Transaction) -> int:
    assert transaction.position is not None, "it was committed"
    return transaction.position.gsn


def _failure(error: Exception, steps: list[Step]) -> tuple[str, list[Step], str]:
    return type(error).__name__, steps, str(error)[:_TEXT]


# --- before and after ----------------------------------------------------------------------------


def open_accounts(plan: TransactPlan) -> None:
    """Pay in what the accounts begin with.

    Raises:
        ZiplogError: it could not be written.

    """
    balances = [_OPENED] * plan.accounts
    with plan.recorder("opening") as recorder, logdb.connect(plan.coordinators) as database:
        op = recorder.next_op()
        steps: list[Step] = [("accounts", "", balances)]
        recorder.call(events.Invoke(op, now(), 0, steps))
        rid = database.multi_put({f"{ACCOUNT}{n}": paid for n, paid in enumerate(balances)})
        recorder.result(events.Ok(op, now(), steps, 0 if rid is None else rid.gsn))


def read_database(plan: TransactPlan) -> int:
    """Read everything at once by a new client; return how many keys there are.

    Raises:
        ZiplogError: it cannot be read.

    """
    with (
        plan.recorder("final") as recorder,
        logdb.connect(plan.coordinators, timeout=_FINAL_S) as database,
    ):
        op = recorder.next_op()
        recorder.call(events.Invoke(op, now(), 0, []))
        with database.snapshot() as snapshot:
            rows = dict(snapshot.scan())
        steps: list[Step] = []
        if f"{ACCOUNT}0" in rows:
            balances = [rows[f"{ACCOUNT}{account}"] for account in range(plan.accounts)]
            ledger = {k.removeprefix(LEDGER): v for k, v in rows.items() if k.startswith(LEDGER)}
            steps += [("balances", "", balances), ("ledger", "", ledger)]
        steps += [("r", key, rows[key]) for key in rows if key.startswith(LIST)]
        for key in _ALL_REGISTERS:
            value = rows.get(key)
            steps.append(("r", key, value[0] if isinstance(value, list) else value))
        recorder.result(events.Ok(op, now(), steps))
    return len(rows)
