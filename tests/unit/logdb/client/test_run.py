"""Retries of transactions: `run` repeats a function only if its transaction had no effect."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from logdb.client.async_base import AsyncTransactions
from logdb.client.backoff import Backoff
from logdb.client.blocking_base import Transactions
from logdb.errors import TransactionAborted
from tests.unit.logdb.client.fakes import FakeDatabase

if TYPE_CHECKING:
    from collections.abc import Generator

    import logdb
    from logdb import aio
    from ziplog.client.common.requests import Request

T = TypeVar("T")

LARGEST = 1 << 20


class FakeEngine:
    """The engine of a blocking database, on a fake database."""

    def __init__(self, db: FakeDatabase) -> None:
        self.db = db

    def check_open(self) -> None:
        pass

    def backoff(self, retries: int | None, _timeout: float | None) -> Backoff:
        return Backoff(retries)

    def deadline_ns(self, _timeout: float | None = None) -> int:
        return self.db.harness.until()

    def run(self, steps: Generator[Request, Any, T]) -> T:
        return self.db.drive(steps)


class FakeAsyncEngine(FakeEngine):
    """The same for an asyncio database."""

    async def run(self, steps: Generator[Request, Any, T]) -> T:  # type: ignore[override]
        return self.db.drive(steps)


def test_a_committed_transaction_is_not_repeated() -> None:
    db = FakeDatabase().open()
    engine: Any = FakeEngine(db)

    def function(transaction: logdb.Transaction) -> None:
        transaction.put(b"k", 1)
        transaction.commit()
        raise TransactionAborted([b"of another transaction"])

    with pytest.raises(TransactionAborted):
        Transactions(engine, LARGEST).run(function, retries=2)
    assert len(db.commits()) == 1


def test_a_committed_asyncio_transaction_is_not_repeated() -> None:
    db = FakeDatabase().open()
    engine: Any = FakeAsyncEngine(db)

    async def function(transaction: aio.Transaction) -> None:
        transaction.put(b"k", 1)
        await transaction.commit()
        raise TransactionAborted([b"of another transaction"])

    with pytest.raises(TransactionAborted):
        asyncio.run(AsyncTransactions(engine, LARGEST).run(function, retries=2))
    assert len(db.commits()) == 1
