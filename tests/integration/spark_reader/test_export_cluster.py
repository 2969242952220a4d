"""`ziplog export` of a real log, and of its files: the rows of a subscription, in its order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from pyarrow import ipc, parquet

from tests.unit.spark_reader.logs import TIMEOUT_S, await_archives, small_cluster, subscribed
from tests.waiting import wait_until
from ziplog import policy
from ziplog.cli.rendering import as_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ziplog import Record
    from ziplog.local import Cluster

pytestmark = pytest.mark.timeout(300)

EXPORT = [sys.executable, "-m", "ziplog", "export"]
ONE_GROUP = 700


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A log with sealed segments and later records, of both shards in turn."""
    with small_cluster(tmp_path_factory.mktemp("export") / "log", f=0) as running:
        with running.connect(timeout=TIMEOUT_S) as log:
            for number in range(8):
                log.set_policy(policy.pin(number % 2))
                log.insert_many([os.urandom(number * 500) for _ in range(ONE_GROUP)])
                log.insert_many([b"%d" % n for n in range(9)], key=b"key-%d" % number)
            log.insert_many([b"the end"])
            await_archives(log, servers=1)
        yield running


@pytest.fixture(scope="module")
def records(cluster: Cluster) -> list[Record]:
    return subscribed(cluster)


def export(*arguments: str | Path, status: int = 0) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run([*EXPORT, *map(str, arguments)], check=False, capture_output=True)
    assert done.returncode == status, done.stderr
    return done


def test_json_lines_equal_those_of_tail(cluster: Cluster, records: list[Record]) -> None:
    lines = export("-o", "-", "--format", "jsonl", "--bootstrap", cluster.endpoint).stdout
    assert lines.splitlines(keepends=True) == [as_json(record) for record in records]
    assert len(records) > 8 * ONE_GROUP


def test_a_range_is_a_file_in_the_order_of_the_log(
    cluster: Cluster, records: list[Record], tmp_path: Path
) -> None:
    begin, end = records[len(records) // 5], records[-3]
    ends = ("--from", str(begin.rid), "--to", str(end.rid), "--bootstrap", cluster.endpoint)
    export("-o", tmp_path / "rows.parquet", *ends)
    export("-o", tmp_path / "rows.arrow", "--format", "arrow", *ends)
    rows = parquet.read_table(tmp_path / "rows.parquet")
    assert ipc.open_file(tmp_path / "rows.arrow").read_all().equals(rows)
    found = zip(
        rows["offset"].to_pylist(), rows["partition"].to_pylist(), rows["value"].to_pylist(),
        rows["key"].to_pylist(), rows["epoch"].to_pylist(), rows["timestamp"].to_pylist(),
        strict=True,
    )  # fmt: skip
    assert list(found) == [
        (*record.rid, record.payload, record.key, record.epoch, record.timestamp)
        for record in records
        if begin.rid <= record.rid < end.rid
    ]
    assert set(rows["topic"].to_pylist()) == {"local"}


def test_times_filter_the_records_of_a_range(cluster: Cluster, records: list[Record]) -> None:
    begin = records[50]
    # Positions of several shards are not in the order of their times.
    times = sorted({record.timestamp for record in records[50:]})
    since, until = times[len(times) // 4], times[len(times) // 2]
    lines = export(
        "-o", "-", "--format", "jsonl", "--bootstrap", cluster.endpoint, "--from", str(begin.rid),
        "--since", since.isoformat(), "--until", until.isoformat(),
    ).stdout  # fmt: skip
    chosen = [
        record
        for record in records
        if begin.rid <= record.rid and since <= record.timestamp < until
    ]
    assert 0 < len(chosen) < len(records)
    assert lines.splitlines(keepends=True) == [as_json(record) for record in chosen]


def test_ends_that_depend_on_the_log_need_no_records_that_were_trimmed(tmp_path: Path) -> None:
    with small_cluster(tmp_path / "log", f=0) as running, running.connect() as log:
        rids = [log.append(b"%d" % number) for number in range(4)]
        log.trim(rids[1])
        for ends, found in (
            (("--to", "-1"), rids[1:3]),
            (("--from", "recent"), rids[3:]),
            (("--from", "recent", "--to", "end"), rids[3:]),
            (("--from", "-2", "--to", "end"), rids[2:]),
        ):
            lines = export("-o", "-", "--format", "jsonl", "--bootstrap", log.endpoints[0], *ends)
            assert [json.loads(line)["rid"] for line in lines.stdout.splitlines()] == [
                str(rid) for rid in found
            ]


def test_a_reader_may_close_the_pipe_early(cluster: Cluster) -> None:
    for kind in ("parquet", "arrow", "jsonl"):
        arguments = [*EXPORT, "-o", "-", "--format", kind, "--bootstrap", cluster.endpoint]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.read(4)
            process.stdout.close()
            assert (process.stderr.read(), process.wait()) == (b"", 0)


def test_missing_positions_servers_and_directories_are_reported_in_one_line(
    cluster: Cluster, tmp_path: Path
) -> None:
    beyond = export(
        "-o", tmp_path / "x", "--to", 2**62, "--bootstrap", cluster.endpoint, status=1
    ).stderr
    assert beyond.startswith(b"ziplog: error: no record at ")
    away = export("-o", tmp_path / "x", "--bootstrap", "127.0.0.1:9", "--timeout", 1, status=1)
    assert b"no membership service answered at 127.0.0.1:9" in away.stderr
    nothing = export("-o", tmp_path / "x", "--path", tmp_path / "away", status=2).stderr
    assert nothing.startswith(b"ziplog: error: --path is ")
    assert [line.count(b"\n") for line in (beyond, away.stderr, nothing)] == [1, 1, 1]
    assert list(tmp_path.iterdir()) == []


def test_an_export_from_files_equals_one_from_servers(
    cluster: Cluster, records: list[Record], tmp_path: Path
) -> None:
    end = str(records[-1].rid)
    wait_until(
        lambda: not export_fails(tmp_path / "running", cluster, end), "the files end too early"
    )
    cluster.stop()
    export("-o", tmp_path / "stopped", "--format", "jsonl", "--path", cluster.config.data_dir)
    lines = [as_json(record) for record in records]
    assert (tmp_path / "running").read_bytes() == b"".join(lines[:-1])
    assert (tmp_path / "stopped").read_bytes() == b"".join(lines)


def export_fails(output: Path, cluster: Cluster, end: str) -> bool:
    data = cluster.config.data_dir
    arguments = ["-o", output, "--format", "jsonl", "--path", data, "--to", end]
    done = subprocess.run([*EXPORT, *map(str, arguments)], check=False, capture_output=True)
    assert done.returncode == 0 or b"the end of the files of all shards" in done.stderr, done.stderr
    return done.returncode != 0
