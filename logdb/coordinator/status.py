"""The status document of a coordinator, as JSON for operators.

It only reads. A field keeps its meaning across versions. See docs/logdb.md, section 16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ziplog.types import cluster_id

if TYPE_CHECKING:
    from logdb.cleaner.cleaner import Cleaner
    from logdb.coordinator.cache import ValueCache
    from logdb.coordinator.log_tailer import LogTailer
    from logdb.coordinator.pending_requests import PendingRequests
    from logdb.coordinator.sessions import Sessions
    from logdb.snapshots import Snapshots


def document(
    cluster: int,
    endpoint: str,
    tailer: LogTailer,
    cleaner: Cleaner | None,
    snapshots: Snapshots,
    sessions: Sessions,
    pending: PendingRequests,
    cache: ValueCache,
) -> bytes:
    """Return a coordinator's status as a JSON object."""
    state = tailer.state
    fields = {
        "ready": tailer.is_ready,
        "cluster": cluster_id(cluster),
        "endpoint": endpoint,
        "position": str(state.position),
        "passed": tailer.passed,
        "tail": tailer.tail,
        "starts": tailer.starts,
        "keys": len(state.versions),
        "data_bytes": state.versions.data_bytes,
        "records": state.records,
        "commits": state.commits,
        "aborts": state.aborts,
        "first_foreign": state.first_foreign,
        "first_unreadable": state.first_unreadable,
        "since_checkpoint": state.since_checkpoint,
        "last_checkpoint": str(state.last_done) if state.last_done else None,
        "checkpoints": cleaner is not None,
        "cleaner": msgspec.structs.asdict(cleaner.counts) if cleaner else {},
        "log_bytes": state.log_usage.log_bytes,
        "moving_bytes": state.log_usage.moving_bytes,
        "dead_bytes": state.log_usage.dead_bytes,
        "trimmed": state.trimmed,
        "snapshots": len(snapshots),
        "snapshot_entries": snapshots.entries,
        "sessions": len(sessions),
        "waiting": len(pending),
        "cached_values": len(cache),
        "cache_bytes": cache.bytes,
    }
    return msgspec.json.encode(fields)
