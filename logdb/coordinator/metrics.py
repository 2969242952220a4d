"""The metrics of a coordinator (docs/operating.md, section 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ziplog.wire import Value

if TYPE_CHECKING:
    from logdb.coordinator.node import CoordinatorNode


def metrics(node: CoordinatorNode) -> list[Value]:
    """Return the metrics of a coordinator; while it replays the log, only that it is not ready."""
    if not node.is_ready:
        return [Value("logdb_ready", 0)]
    state, cache = node.tailer.state, node.cache
    is_stopped = bool(state.first_foreign or state.first_unreadable)
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
        "logdb_cleaner_stopped": int(is_stopped),
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
    ]  # fmt: skip
