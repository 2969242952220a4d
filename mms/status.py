"""The status document: the cluster as the leader of the membership service sees it.

It shows the last reports, never expectations. See docs/protocol.md, sections 3 and 13.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

from mms import membership_rules
from mms.servers import UP_NS, service_disk, wire_versions
from ziplog.status_document import nodes_of
from ziplog.types import RecordId, cluster_id

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mms.commands import RecordLoss
    from mms.servers import FailureHandlers, Server, Servers
    from mms.state import ClusterState
    from mms.upgrades import Peers
    from ziplog.config import ClusterConfig, NodeConfig
    from ziplog.core.cursors import Cursor
    from ziplog.core.view import Lease, Placement, Replica
    from ziplog.core.wire_use import Release
    from ziplog.wire import Heartbeat

#: Maximum number of shards listed in `blocks`, and of earlier reports searched for them.
_MAX_BLOCKED: Final = 16
_MAX_CANDIDATES: Final = 256


def document(
    config: ClusterConfig,
    state: ClusterState,
    servers: Servers,
    failure_handlers: FailureHandlers,
    peers: Peers,
    *,
    name: str,
    pid: int,
    release: Release,
    free_bytes: int | None,
    connected: tuple[str, ...],
    lease: Lease | None,
    epoch: int,
    finalized: int,
    durability: Mapping[str, Any],
    now: int,
) -> bytes:
    """Return the document as JSON.

    Args:
        config: the cluster file.
        state: the committed state.
        servers: what the storage servers reported.
        failure_handlers: what the failure handlers reported.
        peers: what the other nodes of the service reported.
        name: this node, the leader.
        pid: its process.
        release: what it runs.
        free_bytes: the free space of its disk; None: unknown.
        connected: the other nodes of the service that it can reach.
        lease: the running lease; None before the first.
        epoch: the epoch in which the servers are.
        finalized: the last finalized epoch; -1 for none.
        durability: from `DurabilityLevel.status`.
        now: monotonic nanoseconds.

    """
    trimmed = state.lease_at(state.trim) if state.trim else None
    first = RecordId(state.trim, trimmed.owner(state.trim) if trimmed is not None else 0)
    blocks = blockers(state, servers, now)
    obstacles = failure_handlers.obstacles(now)
    found = {
        "cluster": state.name,
        "cluster_id": cluster_id(state.cluster),
        **durability,
        "lease": lease.number if lease is not None else 0,
        "epoch": epoch,
        "finalized_epoch": finalized,
        "trimmed_before": str(first),
        "wire_in_use": state.wire,
        "mms": [
            _leader(node, pid, release, free_bytes)
            if node.name == name
            else _follower(node, peers, now, is_connected=node.name in connected)
            for node in config.mms
        ],
        "failure_handlers": failure_handlers.status(now),
        "shards": [
            _shard(placement, state, servers, now)
            | {
                "weight": lease.weight_of(shard) if lease is not None else 0,
                "blocks": blocks.get(shard, []),
                "obstacle": _obstacle(
                    placement,
                    servers,
                    obstacles,
                    now,
                    is_over=membership_rules.is_over(state, shard),
                ),
            }
            for shard, placement in state.placements.items()
        ],
        "blocked_by": min(blocks, key=servers.frontier, default=None),
        "losses": [_loss(state, loss) for loss in state.losses],
        "cursors": [_cursor(cursor) for cursor in state.cursors.in_order()],
        "min_regions": config.required_regions,
        "lost_regions": state.lost_regions,
    }
    found["regions"] = _regions(found)
    return msgspec.json.encode(found)


def _regions(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of each region: given up, or all, some or none of its nodes are up."""
    nodes = nodes_of(document)
    found = {}
    for region in sorted({node["region"] for node in nodes}):
        are_up = [node["state"] in {"up", "full"} for node in nodes if node["region"] == region]
        state = "up" if all(are_up) else "degraded" if any(are_up) else "away"
        found[region] = {
            "state": "lost" if region in document["lost_regions"] else state,
            "servers_up": sum(are_up),
            "servers": len(are_up),
        }
    return found


def _cursor(cursor: Cursor) -> dict[str, Any]:
    return {
        "name": cursor.name,
        "state": cursor.state,
        "gsn": cursor.position,
        "term": cursor.term,
        "owner": cursor.owner_text or None,
        "moved_us": cursor.moved_us,
        "is_holding": cursor.is_holding,
    }


def _obstacle(
    placement: Placement,
    servers: Servers,
    obstacles: dict[int, str] | None,
    now: int,
    *,
    is_over: bool,
) -> str | None:
    """Return why a shard cannot be recovered now, and what to do; None: it can, or need not."""
    replicas = servers.replicas(placement.shard)
    states = {one.state(now) for one in replicas}
    if is_over or (placement.state != "recovering" and states <= {"up", "full"}):
        return None  # The failure handler's heartbeat is older than the end of the recovery.
    if states == {"down"}:
        names = " and ".join(server.name for server in replicas)
        return f"no server of the shard is up; start {names}"
    if obstacles is not None:
        return obstacles.get(placement.shard)
    if placement.state == "recovering" or "limbo" in states:
        return (
            "no failure handler leads, and only its leader recovers shards; start a majority of the"
            " failure handlers (a cluster file without them needs one)"
        )
    return None


def _leader(node: NodeConfig, pid: int, release: Release, free_bytes: int | None) -> dict[str, Any]:
    return {
        "name": node.name,
        "endpoint": node.endpoint,
        "region": node.region or "",
        "pid": pid,
        "version": release.version or None,
        "wire_versions": list(release.wires),
        "leader": True,
        "state": "up",
        "disk": service_disk(free_bytes),
    }


def _follower(node: NodeConfig, peers: Peers, now: int, *, is_connected: bool) -> dict[str, Any]:
    info = peers.info(node.name, now)
    # The connection of a process that hangs stays open.
    state = "down" if not is_connected else "suspect" if info is None else "up"
    return {
        "name": node.name,
        "endpoint": node.endpoint,
        "region": node.region or "",
        # Nodes of the service do not exchange their process ids.
        "pid": None,
        "version": (info.version or None) if info is not None else None,
        "wire_versions": wire_versions(info),
        "leader": False,
        "state": state,
        "disk": service_disk(info.free_bytes if info is not None else None),
    }


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


def blockers(state: ClusterState, servers: Servers, now: int) -> dict[int, list[int]]:
    """Return the shards that hold back other shards' records from readers, each with those shards.

    Shard s holds back the last stable record of shard t under three conditions. One of them has
    readers; the known decisions of s end at or before that record; and the report of s came after
    the one of t. The last one makes it certain: when s reported, t's record was stable, and
    s had not decided the positions before it. A shard in recovery decides nothing, so its report
    counts as new; but it has nothing to decide in leases without it.

    Args:
        state: the committed state.
        servers: what the storage servers reported.
        now: monotonic nanoseconds.

    """
    open_from = {
        shard: frontier
        if state.placements[shard].state == "live"
        else state.next_owned(shard, frontier)
        for shard, frontier in membership_rules.frontiers(state, servers).items()
    }
    reports = sorted(
        (
            now if placement.state == "recovering" else server.last_heard_at,
            shard,
            heartbeat.stable_gsn,
            _has_readers(servers.replicas(shard)),
        )
        for shard, placement in state.placements.items()
        if (server := _reporting_server(servers.replicas(shard), now)) is not None
        and (heartbeat := server.heartbeat) is not None
    )
    found: dict[int, list[int]] = {}
    most = 0
    for index, (_, shard, stable, has_readers) in enumerate(reports):
        # In most cases no earlier report reaches so far, and the search is skipped.
        if shard in open_from and open_from[shard] <= most:
            held_back = (
                other
                for _, other, gsn, other_has_readers in reports[
                    max(index - _MAX_CANDIDATES, 0) : index
                ]
                if open_from[shard] <= gsn and (has_readers or other_has_readers)
            )
            if some := list(islice(held_back, _MAX_BLOCKED)):
                found[shard] = sorted(some)
        most = max(most, stable)
    return found


def _reporting_server(replicas: list[Server], now: int) -> Server | None:
    """Return the server that counts for a shard: the primary, or if it is silent, the last heard.

    A backup learns of stable positions one message later.
    """
    primary = replicas[0]
    if primary.heartbeat is not None and now - primary.last_heard_at < UP_NS:
        return primary
    reporting = [server for server in replicas if server.heartbeat is not None]
    return max(reporting, key=lambda server: server.last_heard_at, default=None)


def _has_readers(replicas: list[Server]) -> bool:
    return any(one.heartbeat is not None and one.heartbeat.has_readers for one in replicas)


def _epoch(state: ClusterState, frontier: int) -> int:
    """Return the epoch of a frontier; 0: unknown."""
    last = state.last
    if last is None or not frontier:
        return 0
    lease = state.lease_at(max(frontier, state.trim))
    return lease.epoch_at(max(frontier, state.trim)) if lease else last.stop_epoch


def _shard(placement: Placement, state: ClusterState, servers: Servers, now: int) -> dict[str, Any]:
    shard, replicas = placement.shard, servers.replicas(placement.shard)
    primary: Heartbeat | None = replicas[0].heartbeat
    frontier, is_over = servers.frontier(placement.shard), membership_rules.is_over(state, shard)
    return {
        "id": shard,
        "view": placement.view,
        # The first of its servers to stop leaves a recovery behind, which nothing waits for.
        "state": "finalized" if is_over else placement.state,
        "is_over": is_over,
        "rate_per_s": primary.rate_per_s
        if primary is not None and replicas[0].is_heard(now)
        else 0,
        "stable_gsn": primary.stable_gsn if primary is not None else 0,
        "durable_gsn": primary.durable_gsn if primary is not None else 0,
        "frontier": frontier,
        "epoch": _epoch(state, frontier),
        "holes": primary.holes if primary is not None else 0,
        "is_watched": _has_readers(replicas),
        # A full backup still stores what the primary places.
        "refusing": replicas[0].state(now) == "full",
        "regions": sorted(placement.regions),
        "replicas": [
            _replica(server, replica, now)
            for server, replica in zip(replicas, placement.replicas, strict=True)
        ],
    }


def _replica(server: Server, replica: Replica, now: int) -> dict[str, Any]:
    heartbeat, state = server.heartbeat, server.state(now)
    return {
        "name": server.name,
        "endpoint": replica.endpoint,
        "region": replica.region,
        "role": "primary" if server.index == 0 else "backup",
        # The process of a server that is down is dead, or another program has its number by now.
        "pid": heartbeat.pid if heartbeat is not None and state != "down" else None,
        "state": state,
        "heartbeat_age_ms": server.heartbeat_age_ms(now),
        "full": server.full or None,
        "version": (heartbeat.version or None) if heartbeat is not None else None,
        "wire_versions": wire_versions(heartbeat),
        "disk": _disk(heartbeat) if heartbeat is not None and server.is_heard(now) else None,
    }


def _disk(heartbeat: Heartbeat) -> dict[str, Any]:
    return {
        "free_bytes": heartbeat.free_bytes,
        "reserve_bytes": heartbeat.reserve_bytes,
        "full": bool(heartbeat.full),
    }
