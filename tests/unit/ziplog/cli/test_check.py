"""`ziplog check`: the findings of a status document, and the exit codes."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.unit.ziplog.cli.fakes import STATUS, FakeLog, run
from ziplog.cli import check
from ziplog.cli.check import Level, findings, reply_findings
from ziplog.core.units import NS_PER_S
from ziplog.errors import UnavailableError
from ziplog.monitor import nodes
from ziplog.monitor.rates import NodeReply
from ziplog.wire import Metrics, Value

if TYPE_CHECKING:
    from collections.abc import Callable


def healthy() -> dict[str, Any]:
    document: dict[str, Any] = deepcopy(STATUS)
    document["failure_handlers"] = document["failure_handlers"][:1]
    document["blocked_by"] = None
    document["shards"][0]["replicas"][0]["disk"] = {
        "free_bytes": 9 << 30, "reserve_bytes": 1 << 30, "full": False,
    }  # fmt: skip
    for node in (*document["mms"], *document["failure_handlers"]):
        node["version"] = "0.1.0"
        node["disk"] = {"free_bytes": 1 << 30, "reserve_bytes": 0, "full": False}
    return document


def problems(document: dict[str, Any]) -> list[tuple[Level, str]]:
    return [(each.level, each.check) for each in findings(document) if each.level]


def replica(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["shards"][0]["replicas"][0]
    return found


def test_nothing_is_found_in_a_healthy_cluster() -> None:
    assert problems(healthy()) == []
    assert len(list(findings(healthy()))) == 7


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d.update(failure_handlers=[]), (Level.WARNING, "failure handler")),
        (
            lambda d: d["failure_handlers"][0].update(state="down"),
            (Level.CRITICAL, "failure handler"),
        ),
        (
            lambda d: d["failure_handlers"][0].update(leader=False),
            (Level.WARNING, "failure handler"),
        ),
        (
            lambda d: d["mms"].extend({**d["mms"][0], "state": s} for s in ("up", "down")),
            (Level.WARNING, "membership"),
        ),
        (lambda d: d["shards"][0].update(state="recovering"), (Level.CRITICAL, "shard 0")),
        (lambda d: d["shards"][0].update(refusing=True), (Level.CRITICAL, "shard 0")),
        (
            lambda d: d["shards"][0].update(state="parked", obstacle="start shard-0-0"),
            (Level.CRITICAL, "shard 0"),
        ),
        (lambda d: d["shards"][0].update(state="leaving"), (Level.WARNING, "shard 0")),
        (lambda d: replica(d).update(state="suspect"), (Level.WARNING, "shard 0")),
        (lambda d: replica(d).update(state="down"), (Level.CRITICAL, "shard 0")),
        (lambda d: replica(d).update(state="limbo"), (Level.CRITICAL, "shard 0")),
        (
            lambda d: replica(d)["disk"].update(free_bytes=(2 << 30) - 1),
            (Level.WARNING, "disk of shard-0-0"),
        ),
        (
            lambda d: (replica(d)["disk"].update(full=True), replica(d).update(full="no space")),
            (Level.CRITICAL, "disk of shard-0-0"),
        ),
        (
            lambda d: d["mms"][0]["disk"].update(free_bytes=200 << 20),
            (Level.WARNING, "disk of mms-0"),
        ),
        (
            lambda d: d["failure_handlers"][0]["disk"].update(free_bytes=0, full=True),
            (Level.CRITICAL, "disk of fh-0"),
        ),
        (lambda d: d.update(blocked_by=0), (Level.WARNING, "readers")),
        (lambda d: d.update(losses=[{"shard": 0}]), (Level.WARNING, "losses")),
        (lambda d: replica(d).update(version="0.2.0"), (Level.WARNING, "versions")),
    ],
)
def test_each_problem_is_found(
    change: Callable[[dict[str, Any]], object], problem: tuple[Level, str]
) -> None:
    document = healthy()
    change(document)
    assert problems(document) == [problem]


def test_a_stopped_server_of_a_shard_that_is_over_is_no_problem() -> None:
    document = healthy()
    former = deepcopy(document["shards"][0]) | {"id": 1, "state": "finalized"}
    former["replicas"][0] |= {"state": "down", "version": "0.0.9"}
    document["shards"].append(former)
    assert problems(document) == [(Level.WARNING, "shard 1"), (Level.WARNING, "versions")]
    former["is_over"] = True
    assert problems(document) == []


def test_an_unfinished_upgrade_is_a_warning() -> None:
    document = healthy()
    document["wire_in_use"] = 1
    nodes = [*document["mms"], *document["failure_handlers"], replica(document)]
    for node in nodes:
        node["wire_versions"] = [1, 2]
    assert problems(document) == [(Level.WARNING, "versions")]
    for known in ([1, 1], None):  # a node of the former release, or one that has not reported
        nodes[-1]["wire_versions"] = known
        assert problems(document) == []


def test_the_exit_code_says_whether_all_is_well(
    log: FakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = healthy()
    monkeypatch.setattr(log, "cluster", lambda: document)
    monkeypatch.setattr(nodes, "replies_of", lambda *_: {"mms-0": None})
    result = run("check")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == "ok        membership          1 of 1 up, leader mms-0"
    assert run("check", "--format", "nagios").stdout == "ZIPLOG OK - 7 checks\n"
    document["shards"][0]["state"] = "recovering"
    assert run("check").exit_code == 1
    result = run("check", "--format", "nagios")
    assert result.exit_code == 2
    assert result.stdout == ("ZIPLOG CRITICAL - shard 0: recovering, view 1; it takes no records\n")
    lines = [
        msgspec.json.decode(line)
        for line in run("check", "--format", "json").stdout_bytes.splitlines()
    ]
    assert [line["level"] for line in lines].count("critical") == 1
    assert run("check", "--json").stdout == run("check", "--format", "json").stdout


def reply(clock_s: float, *lags_s: float) -> NodeReply:
    """Return a reply at 100 s of a node's clock and of its backups' lags."""
    lags = [
        Value("ziplog_replica_lag_seconds", lag, {"shard": "0", "peer": f"shard-0-{number}"})
        for number, lag in enumerate(lags_s, 1)
    ]
    clock = Value("ziplog_time_seconds", clock_s)
    return NodeReply(Metrics(7, 1, [clock, *lags], []), 100 * NS_PER_S)


@pytest.mark.parametrize(
    ("replies", "found"),
    [
        ({"mms-0": None}, []),
        (
            {"mms-0": reply(1_101.0), "shard-0-0": reply(1_100.0, 0.5, 4.0), "fh-0": None},
            [
                (Level.OK, "lags", "backups are at most 4.0 s behind (shard-0-2)"),
                (Level.OK, "clocks", "at most 1.0 s ahead of this machine's (mms-0)"),
            ],
        ),
        (
            {"mms-0": reply(1_101.0), "shard-0-0": reply(1_097.5, 5.5)},
            [
                (Level.WARNING, "lags", "backups are at most 5.5 s behind (shard-0-1)"),
                (Level.WARNING, "clocks", "at most 2.5 s behind this machine's (shard-0-0)"),
            ],
        ),
    ],
)
def test_late_backups_and_wrong_clocks_are_found(
    replies: dict[str, NodeReply | None], found: list[tuple[Level, str, str]]
) -> None:
    assert [tuple(one) for one in reply_findings(replies, 1_000 * NS_PER_S)] == found


def files(damaged: int, impossible: int) -> NodeReply:
    """Return a server's reply about its unreadable entries."""
    results = {"repaired": 1, "impossible": impossible}
    repairs = [Value("ziplog_repairs_total", n, {"result": one}) for one, n in results.items()]
    values = [Value("ziplog_damaged_entries", damaged, {"shard": "0"}), *repairs]
    return NodeReply(Metrics(7, 1, values, []), NS_PER_S)


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        (files(0, 0), (Level.OK, "files", "no server has found unreadable entries")),
        (
            files(1200, 0),
            (Level.WARNING, "files of s0", "unreadable entries: 1,200; its log names them"),
        ),
        (
            files(0, 2),
            (
                Level.WARNING,
                "files of s0",
                "unreadable entries, and no other server could repair them; its log names them",
            ),
        ),
        (
            files(1, 1),
            (
                Level.CRITICAL,
                "files of s0",
                "unreadable entries: 1, and no other server could repair them; its log names them",
            ),
        ),
    ],
)
def test_unreadable_entries_are_found(reply: NodeReply, found: tuple[Level, str, str]) -> None:
    replies = {"mms-0": NodeReply(Metrics(7, 1, [], []), NS_PER_S), "s0": reply, "s1": None}
    assert [tuple(one) for one in reply_findings(replies, 0)] == [found]


def test_an_absent_cluster_is_critical(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_bootstrap: str, _timeout: float) -> None:
        raise UnavailableError("no membership service answered")

    monkeypatch.setattr(check, "connect", refuse)
    result = run("check", "--format", "nagios")
    assert result.exit_code == 2
    assert result.stdout == "ZIPLOG CRITICAL - reachable: no membership service answered\n"
    assert run("check").exit_code == 1
