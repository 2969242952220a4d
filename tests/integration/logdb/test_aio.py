"""The asyncio client with a real log and a real coordinator."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import logdb
import ziplog
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Body = Callable[[logdb.aio.Database], Awaitable[None]]


@pytest.fixture
def run(coordinator: logdb.Coordinator) -> Callable[[Body], None]:
    """Run a body with an empty database."""

    async def main(body: Body) -> None:
        async with logdb.aio.connect(coordinator.endpoint) as db:
            async with db.transaction() as t:
                async for key, _ in db.scan(b""):
                    t.delete(key)
            await body(db)

    return lambda body: asyncio.run(main(body))


def test_single_reads_and_writes(run: Callable[[Body], None]) -> None:
    async def body(db: logdb.aio.Database) -> None:
        assert await db.get("k", default=0) == 0
        first = await db.put("k", [1, "two"])
        assert await db.get(b"k") == [1, "two"]
        assert await db.exists("k")
        assert await db.delete("k") > first
        assert not await db.exists("k")
        assert await db.multi_put({}) is None
        assert await db.multi_get([]) == []
        await db.multi_put({"a": 1, "b": b"x" * 100_000})
        assert await db.multi_get(["b", "absent", "a"]) == [b"x" * 100_000, None, 1]
        assert await db.test_and_multi_put({"a": 1}, {"a": 2})
        assert not await db.test_and_multi_put({"a": 1}, {"a": 3})
        assert await db.get("a") == 2
        with pytest.raises(logdb.UnsupportedValueError):
            await db.put("k", object())

    run(body)


def test_scans(run: Callable[[Body], None]) -> None:
    async def body(db: logdb.aio.Database) -> None:
        await db.multi_put({f"a{number:04}": number for number in range(1200)})
        assert [value async for _, value in db.scan(prefix="a")] == list(range(1200))
        assert [row async for row in db.scan("a0001", "a0003")] == [("a0001", 1), ("a0002", 2)]
        assert len([row async for row in db.scan(limit=7)]) == 7
        async with db.snapshot() as snapshot:
            await db.put("a0000", "new")
            assert await snapshot.get("a0000") == 0
            assert await snapshot.multi_get(["a0001", "b"]) == [1, None]
            assert await snapshot.exists("a0002")
            assert len([row async for row in snapshot.scan()]) == 1200
            assert snapshot.position.gsn > 0
        with pytest.raises(ziplog.ClosedError, match="take a new one"):
            await snapshot.get("a0000")
        snapshot = await db.snapshot()
        assert await snapshot.get("a0000") == "new"
        await snapshot.close()
        async with await db.snapshot() as snapshot:
            assert await snapshot.get("a0000") == "new"

    run(body)


def test_transactions(run: Callable[[Body], None]) -> None:
    async def body(db: logdb.aio.Database) -> None:
        async with db.transaction() as t:
            assert await t.get("k", default=0) == 0
            t.put("k", 1)
            t.put("l", 1)
            t.delete("l")
            assert await t.multi_get(["k", "l"]) == [1, None]
            assert await t.exists("k")
            assert [row async for row in t.scan()] == [("k", 1)]
        assert t.status == "committed"
        assert t.position is not None
        with pytest.raises(logdb.TransactionClosed):
            await t.get("k")
        t = db.transaction()
        with pytest.raises(ZeroDivisionError):  # noqa: PT012 - it ends by it
            async with t:
                t.put("k", 5)
                raise ZeroDivisionError
        assert t.status == "rolled back"
        t = db.transaction()
        with pytest.raises(logdb.TransactionAborted):  # noqa: PT012 - its end raises
            async with t:
                t.put("k", await t.get("k") + 1)
                await db.put("k", 10)
        assert await db.get("k") == 10

    run(body)


def test_many_tasks_count(run: Callable[[Body], None]) -> None:
    async def body(db: logdb.aio.Database) -> None:
        @db.transactional(retries=10_000)
        async def increment(t: logdb.aio.Transaction, key: str) -> int:
            value: int = await t.get(key, default=0) + 1
            t.put(key, value)
            return value

        found = await asyncio.gather(*(increment("n") for _ in range(20)))
        assert sorted(found) == list(range(1, 21))
        assert await db.get("n") == 20
        await asyncio.gather(*(db.put(f"k{number}", number) for number in range(300)))
        assert sum([value async for _, value in db.scan(prefix="k")]) == sum(range(300))

    run(body)


def test_run_retries_an_error_caused_by_an_outdated_read(
    run: Callable[[Body], None],
) -> None:
    async def body(db: logdb.aio.Database) -> None:
        await db.put("stale", 0)
        seen: list[int] = []

        async def work(t: logdb.aio.Transaction) -> None:
            seen.append(await t.get("stale"))
            if seen == [0]:
                await db.put("stale", 1)
            raise KeyError(seen[-1])

        with pytest.raises(KeyError, match="1"):
            await db.run(work)
        assert seen == [0, 1]

    run(body)


def test_run_ends_after_the_given_retries(run: Callable[[Body], None]) -> None:
    async def body(db: logdb.aio.Database) -> None:
        attempts = 0

        async def overtaken(t: logdb.aio.Transaction) -> None:
            nonlocal attempts
            attempts += 1
            await t.get("k")
            await db.put("k", attempts)
            t.put("k", -1)

        with pytest.raises(logdb.TransactionAborted):
            await db.run(overtaken, retries=3)
        assert attempts == 4

    run(body)


def test_a_plain_function_may_write(run: Callable[[Body], None]) -> None:
    async def body(db: logdb.aio.Database) -> None:
        assert await db.run(lambda t: t.put("k", 1)) is None
        assert await db.run(lambda t: t.get("k"), 10) == 1

        @db.transactional
        def write(t: logdb.aio.Transaction, value: int) -> int:
            t.put("k", value)
            return value

        assert await write(5) == 5
        assert await db.get("k") == 5

    run(body)


def test_a_watch_is_closed_by_another_task(run: Callable[[Body], None]) -> None:
    async def body(db: logdb.aio.Database) -> None:
        values = db.watch("never")
        assert await anext(values) is None
        waiting = asyncio.create_task(anext(values, "closed"))  # type: ignore[arg-type]
        await until(lambda: db._engine.core._tasks, "it waits")
        await values.close()
        assert await asyncio.wait_for(waiting, 20) == "closed"
        await values.close()

    run(body)


def test_reads_of_one_transaction_at_once(run: Callable[[Body], None]) -> None:
    async def body(db: logdb.aio.Database) -> None:
        await db.multi_put({f"k{number}": number for number in range(20)})
        async with db.transaction() as t:
            found = await asyncio.gather(*(t.get(f"k{number}") for number in range(20)))
            assert found == list(range(20))
            t.put("sum", sum(found))
        assert await db.get("sum") == sum(range(20))

    run(body)


def test_a_watch(run: Callable[[Body], None]) -> None:
    async def body(db: logdb.aio.Database) -> None:
        seen: list[Any] = []
        is_begun = asyncio.Event()

        async def watch() -> None:
            async with db.watch("k", default="absent") as values:
                async for value in values:
                    seen.append(value)
                    is_begun.set()
                    if value == "last":
                        return

        task = asyncio.create_task(watch())
        await is_begun.wait()
        await db.put("k", "last")
        await asyncio.wait_for(task, 20)
        assert seen == ["absent", "last"]
        values = db.watch("k", timeout=2)
        assert await anext(values) == "last"
        with pytest.raises(ziplog.DeadlineError):
            await anext(values)
        await values.close()
        assert [value async for value in values] == []

    run(body)


def test_cancelled_calls_leave_nothing_open(run: Callable[[Body], None]) -> None:
    async def body(db: logdb.aio.Database) -> None:
        values = db.watch("k")
        await anext(values)
        task = asyncio.create_task(anext(values))  # type: ignore[arg-type]
        put = asyncio.create_task(db.put("k", 1))
        await until(lambda: len(db._engine.core._tasks) == 2, "both are under way")
        # Both before one is waited for: meanwhile the other might end.
        for under_way in (task, put):
            under_way.cancel()
        for cancelled in (task, put):
            with pytest.raises(asyncio.CancelledError):
                await cancelled
        assert not db._engine.core._tasks
        assert await db.get("k") in {None, 1}

    run(body)


def test_connect_and_close(coordinator: logdb.Coordinator) -> None:
    async def main() -> None:
        db = await logdb.aio.connect(coordinator.endpoint)
        assert (await db.status())["endpoint"] == coordinator.endpoint
        assert db.stats()["protocol_errors"] == 0
        assert "logdb.aio" in repr(db)
        values = db.watch("k")
        await anext(values)
        waiting = asyncio.create_task(anext(values))  # type: ignore[arg-type]
        await until(lambda: db._engine.core._tasks, "it waits")
        await db.close()
        await db.close()
        with pytest.raises(ziplog.ClosedError):
            await waiting
        with pytest.raises(ziplog.ClosedError):
            await db.get("k")
        for refused in (db.multi_put({}), db.run(lambda _: None), db.__aenter__(), db.snapshot()):
            with pytest.raises(ziplog.ClosedError):
                await refused
        for call in (db.transaction, db.scan, lambda: db.watch("k")):
            with pytest.raises(ziplog.ClosedError):
                call()
        with pytest.raises(ziplog.UnavailableError):
            await logdb.aio.connect("127.0.0.1:1", timeout=0.1)
        with pytest.raises(ziplog.ConfigError):
            await logdb.aio.connect("nonsense")

    asyncio.run(main())


def test_a_commit_with_unknown_outcome_resolves(log: ziplog.Log) -> None:
    coordinator = logdb.Coordinator(log)
    port = int(coordinator.endpoint.rpartition(":")[2])

    async def main() -> None:
        async with logdb.aio.connect(coordinator.endpoint) as db:
            await db.put("doubt", 1)
            # One sign of life and then silence: the record gets into the log.
            db._engine.core._coordinators._last_reply[db._engine.core._coordinators._current] = (
                2**62
            )
            coordinator.close()
            with pytest.raises(ziplog.OutcomeUnknownError) as caught:
                await db.put("doubt", 2, timeout=0.5)
            with logdb.Coordinator(log, port=port):
                assert isinstance(await caught.value.resolve(), ziplog.RecordId)
                assert await db.get("doubt") == 2

    asyncio.run(main())
