"""The metrics of a process, for its `Driver`: the node's own, the driver's and the process's.

A snapshot is made at most twice a second, however many monitors ask. See docs/monitoring.md.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Final

from ziplog.core.units import NS_PER_S
from ziplog.runtime.clock import now_ns
from ziplog.runtime.descriptors import open_descriptors
from ziplog.version import FILES, version
from ziplog.wire import Durations, Metrics, Value
from ziplog.wire.metrics import MAX_DURATIONS, MAX_VALUES
from ziplog.wire.node_info import VERSIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.runtime.driver import Driver
    from ziplog.runtime.transport import Transport

    #: Returns what a node counts, at a time in ns.
    NodeMetrics = Callable[[Driver, int], tuple[list[Value], list[Durations]]]

_SHORTEST_INTERVAL_NS: Final = NS_PER_S // 2
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_RECEIVED: Final = {"direction": "received"}
_SENT: Final = {"direction": "sent"}


class Reporter:
    """Makes the snapshots of one process."""

    def __init__(
        self,
        transport: Transport,
        node_metrics: NodeMetrics,
        cluster: Callable[[], int],
        *,
        clock: Callable[[], int] = now_ns,
    ) -> None:
        """Report on the process that runs this transport.

        Args:
            transport: of the process.
            node_metrics: returns what the node counts.
            cluster: returns the number of the cluster; 0: unknown.
            clock: nanoseconds.

        """
        self._transport: Final = transport
        self._node_metrics: Final = node_metrics
        self._cluster: Final = cluster
        self._clock: Final = clock
        self._started_at: Final = time.time()
        self._last: tuple[list[Value], list[Durations]] = ([], [])
        self._made_at: int | None = None

    def __call__(self, driver: Driver, request: int) -> Metrics:
        """Return the metrics, for a request's number; call it on the driver's thread."""
        now = self._clock()
        if self._made_at is None or now - self._made_at >= _SHORTEST_INTERVAL_NS:
            self._made_at = now
            values, durations = self._node_metrics(driver, now)
            values = [*self._process(), *self._connections(), *self._frames(driver), *values]
            durations = [
                Durations.of("ziplog_loop_turn_seconds", driver.iterations, {}),
                *durations,
            ]
            self._last = values[: MAX_VALUES - 1], durations[:MAX_DURATIONS]
        values, durations = self._last
        clock = Value("ziplog_time_seconds", time.time())
        return Metrics(self._cluster(), request, [clock, *values], durations)

    def _process(self) -> list[Value]:
        used = os.times()
        python = ".".join(map(str, sys.version_info[:3]))
        wire = "-".join(map(str, sorted(set(VERSIONS))))
        versions = {"version": version(), "wire": wire, "files": str(FILES), "python": python}
        return [
            Value("ziplog_build_info", 1, versions),
            Value("ziplog_start_time_seconds", self._started_at),
            Value("process_cpu_seconds_total", used.user + used.system),
            Value("ziplog_loop_busy_seconds_total", time.thread_time()),
            *_resident_memory(),
            Value("process_open_fds", open_descriptors()),
        ]

    def _connections(self) -> list[Value]:
        transport, counters = self._transport, self._transport.counters
        incoming, outgoing = transport.connection_counts
        return [
            Value("ziplog_connections", incoming, {"direction": "incoming"}),
            Value("ziplog_connections", outgoing, {"direction": "outgoing"}),
            Value("ziplog_connections_cut_total", transport.garbage, {"reason": "malformed"}),
            Value("ziplog_connections_cut_total", counters.flooded, {"reason": "flood"}),
            Value("ziplog_connections_cut_total", counters.silent, {"reason": "silent"}),
            Value("ziplog_connections_cut_total", transport.shed, {"reason": "limit"}),
            *(
                Value("ziplog_handshakes_total", count, {"result": result})
                for result, count in counters.handshakes.items()
            ),
        ]

    def _frames(self, driver: Driver) -> list[Value]:
        counters, other_versions = self._transport.counters, driver.other_versions
        dropped = {
            "queue": self._transport.dropped - counters.unroutable,
            "unknown-peer": counters.unroutable,
            "overload": driver.overload_drops,
            "malformed": driver.bad_frames - other_versions,
            "version": other_versions,
        }
        return [
            Value("ziplog_frames_total", counters.received_frames, _RECEIVED),
            Value("ziplog_frames_total", counters.sent_frames, _SENT),
            Value("ziplog_frame_bytes_total", counters.received_bytes, _RECEIVED),
            Value("ziplog_frame_bytes_total", counters.sent_bytes, _SENT),
            *(
                Value("ziplog_frames_dropped_total", count, {"reason": reason})
                for reason, count in dropped.items()
            ),
        ]


def _resident_memory() -> list[Value]:
    """Return the resident memory; nothing if no descriptor is left to read it with."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - quick
            pages = int(file.read().split()[1])
    except OSError:
        return []
    return [Value("process_resident_memory_bytes", pages * _PAGE_BYTES)]
