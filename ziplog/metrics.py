"""Metrics of clients in the program's own Prometheus registry; needs `ziplog[monitor]`.

`register` adds a client to a registry of `prometheus_client`. A scrape reads the client's present
counters; it sends nothing, and no insert waits for it. See docs/monitoring.md.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Final, NamedTuple

from ziplog.core.first_seen import FirstSeen
from ziplog.core.histogram import BOUNDS_US
from ziplog.errors import ConfigError
from ziplog.runtime.clock import now_ns

try:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "ziplog.metrics needs prometheus_client, not installed: pip install 'ziplog[monitor]'",
        name=error.name,
    ) from error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.registry import CollectorRegistry

    from ziplog.client.asynchronous import AsyncLog
    from ziplog.client.blocking import Log
    from ziplog.client.inserts.measurements import Measurements

__all__ = ["register"]

_BOUNDS: Final = (*(repr(us / 1e6) for us in BOUNDS_US), "+Inf")


def register(registry: CollectorRegistry, log: Log | AsyncLog, client: str = "ziplog") -> None:
    """Export the metrics of a client.

    Counters start when the client was created, durations with this call. The client's series end
    when the program drops the client. After it is closed, another client may take its name.

    Args:
        registry: for example `prometheus_client.REGISTRY`.
        log: the client; an asyncio client in its event loop.
        client: the label `client` of all its series; unique in the registry.

    Raises:
        ConfigError: another client that is still open has this name.
        ClosedError: the client is closed.

    """
    with _lock:
        collector = _collectors.get(registry)
        if collector is None:
            collector = _ClientCollector()
            registry.register(collector)
            _collectors[registry] = collector
        collector.add(log, client)


class _Client(NamedTuple):
    """A registered client: the registry does not keep it alive."""

    log: weakref.ref[Log | AsyncLog]
    measurements: Measurements
    #: Of earlier scrapes: the end of what the servers had reported to its subscriptions.
    reported: FirstSeen

    def reader_lag_s(self, now: int) -> float:
        """Return how far the slowest subscription is behind the servers, in seconds."""
        backlogs = [] if self.measurements.is_closed else self.measurements.backlogs()
        for _, stop in backlogs:
            self.reported.observe(stop, now)
        behind = [start for start, stop in backlogs if start < stop]
        return self.reported.age_s(min(behind) + 1, now) if behind else 0.0


class _ClientCollector(Collector):
    """The clients of one registry, by name."""

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}

    def add(self, log: Log | AsyncLog, name: str) -> None:
        """Add a client; one that is closed or dropped gives up its name."""
        former = self._clients.get(name)
        if former is not None and not former.measurements.is_closed:
            owner = former.log()
            if owner is log:
                return
            if owner is not None:
                raise ConfigError("client", name, "another name: an open client has this one")
        self._clients[name] = _Client(weakref.ref(log), log.measure(), FirstSeen())

    def describe(self) -> Iterator[Metric]:
        """Yield the metrics without samples."""
        yield from _families({}, {})

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all clients that the program still has."""
        with _lock:
            clients = self._clients.items()
            present = {name: client for name, client in clients if client.log() is not None}
            self._clients = dict(present)
            now = now_ns()
            lags_s = {name: client.reader_lag_s(now) for name, client in present.items()}
        measurements = {name: client.measurements for name, client in present.items()}
        yield from _families(measurements, lags_s)


def _families(clients: dict[str, Measurements], lags_s: dict[str, float]) -> Iterator[Metric]:
    inserts = CounterMetricFamily(
        "ziplog_client_inserts_total",
        "Records by outcome. path: fast: after two message delays. result: error: not inserted;"
        " unknown: the call ended before the outcome was known.",
        labels=("client", "path", "result"),
    )
    durations = HistogramMetricFamily(
        "ziplog_client_insert_duration_seconds",
        "From the sending of a unit, one or more records, to the acks of all replicas.",
        labels=("client",),
    )
    window = GaugeMetricFamily(
        "ziplog_client_window_units", "Units that are sent and not acked.", labels=("client",)
    )
    for name, one in clients.items():
        counters = one.counters
        inserts.add_metric((name, "fast", "ok"), counters.fast_path)
        inserts.add_metric((name, "slow", "ok"), counters.slow_path)
        inserts.add_metric((name, "none", "error"), counters.failed)
        inserts.add_metric((name, "none", "unknown"), counters.unknown)
        if one.durations is not None:
            totals = itertools.accumulate(list(one.durations.counts))
            buckets = list(zip(_BOUNDS, totals, strict=True))
            durations.add_metric((name,), buckets, one.durations.sum_ns / 1e9)
        window.add_metric((name,), one.window_units)
    yield from (inserts, durations, window)
    for key, metric, text in (
        ("retries", "ziplog_client_retries_total", "Units and requests sent again."),
        ("redirects", "ziplog_client_redirects_total", "Refusals with the code redirect."),
        ("delivered", "ziplog_client_delivered_records_total", "Records passed to the program."),
    ):
        family = CounterMetricFamily(metric, text, labels=("client",))
        for name, one in clients.items():
            family.add_metric((name,), getattr(one.counters, key))
        yield family
    lags = GaugeMetricFamily(
        "ziplog_client_reader_lag_seconds",
        "Age of the oldest position that servers reported and the slowest subscription has not"
        " returned; to the scrape before, and at most since the first.",
        labels=("client",),
    )
    for name, lag_s in lags_s.items():
        lags.add_metric((name,), lag_s)
    yield lags


_lock: Final = threading.Lock()
_collectors: Final[weakref.WeakKeyDictionary[CollectorRegistry, _ClientCollector]] = (
    weakref.WeakKeyDictionary()
)
