"""`shard=` of inserts and `shards=` of subscriptions, against real servers."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import ziplog
import ziplog.aio
from tests.waiting import wait_until
from ziplog.errors import ConfigError, DeadlineError, UnavailableError
from ziplog.local import Cluster

if TYPE_CHECKING:
    from pathlib import Path

ZIPLOG = [sys.executable, "-m", "ziplog"]


def ziplog_cli(*arguments: str) -> str:
    return subprocess.run([*ZIPLOG, *arguments], check=True, capture_output=True, text=True).stdout


def test_records_go_to_the_named_shard_and_are_read_from_it_alone(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster, cluster.connect() as log:
        first = log.insert_after(b"a", shard=1)
        more = log.insert_many([b"b", b"c"], first, shard=0)
        last = log.insert_nowait(b"d", more[-1], shard=1).result()
        assert [rid.shard for rid in (first, *more, last)] == [1, 0, 0, 1]
        found = {
            shards: [r.payload for r in log.subscribe(shards=shards, follow=False)]
            for shards in [(0,), (1,), (0, 1)]
        }
        assert found == {(0,): [b"b", b"c"], (1,): [b"a", b"d"], (0, 1): [b"a", b"b", b"c", b"d"]}
        with pytest.raises(ConfigError, match=r"\[9\]"):
            log.subscribe(shards=[0, 9])
        tail = ziplog_cli("tail", "--shard=1", f"--bootstrap={cluster.endpoint}")
        assert tail.splitlines() == [f"{first}\ta", f"{last}\td"]
        inserted = ziplog_cli("insert", "e", "--shard=0", f"--bootstrap={cluster.endpoint}")
        assert inserted.strip().endswith("@0")

        async def follow() -> list[bytes]:
            async with await ziplog.aio.connect(cluster.endpoint) as other:
                rid = await other.insert_after(b"f", shard=1)
                async with other.subscribe(rid, shards={1}) as subscription:
                    return [record.payload for record in await subscription.fetch()]

        assert asyncio.run(follow()) == [b"f"]


def test_a_reader_of_one_shard_does_not_wait_for_another(tmp_path: Path) -> None:
    with (
        Cluster(tmp_path, failure_handlers=0, supervise=False) as cluster,
        cluster.connect(timeout=30.0) as log,
    ):
        start = log.insert_after(b"before", shard=0)
        for name in ("shard-0-0", "shard-0-1"):
            cluster.kill(name)
        rids = log.insert_many([b"%d" % number for number in range(10)], start, shard=1)
        with log.subscribe(start, shards=[1]) as subscription:
            found: list[ziplog.Record] = []
            while len(found) < len(rids):
                found += subscription.fetch(timeout=30.0)
            assert [record.rid for record in found] == rids
        ended = log.subscribe(start, shards=[1], follow=False)
        assert [record.rid for record in ended] == rids
        # A reader of the whole log waits for the dead shard.
        with log.subscribe(rids[0]) as subscription:
            assert subscription.fetch(timeout=1.0) == []
            blocked = subscription.blocked_on
            assert blocked is None or blocked.shard == 0
        with log.subscribe(rids[0], timeout=0.2) as subscription:

            def why() -> str:
                with pytest.raises(DeadlineError) as silence:
                    next(subscription)
                return str(silence.value)

            text = "no record came within 0.2 s: shard 0 holds back what follows"
            wait_until(lambda: why() == text, "the error names the dead shard", 20.0)


@pytest.mark.parametrize(("f", "name"), [(1, "shard-0-0"), (1, "shard-0-1"), (2, "shard-0-0")])
def test_readers_and_writers_continue_while_a_server_stays_down(
    tmp_path: Path, f: int, name: str
) -> None:
    with (
        Cluster(tmp_path, shards=2, f=f, supervise=False) as cluster,
        cluster.connect(timeout=60.0) as log,
        log.subscribe() as subscription,
    ):
        before = [log.insert_after(b"before", shard=shard) for shard in (0, 1)]
        cluster.kill(name)
        after = [log.insert_after(b"after") for _ in range(20)]
        expected = sorted(before + after)
        found = [record.rid for record in itertools.islice(subscription, len(expected))]
        assert found == expected
        assert log.check_tail() >= expected[-1]
        assert [record.rid for record in log.subscribe(follow=False)] == expected
        (state,) = [one["state"] for one in log.cluster()["shards"] if one["id"] == 0]
        assert state == "recovering", "it has no leases until the server is back"


def test_a_removed_shard_is_read_and_takes_no_records(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster, cluster.connect(timeout=30.0) as log:
        rid = log.insert_after(b"kept", shard=1)
        cluster.finalize_shard(1)
        with pytest.raises(UnavailableError, match="takes no more records") as raised:
            log.insert_after(b"late", shard=1)
        assert not raised.value.retriable
        later = log.insert_after(b"later", rid)
        assert [record.rid for record in log.subscribe(shards=[1], follow=False)] == [rid]
        with log.subscribe(shards=[1]) as subscription:
            assert [record.rid for record in subscription.fetch(timeout=30.0)] == [rid]
            assert subscription.fetch(timeout=0.0) == []
        with log.subscribe(later, shards=[0]) as subscription:
            assert [record.rid for record in subscription.fetch(timeout=30.0)] == [later]
