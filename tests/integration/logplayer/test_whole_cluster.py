"""Processes of a player while the whole cluster restarts, and while its shards come and go."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.integration.logplayer.playing import (
    Filled,
    Process,
    assert_exactly_once,
    history,
    insert,
)
from tests.waiting import wait_until
from ziplog.local import Cluster

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.timeout(300), pytest.mark.nightly]


def play(cluster: Cluster, filled: Filled) -> None:
    """Insert some records, and wait until the database has them."""
    with cluster.connect(timeout=60.0) as log:
        had = filled.count()
        insert(log, 300)
        wait_until(lambda: filled.count() >= had + 300, "the records arrive", 60)


def test_delivery_continues_after_a_restart_and_with_other_shards(tmp_path: Path) -> None:
    """No operator helps the processes, one of which is killed before the end."""
    directory = tmp_path / "log"
    with Cluster(directory, shards=2, mms=3) as cluster, cluster.connect(timeout=60.0) as log:
        start = insert(log, 10)[0]
        filled = Filled(tmp_path, log, "whole", start, partitions=3)
        first, second = Process(filled.file), Process(filled.file)
        first.ready()
        second.ready()
        wait_until(lambda: filled.count() == 10, "the first records arrive", 60)
    with first, second, Cluster(directory) as cluster:
        play(cluster, filled)
        cluster.add_shard()
        play(cluster, filled)
        cluster.remove_shard(0)
        first.send(signal.SIGKILL)
        play(cluster, filled)
        with cluster.connect(timeout=60.0) as log:
            assert_exactly_once(filled.rows(), history(log, start))
        assert second.stop()[0] == 0
