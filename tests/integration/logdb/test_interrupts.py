"""A caller of the database is interrupted at every step: no row and no read is lost."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

import logdb
import logdb.aio
from logdb.client import scanning, transaction
from logdb.client.requests import SnapshotId, SnapshotRequest
from tests.cancelling import Canceller, cancelled
from tests.interrupts import SIGNAL, Struck, interrupted, strike
from tests.waiting import explicit_collections, wait_until
from ziplog.client.engines.signals import SHIELD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ziplog.core.node import Effect

_ROWS = [(f"k{number}", number) for number in range(4)]


@pytest.fixture(autouse=True)
def explicit() -> Iterator[None]:
    with explicit_collections():
        yield


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "PAGE_ROWS", 2)
    monkeypatch.setattr(transaction, "PAGE_ROWS", 2)


@pytest.fixture
def db(coordinator: logdb.Coordinator) -> Iterator[logdb.Database]:
    with logdb.connect(coordinator.endpoint) as db:
        with db.transaction() as t:
            for key, _ in db.scan(b""):
                t.delete(key)
        db.multi_put(dict(_ROWS))
        yield db


def settle(db: logdb.Database) -> None:
    gc.collect(0)
    shared, core = db._engine._shared, db._engine.core
    # The commit of an interrupted call goes on; calls receive its end.
    wait_until(lambda: db.exists("k0") and not core._tasks, "the end of interrupted calls")
    core.check()
    assert not shared._tickets
    assert not shared._role.locked()
    assert len(shared.owners) == 0
    assert SHIELD._owner is None


@pytest.mark.nightly
def test_a_scan_loses_and_repeats_nothing(db: logdb.Database) -> None:
    got: list[Any] = []

    def run() -> None:
        got.clear()
        rows: Any = None
        while True:
            with suppress(Struck):
                rows = rows or db.scan()
                got.extend(rows)
                return

    def check() -> None:
        assert got == _ROWS
        settle(db)

    assert interrupted(run, check) > 200
    wait_until(lambda: db.status()["snapshots"] == 0, "no snapshot is left")


def test_the_snapshot_of_an_interrupted_call_is_released(
    db: logdb.Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reply comes after the interrupt, and before the client cancels the call."""
    engine, core = db._engine._shared.engine, db._engine.core
    step_call, handle = core.step_call, engine.handle
    #: The frames that arrived before the interrupt.
    held: deque[tuple[bytes, bytes]] = deque()
    former = signal.signal(SIGNAL, strike)

    def struck(number: int, request: Any, now: int) -> list[Effect]:
        effects = step_call(number, request, now)
        if type(request) is SnapshotRequest:
            signal.raise_signal(SIGNAL)
        return effects

    try:
        monkeypatch.setattr(core, "step_call", struck)
        monkeypatch.setattr(engine, "handle", lambda *frame: held.append(frame))
        with pytest.raises(Struck):
            db.snapshot()
    finally:
        signal.signal(SIGNAL, former)
    (call,) = core._tasks

    def late() -> None:
        while held:
            handle(*held.popleft())
        while call in core._tasks:
            engine._receive_all()

    monkeypatch.setattr(engine, "handle", handle)
    dropped: list[SnapshotId] = []
    monkeypatch.setattr(engine, "catch_up", late)
    monkeypatch.setattr(core, "_drop_snapshot", dropped.append)
    wait_until(lambda: db.status() and dropped, "its snapshot is released")


def test_a_transaction_reads_everything_or_raises(db: logdb.Database) -> None:
    """Whatever is interrupted in it, what it read before counts at its commit."""
    outcome: list[Any] = []

    def run() -> None:
        outcome.clear()
        t: Any = None
        rows: Any = None
        got: list[Any] = []
        values: Any = None
        while t is None:
            with suppress(Struck):
                t = db.transaction()
        while values is None:
            with suppress(Struck):
                values = t.multi_get(["k0", "k1", "absent"])
        while True:
            with suppress(Struck):
                rows = rows or t.scan("k1", "k4")
                got.extend(rows)
                break
        outcome.append((values, got, t))

    def check() -> None:
        ((values, got, t),) = outcome
        assert values == [0, 1, None]
        assert got == _ROWS[1:]
        sets = t._sets
        assert {read.key for read in sets._reads} == set(sets._versions)
        assert len({read.key for read in sets._reads}) == len(sets._reads) == 3
        assert {(r.start, r.stop) for r in sets._ranges} == sets._range_keys
        assert len(sets._ranges) == 2
        db.put("k3", 3)
        with pytest.raises(logdb.TransactionAborted):
            t.validate()
        settle(db)

    assert interrupted(run, check) > 200


def test_a_commit_is_atomic(db: logdb.Database) -> None:
    done: list[int] = []
    begun: list[int] = []

    def run() -> None:
        number = len(begun)
        begun.append(number)
        with suppress(Struck):
            with db.transaction() as t:
                t.put("a", number)
                t.put("b", number)
            done.append(number)

    def check() -> None:
        a, b = db.multi_get(["a", "b"])
        assert a == b
        assert a is None or a in begun
        settle(db)

    assert interrupted(run, check) > 100
    assert db.get("a") >= done[-1]


@pytest.mark.nightly
def test_a_watch_returns_the_last_value(db: logdb.Database) -> None:
    seen: list[Any] = []
    number = 0
    watch: Any = None

    def run() -> None:
        nonlocal number, watch
        number += 1
        while watch is None:
            with suppress(Struck):
                watch = db.watch("w", timeout=10)
        while True:
            with suppress(Struck):
                db.put("w", number)
                break
        # The watch would wait in vain for a lost value.
        seen.clear()
        while seen[-1:] != [number]:
            with suppress(Struck):
                seen.append(next(watch))

    assert interrupted(run, lambda: settle(db)) > 200


def test_an_asyncio_scan_loses_and_repeats_nothing(
    db: logdb.Database, coordinator: logdb.Coordinator
) -> None:
    async def main() -> None:
        async with logdb.aio.connect(coordinator.endpoint) as other:
            got: list[Any] = []

            async def read(rows: Any, step: Canceller) -> None:
                got.clear()
                while True:
                    with suppress(asyncio.CancelledError):
                        try:
                            got.append(await step(anext(rows)))
                        except StopAsyncIteration:
                            return

            async def outside(step: Canceller) -> None:
                await read(other.scan(), step)

            async def inside(step: Canceller) -> None:
                await read(other.transaction().scan(), step)

            async def check() -> None:
                gc.collect(0)
                assert got == _ROWS
                await other.exists("k0")
                other._engine.core.check()
                assert not other._engine.core._tasks
                assert len(other._engine.owners) == 0

            assert await cancelled(outside, check) > 6
            assert await cancelled(inside, check) > 4

    asyncio.run(main())
