"""`ziplog events`, `epochs` and `top` with a log in memory."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

import ziplog
from tests.unit.ziplog.cli.fakes import FakeLog, FakeSubscription, run
from ziplog.cli import events, moments, top
from ziplog.core.gsn import Schedule
from ziplog.core.histogram import Histogram
from ziplog.errors import ConfigError
from ziplog.monitor.overview import WINDOW, Overview
from ziplog.monitor.rates import Change, NodeReply
from ziplog.wire import Durations, Metrics, Value

if TYPE_CHECKING:
    from collections.abc import Sequence

S = 1_000_000_000
EVENTS = [
    {
        "number": 8, "at_us": 1_790_000_000_000_000, "kind": "recovery", "shard": 1, "node": None,
        "text": "recovery 2 begins in view 1",
    },
    {
        "number": 9, "at_us": 1_790_000_060_123_456, "kind": "node", "shard": 1,
        "node": "shard-1-0", "text": "up\x1b[1m",
    },
]  # fmt: skip


class HistoryLog(FakeLog):
    #: Of each shard.
    weights: ClassVar[dict[int, int]] = {0: 1}

    def cluster(self, **_: float) -> dict[str, Any]:
        status = super().cluster()
        # A developer's own cluster may listen at the default port.
        nodes = [node | {"endpoint": "127.0.0.1:4"} for node in status["mms"]]
        return status | {"trimmed_before": f"{self.trimmed_to}@0", "mms": nodes}

    def events(self, *, after: int) -> list[dict[str, Any]]:
        self.calls.append(("events", after))
        return [dict(event) for event in EVENTS if int(str(event["number"])) > after]

    def subscribe(
        self, start: ziplog.RecordId, *, follow: bool, timeout: float | None = None
    ) -> FakeSubscription:
        return super().subscribe(start, follow=follow, timeout=timeout)

    def epochs(self, start: int, stop: int) -> list[dict[str, Any]]:
        self.calls.append(("epochs", start, stop))
        return [
            {
                "epoch": epoch, "lease": 3, "milliseconds": 10, "start": 1, "stop": 101,
                "shards": [
                    {"shard": shard, "view": 1, "weight": weight, "state": "final"}
                    for shard, weight in self.weights.items()
                ],
            }
            for epoch in range(start, min(stop, 9))
        ]  # fmt: skip


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> HistoryLog:
    made = HistoryLog()
    for module in ("events", "epochs", "top"):
        monkeypatch.setattr(f"ziplog.cli.{module}.connect", lambda *_: made)
    return made


def test_events_are_lines_for_people_and_documents_for_programs(log: HistoryLog) -> None:
    result = run("events")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "2026-09-21T14:13:20.000Z  recovery shard 1               recovery 2 begins in view 1",
        "2026-09-21T14:14:20.123Z  node     shard 1, shard-1-0    up\\x1b[1m",
    ]
    documents = [json.loads(line) for line in run("events", "--json").stdout.splitlines()]
    assert documents[0] == {
        "number": 8, "time": "2026-09-21T14:13:20.000Z", "kind": "recovery", "shard": 1,
        "node": None, "text": "recovery 2 begins in view 1",
    }  # fmt: skip
    assert log.calls == [("events", 0), ("events", 0)]


def test_events_since_a_time(log: HistoryLog) -> None:
    for since in ("2026-09-21T14:14", "@2026-09-21T16:14:00+02:00"):
        assert run("events", "--since", since).stdout.count("\n") == 1
    assert run("events", "--since", "2026-09-22").stdout == ""
    result = run("events", "--since", "yesterday")
    assert result.exit_code == 2
    assert "ISO 8601" in result.stderr


def test_events_follow_until_they_are_interrupted(
    log: HistoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(_: float) -> None:
        if len(log.calls) == 3:
            raise KeyboardInterrupt

    # The module's own `time`: threads of other tests sleep, too.
    monkeypatch.setattr(events, "time", SimpleNamespace(sleep=sleep, time_ns=time.time_ns))
    result = run("events", "--follow")
    assert result.exit_code == 130
    assert result.stdout.count("\n") == 2
    assert log.calls == [("events", 0), ("events", 9), ("events", 9)]


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("90s", 10_000_000 - 90),
        ("@10m", 10_000_000 - 600),
        ("2h", 10_000_000 - 7200),
        ("1.5h", 10_000_000 - 5400),
        ("1d", 10_000_000 - 86_400),
        ("99w", 0),
        ("1970-01-02", 86_400),
        ("1970-01-01T02:00+01:00", 3600),
    ],
)
def test_moments(text: str, moment: int) -> None:
    assert moments.moment_us("--since", text, 10_000_000 * 1_000_000) == moment * 1_000_000


@pytest.mark.parametrize("text", ["", "5", "5y", "m", "-5m", "soon"])
def test_other_moments_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--since"):
        moments.moment_us("--since", text, 0)


def test_epochs_with_their_records(log: HistoryLog) -> None:
    log.insert_many([b"x"] * 3, ziplog.RID_GENESIS)  # In epoch 7 of shard 0.
    lines = run("epochs", "--from", "6", "--to", "7", "--json").stdout.splitlines()
    assert ("epochs", 6, 8) in log.calls
    found = [json.loads(line) for line in lines]
    assert [one["epoch"] for one in found] == [6, 7]
    assert [one["begins"] for one in found] == [None, "2023-11-14T22:13:20.000Z"]
    assert [one["shards"][0]["records"] for one in found] == [0, 3]
    assert [one["shards"][0]["holes"] for one in found] == [0, 0]


def test_holes_are_the_positions_without_a_record_before_the_last_one(log: HistoryLog) -> None:
    log.weights = {0: 1, 3: 2}
    owners = Schedule(list(log.weights.items()))
    own = [gsn for gsn in range(1, 101) if owners.owner(gsn - 1) == 3]
    for gsn in (own[0], own[1], own[5]):
        log.records.append(ziplog.Record(ziplog.RecordId(gsn, 3), b"", None, 0, 7))

    def holes() -> list[tuple[int, int, int]]:
        (line,) = run("epochs", "--from", "7", "--to", "7", "--json").stdout.splitlines()
        shards = json.loads(line)["shards"]
        return [(one["shard"], one["records"], one["holes"]) for one in shards]

    assert holes() == [(0, 0, 0), (3, 3, 3)]
    log.trimmed_to = own[2]
    assert holes() == [(0, 0, 0), (3, 1, 3)]
    log.trimmed_to = own[5]
    assert holes() == [(0, 0, 0), (3, 1, 0)]
    log.trimmed_to = own[5] + 1
    assert holes() == [(0, 0, 0), (3, 0, 0)]


def test_epochs_as_a_table(log: HistoryLog) -> None:
    result = run("epochs", "--from", "7", "--to", "7")
    assert result.exit_code == 0
    head, _, row = result.stdout.splitlines()
    assert head.split() == [
        "epoch", "lease", "begins", "ms", "shard", "weight", "records", "holes", "state", "from"
    ]  # fmt: skip
    assert row.split() == ["7", "3", "10", "0", "1", "0", "0", "final", "1"]
    log.calls.clear()
    assert run("epochs").exit_code == 0
    assert log.calls[0] == ("epochs", 803, 813)  # The present epoch of the status is 812.
    result = run("epochs", "--from", "9", "--to", "8")
    assert (result.exit_code, "--from" in result.stderr) == (2, True)


# --- top ---


def reply(at: int, records: int, cpu: float, acks: Sequence[int] = ()) -> NodeReply:
    histogram = Histogram()
    for ns in acks:
        histogram.add(ns)
    labels = {"shard": "0"}
    values = [
        Value("ziplog_records_total", records, labels | {"role": "primary"}),
        Value("process_cpu_seconds_total", cpu),
        Value("process_resident_memory_bytes", 5 << 20),
        Value("ziplog_replica_lag_seconds", 0.5, labels | {"peer": "shard-0-1"}),
    ]
    durations = [Durations.of("ziplog_ack_duration_seconds", histogram, labels)]
    return NodeReply(Metrics(7, 1, values, durations), at)


def test_rates_are_those_of_the_last_replies() -> None:
    overview = Overview()
    for second in range(100):
        acks = [100_000] * (second - 80) if second > 80 else []
        overview.observe({"shard-0-0": reply(second * S, 50 * second, second / 4, acks)})
    status = {
        "cluster": "c", "epoch": 3, "finalized_epoch": 2, "mms": [], "failure_handlers": [],
        "shards": [
            {
                "id": 0, "state": "live", "view": 1,
                "replicas": [
                    {"name": "shard-0-0", "role": "primary", "state": "up"},
                    {"name": "shard-0-1", "role": "backup", "state": "up"},
                ],
            }
        ],
    }  # fmt: skip
    document = overview.document(status)
    (shard,), (primary, backup) = document["shards"], document["nodes"]
    assert shard["inserted_per_s"] == document["inserted_per_s"] == 50
    assert shard["delivered_per_s"] is None
    assert 64e-6 < shard["ack_p50_s"] < shard["ack_p99_s"] < 128e-6
    assert shard["order_p50_s"] is None
    assert (primary["cpu"], primary["memory_bytes"]) == (0.25, 5 << 20)
    assert (backup["state"], backup["cpu"], backup["lag_s"]) == ("no reply", None, None)
    assert len(overview._replies["shard-0-0"]) == WINDOW
    overview.observe({"shard-0-0": None})
    (shard,) = overview.document(status)["shards"]
    assert shard["inserted_per_s"] is None


def test_quantiles_are_interpolated_in_their_bucket() -> None:
    before, after = reply(0, 1, 0), reply(S, 5, 1, [100_000] * 4 + [10_000])
    change = Change(before.metrics, after.metrics, 1.0)
    name = "ziplog_ack_duration_seconds"
    assert change.quantile(0.1, name) == pytest.approx(32e-6)
    assert change.quantile(1.0, name) == pytest.approx(128e-6)
    assert change.quantile(0.5, name, shard="1") is None
    huge = Change(before.metrics, reply(S, 5, 1, [10**11]).metrics, 1.0)
    assert huge.quantile(0.5, name) == pytest.approx(16.777216)
    # The process restarted meanwhile.
    restarted = Change(after.metrics, before.metrics, 1.0)
    assert restarted.rate("ziplog_records_total") is None
    assert restarted.quantile(0.5, name) is None
    assert change.rate("ziplog_records_total", role="primary") == 4
    assert change.rate("ziplog_records_total", role="backup") is None


def test_top_prints_tables_or_documents(log: HistoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "_REFRESH_S", 0.01)
    assert log.records == []
    lines = run("top", "--count", "2", "--json").stdout.splitlines()
    assert len(lines) == 2
    document = json.loads(lines[1])
    assert [node["state"] for node in document["nodes"]] == ["no reply"] * 4
    result = run("top", "--count", "1")
    assert result.exit_code == 0
    assert "demo: epoch 812, finalized 808" in result.stdout
    assert "primary of 0" in result.stdout
