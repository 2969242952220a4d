"""Membership rules: members of the next lease, the finalized epoch, checks of the cluster file.

Pure functions of `ClusterState` and `Servers`. Rule: a shard is a member of the next lease while
all of its replicas are fit. An unfit shard is parked; its positions stay its own (D29).

See docs/protocol.md, sections 3, 5 and 13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ziplog.core.view import Placement, Replica, fingerprint
from ziplog.types import cluster_id

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from mms.servers import Servers
    from mms.state import ClusterState
    from mms.stragglers import Stragglers
    from ziplog.config import ClusterConfig
    from ziplog.core.view import ShardState


def configured(config: ClusterConfig) -> list[Placement]:
    """Return the placements of a new cluster's shards, from the cluster file."""
    return [
        Placement(
            shard.id,
            1,
            "joining",
            tuple(Replica(n.name, n.endpoint, region=n.region or "") for n in shard.replicas),
        )
        for shard in sorted(config.shards, key=lambda shard: shard.id)
    ]


def default_min_regions(state: ClusterState, config: ClusterConfig) -> int:
    """Return the least number of regions of an insert that requests no number.

    It is the cluster file's, once the servers of the file's shards have their regions of the file:
    while an operator relabels servers one by one, inserts need no more than one region. Removed
    shards do not count: their servers may be lost for good, and never get other labels.
    """
    if config.required_regions < 2:
        return 1
    expected = {shard.id: shard.replicas for shard in config.shards}
    is_labelled = all(
        replica.region == (node.region or "")
        for shard, placement in state.placements.items()
        if shard in expected and shard not in state.retired
        for replica, node in zip(placement.replicas, expected[shard], strict=True)
    )
    return config.required_regions if is_labelled else 1


def contradiction(state: ClusterState, config: ClusterConfig) -> str:
    """Return the error if the cluster file contradicts the committed state; "" if it does not.

    The file may have shards that were not added yet, and may lack shards that left.
    """
    if not state.cluster:
        return ""
    if config.id not in {None, cluster_id(state.cluster)}:
        return (
            f"this is the log of cluster {cluster_id(state.cluster)}, but the cluster file says"
            f" {config.id}. Restore the id or the data directories that belong together"
        )
    if state.name != config.name:
        return (
            f"this is the log of cluster {state.name!r}, but the cluster file says"
            f" {config.name!r}. Restore {state.name!r} in the file, or choose another data_dir"
        )
    homes = {one.name: shard for shard, p in state.placements.items() for one in p.replicas}
    for placement in configured(config):
        known, found = state.placements.get(placement.shard), _names(placement)
        foreign = [
            one
            for one in placement.replicas
            if homes.get(one.name, placement.shard) != placement.shard
        ]
        if foreign or (known is not None and _names(known) != found):
            shard = homes[foreign[0].name] if foreign else placement.shard
            return (
                f"shard {shard} has the servers {_names(state.placements[shard])}, but the cluster"
                f" file puts {found} at shard {placement.shard}. A shard keeps its servers: restore"
                " the former names in the file"
            )
    return ""


def moved_nodes(state: ClusterState, config: ClusterConfig) -> list[str]:
    """Return warnings for nodes with other endpoints in the cluster file than committed."""
    known = {one.name: one.endpoint for p in state.placements.values() for one in p.replicas}
    return [
        f"{one.name} is known at {known[one.name]}, but the cluster file says {one.endpoint}."
        " Clients and servers still use the former: restore it in the file"
        for placement in configured(config)
        for one in placement.replicas
        if known.get(one.name, one.endpoint) != one.endpoint
    ]


def _names(placement: Placement) -> str:
    return ", ".join(one.name for one in placement.replicas)


def first_changes(state: ClusterState, servers: Servers) -> list[Placement]:
    """Return the placements with which the shards that reported become live.

    If each shard has a server in limbo, the shards become live that never held a lease: only a
    shard with a lease can be recovered.
    """
    placements = state.placements.values()
    ready = [placement for placement in placements if servers.has_reported(placement.shard)]
    if not ready:
        ready = [placement for placement in placements if servers.held_no_lease(placement.shard)]
    return [_live(placement, servers) for placement in ready]


def may_be_live(placement: Placement, servers: Servers, now: int) -> bool:
    """Whether a shard is fit to be live, or to become live."""
    shard = placement.shard
    return (
        placement.state in {"joining", "live", "parked"}
        and servers.is_fit(shard, now)
        and (placement.state == "live" or servers.has_reported(shard))
        and (placement.state != "joining" or servers.holds_leases(shard))
    )


def member_changes(
    state: ClusterState, servers: Servers, stragglers: Stragglers, now: int
) -> list[Placement]:
    """Return the placements of shards to park, to make live, or whose servers have new regions.

    They are empty if no member would be left.

    Stragglers are parked only if at least one other fit shard stays live.
    """
    fit = {
        shard
        for shard, placement in state.placements.items()
        if may_be_live(placement, servers, now)
    }
    stay = {shard for shard in fit if not stragglers.is_parked(shard, now)} or fit
    if not stay:
        return []
    return [
        _live(placement, servers) if shard in stay else _in_state(placement, "parked")
        for shard, placement in state.placements.items()
        if placement.state in {"joining", "live", "parked"}
        and (
            (shard in stay) != (placement.state == "live")
            or (shard in stay and servers.is_relabelled(placement))
        )
    ]


def other_clusters(servers: Servers) -> set[int]:
    """Return the cluster numbers that storage servers reported."""
    heartbeats = (server.heartbeat for server in servers)
    return {one.cluster for one in heartbeats if one is not None and one.cluster}


def frontiers(state: ClusterState, servers: Servers) -> dict[int, int]:
    """Return the frontiers of the shards that may own positions which are not stable."""
    found: dict[int, int] = {}
    for shard, placement in state.placements.items():
        frontier, retired = servers.frontier(shard), state.retired.get(shard)
        is_past = retired is not None and 0 < retired.limit <= frontier
        is_done = is_past or (retired is not None and retired.is_finalized)
        if not state.is_new(placement) and not is_done:
            found[shard] = frontier
    return found


def members(
    state: ClusterState, changes: Iterable[Placement], without: Container[int]
) -> dict[int, Placement]:
    """Return the shards of the next lease.

    Args:
        state: the committed state.
        changes: the placements that change with the lease.
        without: draining shards that have no pending work.

    """
    placements = state.placements | {placement.shard: placement for placement in changes}
    return {
        shard: placement
        for shard, placement in sorted(placements.items())
        if placement.state == "live" or (state.may_stay(shard) and shard not in without)
    }


def finalized(state: ClusterState, servers: Servers) -> int:
    """Return the last epoch that ended below the frontiers of all shards; -1: none (D51)."""
    frontier = min(frontiers(state, servers).values(), default=0)
    last = state.last
    if last is None or frontier == 0:
        return state.finalized
    if frontier >= last.stop:
        return last.stop_epoch - 1
    lease = state.lease_at(frontier)
    return max(state.finalized, lease.epoch_at(frontier) - 1 if lease is not None else -1)


def is_over(state: ClusterState, shard: int) -> bool:
    """Whether a shard is finalized, and all its positions are trimmed."""
    retired = state.retired.get(shard)
    return retired is not None and retired.is_finalized and retired.limit <= state.trim


def _live(placement: Placement, servers: Servers) -> Placement:
    """Return the placement of a live shard, with its servers' fingerprints and regions.

    A fingerprint names a data directory: a server that returns with another one does not count
    (D2).
    """
    replicas = tuple(
        msgspec.structs.replace(
            replica,
            fingerprint=replica.fingerprint or fingerprint(server.heartbeat.identity),
            region=server.region(replica.region),
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
