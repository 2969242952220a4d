"""Metrics and health of a status document."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest

from ziplog.monitor import health, metrics

DOCUMENT: dict[str, Any] = {
    "cluster": 'a"b\\c\n', "cluster_id": "0" * 31 + "7", "durability": "memory", "epoch": 9,
    "finalized_epoch": 7, "trimmed_before": "5@1",
    "mms": [{"name": "mms-0", "state": "up", "leader": True, "version": "0.1.0"}],
    "failure_handlers": [
        {"name": "fh-0", "state": "up", "leader": False, "version": None, "heartbeat_age_ms": 250}
    ],
    "shards": [
        {
            "id": 3, "state": "live", "view": 4, "weight": 1, "rate_per_s": 12, "stable_gsn": 2**60,
            "refusing": False, "holes": 2, "blocks": [],
            "replicas": [
                {
                    "name": "shard-3-0", "state": "up", "version": "0.1.0", "heartbeat_age_ms": 0,
                    "disk": {"free_bytes": 10, "reserve_bytes": 3, "full": False},
                },
                {
                    "name": "shard-3-1", "state": "down", "version": "0.1.0",
                    "heartbeat_age_ms": 9000,
                    "disk": {"free_bytes": 10, "reserve_bytes": 3, "full": False},
                },
            ],
        }
    ],
    "losses": [{"shard": 3, "start": 10, "stop": 14}],
}  # fmt: skip


def document() -> dict[str, Any]:
    return deepcopy(DOCUMENT)


def test_the_metrics_of_a_cluster() -> None:
    lines = metrics.render(document()).splitlines()
    for line in (
        "ziplog_cluster_up 1",
        r'ziplog_cluster_info{cluster="a\"b\\c\n",cluster_id="'
        + "0" * 31
        + '7",durability="memory"} 1',
        'ziplog_up{node="shard-3-0"} 1',
        'ziplog_up{node="shard-3-1"} 0',
        'ziplog_node_state{node="shard-3-1",state="down"} 1',
        'ziplog_build_info{node="mms-0",version="0.1.0"} 1',
        'ziplog_heartbeat_age_seconds{node="fh-0"} 0.25',
        'ziplog_raft_leader{node="mms-0"} 1',
        "ziplog_trim_position 5",
        'ziplog_possible_loss_positions_total{shard="3"} 4',
        'ziplog_shard_state{shard="3",state="live"} 1',
        'ziplog_shard_state{shard="3",state="recovering"} 0',
        f'ziplog_shard_stable_position{{shard="3"}} {2**60}',
        'ziplog_disk_free_bytes{node="shard-3-0",shard="3"} 10',
    ):
        assert line in lines
    # A node that is not up has no series of its own work.
    assert not [line for line in lines if "shard-3-1" in line and "disk" in line]


def test_every_line_has_the_text_format_and_every_metric_a_type() -> None:
    typed = set()
    for line in metrics.render(document()).splitlines():
        if found := re.fullmatch(r"# TYPE (\w+) (gauge|counter)", line):
            typed.add(found[1])
            assert (found[2] == "counter") is found[1].endswith("_total")
        elif not line.startswith("# HELP"):
            sample = re.fullmatch(r'(\w+)(\{(\w+="([^"\\]|\\.)*",?)+\})? -?[0-9.e+]+', line)
            assert sample, line
            assert sample[1] in typed


def test_a_silent_cluster_has_one_metric() -> None:
    lines = metrics.render(None).splitlines()
    assert [line for line in lines if line[0] != "#"] == ["ziplog_cluster_up 0"]


def test_a_node_is_alive_unless_it_is_down() -> None:
    assert health.alive(document(), "shard-3-0") == ""
    assert health.alive(document(), "shard-3-1") == "shard-3-1 is down"
    assert health.alive(document(), "x") == "there is no node x"


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("", {}, ""),
        ("", {"state": "finalized"}, ""),
        ("", {"state": "recovering"}, "shard 3 is recovering"),
        ("", {"refusing": True}, "shard 3 refuses records"),
        ("shard-3-0", {}, ""),
        ("shard-3-0", {"state": "recovering"}, "shard 3 is recovering"),
        ("shard-3-1", {}, "shard-3-1 is down"),
        ("mms-0", {"state": "recovering"}, ""),
        ("x", {}, "there is no node x"),
    ],
)
def test_what_is_ready(name: str, changes: dict[str, Any], problem: str) -> None:
    found = document()
    found["shards"][0].update(changes)
    assert health.ready(found, name) == problem
