"""`ziplog config reload` and `ziplog node log-level` on a running cluster."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from tests.integration.reloading import reload, rewrite
from tests.waiting import wait_until
from ziplog.cli import app
from ziplog.deploy import config_reload
from ziplog.errors import DeadlineError
from ziplog.local import Cluster
from ziplog.runtime.settings_reload import read_used

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from click.testing import Result

HUGE = 2**40


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, shards=1) as cluster:
        yield cluster


def set_level(cluster: Cluster, *arguments: str) -> Result:
    path = cluster.config.data_dir / "cluster.toml"
    return CliRunner().invoke(app, ["node", "log-level", *arguments, "--config", str(path)])


def log_of(cluster: Cluster, name: str) -> str:
    return (cluster.config.data_dir / "logs" / f"{name}.log").read_text()


def states(cluster: Cluster) -> set[str]:
    with cluster.connect() as log:
        return {replica["state"] for replica in log.cluster()["shards"][0]["replicas"]}


def test_a_limit_slows_down_a_client_and_refuses_nothing(cluster: Cluster) -> None:
    path = cluster.config.data_dir / "cluster.toml"
    unlimited = path.read_text()
    path.write_text(f"{unlimited}\n[limits]\ninserts_per_s = 200\n")
    assert "limits.inserts_per_s" in reload(path).stderr
    with cluster.connect() as log:
        began = time.monotonic()
        rids = [log.insert_after(b"x") for _ in range(100)]
        # 0.1 s of the rate are admitted at once.
        assert time.monotonic() - began > 80 / 200 * 0.9
        assert rids == sorted(set(rids))
        path.write_text(unlimited)
        assert reload(path).exit_code == 0
        assert log.insert_after(b"x") > rids[-1]


def test_the_reserve_makes_the_servers_full_and_free_again(cluster: Cluster) -> None:
    reserve = cluster.config.disk_reserve_bytes
    pids = {name: cluster.pid(name) for name in cluster.nodes}
    done = reload(rewrite(cluster, disk_reserve_bytes=HUGE), "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout) == {
        "applied": ["disk_reserve_bytes"], "nodes": sorted(cluster.nodes),
        "restart": [], "stop": [], "never": [],
    }  # fmt: skip
    wait_until(lambda: states(cluster) == {"full"}, "all servers are full")
    with cluster.connect() as log:
        disk = log.cluster()["shards"][0]["replicas"][0]["disk"]
    assert disk["reserve_bytes"] == HUGE
    assert reload(rewrite(cluster, disk_reserve_bytes=reserve)).exit_code == 0
    wait_until(lambda: states(cluster) == {"up"}, "the servers have room")
    again = reload(cluster.config.data_dir / "cluster.toml")
    assert "nothing has changed" in again.stderr
    assert {name: cluster.pid(name) for name in cluster.nodes} == pids


def test_the_level_and_the_form_of_logs_change_at_once(cluster: Cluster) -> None:
    assert reload(rewrite(cluster, level="error", format="json")).exit_code == 0
    # Its effects are complete when the command returns, so the warning was filtered.
    assert reload(rewrite(cluster, disk_reserve_bytes=HUGE)).exit_code == 0
    assert "disk full" not in log_of(cluster, "shard-0-0")
    assert reload(rewrite(cluster, level="info")).exit_code == 0
    for name in cluster.nodes:
        wait_until(lambda name=name: "settings" in log_of(cluster, name), f"{name} logs")  # type: ignore[misc]
        line = json.loads(log_of(cluster, name).splitlines()[-1])
        assert (line["event"], line["keys"]) == ("settings changed", "log.level")


def test_a_shorter_suspicion_time_applies_to_running_servers(tmp_path: Path) -> None:
    with Cluster(tmp_path, shards=1, settings={"suspicion_ms": 60_000}) as cluster:
        assert reload(rewrite(cluster, suspicion_ms=200)).exit_code == 0
        cluster.pause("shard-0-1")
        with cluster.connect() as log:
            wait_until(lambda: log.cluster()["shards"][0]["view"] == 2, "the shard was recovered")


def test_one_key_that_needs_a_restart_keeps_all_as_it_is(cluster: Cluster) -> None:
    pids = {name: cluster.pid(name) for name in cluster.nodes}
    path = rewrite(cluster, epoch_ms=20, disk_reserve_bytes=HUGE)
    refused = reload(path, "--json")
    assert refused.exit_code == 2
    assert json.loads(refused.stdout)["restart"] == ["epoch_ms"]
    assert json.loads(refused.stdout)["applied"] == []
    assert refused.stderr == (
        "ziplog: error: no change was applied:"
        " a change of epoch_ms needs `ziplog restart --rolling`\n"
    )
    # A node that gets the signal from another program decides alike.
    os.kill(cluster.pid("shard-0-0"), signal.SIGHUP)
    wait_until(lambda: "epoch_ms needs" in log_of(cluster, "shard-0-0"), "it refuses")
    path.write_text(f"{path.read_text()}x")
    os.kill(cluster.pid("mms-0"), signal.SIGHUP)
    wait_until(lambda: "not valid TOML" in log_of(cluster, "mms-0"), "it refuses")
    mistaken = reload(path)
    assert mistaken.exit_code == 2
    assert len(mistaken.stderr.splitlines()) == 1
    assert "not valid TOML" in mistaken.stderr
    assert states(cluster) == {"up"}
    assert {name: cluster.pid(name) for name in cluster.nodes} == pids


def test_a_node_that_does_not_confirm_is_named(cluster: Cluster) -> None:
    path = rewrite(cluster, level="debug")
    cluster.pause("shard-0-1")
    with pytest.raises(DeadlineError, match="shard-0-1 did not confirm"):
        config_reload.apply(config_reload.plan(path), 0.5)
    cluster.resume("shard-0-1")
    wait_until(lambda: not config_reload.plan(path).nodes, "it has the settings, too")


def test_the_log_level_of_one_node_changes_until_its_restart(cluster: Cluster) -> None:
    name, other = "shard-0-0", "shard-0-1"
    reserve = cluster.config.disk_reserve_bytes
    done = set_level(cluster, name, "error", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout) == {"node": name, "level": "error", "seconds": None}
    # The file has a change that no node has yet: only `config reload` applies it.
    path = rewrite(cluster, disk_reserve_bytes=HUGE)
    assert set_level(cluster, name, "error").exit_code == 0
    assert set(config_reload.plan(path).nodes) == set(cluster.nodes)
    assert reload(path).exit_code == 0
    assert "disk full" not in log_of(cluster, name)
    assert "disk full" in log_of(cluster, other)
    assert reload(rewrite(cluster, disk_reserve_bytes=reserve)).exit_code == 0
    wait_until(lambda: "room again" in log_of(cluster, other), "the other node has room")
    assert "room again" not in log_of(cluster, name)
    cluster.kill(name)
    wait_until(lambda: log_of(cluster, name).count("event=ready") == 2, "it logs again")


def test_a_level_ends_with_its_time_or_by_default_or_with_another_level_in_the_file(
    cluster: Cluster,
) -> None:
    name, reserve = "shard-0-0", cluster.config.disk_reserve_bytes

    def is_filtered() -> bool:
        """Whether the node logs no warning: it becomes full and well again."""
        lines = log_of(cluster, name).count("disk full")
        for value in (HUGE, reserve):
            assert reload(rewrite(cluster, disk_reserve_bytes=value)).exit_code == 0
        return log_of(cluster, name).count("disk full") == lines

    assert not is_filtered()
    assert set_level(cluster, name, "error").exit_code == 0
    assert is_filtered()
    assert set_level(cluster, name, "default").exit_code == 0
    assert not is_filtered()
    assert set_level(cluster, name, "error").exit_code == 0
    assert reload(rewrite(cluster, level="warning")).exit_code == 0
    assert not is_filtered()
    assert set_level(cluster, name, "error", "--for", "1s").exit_code == 0
    wait_until(lambda: not is_filtered(), "the time is over")


def test_at_level_debug_a_node_logs_its_connections(cluster: Cluster) -> None:
    def lines(name: str) -> list[str]:
        return [line for line in log_of(cluster, name).splitlines() if "level=debug" in line]

    assert set_level(cluster, "shard-0-0", "debug").exit_code == 0
    cluster.kill("shard-0-1")
    back = 'event="peer connected" peer=shard-0-1'
    wait_until(lambda: any(back in line for line in lines("shard-0-0")), "it reconnects")
    assert 'event="peer disconnected" peer=shard-0-1 reason="' in lines("shard-0-0")[0]
    assert not lines("fh-0"), "the level of the others is info"


def test_a_log_level_that_no_node_can_take_is_refused(cluster: Cluster) -> None:
    unknown = set_level(cluster, "shard-9-9", "debug")
    assert unknown.exit_code == 2
    assert "one of mms-0, fh-0, shard-0-0, shard-0-1" in unknown.stderr
    assert set_level(cluster, "shard-0-0", "loud").exit_code == 2
    assert set_level(cluster, "shard-0-0", "debug", "--for", "soon").exit_code == 2
    assert set_level(cluster, "shard-0-0", "default", "--for", "1m").exit_code == 2
    cluster.pause("fh-0")
    late = set_level(cluster, "fh-0", "debug", "--timeout", "0.3")
    assert late.exit_code == 1
    assert "fh-0 did not confirm" in late.stderr
    cluster.resume("fh-0")
    wait_until(lambda: "log level changed" in log_of(cluster, "fh-0"), "it applies later")
    cluster.stop()
    dead = set_level(cluster, "shard-0-0", "debug")
    assert dead.exit_code == 1
    assert "shard-0-0 does not run on this machine" in dead.stderr


def test_without_a_running_node_it_is_an_error(tmp_path: Path) -> None:
    with Cluster(tmp_path, shards=1) as cluster:
        killed = cluster.config.data_dir / "shard-0-0"
        cluster.kill("shard-0-0")
        assert (killed / "settings").exists()
        assert read_used(killed, "shard-0-0") is None
        path = cluster.config.data_dir / "cluster.toml"
    refused = reload(path)
    assert refused.exit_code == 1
    assert "runs on this machine" in refused.stderr
