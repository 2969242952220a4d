"""A cluster that behaves as it does after minutes of load: full record caches, and a bounded log.

Until a storage server's record cache is full (`cache_bytes`), it keeps each record in new memory. A
new page costs a page fault, and in a virtual machine the host has to provide it as well. The same
holds for the page cache while the log's files grow. So the caches are filled first, and a process
trims the log meanwhile: servers reuse memory. (The stream of Redis is bounded as well: `MAXLEN`.)
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import ziplog
from metrics.setup import cluster
from metrics.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from ziplog.local import Cluster

_SIZE: Final = 4096
#: Inserts at a shard, as a multiple of what its servers' caches hold.
_FILL: Final = 1.25
#: Seconds between two trims. The records of the last one to two intervals stay.
_TRIM_S: Final = 1.0


@contextmanager
def steady_cluster(shards: int = 1, **options: Any) -> Iterator[Cluster]:
    """Run a cluster as `metrics.setup.cluster` does, with full caches; its log is trimmed."""
    with cluster(shards, **options) as running, Workers(_trim, [(running.endpoint,)]):
        _fill_caches(running)
        yield running


def _fill_caches(cluster: Cluster) -> None:
    """Insert single records at each shard until its servers' caches are full."""
    count = int(_FILL * cluster.config.cache_bytes) // _SIZE
    payload = os.urandom(_SIZE)
    with cluster.connect() as log:
        for shard in cluster.config.shards:
            for _ in range(count):
                log.insert_after(payload, shard=shard.id)


def _trim(endpoint: str, pipe: Connection) -> None:
    """Trim the log up to an earlier tail, again and again."""
    with ziplog.connect(endpoint) as log:
        while True:
            tail = log.check_tail()
            pipe.poll(_TRIM_S)
            log.trim(tail)
