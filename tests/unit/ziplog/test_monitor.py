"""Metrics and health of a status document."""

from __future__ import annotations

import re
import time
from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

import pytest

from ziplog.core.first_seen import FirstSeen
from ziplog.core.histogram import BOUNDS_US, Histogram
from ziplog.monitor import exposition, health, metrics
from ziplog.monitor.catalogue import CATALOGUE
from ziplog.monitor.cursor_polls import CursorPolls
from ziplog.monitor.cursors import ListedCursor, Tail
from ziplog.monitor.status import with_replies
from ziplog.types import CursorInfo, RecordId
from ziplog.wire import Durations, Metrics, Value

if TYPE_CHECKING:
    from ziplog.client.blocking import Log

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
            "refusing": False, "holes": 2, "blocks": [], "is_watched": True, "epoch": 8,
            "replicas": [
                {
                    "name": "shard-3-0", "role": "primary", "state": "up", "version": "0.1.0",
                    "heartbeat_age_ms": 0,
                    "disk": {"free_bytes": 10, "reserve_bytes": 3, "full": False},
                },
                {
                    "name": "shard-3-1", "role": "backup", "state": "down", "version": "0.1.0",
                    "heartbeat_age_ms": 9000,
                    "disk": {"free_bytes": 10, "reserve_bytes": 3, "full": False},
                },
            ],
        }
    ],
    "losses": [{"shard": 3, "start": 10, "stop": 14}],
}  # fmt: skip


S = 1_000_000_000


def document() -> dict[str, Any]:
    return deepcopy(DOCUMENT)


def replies() -> dict[str, Metrics | None]:
    flushes = Histogram()
    for ns in (1, 64_000, 64_001, 20 * S):
        flushes.add(ns)
    labels = {"shard": "3"}
    reply = Metrics(
        7, 1,
        [
            Value("ziplog_build_info", 1, {"version": "0.1.0"}),
            Value("ziplog_records_total", 5, labels | {"role": "primary"}),
            Value("process_cpu_seconds_total", 1.25),
            # What a later release, or a broken node, might send.
            Value("ziplog_later", 1), Value("process_open_fds", 1, {'a"': ""}),
            Value("ziplog_segments", float("nan")), Value("ziplog_flush_duration_seconds", 1),
        ],
        [Durations.of("ziplog_flush_duration_seconds", flushes, labels)],
    )  # fmt: skip
    return {"mms-0": Metrics(7, 1, [], []), "shard-3-0": reply, "shard-3-1": None}


def cursor(name: str, position: int, owner: str = "", **more: Any) -> CursorInfo:
    state = "owned" if owner else "free"
    known = CursorInfo(name, RecordId(position, 3), 7, state, owner, None, 60, False, 0, b"")  # type: ignore[arg-type]
    return known._replace(**more)


def listed() -> list[ListedCursor]:
    return [
        ListedCursor(cursor("billing", 12, "host:1", is_silent=True), 2.5, None),
        ListedCursor(cursor("a/b/0", 12, state="paused"), 0.0, 9.25),
        ListedCursor(cursor("orders/members/0", 1, "host:2"), 0.0, 1.0),
        ListedCursor(cursor("orders/members/1", 1, "host:3", is_silent=True), 0.0, 1.0),
        ListedCursor(cursor("orders/shop/3", 20, "host:2", is_holding=True), 0.5, 1.0),
    ]


def render(found: dict[str, Any] | None, media: str = exposition.TEXT) -> list[str]:
    times = FirstSeen()
    for epoch, at in ((6, 1), (8, 2), (9, 5)):
        times.observe(epoch, at * S)
    families = metrics.families(found, replies() if found else {}, listed(), times, 12 * S)
    return exposition.render(families, media).splitlines()


@pytest.mark.parametrize(("listed", "number"), [(None, []), ((), ["ziplog_cursors 0"])])
def test_the_number_of_cursors_is_not_0_while_it_is_unknown(
    listed: tuple[()] | None, number: list[str]
) -> None:
    found = metrics.families(document(), replies(), listed, FirstSeen(), S)
    lines = exposition.render(found, exposition.TEXT).splitlines()
    assert [line for line in lines if line.startswith("ziplog_cursors")] == number


def test_no_cursors_are_known_before_the_first_list() -> None:
    polls = CursorPolls(cast("Log", None), lambda: None)
    assert polls.cursors() is None
    polls._listed = (time.monotonic(), ())
    assert polls.cursors() == ()
    polls._listed = (time.monotonic() - 11, ())
    assert polls.cursors() is None


def test_the_metrics_of_a_cluster() -> None:
    lines = render(document())
    for line in (
        "ziplog_cluster_up 1",
        r'ziplog_cluster_info{cluster="a\"b\\c\n",cluster_id="'
        + "0" * 31
        + '7",durability="memory"} 1',
        'ziplog_up{node="shard-3-0"} 1',
        'ziplog_up{node="shard-3-1"} 0',
        'ziplog_node_state{node="mms-0",role="mms",state="up"} 1',
        'ziplog_node_state{node="shard-3-1",role="backup",state="down"} 1',
        'ziplog_build_info{node="shard-3-0",version="0.1.0"} 1',
        'ziplog_heartbeat_age_seconds{node="shard-3-0"} 0',
        "ziplog_trim_position 5",
        f"ziplog_tail_position {2**60}",
        "ziplog_unfinalized_seconds 10",
        'ziplog_shard_open_seconds{shard="3"} 10',
        "# TYPE ziplog_possible_loss_positions_total gauge",
        'ziplog_possible_loss_positions_total{shard="3"} 4',
        'ziplog_shard_state{shard="3",state="live"} 1',
        'ziplog_shard_state{shard="3",state="recovering"} 0',
        f'ziplog_shard_stable_position{{shard="3"}} {2**60}',
        'ziplog_disk_free_bytes{node="shard-3-0",shard="3"} 10',
        'ziplog_records_total{node="shard-3-0",shard="3",role="primary"} 5',
        'process_cpu_seconds_total{node="shard-3-0"} 1.25',
    ):
        assert line in lines
    # A node that does not reply has no series of its own work.
    silent = {line.split("{")[0] for line in lines if "shard-3-1" in line}
    assert silent == {"ziplog_up", "ziplog_node_state"}
    unknown = ("ziplog_later", "process_open_fds{", "ziplog_segments{")
    assert not [line for line in lines if line.startswith(unknown)]


def test_the_buckets_of_a_histogram_are_cumulative() -> None:
    name, labels = "ziplog_flush_duration_seconds", 'node="shard-3-0",shard="3"'
    lines = [line for line in render(document()) if line.startswith(name)]
    assert len(lines) == len(BOUNDS_US) + 3
    assert lines[0] == f'{name}_bucket{{{labels},le="6.4e-05"}} 2'
    assert lines[1] == f'{name}_bucket{{{labels},le="0.000128"}} 3'
    assert lines[-4] == f'{name}_bucket{{{labels},le="16.777216"}} 3'
    assert lines[-3] == f'{name}_bucket{{{labels},le="+Inf"}} 4'
    assert lines[-2] == f"{name}_sum{{{labels}}} 20.000128002"
    assert lines[-1] == f"{name}_count{{{labels}}} 4"


@pytest.mark.parametrize("media", [exposition.TEXT, exposition.OPEN_METRICS])
def test_every_line_has_the_format_and_every_metric_a_type(media: str) -> None:
    typed: dict[str, str] = {}
    lines = render(document(), media)
    is_open = media == exposition.OPEN_METRICS
    if is_open:
        assert lines.pop() == "# EOF"
    for line in lines:
        if found := re.fullmatch(r"# TYPE (\w+) (gauge|counter|histogram)", line):
            assert found[1] not in typed
            typed[found[1]] = found[2]
            if found[1] == "ziplog_possible_loss_positions_total":  # It falls with a trim.
                assert found[2] == "gauge"
                continue
            assert (found[2] == "counter" and not is_open) is found[1].endswith("_total")
        elif not line.startswith("# HELP"):
            sample = re.fullmatch(r'(\w+)(\{(\w+="([^"\\]|\\.)*",?)+\})? -?[0-9.e+-]+', line)
            assert sample, line
            last = next(reversed(typed))
            suffixes = {"histogram": "_(bucket|sum|count)", "counter": "_total" * is_open}
            assert re.fullmatch(last + suffixes.get(typed[last], ""), sample[1]), line


def test_the_metrics_of_cursors_and_players() -> None:
    lines = [line for line in render(document()) if line.startswith(("ziplog_c", "ziplog_p"))]
    plain = 'cursor="billing",player="",target="",partition=""'
    task = 'cursor="orders/shop/3",player="orders",target="shop",partition="3"'
    for line in (
        "ziplog_cursors 5",
        # A member that was silent for its lease does not count, and its claim owns nothing.
        'ziplog_player_members{player="orders"} 1',
        f"ziplog_cursor_owned{{{plain}}} 0",
        f"ziplog_cursor_owned{{{task}}} 1",
        f"ziplog_cursor_lag_seconds{{{plain}}} 2.5",
        f"ziplog_cursor_lag_seconds{{{task}}} 0.5",
        f"ziplog_cursor_holding{{{task}}} 1",
        f"ziplog_cursor_term{{{task}}} 7",
        f"ziplog_cursor_position{{{task}}} 20",
        f"ziplog_cursor_move_age_seconds{{{task}}} 1",
        'ziplog_cursor_paused{cursor="a/b/0",player="",target="",partition=""} 1',
    ):
        assert line in lines
    assert not [line for line in lines if "members/" in line]
    never_moved = f"ziplog_cursor_move_age_seconds{{{plain}"
    assert not [line for line in lines if line.startswith(never_moved)]


def test_lag_is_the_age_of_the_first_record_that_a_cursor_has_not_passed() -> None:
    times = FirstSeen()
    for last, at in ((100, 10), (200, 20), (300, 30)):
        times.observe(last, at * S)
    tail = Tail(300, 50, times, 35 * S)

    def lag_s(position: int, **inserted_at: int) -> float:
        known = {int(name[1:]): at * S for name, at in inserted_at.items()}
        return tail.lag_s(tail.first_missing(cursor("x", position)), known)

    assert lag_s(301) == 0
    assert lag_s(300) == 5
    assert lag_s(101) == 15
    # Records that were there before the first look: since then, or as the log itself has it.
    assert lag_s(100) == 25
    assert lag_s(100, p100=3) == 32
    # What is trimmed is not waited for.
    assert lag_s(7, p50=1, p7=0) == 34
    assert Tail(300, 301, times, 35 * S).lag_s(301, {}) == 0
    assert [tail.is_older(position) for position in (100, 101)] == [True, False]
    assert not Tail(0, 0, FirstSeen(), S).is_older(0)


def test_a_silent_cluster_has_one_metric() -> None:
    assert [line for line in render(None) if line[0] != "#"] == ["ziplog_cluster_up 0"]


def test_counters_are_named_so() -> None:
    for name, entry in CATALOGUE.items():
        assert (entry.kind == "counter") is name.endswith("_total")
        assert entry.text.endswith(".")


@pytest.mark.parametrize(
    ("accept", "media"),
    [
        ("", exposition.TEXT),
        ("*/*", exposition.TEXT),
        ("text/html, application/openmetrics-text", exposition.OPEN_METRICS),
        (
            "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3",
            exposition.OPEN_METRICS,
        ),
        ("application/openmetrics-text;q=0.2,text/plain;q=0.3", exposition.TEXT),
        ("application/openmetrics-text;q=0", exposition.TEXT),
        ("application/openmetrics-text;q=x", exposition.TEXT),
    ],
)
def test_the_accept_header_chooses_the_format(accept: str, media: str) -> None:
    assert exposition.media_type(accept) == media


def test_the_times_of_epochs_are_bounded() -> None:
    times = FirstSeen()
    assert times.age_s(0, S) == 0
    for epoch in range(20_000):
        times.observe(epoch, epoch * S)
    assert times.age_s(0, 20_000 * S) == 20_000
    assert times.age_s(19_999, 20_000 * S) == pytest.approx(1, abs=2)
    assert times.age_s(20_000, 20_000 * S) == 0
    assert len(times._observed) <= 7200


def test_a_node_is_alive_while_it_replies() -> None:
    assert health.liveness_problem("shard-3-0", 4.9) == ""
    assert health.liveness_problem("shard-3-0", 5.4) == "shard-3-0 has not replied for 5 s"
    assert health.liveness_problem("x", None) == "there is no node x"


def test_the_status_has_what_the_nodes_replied() -> None:
    values = [
        Value("ziplog_build_info", 1, {"version": "0.3.0"}),
        Value("ziplog_start_time_seconds", 1700.5),
        Value("ziplog_replica_lag_seconds", 0.25, {"shard": "3", "peer": "shard-3-1"}),
    ]
    reply = Metrics(7, 1, values, [])
    found = with_replies(document(), {"shard-3-0": reply, "shard-3-1": Metrics(7, 1, [], [])})
    primary, backup = found["shards"][0]["replicas"]
    assert (primary["started"], primary["lag_ms"], primary["version"]) == (1700.5, None, "0.3.0")
    assert (backup["started"], backup["lag_ms"], backup["version"]) == (None, 250, "0.1.0")
    assert found["mms"][0]["started"] is None
    assert "started" not in DOCUMENT["mms"][0]


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("", {}, "shard 3 takes no records: shard-3-1 is down"),
        ("", {"state": "finalized"}, ""),
        ("", {"state": "recovering"}, "shard 3 is recovering"),
        ("shard-3-0", {}, "shard 3 takes no records: shard-3-1 is down"),
        ("shard-3-0", {"state": "finalized"}, ""),
        ("shard-3-0", {"state": "recovering"}, "shard 3 is recovering"),
        ("shard-3-1", {}, "shard-3-1 is down"),
        ("mms-0", {"state": "recovering"}, ""),
        ("fh-0", {}, "no failure handler leads"),
        ("x", {}, "there is no node x"),
    ],
)
def test_what_is_ready(name: str, changes: dict[str, Any], problem: str) -> None:
    found = document()
    found["shards"][0].update(changes)
    assert health.readiness_problem(found, name) == problem


@pytest.mark.parametrize("state", ["up", "full", "suspect"])
@pytest.mark.parametrize(("refusing", "problem"), [(False, ""), (True, "shard 3 refuses records")])
def test_a_live_shard_with_all_servers_is_ready(state: str, refusing: bool, problem: str) -> None:
    found = document()
    found["shards"][0]["refusing"] = refusing
    found["shards"][0]["replicas"][1]["state"] = state
    for name in ("", "shard-3-0"):
        assert health.readiness_problem(found, name) == problem


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (None, "c:1 does not reply"),
        (Metrics(7, 1, [], []), "c:1 is not ready: it replays the log"),
        (Metrics(7, 1, [Value("logdb_ready", 0)], []), "c:1 is not ready: it replays the log"),
        (Metrics(7, 1, [Value("logdb_ready", 1)], []), ""),
    ],
)
def test_a_coordinator_is_ready_once_it_has_replayed_the_log(
    reply: Metrics | None, problem: str
) -> None:
    assert health.coordinator_problem("c:1", reply) == problem
