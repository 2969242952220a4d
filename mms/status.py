"""The status document: the cluster as the leader of the membership service sees it.

Rule: it says what was last heard, never what should be. See docs/protocol.md, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ziplog.types import RecordId

if TYPE_CHECKING:
    from mms.handlers import Handlers
    from mms.servers import Server, Servers
    from mms.state import ClusterState, RecordLoss
    from ziplog.config import ClusterConfig
    from ziplog.view import Placement


def document(
    config: ClusterConfig,
    state: ClusterState,
    servers: Servers,
    handlers: Handlers,
    *,
    name: str,
    pid: int,
    connected: tuple[str, ...],
    epoch: int,
    finalized: int,
    now: int,
) -> bytes:
    """Return the document as JSON.

    Args:
        config: the cluster file.
        state: what the service agreed on.
        servers: what the storage servers reported.
        handlers: what the failure handlers reported.
        name: this node, the leader.
        pid: its process.
        connected: the other nodes of the service that it can reach.
        epoch: the epoch that servers are in.
        finalized: the last finalized epoch; -1 for none.
        now: monotonic nanoseconds.

    """
    lease = state.lease_at(state.trim) if state.trim else None
    first = RecordId(state.trim, lease.owner(state.trim) if lease is not None else 0)
    found = {
        "cluster": state.name,
        "durability": config.durability,
        "epoch": epoch,
        "finalized_epoch": finalized,
        "trimmed_before": str(first),
        "mms": [
            {
                "name": node.name,
                "endpoint": node.endpoint,
                # Nodes of the service do not tell each other their process ids.
                "pid": pid if node.name == name else None,
                "leader": node.name == name,
                "state": "up" if node.name in (name, *connected) else "down",
            }
            for node in config.mms
        ],
        "failure_handlers": handlers.status(now),
        "shards": [_shard(placement, servers, now) for placement in state.placements.values()],
        "losses": [_loss(state, loss) for loss in state.losses],
    }
    return msgspec.json.encode(found)


def _loss(state: ClusterState, loss: RecordLoss) -> dict[str, Any]:
    start = max(loss.start, state.trim)
    ends = (state.lease_at(start), state.lease_at(loss.stop - 1))
    return {
        "shard": loss.shard,
        "start": start,
        "stop": loss.stop,
        "epochs": [
            lease.epoch_at(gsn) if lease is not None else 0
            for lease, gsn in zip(ends, (start, loss.stop - 1), strict=True)
        ],
    }


def _shard(placement: Placement, servers: Servers, now: int) -> dict[str, Any]:
    replicas = servers.replicas(placement.shard)
    primary = replicas[0].heartbeat
    return {
        "id": placement.shard,
        "view": placement.view,
        "state": placement.state,
        "rate_per_s": primary.rate_per_s if primary is not None else 0,
        "stable_gsn": primary.stable_gsn if primary is not None else 0,
        "durable_gsn": primary.durable_gsn if primary is not None else 0,
        "replicas": [
            _replica(server, replica.endpoint, now)
            for server, replica in zip(replicas, placement.replicas, strict=True)
        ],
    }


def _replica(server: Server, endpoint: str, now: int) -> dict[str, Any]:
    return {
        "name": server.name,
        "endpoint": endpoint,
        "role": "primary" if server.index == 0 else "backup",
        "pid": server.heartbeat.pid if server.heartbeat is not None else None,
        "state": server.state(now),
    }
