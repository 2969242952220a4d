"""Streams from `latest`: every later insert comes after their start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spark_reader.options import SERVERS, TIMEOUT, parse
from spark_reader.sources import source_of
from tests.unit.spark_reader.logs import TIMEOUT_S
from ziplog import RecordId, policy
from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ziplog import Log

#: Long epochs, so that an idle shard owns positions of the epoch in which the others are.
EPOCH_MS = 60_000


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "log", shards=2, epoch_ms=EPOCH_MS) as running:
        yield running


def insert(log: Log, shard: int, count: int) -> list[RecordId]:
    log.set_policy(policy.pin(shard))
    return log.insert_many([b"record"] * count)


def latest_decided(cluster: Cluster) -> int:
    named = {SERVERS: cluster.endpoint, TIMEOUT: str(TIMEOUT_S)}
    with source_of(parse(named)).open() as session:
        return session.latest_decided()


def test_later_inserts_at_an_idle_shard_come_after_latest(cluster: Cluster) -> None:
    assert latest_decided(cluster) == 1
    with cluster.connect(timeout=TIMEOUT_S) as log:
        filled, other = insert(log, 0, 100), insert(log, 1, 1)
        if other[0] > filled[-1]:
            # An epoch ended between the two; the next one has just begun.
            filled, other = insert(log, 0, 100), insert(log, 1, 1)
        assert other[0] < filled[-1], "that shard has positions before the tail"
        begin = latest_decided(cluster)
        assert begin == filled[-1].gsn + 1
        assert all(rid.gsn >= begin for shard in (1, 0) for rid in insert(log, shard, 10))


def test_removed_shards_and_trims_do_not_block_latest(cluster: Cluster) -> None:
    with cluster.connect(timeout=TIMEOUT_S) as log:
        insert(log, 1, 10)
        log.remove_shard(1)
        filled = insert(log, 0, 10)
        begin = latest_decided(cluster)
        assert begin == filled[-1].gsn + 1
        log.trim(RecordId(begin + 5, 0))
        assert latest_decided(cluster) == begin + 5
