"""`ziplog shard`: its output, its refusals and exit codes."""

from __future__ import annotations

import json
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.ziplog.cli.fakes import STATUS, FakeLog, cluster_file, run, shard
from ziplog.cli import shards
from ziplog.config import NodeConfig
from ziplog.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_shard_list_shows_each_shard_and_its_servers(
    log: FakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [shard(0), shard(3, state="finalized", weight=0)]
    monkeypatch.setattr(log, "cluster", lambda: {**STATUS, "shards": found})
    lines = [json.loads(line) for line in run("shard", "list", "--json").stdout.splitlines()]
    assert lines == found
    rows = [row.split() for row in run("shard", "list").stdout.splitlines()]
    expected = [
        "3",
        "finalized",
        "12",
        "123456",
        "0",
        "12345678",
        "shard-3-0",
        "127.0.0.1:31996",
        "suspect",
    ]
    assert expected in rows
    assert ["shard-3-1", "127.0.0.1:31997", "suspect"] in rows


def test_shards_are_removed_and_finalized_and_their_servers_must_keep_running(
    log: FakeLog,
) -> None:
    for verb in ("remove", "finalize"):
        result = run("shard", verb, "1", "--timeout", "7")
        assert (result.exit_code, result.stdout) == (0, "")
        assert "keep its servers running" in result.stderr
        assert log.calls[-1] == (verb, 1, 7.0)


def test_a_terminal_shows_how_a_shard_changes_and_a_pipe_does_not(
    log: FakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def cluster(*, timeout: float) -> dict[str, Any]:
        assert timeout <= 1.0
        asked.set()
        return {**STATUS, "shards": [shard(1, state="leaving")]}

    def remove_shard(number: int, *, timeout: float) -> None:
        assert asked.wait(20)
        raise UnavailableError(f"shard {number} is leaving")

    monkeypatch.setattr(log, "cluster", cluster)
    monkeypatch.setattr(log, "remove_shard", remove_shard)
    shown = run("shard", "remove", "1", env={"FORCE_COLOR": "1", "TERM": "xterm"})
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert "shard 1" in shown.stderr.splitlines()[0]
    assert shown.stderr.endswith("ziplog: error: shard 1 is leaving\n")
    threads = [thread.name for thread in threading.enumerate()]
    assert "ziplog-progress" not in threads
    asked.set()
    assert run("shard", "remove", "1").stderr == "ziplog: error: shard 1 is leaving\n"
    described = shards._describe({"shards": [shard(1, state="leaving")]}, 1)
    assert described == "shard 1 is leaving: shard-1-0 suspect, shard-1-1 suspect"
    assert shards._describe({"shards": []}, 1) == "shard 1: its servers are starting"


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def test_a_shard_that_an_operator_wrote_and_started_is_placed(
    log: FakeLog, tmp_path: Path, listening: int
) -> None:
    path = cluster_file(tmp_path, listening)
    result = run("shard", "add", "--config", str(path), "--shard", "1")
    assert (result.exit_code, result.stdout) == (0, "1\n")
    assert f"shard 1 is live: other at 127.0.0.1:{listening}" in result.stderr
    assert log.calls[-1][:3] == ("add", 1, {"other": f"127.0.0.1:{listening}"})
    missing = run("shard", "add", "--config", str(path), "--shard", "2")
    assert (missing.exit_code, missing.stdout) == (2, "")
    assert "its ids are 0, 1" in missing.stderr


def test_servers_that_do_not_listen_are_named_before_the_service_gets_the_shard(
    log: FakeLog, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    path = cluster_file(tmp_path, port)
    result = run("shard", "add", "--config", str(path), "--shard", "1", "--timeout", "0.1")
    assert result.exit_code == 1
    assert f"other of shard 1 does not listen at 127.0.0.1:{port}" in result.stderr
    assert "see the logs of its servers" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not any(call[0] == "add" for call in log.calls)


def test_another_clusters_file_is_refused(log: FakeLog, tmp_path: Path, listening: int) -> None:
    for changes in ({"name": "else"}, {"mms": (NodeConfig("mms-0", "127.0.0.1", 9, 10),)}):
        path = cluster_file(tmp_path, listening, **changes)
        for options in (("--config", str(path), "--shard", "1"), ("--data-dir", str(tmp_path))):
            result = run("shard", "add", *options)
            assert result.exit_code == 2
            assert "leads to cluster 'demo' at 127.0.0.1:7400" in result.stderr
    assert not any(call[0] == "add" for call in log.calls)


def test_no_shard_is_added_where_its_servers_would_not_be_started(
    log: FakeLog, tmp_path: Path, listening: int
) -> None:
    text = cluster_file(tmp_path, listening).read_text()
    here = run("shard", "add", "--data-dir", str(tmp_path))
    assert here.exit_code == 1
    assert f"`ziplog up` is not running in {tmp_path}" in here.stderr
    # The process ids in STATUS belong to no node of this cluster.
    anywhere = run("shard", "add")
    assert anywhere.exit_code == 1
    assert (
        "cannot find a process of this cluster on this machine; use --data-dir" in anywhere.stderr
    )
    assert (tmp_path / "cluster.toml").read_text() == text


def test_a_mistake_in_the_file_of_the_running_cluster_is_reported(
    log: FakeLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("[cluster")
    monkeypatch.setattr(shards, "_config_of", lambda *_: path)
    result = run("shard", "add")
    assert result.exit_code == 2
    assert str(path) in result.stderr
    assert not any(call[0] == "add" for call in log.calls)


@pytest.mark.parametrize(
    "options",
    [("--shard", "1"), ("--config", "x"), ("--config", "x", "--shard", "1", "--data-dir", "y")],
    ids=" ".join,
)
def test_options_that_contradict_each_other_are_bad_usage(
    log: FakeLog, options: tuple[str, ...]
) -> None:
    result = run("shard", "add", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "must be given together, and without --data-dir" in result.stderr
