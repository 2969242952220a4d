"""Fraud detection: purchases of customers, and a flag for each that is far above the usual ones.

    cd examples; python -m speculation.fraud [subscribe|speculate]

Purchases arrive at any shard. A task takes a share of the customers: it reads all records and
ignores those of others.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import msgspec

from speculation.application import Application, Effect, encoded

if TYPE_CHECKING:
    from collections.abc import Iterator

CUSTOMERS: Final = 400
#: Purchases of a customer before one of them may be flagged.
_LEARNED: Final = 5
#: A purchase of so many times the usual amount is flagged.
_FACTOR: Final = 8
#: Probability of a fraud.
_FRAUD: Final = 0.003


class Purchase(msgspec.Struct, array_like=True):
    """A purchase of a customer."""

    customer: int
    cents: int


class Fraud(Application):
    """One task: a share of the customers, with what they spent."""

    def __init__(
        self,
        *,
        task: int = 0,
        tasks: int = 1,
        compute_ms: float = 2.2,
        is_busy: bool = False,
    ) -> None:
        """Begin without a purchase; a batch of SpecLog's application takes 2.2 ms.

        Args:
            task: this task's number, from 0.
            tasks: the number of all tasks.
            compute_ms: time that a batch takes besides.
            is_busy: spend that time computing, not asleep.

        """
        super().__init__("purchases", "total", "flags", compute_ms=compute_ms, is_busy=is_busy)
        self._task: Final = task
        self._tasks: Final = tasks
        self._decode: Final = msgspec.msgpack.Decoder(Purchase).decode

    def on_record(self, payload: bytes) -> Effect:
        """Compare a purchase with the customer's earlier ones."""
        purchase = self._decode(payload)
        customer, cents = purchase.customer, purchase.cents
        if customer % self._tasks != self._task:
            return Effect([], None)
        purchases, total, flags = self.table.get(customer) or (0, 0, 0)
        if purchases >= _LEARNED and cents * purchases > _FACTOR * total:
            usual = total / purchases / 100
            output = f"customer {customer} spends {cents / 100:.2f}, usually {usual:.2f}"
            # A flagged purchase is not usual.
            return Effect([self.table.put(customer, purchases, total, flags + 1)], output)
        return Effect([self.table.put(customer, purchases + 1, total + cents, flags)], None)


def records(count: int, seed: int) -> Iterator[tuple[bytes, None]]:
    """Yield payloads, each for any shard: made-up purchases, a few of them fraud."""
    chance = random.Random(seed)  # noqa: S311 - test data
    for _ in range(count):
        customer = int(CUSTOMERS * chance.random() ** 2)
        cents = int(1000 + 20 * customer + chance.expovariate(1 / 1500))
        if chance.random() < _FRAUD:
            cents *= 25
        yield encoded(Purchase(customer, cents)), None


if __name__ == "__main__":
    from speculation.command import main

    main(__doc__, Fraud, records)
