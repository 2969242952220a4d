"""A rolling restart of real processes under load."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

import logdb
import ziplog
from tests.waiting import wait_until
from ziplog.cli import app
from ziplog.deploy.rolling_restart import RollingRestart
from ziplog.errors import ConfigError, UnavailableError
from ziplog.local import Cluster

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S = 60.0


def insert_until(stopped: threading.Event, log: ziplog.Log, rids: list[ziplog.RecordId]) -> None:
    while not stopped.is_set():
        rids.append(log.insert_after(str(len(rids)).encode(), timeout=TIMEOUT_S))


@pytest.mark.timeout(300)
def test_no_insert_fails_and_no_record_is_lost(tmp_path: Path) -> None:
    with Cluster(tmp_path, shards=2) as cluster, cluster.connect(timeout=TIMEOUT_S) as log:
        pids = {name: cluster.pid(name) for name in cluster.nodes}
        rids: list[ziplog.RecordId] = []
        stopped, errors = threading.Event(), list[BaseException]()

        def load() -> None:
            try:
                insert_until(stopped, log, rids)
            except BaseException as error:  # noqa: BLE001 - reported below
                errors.append(error)

        loading = threading.Thread(target=load)
        loading.start()
        done: list[str] = []
        try:
            with cluster.connect() as other:
                restart = RollingRestart(tmp_path, other, TIMEOUT_S)
                restart.run([], lambda name, _: done.append(name))
        finally:
            stopped.set()
            loading.join()
        assert errors == []
        assert done[0] == "shard-0-1"
        assert done[-2:] == ["fh-0", "mms-0"]
        assert sorted(done) == sorted(pids)
        assert all(cluster.pid(name) != pid for name, pid in pids.items())
        found = {record.rid: record.payload for record in log.subscribe(follow=False)}
        assert found == {rid: str(index).encode() for index, rid in enumerate(rids)}


def test_commits_and_moves_of_a_cursor_go_on(tmp_path: Path) -> None:
    stopped, taken = threading.Event(), list[ziplog.RecordId]()
    counts = {"commits": 0, "moves": 0}
    #: The counts before the first restart and after each.
    seen: list[dict[str, int]] = []

    def increment(t: logdb.Transaction) -> None:
        t.put("n", t.get("n", 0) + 1)

    def commit(db: logdb.Database) -> None:
        while not stopped.is_set():
            db.run(increment)
            counts["commits"] += 1

    def consume(cursor: ziplog.Cursor) -> None:
        while not stopped.is_set():
            taken.extend(record.rid for record in cursor.fetch())
            cursor.commit()
            counts["moves"] += 1

    with (
        Cluster(tmp_path, shards=2) as cluster,
        cluster.connect(timeout=TIMEOUT_S) as log,
        logdb.Coordinator(log) as coordinator,
        logdb.connect(coordinator.endpoint, timeout=TIMEOUT_S) as db,
        log.cursor("consumer") as cursor,
        cluster.connect() as other,
        ThreadPoolExecutor(2) as pool,
    ):
        load = [pool.submit(commit, db), pool.submit(consume, cursor)]
        try:
            wait_until(lambda: all(counts.values()), "a commit and a move")
            seen.append(counts.copy())
            restart = RollingRestart(tmp_path, other, TIMEOUT_S)
            restart.run(["shard-0-1", "shard-0-0"], lambda *_: seen.append(counts.copy()))
        finally:
            stopped.set()
            db.put("end", 1)  # The consumer may wait for a record.
            for each in load:
                each.result()
        for name in counts:
            assert seen[0][name] < seen[1][name] < seen[2][name], f"{name} did not go on"
        assert db.get("n") == counts["commits"]
        stored = [record.rid for record in log.subscribe(follow=False)]
        assert taken == stored[: len(taken)]


def test_one_node_is_restarted_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    with Cluster(tmp_path, shards=1) as cluster, cluster.connect() as log:
        restart = RollingRestart(tmp_path, log, TIMEOUT_S)
        pids = {name: cluster.pid(name) for name in cluster.nodes}
        restart.run(["shard-0-0"], lambda *_: None)
        changed = [name for name, pid in pids.items() if cluster.pid(name) != pid]
        assert changed == ["shard-0-0"]
        arguments = ["node", "restart", "shard-0-1", "--data-dir", str(tmp_path), "--json"]
        result = CliRunner().invoke(app, arguments)
        assert json.loads(result.stdout)["node"] == "shard-0-1", result.stderr
        assert cluster.pid("shard-0-1") != pids["shard-0-1"]
        with pytest.raises(ConfigError, match="--node is 'x, y'; it must be among shard-0-1"):
            restart.run(["x", "shard-0-0", "y"], lambda *_: None)


def test_one_restart_runs_at_a_time(tmp_path: Path) -> None:
    """Two operators: each would find all nodes up, and both would stop one."""
    refused = []
    with Cluster(tmp_path, shards=1) as cluster, cluster.connect() as log:
        pid = cluster.pid("shard-0-0")

        def restart_another(*_: object) -> None:
            arguments = ["node", "restart", "shard-0-0", "--data-dir", str(tmp_path)]
            refused.append(CliRunner().invoke(app, arguments))

        restart = RollingRestart(tmp_path, log, TIMEOUT_S)
        restart.run(["shard-0-1"], restart_another)
        assert refused[0].exit_code == 1
        assert isinstance(refused[0].exception, UnavailableError | SystemExit)
        assert cluster.pid("shard-0-0") == pid
        restart.run(["shard-0-0"], lambda *_: None)
        assert cluster.pid("shard-0-0") != pid


def test_a_cluster_without_a_supervisor_is_refused(tmp_path: Path) -> None:
    with (
        Cluster(tmp_path / "data", shards=1) as cluster,
        cluster.connect() as log,
        pytest.raises(UnavailableError, match="no supervisor is running in"),
    ):
        RollingRestart(tmp_path, log, TIMEOUT_S)


def test_a_shard_is_parked_before_its_server_stops(tmp_path: Path) -> None:
    with Cluster(tmp_path, shards=2) as cluster, cluster.connect() as log:
        RollingRestart(tmp_path, log, TIMEOUT_S).run(["shard-0-0"], lambda *_: None)
        expected = ["parked in view 1", "restarted, process", "live in view 1"]

        def has_happened() -> bool:
            texts = iter([one["text"] for one in log.events() if one["shard"] == 0])
            return all(any(text.startswith(wanted) for text in texts) for wanted in expected)

        wait_until(has_happened, f"events of shard 0: {expected}")
