"""Pairs trading: prices of stocks, and a signal when two that move together drift apart.

    cd examples; python -m speculation.trading [subscribe|speculate]

A stock's prices go to one shard. The application needs the order across shards: a signal compares
the newest prices of two stocks, and two replicas must find the same signals. The relation of a pair
is a linear regression that each price updates.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Final

import msgspec

from speculation.application import Application, Effect, Former, encoded

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Each stock with an even number moves with the next one.
STOCKS: Final = 20
#: The weight of the newest prices of a pair.
_WEIGHT: Final = 0.02
#: Prices of a pair before it may give a signal.
_LEARNED: Final = 50
_DEVIATIONS: Final = 3.0


class Price(msgspec.Struct, array_like=True):
    """The price of a stock now."""

    stock: int
    price: float


class Trading(Application):
    """The pairs, with their last prices and how they move together.

    The row of a pair: number of prices, the last price of each stock, the means of x, y, x*x and
    x*y, and the variance of what the line does not explain.
    """

    def __init__(self, *, compute_ms: float = 0.8, is_busy: bool = False) -> None:
        """Begin without a price; a batch of SpecLog's application takes 0.8 ms."""
        super().__init__(
            "prices", "x", "y", "mx", "my", "mxx", "mxy", "variance",
            compute_ms=compute_ms, is_busy=is_busy,
        )  # fmt: skip
        self._decode: Final = msgspec.msgpack.Decoder(Price).decode

    def on_record(self, payload: bytes) -> Effect:
        """Compare a pair's prices with their relation, then learn from them."""
        price = self._decode(payload)
        pair, is_second = divmod(price.stock, 2)
        row = self.table.get(pair)
        if row is None:
            first = (0.0, price.price) if is_second else (price.price, 0.0)
            return Effect([self.table.put(pair, 0, *first, 0, 0, 0, 0, 0)], None)
        count, x, y, *means, variance = row
        x, y = (x, price.price) if is_second else (price.price, y)
        if not x or not y:
            return Effect([self.table.put(pair, 0, x, y, 0, 0, 0, 0, 0)], None)
        if not count:
            return Effect([self.table.put(pair, 1, x, y, x, y, x * x, x * y, 0)], None)
        return self._learn(pair, count, (x, y), means, variance)

    def _learn(
        self,
        pair: int,
        count: int,
        prices: tuple[float, float],
        means: list[float],
        variance: float,
    ) -> Effect:
        """Update the regression of a pair."""
        x, y = prices
        news = (x, y, x * x, x * y)
        means = [m + _WEIGHT * (new - m) for m, new in zip(means, news, strict=True)]
        mx, my, mxx, mxy = means
        spread = mxx - mx * mx
        slope = (mxy - mx * my) / spread if spread > 0 else 0.0
        gap = y - my - slope * (x - mx)
        output = None
        if count >= _LEARNED and abs(gap) > _DEVIATIONS * math.sqrt(variance):
            order = "sell" if gap > 0 else "buy"
            output = f"pair {pair}: {order} the second at {y:.2f}, {abs(gap):.2f} apart"
        variance += _WEIGHT * (gap * gap - variance)
        former: Former = self.table.put(pair, count + 1, x, y, *means, variance)
        return Effect([former], output)


def records(count: int, seed: int) -> Iterator[tuple[bytes, int]]:
    """Yield payloads and the keys that choose their shards: made-up prices of pairs."""
    chance = random.Random(seed)  # noqa: S311 - test data
    common = [100.0 + pair for pair in range(STOCKS // 2)]
    for _ in range(count):
        stock = chance.randrange(STOCKS)
        pair, is_second = divmod(stock, 2)
        common[pair] *= math.exp(chance.gauss(0, 0.002))
        price = common[pair] * (1.5 if is_second else 1.0) * math.exp(chance.gauss(0, 0.001))
        yield encoded(Price(stock, price)), stock


if __name__ == "__main__":
    from speculation.command import main

    main(__doc__, Trading, records)
