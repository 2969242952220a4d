"""Client processes that insert the feed into the log, pipelined.

Each key belongs to one process. A process inserts its batches in sequence, each after the last
record of its key, so the log has a key's events in the order of the feed, even if its shard fails
between two batches. Bounded: a few batches wait at each process.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import ziplog
from ziplog import policy

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future

    from spark_pipeline.feed import Batch

_SPAWN: Final = multiprocessing.get_context("spawn")
#: Batches that wait, all processes together.
_WAITING: Final = 16
_TIMEOUT_S: Final = 60.0


def insert(bootstrap: str, batches: Iterable[Batch], processes: int) -> None:
    """Insert batches, which are in the order of the feed, from some processes."""
    waiting: deque[Future[None]] = deque()
    turns: dict[str, int] = {}
    with ExitStack() as stack:
        pools = [
            stack.enter_context(
                ProcessPoolExecutor(1, _SPAWN, initializer=_connect, initargs=(bootstrap,))
            )
            for _ in range(processes)
        ]
        for key, payloads in batches:
            pool = pools[turns.setdefault(key, len(turns)) % processes]
            waiting.append(pool.submit(_insert, key, payloads))
            if len(waiting) > _WAITING:
                waiting.popleft().result()
        for rest in waiting:
            rest.result()


# --- in a client process ---

_log: ziplog.Log
_last: dict[str, ziplog.RecordId] = {}


def _connect(bootstrap: str) -> None:
    global _log  # noqa: PLW0603 - of this process
    _log = ziplog.connect(bootstrap, policy=policy.by_key_hash(), timeout=_TIMEOUT_S)


def _insert(key: str, payloads: list[bytes]) -> None:
    rids = _log.insert_many(payloads, _last.get(key, ziplog.RID_GENESIS), key=key)
    _last[key] = rids[-1]
