"""The metrics of a coordinator (docs/monitoring.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core.first_seen import FirstSeen
from ziplog.wire import Durations, Value

if TYPE_CHECKING:
    from logdb.coordinator.node import CoordinatorNode


class CoordinatorMetrics:
    """The metrics of one coordinator."""

    def __init__(self, node: CoordinatorNode) -> None:
        """Report on a coordinator."""
        self._node: Final = node
        #: Of earlier snapshots: the end of what the servers had reported.
        self._reported: Final = FirstSeen()

    def collect(self, now: int, wall_ns: int) -> tuple[list[Value], list[Durations]]:
        """Return the metrics; while it replays the log, only its lag and that it is not ready.

        Args:
            now: the node's clock, in ns.
            wall_ns: the wall clock, in ns.

        """
        tailer = self._node.tailer
        tailer.wall_offset_ns = wall_ns - now
        start, stop = tailer.backlog
        self._reported.observe(stop, now)
        lag_s = self._reported.age_s(start + 1, now) if start < stop else 0.0
        values = [Value("logdb_lag_seconds", lag_s), *_of_state(self._node)]
        durations = Durations.of("logdb_commit_duration_seconds", tailer.commit_durations, {})
        return values, [durations] if self._node.is_ready else []


def _of_state(node: CoordinatorNode) -> list[Value]:
    if not node.is_ready:
        return [Value("logdb_ready", 0)]
    state, cache = node.tailer.state, node.cache
    gauges = {
        "logdb_ready": 1,
        "logdb_keys": len(state.versions),
        "logdb_data_bytes": state.versions.data_bytes,
        "logdb_log_bytes": state.log_usage.log_bytes,
        "logdb_dead_bytes": state.log_usage.dead_bytes,
        "logdb_sessions": len(node.sessions),
        "logdb_snapshots": len(node.snapshots),
        "logdb_waiting": len(node.pending),
        "logdb_cache_bytes": cache.bytes,
        "logdb_cleaner_stopped": int(bool(state.first_unreadable)),
        "logdb_commits_total": node.decided.get("committed", 0),
    }
    return [
        *(Value(name, value) for name, value in gauges.items()),
        *(
            Value("logdb_aborts_total", count, {"reason": outcome})
            for outcome, count in node.decided.items()
            if outcome != "committed"
        ),
        Value("logdb_cache_requests_total", cache.hits, {"result": "hit"}),
        Value("logdb_cache_requests_total", cache.misses, {"result": "miss"}),
        *_cleaner(node),
    ]


def _cleaner(node: CoordinatorNode) -> list[Value]:
    if node.cleaner is None:
        return []
    counts = node.cleaner.counts
    return [
        *(
            Value("logdb_cleaner_rounds_total", count, {"result": result})
            for result, count in (
                ("completed", counts.rounds), ("failed", counts.failed), ("left", counts.left)
            )
        ),
        Value("logdb_cleaner_moved_bytes_total", counts.moved_bytes),
        Value("logdb_cleaner_copied_records_total", counts.copied),
    ]  # fmt: skip
