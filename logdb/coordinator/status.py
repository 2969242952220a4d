"""The status document of a coordinator: what an operator may want to know, as JSON.

Rule: read only; a field once given keeps its meaning. See docs/logdb.md, section 16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from logdb.coordinator.node import CoordinatorNode


def document(node: CoordinatorNode) -> bytes:
    """Return how a coordinator is: a JSON object."""
    follower, cache = node.follower, node.cache
    state = follower.state
    cleaner = node.cleaner
    told = {
        "ready": follower.is_ready,
        "endpoint": node.endpoint,
        "position": str(state.position),
        "passed": follower.passed,
        "tail": follower.tail,
        "starts": follower.starts,
        "keys": len(state.versions),
        "data_bytes": state.versions.data_bytes,
        "records": state.records,
        "commits": state.commits,
        "aborts": state.aborts,
        "first_foreign": state.first_foreign,
        "since_checkpoint": state.since_checkpoint,
        "last_checkpoint": str(state.last_done) if state.last_done else None,
        "checkpoints": cleaner is not None,
        "cleaner": msgspec.structs.asdict(cleaner.counts) if cleaner else {},
        "log_bytes": state.segments.log_bytes,
        "moving_bytes": state.segments.moving_bytes,
        "dead_bytes": state.segments.dead_bytes,
        "trimmed": state.trimmed,
        "snapshots": len(node.snapshots),
        "snapshot_entries": node.snapshots.entries,
        "sessions": len(node.sessions),
        "waiting": len(node.waitings),
        "cached_values": len(cache),
        "cache_bytes": cache.bytes,
    }
    return msgspec.json.encode(told)
