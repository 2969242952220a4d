"""Health of a cluster and of its nodes.

For liveness probes: the node's event loop turns, whatever other machines do. For load balancers and
waits, a node or the cluster is ready: it can do its work. Each function returns the reason why not,
or "".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ziplog.monitor.rates import total
from ziplog.status_document import WELL, nodes_of, stalled_by

if TYPE_CHECKING:
    from ziplog.wire import Metrics

#: Silence after which a node counts as dead, in seconds.
_DEAD_S: Final = 5.0


def liveness_problem(name: str, silence_s: float | None) -> str:
    """Return why a node counts as dead: it has not replied to the monitor for 5 s.

    Args:
        name: of the node.
        silence_s: time since it replied, in seconds; None: there is no such node.

    """
    if silence_s is None:
        return f"there is no node {name}"
    return f"{name} has not replied for {silence_s:.0f} s" if silence_s >= _DEAD_S else ""


def readiness_problem(document: dict[str, Any], name: str = "") -> str:
    """Return why a node is not ready; "" for `name`: why the cluster is not."""
    if name:
        node = _find(document, name)
        if node is None:
            return f"there is no node {name}"
        shard = _shard_of(document, name)
        if node["state"] != "up":
            return f"{name} is {node['state']}"
        handlers = document["failure_handlers"]
        if node in handlers and not any(one["leader"] for one in handlers):
            return "no failure handler leads"
        return _shard_problem(shard) if shard is not None else ""
    for shard in document["shards"]:
        if problem := _shard_problem(shard):
            return problem
    return ""


def coordinator_problem(name: str, reply: Metrics | None) -> str:
    """Return why a coordinator of LogDB is not ready.

    Args:
        name: its endpoint.
        reply: its metrics; None: it does not reply.

    """
    if reply is None:
        return f"{name} does not reply"
    return "" if total(reply, "logdb_ready") else f"{name} is not ready: it replays the log"


def _shard_problem(shard: dict[str, Any]) -> str:
    if shard["state"] not in WELL:
        return f"shard {shard['id']} is {shard['state']}"
    if absent := stalled_by(shard):
        return f"shard {shard['id']} takes no records: {', '.join(absent)}"
    return f"shard {shard['id']} refuses records" if shard["refusing"] else ""


def _find(document: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((node for node in nodes_of(document) if node["name"] == name), None)


def _shard_of(document: dict[str, Any], name: str) -> dict[str, Any] | None:
    for shard in document["shards"]:
        if any(replica["name"] == name for replica in shard["replicas"]):
            found: dict[str, Any] = shard
            return found
    return None
