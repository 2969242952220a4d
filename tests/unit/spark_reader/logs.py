"""Small test clusters with some records, and the records that a subscription delivers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pyspark.serializers import CloudPickleSerializer

from spark_reader.options import SERVERS, parse
from spark_reader.sources import source_of
from tests.waiting import wait_until
from ziplog import RID_GENESIS, RecordId, policy
from ziplog.archive.client import ArchiveClient
from ziplog.errors import UnavailableError
from ziplog.local import Cluster
from ziplog.segments.blocks import Block

if TYPE_CHECKING:
    from pathlib import Path

    from spark_reader.reading import Source
    from ziplog import Log, Record

#: Generous: a shard may be unavailable for some seconds.
TIMEOUT_S = 60
#: A record as a row: gsn, shard, value, key, epoch.
Key = tuple[int, int, bytes, bytes | None, int]

_MIB = 1024 * 1024


def small_cluster(directory: Path, f: int = 1) -> Cluster:
    """Start a cluster of two shards with segments of minimum size."""
    return Cluster(directory, f=f, settings={"segment_bytes": _MIB})


def await_archives(log: Log, servers: int = 2) -> None:
    """Wait until `servers` servers of each of shards 0 and 1 serve the first block of their shard.

    An archive builds blocks only while the processor is idle.
    """
    for shard in (0, 1):
        wait_until(
            lambda shard=shard: _served(log, shard) >= servers,  # type: ignore[misc]
            "no archive serves sealed segments",
            deadline_s=150,
        )


def _served(log: Log, shard: int) -> int:
    served = 0
    for host, port in log.outline(shard, 1, 2).archives:
        with ArchiveClient(host, port, log.cluster_number, shard) as archive:
            try:
                served += isinstance(archive.block(1), Block)
            except UnavailableError:
                return 0
    return served


def fill(cluster: Cluster, count: int, size: int = 4000) -> None:
    """Insert `count` records of random bytes at each shard, and as many short ones with a key."""
    with cluster.connect(timeout=TIMEOUT_S) as log:
        for shard in (0, 1):
            log.set_policy(policy.pin(shard))
            log.insert_many([os.urandom(size) for _ in range(count)])
            log.insert_many([b"%d" % at for at in range(count)], key=b"k%d" % shard)


def fill_named(cluster: Cluster, name: str, count: int, size: int = 0) -> list[bytes]:
    """Insert `count` records `NAME NUMBER ...` at both shards; return their payloads."""
    payloads = [b"%s %d " % (name.encode(), number) + b"." * size for number in range(count)]
    with cluster.connect(timeout=TIMEOUT_S) as log:
        for shard in (0, 1):
            log.set_policy(policy.pin(shard))
            mine = payloads[shard::2]
            for at in range(0, len(mine), 1000):
                log.insert_many(mine[at : at + 1000], key=b"k%d" % shard)
    return payloads


def as_sent(source: Source) -> Source:
    """Return a source as Spark sends it to a task."""
    spark = CloudPickleSerializer()
    sent: Source = spark.loads(spark.dumps(source))
    return sent


def tail(cluster: Cluster) -> RecordId:
    """Return a position before which nothing is inserted from now on."""
    named = {SERVERS: cluster.endpoint, "timeout": str(TIMEOUT_S)}
    with source_of(parse(named)).open() as session:
        return RecordId(session.latest_decided(), 0)


def subscribed(cluster: Cluster, begin: RecordId = RID_GENESIS) -> list[Record]:
    """Return the records of a subscription from a position, or from the start of the log."""
    with cluster.connect(timeout=TIMEOUT_S) as log, log.subscribe(begin, follow=False) as records:
        return list(records)


def placed(cluster: Cluster, begin: RecordId) -> int:
    """Return how many records are in the log from there on, repetitions too."""
    count = 0
    with cluster.connect(timeout=TIMEOUT_S) as log:
        stop = log.check_tail().gsn + 1
        for extent in log.extents(begin.gsn, stop).shards:
            with log.scan(extent.shard, extent.start, extent.stop) as scan:
                count += sum(len(unit.gsns) for units, _ in scan for unit in units)
    return count


def as_key(record: Record) -> Key:
    """Return a record as a row."""
    return (*record.rid, record.payload, record.key, record.epoch)
