"""The cluster at a glance: the status document, with rates, latencies, disks and lags."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from ziplog.core.units import NS_PER_S
from ziplog.monitor.rates import Change, total

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ziplog.monitor.rates import NodeReply

#: Number of replies of a node over which rates are measured.
WINDOW: Final = 10


class Overview:
    """The last replies of all nodes."""

    def __init__(self) -> None:
        """Start without replies."""
        self._replies: Final[dict[str, deque[NodeReply]]] = {}

    def observe(self, replies: Mapping[str, NodeReply | None]) -> None:
        """Add the latest replies; None: the node does not reply."""
        for name, reply in replies.items():
            if reply is None:
                self._replies.pop(name, None)
                continue
            kept = self._replies.setdefault(name, deque(maxlen=WINDOW))
            if not kept or kept[-1].at < reply.at:
                kept.append(reply)

    def document(self, status: dict[str, Any]) -> dict[str, Any]:
        """Return the document for a status document; rates are by second, times in seconds."""
        shards = [self._shard(shard) for shard in status["shards"]]
        return {
            "cluster": status["cluster"],
            "epoch": status["epoch"],
            "finalized_epoch": status["finalized_epoch"],
            "inserted_per_s": _sum(shard["inserted_per_s"] for shard in shards),
            "delivered_per_s": _sum(shard["delivered_per_s"] for shard in shards),
            "shards": shards,
            "nodes": [
                *(self._node(node, "mms") for node in status["mms"]),
                *(self._node(node, "handler") for node in status["failure_handlers"]),
                *(
                    self._node(node, f"{node['role']} of {shard['id']}")
                    for shard in status["shards"]
                    for node in shard["replicas"]
                ),
            ],
        }

    def _change(self, name: str) -> Change | None:
        kept = self._replies.get(name)
        if kept is None:
            return None
        first, last = kept[0], kept[-1]
        return Change(first.metrics, last.metrics, (last.at - first.at) / NS_PER_S)

    def _shard(self, shard: dict[str, Any]) -> dict[str, Any]:
        names = [replica["name"] for replica in shard["replicas"]]
        primary, changes = self._change(names[0]), [self._change(name) for name in names]
        delivered = [
            one.rate("ziplog_delivered_records_total") for one in changes if one is not None
        ]
        found = {
            "id": shard["id"],
            "state": shard["state"],
            "view": shard["view"],
            "inserted_per_s": None,
            "delivered_per_s": _sum(delivered),
        }
        if primary is None:
            return found | dict.fromkeys(("ack_p50_s", "ack_p99_s", "order_p50_s", "order_p99_s"))
        acks, waits = "ziplog_ack_duration_seconds", "ziplog_order_wait_seconds"
        return found | {
            "inserted_per_s": primary.rate("ziplog_records_total"),
            "ack_p50_s": primary.quantile(0.5, acks),
            "ack_p99_s": primary.quantile(0.99, acks),
            "order_p50_s": primary.quantile(0.5, waits),
            "order_p99_s": primary.quantile(0.99, waits),
        }

    def _node(self, node: dict[str, Any], role: str) -> dict[str, Any]:
        change, disk = self._change(node["name"]), node.get("disk")
        found = {
            "name": node["name"],
            "role": role,
            "state": node["state"] if change is not None else "no reply",
            "disk_free_bytes": disk["free_bytes"] if disk is not None else None,
        }
        if change is None:
            names = ("cpu", "memory_bytes", "stored_bytes", "flush_p99_s", "lag_s")
            return found | dict.fromkeys(names)
        return found | {
            "cpu": change.rate("process_cpu_seconds_total"),
            "memory_bytes": total(change.after, "process_resident_memory_bytes"),
            "stored_bytes": total(change.after, "ziplog_stored_bytes"),
            "flush_p99_s": change.quantile(0.99, "ziplog_flush_duration_seconds"),
            "lag_s": self._lag(node["name"]),
        }

    def _lag(self, name: str) -> float | None:
        """Return how far a backup is behind, as its primary sees it."""
        lags = (
            total(kept[-1].metrics, "ziplog_replica_lag_seconds", peer=name)
            for kept in self._replies.values()
        )
        return next((lag for lag in lags if lag is not None), None)


def _sum(rates: Any) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None
