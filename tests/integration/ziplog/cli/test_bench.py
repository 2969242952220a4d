"""`ziplog bench`: real processes on a real cluster, and the forms of its output."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.ziplog.cli.fakes import run
from tests.waiting import wait_until
from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Cluster(tmp_path_factory.mktemp("bench"), shards=1) as cluster:
        yield cluster.endpoint


@pytest.mark.parametrize("operation", ["insert", "tail"])
def test_a_benchmark_reports_rate_and_latencies(endpoint: str, operation: str) -> None:
    done = run(
        "bench", operation, "--bootstrap", endpoint, "--seconds", "0.3", "--clients", "2",
        "--size", "40", "--json",
    )  # fmt: skip
    assert (done.exit_code, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert (document["operation"], document["clients"]) == (operation, 2)
    assert document["size_bytes"] == 40
    assert document["per_s"] > 0
    latency = document["latency_us"]
    assert 0 < latency["p50"] <= latency["p99"] <= latency["max"]
    assert sum(count for _, count in document["histogram_us"]) == document["count"] > 0
    assert (document["fast_path_share"] is None) is (operation == "tail")


def test_the_histogram_is_text_or_csv(endpoint: str) -> None:
    arguments = ("bench", "insert", "--bootstrap", endpoint, "--seconds", "0.2", "--size", "0")
    first, second, *bars = run(*arguments).stdout.splitlines()
    assert first.startswith("insert: ")
    assert "/s, fast path " in first
    assert second.startswith("latency in us: p50 ")
    assert all("%" in line for line in bars)
    rows = list(csv.DictReader(io.StringIO(run(*arguments, "--csv").stdout)))
    assert {row["operation"] for row in rows} == {"insert"}
    ends = [float(row["up_to_us"]) for row in rows]
    assert ends == sorted(ends)


def test_a_failed_process_is_reported_in_one_line() -> None:
    done = run("bench", "insert", "--bootstrap", "127.0.0.1:1", "--timeout", "1")
    assert done.exit_code == 1
    assert "a process of the benchmark failed: no membership service" in done.stderr
    assert run("bench", "tail", "--size", "8").exit_code == 2


def test_no_process_is_left_if_a_benchmark_is_killed(endpoint: str) -> None:
    verb = ["bench", "tail", "--bootstrap", endpoint, "--seconds", "60"]
    with subprocess.Popen([sys.executable, "-m", "ziplog", *verb]) as benchmark:
        wait_until(lambda: len(measuring(endpoint)) == 2, "both processes run")
        benchmark.kill()
    wait_until(lambda: not measuring(endpoint), "they have ended")


def measuring(endpoint: str) -> list[Path]:
    """Return the measuring processes of a cluster."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            arguments = (directory / "cmdline").read_bytes().split(b"\0")
            if b"ziplog.bench.client" in arguments and endpoint.encode() in arguments:
                # The prelude of a process has its arguments, too.
                found += [directory] if b"-c" not in arguments else []
    return found
