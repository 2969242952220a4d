"""`resolve` and `sync` against the processes of a cluster."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

import ziplog
from ziplog.local import Cluster

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("durability", ["memory", "disk"])
def test_resolve_and_sync(tmp_path: Path, durability: str) -> None:
    """A backup is paused for less or more than the suspicion timeout; both results are valid."""
    with Cluster(tmp_path, shards=2, f=1, durability=durability) as cluster:
        with cluster.connect() as log:
            assert log.sync() == ziplog.RID_GENESIS
            rids = [log.insert_after(b"%d" % number) for number in range(20)]
            assert log.sync() == max(rids)
            log.set_policy(ziplog.policy.pin(0))
            cluster.pause("shard-0-1")
            try:
                with pytest.raises(ziplog.OutcomeUnknownError) as caught:
                    log.insert_after(b"doubtful", timeout=0.1)
            finally:
                cluster.resume("shard-0-1")
            rid = caught.value.resolve(60)
            last = log.insert_after(b"last", rids[-1], timeout=60)
            found = {record.payload: record.rid for record in log.subscribe(follow=False)}
            assert found.get(b"doubtful") == rid
            assert found[b"last"] == last
            assert len(found) == 21 + (rid is not None)
            assert log.sync(60) == max([*rids, last, rid or last])

        async def body() -> None:
            async with ziplog.aio.connect(cluster.endpoint) as log:
                rid = await log.insert_after(b"x")
                assert await log.sync() == rid

        asyncio.run(body())
