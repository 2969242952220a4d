"""Readers and cursors that begin between a row and its repetition, on real servers."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from typing import TYPE_CHECKING

import pytest

import ziplog
import ziplog.aio
from tests.waiting import wait_until
from ziplog import RecordId, local
from ziplog.archive.client import ArchiveClient

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(300)

MIB = 1024 * 1024
ROWS = [b"row %d" % number for number in range(12)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[local.Cluster]:
    """Two shards, with segments that are as small as may be."""
    settings = {"segment_bytes": MIB, "disk_reserve_bytes": 0}
    directory = tmp_path_factory.mktemp("known")
    with local.Cluster(directory, shards=2, settings=settings) as running:
        yield running


@pytest.fixture
def log(cluster: local.Cluster) -> Iterator[ziplog.Log]:
    with cluster.connect(timeout=60.0) as client:
        yield client


@pytest.fixture
def writer() -> bytes:
    return uuid.uuid4().bytes


def write(log: ziplog.Log, writer: bytes, count: int = len(ROWS)) -> RecordId:
    """Write the first rows, as often as it is called; return the position behind them."""
    log.insert_rows(ROWS[:count], shard=0, writer=writer, batch=0)
    tail = log.check_tail()
    return RecordId(tail.gsn + 1, tail.shard)


def read(log: ziplog.Log, start: RecordId, *, known_rows: bool = True) -> list[bytes]:
    with log.subscribe(start, follow=False, known_rows=known_rows) as records:
        return [record.payload for record in records]


def fill(log: ziplog.Log, mebibytes: int) -> RecordId:
    """Fill segments of shard 0; return the position behind them."""
    for number in range(mebibytes * 10):
        rids = log.insert_many([b"%d" % number + bytes(1000)] * 100, shard=0)
    return RecordId(rids[-1].gsn + 1, 0)


def table_at(log: ziplog.Log, gsn: int) -> int:
    """Return the position of the nearest table that an archive of shard 0 has; 0: none."""
    found = []
    for host, port in log.outline(0, gsn, gsn + 1).archives:
        with ArchiveClient(host, port, log.cluster_number, 0) as archive:
            at, table = archive.writers(gsn)
            found.append(at if table else 0)
    return max(found, default=0)


def test_reader_that_begins_between_a_row_and_its_repetition(
    log: ziplog.Log, writer: bytes
) -> None:
    middle = write(log, writer, 5)
    write(log, writer)
    assert read(log, middle) == ROWS[5:]
    assert read(log, middle, known_rows=False) == ROWS, "the default knows no row before"
    end = write(log, writer)
    assert read(log, end) == []


def test_asyncio_reader_that_begins_between_a_row_and_its_repetition(
    cluster: local.Cluster, log: ziplog.Log, writer: bytes
) -> None:
    middle = write(log, writer, 5)
    write(log, writer)

    async def payloads() -> list[bytes]:
        async with (
            await ziplog.aio.connect(cluster.endpoint, timeout=60.0) as client,
            client.subscribe(middle, follow=False, known_rows=True) as records,
        ):
            return [record.payload async for record in records]

    assert asyncio.run(payloads()) == ROWS[5:]


def test_cursor_returns_each_row_once_after_a_restart(
    cluster: local.Cluster, log: ziplog.Log, writer: bytes
) -> None:
    name = f"test/{uuid.uuid4().hex}"
    tail = log.check_tail()
    begin = RecordId(tail.gsn + 1, tail.shard)
    write(log, writer, 5)
    got: list[bytes] = []
    with cluster.connect(timeout=60.0) as client, client.cursor(name, start=begin) as cursor:
        while len(got) < 5:
            got += [record.payload for record in cursor.fetch(5 - len(got))]
        cursor.commit()
    write(log, writer)
    with cluster.connect(timeout=60.0) as client, client.cursor(name) as cursor:
        while len(got) < len(ROWS):
            got += [record.payload for record in cursor.fetch(len(ROWS) - len(got))]
        assert cursor.fetch(1, timeout=0.5) == []
    assert got == ROWS
    log.delete_cursor(name)


def test_archive_has_the_rows_before_a_long_stretch_and_before_the_trim_point(
    log: ziplog.Log, writer: bytes
) -> None:
    behind = write(log, writer, 5)
    middle = fill(log, 4)
    wait_until(lambda: table_at(log, middle.gsn) > behind.gsn, "an archive has the table")
    write(log, writer)
    assert read(log, middle) == ROWS[5:]
    first = table_at(log, middle.gsn)
    end = fill(log, 2)
    # An archive that makes the next block file after the trim would have lost the table.
    wait_until(lambda: table_at(log, end.gsn) > first, "an archive has the next block file")
    log.trim(RecordId(first, 0))
    found = read(log, middle)[: len(ROWS[5:])]
    assert found == ROWS[5:], "the trimmed rows are known to the archive"


def test_reader_begins_while_a_server_is_down(
    cluster: local.Cluster, log: ziplog.Log, writer: bytes
) -> None:
    middle = write(log, writer, 5)
    write(log, writer)
    os.kill(cluster.pid("shard-0-1"), signal.SIGKILL)
    assert read(log, middle) == ROWS[5:]
