"""`ziplog.metrics`: a client's counters in a real registry of prometheus_client."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.unit.ziplog.client.fakes import (
    MS,
    ClientHarness,
    S,
    ack,
    connected,
    pinned,
    refused,
    sent,
)
from tests.unit.ziplog.client.reader import Reader
from ziplog import metrics
from ziplog.client.common.requests import MeasureRequest
from ziplog.core.node import Closing
from ziplog.core.units import NEVER
from ziplog.errors import ConfigError, DeadlineError, OutcomeUnknownError
from ziplog.types import RID_GENESIS, RecordId


class SteppedLog:
    """A log whose client node the test steps."""

    def __init__(self, harness: ClientHarness | None = None) -> None:
        self.harness = connected(pinned) if harness is None else harness

    def measure(self) -> Any:
        return self.harness.answers.pop(self.harness.call(MeasureRequest(NEVER)))


def scrape(registry: CollectorRegistry) -> list[str]:
    text = generate_latest(registry).decode()
    return [line for line in text.splitlines() if line[0] != "#"]


def series(registry: CollectorRegistry, start: str) -> list[str]:
    return [line for line in scrape(registry) if line.startswith(f"ziplog_client_{start}")]


def registered(log: SteppedLog, name: str = "ziplog") -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=True)
    metrics.register(registry, log, name)  # type: ignore[arg-type]
    return registry


def place(harness: ClientHarness, gsn: int, after: int = 0) -> None:
    """Ack the unit in flight, `after` ns after it was sent."""
    (insert,) = sent(harness)
    harness.now += after
    gsns = list(range(gsn, gsn + insert.count))
    harness.give(ack(insert, 1, gsns), ack(insert, 0, gsns))


def test_exposition_has_every_metric_with_its_type() -> None:
    log = SteppedLog()
    registry = registered(log, "orders")
    log.harness.insert(b"x")
    place(log.harness, 10, 100_000)
    log.harness.insert(b"y")
    text = generate_latest(registry).decode()
    bounds = [line for line in text.splitlines() if "_bucket" in line]
    assert bounds[:2] == [
        'ziplog_client_insert_duration_seconds_bucket{client="orders",le="6.4e-05"} 0.0',
        'ziplog_client_insert_duration_seconds_bucket{client="orders",le="0.000128"} 1.0',
    ]
    assert bounds[-1].endswith('le="+Inf"} 1.0')
    assert len(bounds) == 20
    lines = [line for line in text.splitlines() if "_bucket" not in line and "# HELP" not in line]
    assert lines == [
        "# TYPE ziplog_client_inserts_total counter",
        'ziplog_client_inserts_total{client="orders",path="fast",result="ok"} 1.0',
        'ziplog_client_inserts_total{client="orders",path="slow",result="ok"} 0.0',
        'ziplog_client_inserts_total{client="orders",path="none",result="error"} 0.0',
        'ziplog_client_inserts_total{client="orders",path="none",result="unknown"} 0.0',
        "# TYPE ziplog_client_insert_duration_seconds histogram",
        'ziplog_client_insert_duration_seconds_count{client="orders"} 1.0',
        'ziplog_client_insert_duration_seconds_sum{client="orders"} 0.0001',
        "# TYPE ziplog_client_window_units gauge",
        'ziplog_client_window_units{client="orders"} 1.0',
        "# TYPE ziplog_client_retries_total counter",
        'ziplog_client_retries_total{client="orders"} 0.0',
        "# TYPE ziplog_client_redirects_total counter",
        'ziplog_client_redirects_total{client="orders"} 0.0',
        "# TYPE ziplog_client_delivered_records_total counter",
        'ziplog_client_delivered_records_total{client="orders"} 0.0',
        "# TYPE ziplog_client_reader_lag_seconds gauge",
        'ziplog_client_reader_lag_seconds{client="orders"} 0.0',
    ]


def test_durations_count_from_the_registration_on_both_paths() -> None:
    log = SteppedLog()
    harness = log.harness
    harness.insert(b"before")
    place(harness, 10, MS)
    timeout = harness.core._inserts.windows[0].retransmit_timeout
    registry = registered(log)
    continued = harness.core._inserts.windows[0].retransmit_timeout
    assert (continued.ns, continued._smoothed, continued._variance) == (
        timeout.ns, timeout._smoothed, timeout._variance,
    )  # fmt: skip
    harness.insert(b"short path")
    assert harness.core._inserts.plain.insert is not None
    place(harness, 20, MS)
    harness.insert(b"a", b"b")
    assert harness.core._inserts.plain.insert is None
    place(harness, 30, 2 * MS)
    assert series(registry, "insert_duration_seconds_count") == [
        'ziplog_client_insert_duration_seconds_count{client="ziplog"} 2.0'
    ]
    assert series(registry, "insert_duration_seconds_sum") == [
        'ziplog_client_insert_duration_seconds_sum{client="ziplog"} 0.003'
    ]
    assert series(registry, "inserts_total")[0].endswith(" 4.0")


def test_failed_inserts_count_by_what_is_known_of_them() -> None:
    log = SteppedLog()
    harness, registry = log.harness, registered(log)
    call = harness.insert(b"refused", after=RecordId(999, 0))
    (insert,) = sent(harness)
    harness.give(refused(insert, 0, "no-such-position"))
    assert isinstance(harness.answers.pop(call), Exception)
    call = harness.insert(b"a", b"b", timeout=S)
    sent(harness)
    assert series(registry, "window_units") == ['ziplog_client_window_units{client="ziplog"} 1.0']
    harness.pass_time(2 * S)
    error = harness.answers.pop(call)
    assert isinstance(error, OutcomeUnknownError)
    assert not isinstance(error, DeadlineError)
    assert [line.rpartition(",")[2] for line in series(registry, "inserts_total")] == [
        'result="ok"} 0.0', 'result="ok"} 0.0', 'result="error"} 1.0', 'result="unknown"} 2.0',
    ]  # fmt: skip
    retries = float(series(registry, "retries_total")[0].rpartition(" ")[2])
    assert retries == harness.core.counters.retries > 0


def test_records_that_an_insert_of_many_placed_do_not_count_as_failed() -> None:
    log = SteppedLog()
    harness, registry = log.harness, registered(log)
    many = 600  # more than a unit's records
    harness.insert(*[b"x"] * many, timeout=S)
    first, *rest = sent(harness)
    assert rest
    gsns = list(range(10, 10 + first.count))
    harness.give(ack(first, 1, gsns), ack(first, 0, gsns))
    harness.pass_time(2 * S)
    assert harness.core.counters.unknown == many - first.count
    assert series(registry, "inserts_total")[0].endswith(f" {float(first.count)}")


def test_the_lag_of_the_slowest_subscription_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader()
    log = SteppedLog(reader)
    registry = registered(log)
    now = 1000 * S
    monkeypatch.setattr(metrics, "now_ns", lambda: now)

    def lag_s(seconds: int) -> float:
        """Return the lag, `seconds` after the last scrape."""
        nonlocal now
        now += seconds * S
        return float(series(registry, "reader_lag_seconds")[0].rpartition(" ")[2])

    assert lag_s(0) == 0
    reader.deliver(0, 1, 7, [1], [5], stable=7)
    reader.deliver(1, 1, 8)
    assert [lag_s(10), lag_s(10), lag_s(5)] == [0, 10, 15]
    reader.deliver(0, 7, 11, [9], stable=11)
    reader.deliver(1, 8, 11)
    assert lag_s(5) == 20
    assert [record.rid.gsn for record in reader.batch(reader.fetch(0, 2)).records] == [1, 5]
    assert [lag_s(5), lag_s(5)] == [5, 10], "gsn 9 was reported before the scrape 10 s ago"
    assert reader.gsns() == [9]
    assert lag_s(5) == 0
    reader.deliver(0, 11, 21, [15], stable=21)
    assert [lag_s(5), lag_s(5)] == [0, 5]
    log.harness.step(Closing())
    assert lag_s(5) == 0


def test_a_scrape_releases_the_memory_of_clients_that_the_program_dropped() -> None:
    log = SteppedLog()
    registry = registered(log)
    subscriptions = weakref.ref(log.harness.core._subscriptions)
    del log
    assert scrape(registry) == []
    gc.collect()
    assert subscriptions() is None


def test_a_name_belongs_to_one_open_client() -> None:
    first, second = SteppedLog(), SteppedLog()
    registry = registered(first, "a")
    metrics.register(registry, first, "a")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="client is 'a'; it must be another name"):
        metrics.register(registry, second, "a")  # type: ignore[arg-type]
    metrics.register(registry, second, "b")  # type: ignore[arg-type]
    second.harness.insert(b"x")
    assert series(registry, "window_units") == [
        'ziplog_client_window_units{client="a"} 0.0', 'ziplog_client_window_units{client="b"} 1.0',
    ]  # fmt: skip
    first.harness.step(Closing())
    third = SteppedLog()
    metrics.register(registry, third, "a")  # type: ignore[arg-type]
    third.harness.insert(b"x", after=RID_GENESIS)
    assert series(registry, "window_units")[0].endswith('client="a"} 1.0')
    del third
    assert series(registry, "window_units") == ['ziplog_client_window_units{client="b"} 1.0']


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ziplog_loads_prometheus_client_on_request_only() -> None:
    loaded = "'prometheus_client' in sys.modules"
    program = f"import sys, ziplog; ziplog.Log; print({loaded}); ziplog.metrics; print({loaded})"
    assert run(program).split() == ["False", "True"]


def test_a_missing_package_is_named_with_its_extra() -> None:
    program = (
        "import sys, ziplog\nsys.modules['prometheus_client'] = None\n"
        "try: ziplog.metrics\nexcept ModuleNotFoundError as error: print(error)"
    )
    assert "pip install 'ziplog[monitor]'" in run(program)
