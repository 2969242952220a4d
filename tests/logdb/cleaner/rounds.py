"""What tests of the cleaner begin with: writes by chance, turns, and a start from what is left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from logdb.records import (
    decode,
)
from tests.logdb.small import SMALL, Oracle, Small

if TYPE_CHECKING:
    import random

    from tests.logdb.fakelog import FakeLog

KEYS = [b"k%02d" % i for i in range(12)]
#: Never due by itself.
NEVER_DUE = msgspec.structs.replace(SMALL, every_records=10**9, min_dead_bytes=10**9)


class KilledError(Exception):
    """The process ends here."""


def overwrite(oracle: Oracle, rng: random.Random, count: int) -> None:
    """Write some transactions: small and large ones, deletions, several keys at once."""
    for _ in range(count):
        keys = rng.sample(KEYS, rng.randint(1, 3))
        writes = {
            key: None if rng.random() < 0.1 else rng.randbytes(rng.randint(0, 90)) for key in keys
        }
        oracle.write(writes, inline=rng.random() < 0.6)
        oracle.note()


def run(small: Small, oracle: Oracle, turns: int) -> None:
    for _ in range(turns):
        oracle.note()
        small.turn()
        oracle.note()


def records(log: FakeLog, kind: type) -> list[Any]:
    found = [decode(log.records[gsn].payload) for gsn in log.gsns]
    return [each for each in found if isinstance(each, kind)]


def begin_anew(log: FakeLog, oracle: Oracle, name: str, settings_: Any = NEVER_DUE) -> Small:
    """Start another coordinator, and see that it has everything."""
    small = Small(log, name, settings_)
    small.settle()
    assert small.error is None, small.error
    oracle.check(small.state)
    return small
