"""Insert latency at level `disk`: one client, 4 KB, f=1, beside the flush of two disks, and Redis.

The *floor* is `TcpFloor` whose servers append what they receive to a file, and flush it
(`fdatasync`), before they return it. All files are on one disk, those of the floor and those of the
cluster. Redis flushes before each reply (`appendfsync always`), at both servers; its `WAIT` returns
when the replica has the entry in memory.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from metrics.setup import cluster

from log_bench.baselines import DiskFloor
from log_bench.latency import ZiplogTarget, compare
from log_bench.other_systems import DurableRedis

if TYPE_CHECKING:
    from log_bench.latency import Target

Figures = dict[str, Any]

_SIZE: Final = 4096


def measure(rounds: int, count: int) -> Figures:
    """Time inserts of one client; `ratio`: Ziplog's medians over the target's, by rounds."""
    payload = os.urandom(_SIZE)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ziplog-bench-"))
        running = stack.enter_context(cluster(durability="disk"))
        targets: list[Target] = [
            ZiplogTarget(stack.enter_context(running.connect())),
            stack.enter_context(DiskFloor(_SIZE, folder)),
        ]
        if DurableRedis.is_installed():
            targets.append(stack.enter_context(DurableRedis()))
        return {"size": _SIZE, "targets": compare(targets, payload, rounds, count)}
