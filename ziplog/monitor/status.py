"""The status document with what only the nodes know: when they started, their versions and lags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ziplog.monitor.rates import total

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ziplog.wire import Metrics


def with_replies(document: dict[str, Any], replies: Mapping[str, Metrics | None]) -> dict[str, Any]:
    """Return a status document whose nodes also have `started`, `lag_ms` and `version`.

    Args:
        document: the document of the membership service.
        replies: the metrics of each node; None: it does not reply.

    """
    return document | {
        "mms": [_node(node, replies) for node in document["mms"]],
        "failure_handlers": [_node(node, replies) for node in document["failure_handlers"]],
        "shards": [
            shard | {"replicas": [_node(node, replies) for node in shard["replicas"]]}
            for shard in document["shards"]
        ],
    }


def _node(node: dict[str, Any], replies: Mapping[str, Metrics | None]) -> dict[str, Any]:
    """Return a node with its start (in Unix time), and its lag behind its primary."""
    name, reply = node["name"], replies.get(node["name"])
    if reply is None:
        return node | {"started": None, "lag_ms": None}
    builds = [one for one in reply.values if one.name == "ziplog_build_info"]
    version = builds[0].labels.get("version") if builds else node.get("version")
    lags = [
        lag
        for other in replies.values()
        if other is not None
        and (lag := total(other, "ziplog_replica_lag_seconds", peer=name)) is not None
    ]
    return node | {
        "started": total(reply, "ziplog_start_time_seconds"),
        "lag_ms": int(1000 * lags[0]) if lags else None,
        "version": version,
    }
