"""A player of a log at durability level `memory`, of which all servers of a shard die at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import logplayer
from logplayer import targets
from tests.integration.logplayer.playing import LEASE_S, Filled, history, insert
from tests.waiting import wait_until
from ziplog.errors import ZiplogError
from ziplog.local import Cluster
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from pathlib import Path

    import ziplog

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]
#: An insert is on a disk so late that a crash loses it.
_SLOW_FLUSH = {"flush_interval_ms": 10_000}
_STATEMENT = "INSERT INTO events VALUES (:gsn, :key_text, :text)"


def _crash(cluster: Cluster, shard: int) -> None:
    """Kill all servers of a shard at once; what they had not flushed is not on their disks."""
    names = [node.name for node in cluster.config.shards[shard].replicas]
    for name in names:
        cluster.kill(name)
    for name in names:
        cluster.restart(name)


def _are_reported(log: ziplog.Log, gone: list[int]) -> bool:
    """Whether the status has the losses; it has them from the return of the shard on."""
    losses = log.cluster()["losses"]
    return all(any(one["start"] <= gsn < one["stop"] for one in losses) for gsn in gone)


def _insert_after_recovery(log: ziplog.Log) -> list[RecordId]:
    found: list[RecordId] = []

    def is_inserted() -> bool:
        try:
            found.extend(insert(log, 100))
        except ZiplogError:
            return False
        return True

    wait_until(is_inserted, "the shard accepts records again", deadline_s=120)
    return found


@pytest.mark.parametrize("shards", [1, 2])
def test_what_was_played_stays_and_what_is_left_is_played_once(tmp_path: Path, shards: int) -> None:
    with (
        Cluster(tmp_path / "log", shards=shards, settings=_SLOW_FLUSH, supervise=False) as cluster,
        cluster.connect(timeout=60) as log,
    ):
        filled = Filled(tmp_path, log, "losses", RID_GENESIS)
        copy = targets.sqlite("copy", filled.path, _STATEMENT)
        player = logplayer.Player(log, "losses", [copy], lease_s=LEASE_S, commit_ms=50)
        with player:
            insert(log, 100)
            log.sync()
            gone: list[int] = []
            while not gone:  # The servers may have flushed just before they were killed.
                before = insert(log, 200)
                player.wait_until(before[-1], timeout=60)
                played = filled.rows()
                _crash(cluster, before[-1].shard)
                last = max(_insert_after_recovery(log))
                player.wait_until(last, timeout=120)
                left = history(log, RID_GENESIS)
                gone = [gsn for gsn, _, _ in played if gsn not in {one[0] for one in left}]
            (task,) = player.status()["tasks"]
            assert task["state"] == "playing"
        rows = filled.rows()
        assert rows[: len(played)] == played, "what was played stays"
        gsns = [gsn for gsn, _, _ in rows]
        assert gsns == sorted(set(gsns)), "each record once, in order"
        assert set(left) <= set(rows), "what is left is played"
        wait_until(lambda: _are_reported(log, gone), "the losses are reported", deadline_s=60)
