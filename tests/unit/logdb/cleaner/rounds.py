"""Helpers of the cleaner's tests: random writes, steps, and restarts from the rest of the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from logdb.records import (
    decode,
)
from tests.unit.logdb.small import SMALL, Oracle, Small

if TYPE_CHECKING:
    import random

    from tests.unit.logdb.fakelog import FakeLog

KEYS = [b"k%02d" % i for i in range(12)]
#: Settings with which no round is due.
NEVER_DUE = msgspec.structs.replace(SMALL, every_records=10**9, min_dead_bytes=10**9)


class KilledError(Exception):
    """Simulated end of the process."""


def overwrite(oracle: Oracle, rng: random.Random, count: int) -> None:
    """Write random transactions: small and large values, deletions, several keys at once."""
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
        small.step()
        oracle.note()


def records(log: FakeLog, kind: type) -> list[Any]:
    found = [decode(log.records[gsn].payload) for gsn in log.gsns]
    return [each for each in found if isinstance(each, kind)]


def restart(log: FakeLog, oracle: Oracle, name: str, settings_: Any = NEVER_DUE) -> Small:
    """Start another coordinator, and check that it has the whole state."""
    small = Small(log, name, settings_)
    small.settle()
    assert small.error is None, small.error
    oracle.check(small.state)
    return small
