"""Tasks with calls of an asyncio database are cancelled at every await.

A cancelled transaction commits as a whole or not at all. Its client goes on, and nothing is left:
no task, no future, no open call, no snapshot.
"""

from __future__ import annotations

import asyncio
import gc
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import pytest

import logdb
import logdb.aio
from logdb.client import scanning, transaction
from tests.waiting import explicit_collections, next_turn, until
from ziplog.client.engines import asyncio_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator

    Body = Callable[[], Awaitable[object]]

#: "early": before the awaited result arrives; "late": together with it; "timeout": by a time-out.
Kind = Literal["early", "late", "timeout"]
KINDS: Final[tuple[Kind, ...]] = ("early", "late", "timeout")


@pytest.fixture(autouse=True)
def explicit() -> Iterator[None]:
    with explicit_collections():
        gc.freeze()  # So that a collection takes little time.
        yield
        gc.unfreeze()


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "PAGE_ROWS", 2)
    monkeypatch.setattr(transaction, "PAGE_ROWS", 2)


class Cancelling:
    """Awaits a body in the running task, which is cancelled at one of the body's awaits."""

    def __init__(self, body: Body, at: int, kind: Kind) -> None:
        self._body: Final = body
        self._at: Final = at
        self._kind: Final = kind
        self._awaits = 0

    @property
    def has_struck(self) -> bool:
        """Whether the body reached that await."""
        return self._awaits >= self._at

    async def run(self) -> None:
        async with asyncio.timeout(None) as self._scope:
            await self

    def __await__(self) -> Generator[Any, Any, None]:
        steps = self._body().__await__()
        sent: Any = None
        while True:
            try:
                waited = steps.send(sent)
                while True:
                    self._awaits += 1
                    if self._awaits == self._at:
                        self._strike(waited)
                    try:
                        sent = yield waited
                    except BaseException as error:  # noqa: BLE001 - the body gets it
                        waited = steps.throw(error)
                    else:
                        break
            except StopIteration:
                return

    def _strike(self, waited: asyncio.Future[Any] | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._kind == "timeout":
            self._scope.reschedule(asyncio.get_running_loop().time())
        elif self._kind == "late" and waited is not None:
            waited.add_done_callback(lambda _: task.cancel())
        else:
            task.cancel()


async def cancelled(body: Body, check: Callable[[], Awaitable[None]]) -> int:
    """Run a body once for each of its awaits, and cancel it there; return the number of runs."""
    runs = 0
    for kind in KINDS:
        at, has_struck = 1, True
        while has_struck:
            cancelling = Cancelling(body, at, kind)
            with suppress(asyncio.CancelledError, TimeoutError):
                await asyncio.create_task(cancelling.run())
            has_struck = cancelling.has_struck
            # It knows the task and its error, whose traceback would keep iterators open.
            del cancelling
            try:
                await check()
            except BaseException as failure:
                failure.add_note(f"cancelled at await {at}, {kind}")
                raise
            runs, at = runs + 1, at + 1
    return runs


async def settle(db: logdb.aio.Database) -> None:
    """Wait until the calls of cancelled tasks have ended; assert that nothing of them is left."""
    engine, core = db._engine._engine, db._engine.core
    await next_turn()  # The loop forgets the cancelled task.
    gc.collect()
    await db.exists("k")
    calls = core._calls
    assert calls is not None
    await until(lambda: not calls._callbacks and not calls.core._inserts._calls, "no open inserts")
    core.check()
    assert not core._tasks
    assert not core._commits._open
    assert not engine._futures
    assert not core._coordinators._queries
    assert len(engine.owners) == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
    async with asyncio.timeout(20):
        while (await db.status())["snapshots"]:
            await next_turn()


@asynccontextmanager
async def watched(endpoint: str) -> AsyncIterator[logdb.aio.Database]:
    """Connect to an empty database; at the end, no exception of a task or future was lost."""
    lost: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
    async with logdb.aio.connect(endpoint) as db:
        async with db.transaction() as t:
            async for key, _ in db.scan(b""):
                t.delete(key)
        yield db
    gc.collect()
    assert lost == []
    assert not asyncio_engine._BUSY


def test_cancelled_transaction_commits_as_a_whole_or_not_at_all(
    coordinator: logdb.Coordinator,
) -> None:
    begun: list[int] = []
    #: Numbers of transactions that are known to have no effect.
    without_effect: set[int] = set()
    transactions: list[logdb.aio.Transaction] = []

    async def main() -> None:
        async with watched(coordinator.endpoint) as db:
            await db.multi_put({"a": 0, "b": 0, "c": 0, "d": 0})

            async def transact() -> None:
                number = len(begun) + 1
                begun.append(number)
                t = db.transaction()
                transactions.append(t)
                async with t:
                    former = await t.get("a")
                    assert await t.multi_get(["b", "absent"]) == [former, None]
                    assert await t.exists("c")
                    assert [row[0] async for row in t.scan("b")] == ["b", "c", "d"]
                    t.put("a", number)
                    t.put("b", number)
                    await t.validate()

            async def check() -> None:
                t, number = transactions[-1], begun[-1]
                assert t.status in {"committed", "rolled back", "in doubt"}
                if t.status == "rolled back":
                    without_effect.add(number)
                await settle(db)
                a, b = await db.multi_get(["a", "b"])
                assert a == b
                assert a in {0, *begun} - without_effect
                if t.status == "committed":
                    assert a == number
                await db.multi_put({"c": number, "d": number})

            assert await cancelled(transact, check) > 12
            statuses = {t.status for t in transactions}
            assert statuses == {"committed", "rolled back", "in doubt"}

    asyncio.run(main())


def test_cancelled_retries_change_a_value_once_or_never(coordinator: logdb.Coordinator) -> None:
    async def main() -> None:
        async with (
            watched(coordinator.endpoint) as db,
            logdb.aio.connect(coordinator.endpoint) as other,
        ):
            await db.put("n", 0)
            attempts: list[logdb.aio.Transaction] = []

            async def increment(t: logdb.aio.Transaction) -> None:
                attempts.append(t)
                found = await t.get("n")
                if len(attempts) == 1:
                    await other.put("n", found + 1000)
                t.put("n", found + 1)

            async def run() -> None:
                attempts.clear()
                await db.run(increment)

            former = 0

            async def check() -> None:
                nonlocal former
                await settle(db)
                await settle(other)
                found = await db.get("n")
                last = attempts[-1].status
                allowed = {"committed": {1}, "in doubt": {0, 1}}.get(last, {0})
                assert (found - former) % 1000 in allowed
                former = found

            assert await cancelled(run, check) > 15

    asyncio.run(main())


def test_cancelled_writes_snapshots_and_watches_leave_nothing_open(
    coordinator: logdb.Coordinator,
) -> None:
    begun: list[int] = []

    async def main() -> None:
        async with watched(coordinator.endpoint) as db:

            async def call() -> None:
                number = len(begun) + 1
                begun.append(number)
                await db.multi_put({"a": number, "b": number})
                async with db.snapshot() as snapshot:
                    assert await snapshot.multi_get(["a", "b"]) == [number, number]
                    assert len([row async for row in snapshot.scan()]) == 2
                async with db.watch("a") as values:
                    assert await anext(values) == number
                assert await db.test_and_multi_put({"a": number}, {"a": -number, "b": -number})
                await db.get("a")
                assert len([row async for row in db.scan()]) == 2

            async def check() -> None:
                await settle(db)
                a, b = await db.multi_get(["a", "b"])
                assert a == b
                assert a is None or abs(a) in begun

            assert await cancelled(call, check) > 25

    asyncio.run(main())


def test_cancelled_connect_leaves_nothing_open(coordinator: logdb.Coordinator) -> None:
    async def main() -> None:
        async with watched(coordinator.endpoint) as db:
            before = sockets()

            async def connect() -> None:
                async with logdb.aio.connect(coordinator.endpoint) as other:
                    await other.get("k")

            async def check() -> None:
                await settle(db)
                await until(lambda: sockets() <= before, "its sockets are closed")

            assert await cancelled(connect, check) > 6

    asyncio.run(main())


def sockets() -> int:
    """Return the number of open sockets of this process."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # Closed meanwhile.
            found += str(link.readlink()).startswith("socket:")
    return found
