"""Which changes of a cluster file nodes take, and when."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ziplog.config import ClusterConfig, NodeConfig, ShardConfig
from ziplog.config_changes import changes, flatten, refuse
from ziplog.config_tables import LimitsConfig, LogConfig, MonitorConfig
from ziplog.errors import ConfigError

MMS = (NodeConfig("mms-0", "127.0.0.1", 7400, 7401),)
SHARD = ShardConfig(0, (NodeConfig("shard-0-0", "127.0.0.1", 7402),))
CONFIG = ClusterConfig(name="local", data_dir=Path("/data"), mms=MMS, shards=(SHARD,), f=0, id=None)
KINDS = {
    "cache_bytes": (2**20, "reload"),
    "disk_reserve_bytes": (0, "reload"),
    "durability": ("disk", "reload"),
    "epoch_ms": (20, "restart"),
    "flush_interval_ms": (20, "restart"),
    "insecure": (True, "restart"),
    "lag_fix": (False, "restart"),
    "max_key_bytes": (1, "restart"),
    "max_payload_bytes": (1, "restart"),
    "max_unsettled_units": (1, "restart"),
    "min_regions": (1, "restart"),
    "name": ("other", "never"),
    "raft_password": ("0123456789abcdef", "stop"),
    "rtt_ms": (250, "restart"),
    "segment_bytes": (2**20, "restart"),
    "session_timeout_s": (10, "restart"),
    "suspicion_ms": (100, "reload"),
}


def changed(**values: Any) -> dict[str, str]:
    # As after a write to the node's directory, and a read from it.
    used = json.loads(json.dumps(flatten(CONFIG)))
    return dict(changes(used, dataclasses.replace(CONFIG, **values)))


def test_an_unchanged_file_has_no_change() -> None:
    assert changed() == {}


def test_archive_ports_may_come_and_go_with_a_restart() -> None:
    node = dataclasses.replace(SHARD.replicas[0], archive_port=7403)
    other = dataclasses.replace(CONFIG, shards=(ShardConfig(0, (node,)),))
    expected = {"archive ports of shard 0": "restart"}
    assert dict(changes(flatten(CONFIG), other)) == expected
    assert dict(changes(flatten(other), CONFIG)) == expected
    assert not changes(flatten(other), other)
    more = (
        *CONFIG.shards,
        ShardConfig(1, (dataclasses.replace(node, name="shard-1-0", port=7404),)),
    )
    assert not changes(flatten(CONFIG), dataclasses.replace(CONFIG, shards=more)), "a new shard"


@pytest.mark.parametrize("name", KINDS)
def test_each_key_of_the_cluster_has_its_kind(name: str) -> None:
    value, kind = KINDS[name]
    assert changed(**{name: value}) == {name: kind}


def test_every_key_is_covered_above() -> None:
    groups = {"mms", "failure_handler", "shard 0"}
    names = set(flatten(CONFIG)) - {"id", "f", "data_dir"} - groups
    names -= {f"regions of {group}" for group in groups}
    assert {name for name in names if "." not in name} == set(KINDS)


def test_all_keys_of_the_log_are_reloaded() -> None:
    log = LogConfig(level="debug", format="json", file_bytes=65_536, files=1)
    names = ("log.level", "log.format", "log.file_bytes", "log.files")
    assert changed(log=log) == dict.fromkeys(names, "reload")


def test_limits_and_the_monitor_are_reloaded() -> None:
    assert changed(limits=LimitsConfig(1, 2)) == {
        "limits.inserts_per_s": "reload", "limits.insert_bytes_per_s": "reload",
    }  # fmt: skip
    monitored = dataclasses.replace(CONFIG, monitor=MonitorConfig())
    used = flatten(monitored)
    assert set(changes(used, CONFIG)) == {"monitor.host", "monitor.port"}
    moved = dataclasses.replace(monitored, monitor=MonitorConfig(port=1))
    assert changes(used, moved) == {"monitor.port": "reload"}


def test_new_shards_and_a_first_id_are_no_change() -> None:
    added = ShardConfig(1, (NodeConfig("shard-1-0", "127.0.0.1", 7410),))
    assert changed(shards=(SHARD, added), id="0" * 32) == {}
    known = flatten(dataclasses.replace(CONFIG, id="0" * 32))
    assert changes(known, CONFIG) == {"id": "never"}


def test_settings_of_a_later_release_are_no_change() -> None:
    """Its nodes run, while the command line is of this release, or was put back to it."""
    later = flatten(CONFIG) | {"new_key": 1, "log.new": 2, "new.table": 3, "regions of shard 7": []}
    assert changes(later, CONFIG) == {"regions of shard 7": "restart"}


def test_changed_nodes_are_named() -> None:
    moved = ShardConfig(0, (NodeConfig("shard-0-0", "127.0.0.1", 7409),))
    assert changed(shards=(moved,)) == {"shard 0": "never"}
    mms = (NodeConfig("mms-0", "127.0.0.1", 7400, 7409),)
    assert changed(mms=mms, data_dir=Path("/other")) == {"mms": "stop", "data_dir": "stop"}


def test_a_region_changes_with_a_restart_of_its_node() -> None:
    node = dataclasses.replace(SHARD.replicas[0], region="eu")
    found = changed(shards=(dataclasses.replace(SHARD, replicas=(node,)),))
    assert found == {"regions of shard 0": "restart"}


def test_a_password_is_not_in_the_table() -> None:
    password = "0123456789abcdef"
    table = flatten(dataclasses.replace(CONFIG, raft_password=password))
    assert password not in json.dumps(table)
    assert table["raft_password"]


def test_one_change_that_needs_more_than_a_reload_refuses_all() -> None:
    refuse(changes(flatten(CONFIG), dataclasses.replace(CONFIG, cache_bytes=2**20)))
    new = dataclasses.replace(CONFIG, cache_bytes=2**20, epoch_ms=20, lag_fix=False, name="other")
    with pytest.raises(ConfigError) as caught:
        refuse(changes(flatten(CONFIG), new))
    assert str(caught.value) == (
        "no change was applied: a change of epoch_ms, lag_fix needs `ziplog restart --rolling`;"
        " name cannot change in a cluster that exists"
    )
