"""The plan of a LogDB benchmark run: target, workload, number of keys, seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Number of keys in the YCSB workloads.
YCSB_KEYS: Final = 100_000


@dataclass(frozen=True)
class Plan:
    """Workload, target and seed that all clients of a run share."""

    #: "logdb" or "redis".
    target: str
    #: The coordinators, or the port of Redis.
    endpoint: str
    #: "counters", or a mix and a distribution of YCSB: "A zipfian".
    workload: str = "counters"
    #: LogDB: the commit record contains small writes.
    is_inline: bool = True
    #: LogDB: the minimum duration of an insert in microseconds; 0: no delay.
    hold_us: int = 0
    #: Redis: the client waits until the replica has the write.
    is_waiting: bool = False
    keys: int = YCSB_KEYS
    seed: int = 1
