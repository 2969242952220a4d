"""Bulk reads on real sockets: the blocking and the asyncio API."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import ziplog
from tests.unit.ziplog.client.fakes import CLUSTER
from tests.unit.ziplog.client.served import ServedCluster
from ziplog import (
    ClosedError,
    ConfigError,
    DeadlineError,
    Extent,
    RecordTooLargeError,
    TrimmedError,
    wire,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


WRITER = b"writer 0123456789"[:16]


@pytest.fixture(name="cluster")
def _cluster() -> Iterator[ServedCluster]:
    with ServedCluster() as cluster:
        yield cluster


@pytest.fixture(name="log")
def _log(cluster: ServedCluster) -> Iterator[ziplog.Log]:
    with ziplog.connect(cluster.endpoint) as log:
        yield log


def test_extents_and_outlines_of_a_real_cluster(log: ziplog.Log) -> None:
    rid = log.insert_after(b"x")
    found = log.extents(1, rid.gsn + 1)
    assert found.shards == [Extent(0, 1, rid.gsn + 1)]
    assert found.epoch_at(rid.gsn) == 0
    assert log.extents().end == 1_000_001
    assert log.cluster_number == CLUSTER
    outline = log.outline(0, 1, rid.gsn + 1)
    assert outline.steps == [(2, 16)]
    assert [port for _, port in outline.archives] == [9000, 9001]
    assert {host for host, _ in outline.archives} == {"127.0.0.1"}


def test_a_scan_gives_all_units_and_ends(log: ziplog.Log) -> None:
    rids = [log.insert_after(b"%d" % number) for number in range(5)]
    with log.scan(0, 2, 9) as scan:
        steps = list(scan)
    gsns = [gsn for units, _ in steps for unit in units for gsn in unit.gsns]
    assert gsns == [rid.gsn for rid in rids[1:]]
    assert steps[-1][1] == scan.position == 9
    assert list(log.scan(0, 3, 3)) == []


def test_invalid_scans_are_refused(cluster: ServedCluster, log: ziplog.Log) -> None:
    with pytest.raises(ConfigError, match="shard"):
        log.scan(-1, 1, 2)
    with pytest.raises(ConfigError, match="no less than the start"):
        log.scan(0, 3, 2)
    with pytest.raises(ConfigError, match="start"):
        log.extents(-1)
    with pytest.raises(ConfigError, match="stop"):
        log.outline(0, 1, 2**63)
    cluster.trim = 5
    with pytest.raises(TrimmedError):
        list(log.scan(0, 1, 9))


def test_scan_without_progress_raises_deadline_error(
    cluster: ServedCluster, log: ziplog.Log
) -> None:
    cluster.silent |= {wire.Subscribe, wire.Credit}
    with log.scan(0, 1, 9, timeout=0.05) as scan:
        with pytest.raises(DeadlineError, match="beyond gsn 1"):
            next(scan)
        with pytest.raises(DeadlineError):
            next(scan)
    assert list(scan) == []
    scan = log.scan(0, 1, 9)
    log.close()
    with pytest.raises(ClosedError):
        next(scan)
    scan.close()


def test_rows_that_are_inserted_again_are_read_once(log: ziplog.Log) -> None:
    payloads, keys = [b"%d" % number for number in range(6)], ["a", "a", None, b"b", b"b", "b"]
    part = log.insert_rows(payloads[:3], keys=keys[:3], shard=0, writer=WRITER, batch=1)
    rids = log.insert_rows(payloads, keys=keys, shard=0, writer=WRITER, batch=1)
    assert part + rids == sorted({*part, *rids})
    more = log.insert_rows([b"6"], shard=0, writer=bytearray(WRITER), batch=1, row=6)
    records = list(log.subscribe(follow=False))
    assert [(record.payload, record.key) for record in records] == [
        (b"0", b"a"), (b"1", b"a"), (b"2", None), (b"3", b"b"), (b"4", b"b"), (b"5", b"b"),
        (b"6", None),
    ]  # fmt: skip
    assert [record.rid for record in records] == part + rids[3:] + more
    assert log.read_record(rids[0]).payload == b"0", "a single position has one owner"
    assert log.insert_rows([], shard=0, writer=WRITER, batch=2) == []


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("shard", {"shard": -1}),
        ("writer", {"writer": b"short"}),
        ("writer", {"writer": "0123456789abcdef"}),
        ("batch", {"batch": -1}),
        ("row", {"row": 2**62}),
        ("keys", {"keys": [None, None]}),
    ],
)
def test_invalid_rows_are_refused(log: ziplog.Log, name: str, wrong: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"shard": 0, "writer": WRITER, "batch": 0} | wrong
    with pytest.raises(ConfigError, match=f"^{name} (is|has)"):
        log.insert_rows([b"x"], **arguments)


def test_rows_that_are_too_large_are_not_sent(cluster: ServedCluster, log: ziplog.Log) -> None:
    payloads = {"payloads": [b"", bytes(2**20), bytearray(2**20 + 1)]}
    keys = {"payloads": [b""] * 3, "keys": [None, bytes(4096), "k" * 4097]}
    for what, fields in (("payload", payloads), ("key", keys)):
        with pytest.raises(RecordTooLargeError) as caught:
            log.insert_rows(**fields, shard=0, writer=WRITER, batch=0)
        assert (caught.value.what, caught.value.index) == (what, 2)
    assert not any(isinstance(message, wire.Insert) for message in cluster.received)


def test_bulk_reads_and_rows_by_asyncio(cluster: ServedCluster) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), ziplog.aio.connect(cluster.endpoint) as log:
            for _ in range(2):
                await log.insert_rows([b"x"] * 2, keys=["k", "l"], shard=0, writer=WRITER, batch=1)
            assert await log.insert_rows([], shard=0, writer=WRITER, batch=1) == []
            async with log.subscribe(follow=False) as subscription:
                assert [record.rid.gsn async for record in subscription] == [1, 2]
            await log.insert_after(b"5")
            assert (await log.extents(1, 6)).shards == [Extent(0, 1, 6)]
            assert (await log.outline(0, 1, 6)).steps[0][0] == 6
            assert log.cluster_number == CLUSTER
            async with log.scan(0, 1, 9) as scan:
                steps = [step async for step in scan]
            assert sum(len(units) for units, _ in steps) == 3
            assert steps[-1][1] == 9
            with pytest.raises(ConfigError):
                await log.scan(7, 1, 9)
            cluster.trim = 5
            with pytest.raises(TrimmedError):
                async for _ in log.scan(0, 1, 9):
                    pass
            left = await log.scan(0, 5, 9)
        await left.close()

    asyncio.run(main())
