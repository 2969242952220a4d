"""Intrusion detection: readings of sensors, and an alert for each that is far from its usual ones.

    cd examples; python -m speculation.intrusion [subscribe|speculate]

The sensors of a group write to one shard, and a task for that shard needs no order with the
others: it reads its shard only (`shards=`). The usual value of a sensor is a moving mean, its
spread a moving variance.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Final

import msgspec

from speculation.application import Application, Effect, encoded

if TYPE_CHECKING:
    from collections.abc import Iterator

SENSORS: Final = 20
#: The weight of the newest reading.
_WEIGHT: Final = 0.05
#: Readings of a sensor before it may raise an alert.
_LEARNED: Final = 20
_DEVIATIONS: Final = 6.0
#: Probability of a reading that no sensor should have.
_INTRUSION: Final = 0.005


class Reading(msgspec.Struct, array_like=True):
    """A reading of a sensor."""

    sensor: int
    value: float


class Intrusion(Application):
    """The sensors of one group, with their usual values."""

    def __init__(self, *, compute_ms: float = 1.4, is_busy: bool = False) -> None:
        """Begin without a reading; a batch of SpecLog's application takes 1.4 ms."""
        super().__init__("readings", "mean", "variance", compute_ms=compute_ms, is_busy=is_busy)
        self._decode: Final = msgspec.msgpack.Decoder(Reading).decode

    def on_record(self, payload: bytes) -> Effect:
        """Compare a reading with the usual ones, then learn from it."""
        reading = self._decode(payload)
        readings, mean, variance = self.table.get(reading.sensor) or (0, reading.value, 0.0)
        distance = reading.value - mean
        output = None
        if readings >= _LEARNED and abs(distance) > _DEVIATIONS * math.sqrt(variance):
            output = f"sensor {reading.sensor} reads {reading.value:.2f}, usually {mean:.2f}"
        mean += _WEIGHT * distance
        variance = (1 - _WEIGHT) * (variance + _WEIGHT * distance**2)
        return Effect([self.table.put(reading.sensor, readings + 1, mean, variance)], output)


def records(count: int, seed: int) -> Iterator[tuple[bytes, int]]:
    """Yield payloads and the keys that choose their shards: made-up readings, some far off."""
    chance = random.Random(seed)  # noqa: S311 - test data
    for number in range(count):
        sensor = chance.randrange(SENSORS)
        value = 20 + 5 * math.sin(number / 500) + sensor / 10 + chance.gauss(0, 0.3)
        if chance.random() < _INTRUSION:
            value += 30
        yield encoded(Reading(sensor, value)), sensor


if __name__ == "__main__":
    from speculation.command import main

    main(__doc__, Intrusion, records)
