"""The metrics of clients of a real cluster, as a scraper gets them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry

import ziplog
from ziplog import metrics
from ziplog.local import Cluster

if TYPE_CHECKING:
    from pathlib import Path


def test_metrics_of_a_blocking_and_an_asyncio_client(tmp_path: Path) -> None:
    registry = CollectorRegistry()

    def value(name: str, client: str, **labels: str) -> float:
        labels["client"] = client
        found = registry.get_sample_value(f"ziplog_client_{name}", labels)
        assert found is not None
        return found

    def inserted(client: str) -> float:
        return sum(value("inserts_total", client, path=p, result="ok") for p in ("fast", "slow"))

    async def insert_and_read() -> None:
        async with ziplog.aio.connect(cluster.endpoint) as log:
            metrics.register(registry, log, "aio")
            await asyncio.gather(*(log.insert_after(b"y") for _ in range(5)))
            assert len([record async for record in log.subscribe(follow=False)]) == 15
            assert inserted("aio") == 5
            assert 1 <= value("insert_duration_seconds_count", "aio") <= 5
            # A scraper runs in a thread of its own.
            delivered = await asyncio.to_thread(value, "delivered_records_total", "aio")
            assert delivered == 15

    with Cluster(tmp_path, shards=1) as cluster, cluster.connect() as log:
        metrics.register(registry, log, "blocking")
        for _ in range(10):
            log.insert_after(b"x")
        assert inserted("blocking") == 10
        # On a busy machine a unit may be sent again; then its duration may be ambiguous.
        assert 1 <= value("insert_duration_seconds_count", "blocking") <= 10
        assert value("insert_duration_seconds_sum", "blocking") > 0
        assert value("window_units", "blocking") == 0
        asyncio.run(insert_and_read())
        assert inserted("blocking") == 10
        log.close()
        assert inserted("blocking") == 10
        with pytest.raises(ziplog.ClosedError):
            metrics.register(registry, log, "again")
