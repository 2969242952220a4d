"""What follows from what was agreed on and what is heard: members, rates, the finalized epoch.

Functions only, of `ClusterState` and `Servers`. Rule: a shard is a member of the next lease while
all of its replicas are fit; one that is not is parked, and nothing that it owns is touched (D29).

See docs/protocol.md, sections 3 and 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ziplog.view import Placement, Replica, fingerprint

if TYPE_CHECKING:
    from mms.servers import Servers
    from mms.state import ClusterState
    from ziplog.config import ClusterConfig
    from ziplog.view import ShardState


def configured(config: ClusterConfig) -> list[Placement]:
    """Return where the cluster file puts the shards of a new cluster."""
    return [
        Placement(
            shard.id, 1, "joining", tuple(Replica(n.name, n.endpoint) for n in shard.replicas)
        )
        for shard in sorted(config.shards, key=lambda shard: shard.id)
    ]


def first_changes(state: ClusterState, servers: Servers) -> list[Placement]:
    """Return the placements with which the shards that reported begin to work."""
    return [
        _live(placement, servers)
        for shard, placement in state.placements.items()
        if servers.has_reported(shard)
    ]


def member_changes(state: ClusterState, servers: Servers, now: int) -> list[Placement]:
    """Return the placements of shards to park or to bring back; none if none would be left."""
    changes: list[Placement] = []
    is_left = False
    for shard, placement in state.placements.items():
        if placement.state not in {"joining", "live", "parked"}:
            continue
        is_live = placement.state == "live"
        fit = servers.is_fit(shard, now) and (is_live or servers.has_reported(shard))
        is_left = is_left or fit
        if fit != is_live:
            changed = _live(placement, servers) if fit else _in_state(placement, "parked")
            changes.append(changed)
    return changes if is_left else []


def other_clusters(servers: Servers) -> set[int]:
    """Return the numbers of the clusters that storage servers say that they are of."""
    heartbeats = (server.heartbeat for server in servers)
    return {one.cluster for one in heartbeats if one is not None and one.cluster}


def rates(state: ClusterState, servers: Servers) -> dict[int, int]:
    """Return the rates of the live shards, in records a second, as their primaries say."""
    found: dict[int, int] = {}
    for shard, placement in state.placements.items():
        primary = servers.replicas(shard)[0].heartbeat
        if placement.state == "live" and primary is not None:
            found[shard] = primary.rate_per_s
    return found


def finalized(state: ClusterState, servers: Servers) -> int:
    """Return the last epoch that ended below the frontiers of all shards; -1: none (D51)."""
    frontier = min(
        (
            servers.frontier(shard)
            for shard, placement in state.placements.items()
            if placement.state not in {"joining", "finalized"}
        ),
        default=0,
    )
    last = state.last
    if last is None or frontier == 0:
        return state.finalized
    if frontier >= last.stop:
        return last.first_epoch + last.epochs - 1
    lease = state.lease_at(frontier)
    return max(state.finalized, lease.epoch_at(frontier) - 1 if lease is not None else -1)


def _live(placement: Placement, servers: Servers) -> Placement:
    """Return the placement of a shard that takes records, and whose servers are known from now on.

    Each with its data directory: one that comes back without it must not count (D2).
    """
    replicas = tuple(
        msgspec.structs.replace(
            replica, fingerprint=replica.fingerprint or fingerprint(server.heartbeat.identity)
        )
        if server.heartbeat is not None
        else replica
        for replica, server in zip(
            placement.replicas, servers.replicas(placement.shard), strict=True
        )
    )
    return msgspec.structs.replace(placement, state="live", replicas=replicas)


def _in_state(placement: Placement, state: ShardState) -> Placement:
    return msgspec.structs.replace(placement, state=state)
