"""Rebuild of the membership service's state from what the storage servers hold.

    holdings of servers and failure handlers -> checks -> the state of a new consensus group

Rules: no position, lease number or view is given out twice. A shard continues in its current view
only if a server that is present resumes in it; otherwise in a view above all that were seen, so
that all its servers start in limbo. A shard that has left stays out. Pure
(docs/protocol.md, section 16).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from mms.cursor_table import CursorTable
from mms.membership_rules import contradiction
from mms.rebuilt_leases import known_end, rebuilt_runs
from mms.snapshot import Recovering, Retired
from mms.state import ClusterState
from ziplog.core.holdings import RebuildPlan, RebuiltShard
from ziplog.core.view import Placement, Replica
from ziplog.errors import UnavailableError
from ziplog.types import cluster_id

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ziplog.config import ClusterConfig, ShardConfig
    from ziplog.core.holdings import HandlerHoldings, Holdings, ServerHoldings, ShardRecovery
    from ziplog.core.view import ShardState

#: The fingerprint of a directory that is not here and was never reported; no directory has it.
_UNKNOWN: Final = "unknown"


class Rebuilt(NamedTuple):
    """A rebuilt state, and what an operator should know about it."""

    state: ClusterState
    #: The first position after all known leases and entries.
    known_end: int
    #: Lines of text.
    notes: list[str]


def plan(config: ClusterConfig, holdings: Holdings) -> RebuildPlan:
    """Return the state of the membership service, and its summary; raises what `rebuild` raises."""
    rebuilt = rebuild(config, holdings.servers, holdings.handlers, holdings.lost)
    state = rebuilt.state
    held = {server.node: server for server in holdings.servers}
    return RebuildPlan(
        state.snapshot(),
        cluster_id(state.cluster),
        state.trim,
        rebuilt.known_end,
        _stop(state),
        [
            RebuiltShard(
                placement.shard,
                placement.state,
                placement.view,
                [_described(replica, held.get(replica.name)) for replica in placement.replicas],
            )
            for placement in state.placements.values()
        ],
        rebuilt.notes,
    )


def _described(replica: Replica, held: ServerHoldings | None) -> str:
    if held is None:
        return f"{replica.name} (missing)"
    if replica.fingerprint != held.fingerprint:
        return f"{replica.name} (another directory)"
    return f"{replica.name} ({'stopped cleanly' if held.view else 'crashed'})"


class _Recoveries(NamedTuple):
    """What is known of the shards' recoveries, and of lost servers."""

    #: The failure handler's log is here: what is not in it did not happen.
    is_known: bool
    by_shard: dict[int, ShardRecovery]
    #: The cluster has failure handlers.
    are_possible: bool
    #: The servers whose directories are lost for good.
    lost: Collection[str]


def rebuild(
    config: ClusterConfig,
    servers: Sequence[ServerHoldings],
    handlers: Sequence[HandlerHoldings],
    lost: Collection[str] = (),
) -> Rebuilt:
    """Return the state of the membership service.

    Args:
        config: the cluster file.
        servers: what the storage servers' directories hold that are here.
        handlers: what the failure handlers' directories hold that are here.
        lost: the names of the storage servers whose directories are lost for good.

    Raises:
        UnavailableError: a directory is missing, or of another cluster.

    """
    recoveries = _recoveries(config, handlers, lost)
    state = ClusterState()
    state.cluster = _cluster(config, servers)
    state.name = config.name
    # The service changes it once all servers have reported another one.
    state.durability = "disk" if {one.level for one in servers} == {"disk"} else "memory"
    state.trim = max(server.trim for server in servers)
    state.wire = max(server.wire for server in servers)
    state.runs = rebuilt_runs(servers, state.trim)
    state.history_bytes = sum(run.max_bytes for run in state.runs)
    notes: list[str] = []
    for shard in sorted(config.shards, key=lambda shard: shard.id):
        names = [node.name for node in shard.replicas]
        held = [server for server in servers if server.node in names]
        _add_shard(state, shard, held, recoveries, notes)
    _check_owners(state)
    wrong = contradiction(state, config)
    if wrong:
        raise UnavailableError(wrong)
    if not state.placements:
        raise UnavailableError("no shard was ever live: run `ziplog up --found-again` instead")
    state.retirements = len(state.retired)
    # Terms of lost cursors may be known elsewhere; there were fewer of them than positions.
    state.cursors = CursorTable((), _stop(state))
    fresh = ClusterState()
    fresh.restore(state.snapshot())  # with everything that follows from it
    fresh.check()
    return Rebuilt(fresh, known_end(servers), notes)


def _cluster(config: ClusterConfig, servers: Sequence[ServerHoldings]) -> int:
    """Return the number of the cluster; it must be the same everywhere."""
    found = {server.cluster: server.node for server in servers if server.cluster}
    expected = int(config.id, 16) if config.id is not None else min(found, default=0)
    for cluster, node in found.items():
        if cluster != expected:
            raise UnavailableError(
                f"the directory of {node} is of cluster {cluster_id(cluster)}, but this is cluster"
                f" {cluster_id(expected)}: put the right directory back"
            )
    if not found:
        raise UnavailableError(
            "the storage servers' directories are empty: put the right ones back"
        )
    return expected


def _recoveries(
    config: ClusterConfig, handlers: Sequence[HandlerHoldings], lost: Collection[str]
) -> _Recoveries:
    nodes = config.failure_handlers
    if not handlers:
        return _Recoveries(is_known=not nodes, by_shard={}, are_possible=bool(nodes), lost=lost)
    if 2 * len(handlers) <= len(nodes):
        here = ", ".join(handler.node for handler in handlers)
        raise UnavailableError(
            f"of {len(nodes)} failure handlers, only {here} has its directory: put the others back,"
            f" or move {here} away"
        )
    latest = max(handlers, key=lambda handler: (handler.term, handler.index))
    by_shard = {one.shard: one for one in latest.recoveries}
    return _Recoveries(is_known=True, by_shard=by_shard, are_possible=True, lost=lost)


def _add_shard(
    state: ClusterState,
    shard: ShardConfig,
    held: Sequence[ServerHoldings],
    recoveries: _Recoveries,
    notes: list[str],
) -> None:
    """Add a shard's placement, and its limit if it has left, to the state."""
    known = _known(shard, held)
    if known.state == "joining" and not _was_member(state, shard.id):
        notes.append(f"shard {shard.id} had not joined: run `ziplog shard add` again")
        return
    recovery = recoveries.by_shard.get(shard.id)
    view = _view(known, held, recoveries)
    limit = max(one.limit for one in held)
    placed_as: ShardState = "parked"
    if limit or _has_left(known.state):
        is_finalized = known.state == "finalized"
        placed_as = "finalized" if is_finalized else "leaving"
        state.retired[shard.id] = Retired(shard.id, limit or _stop(state), is_finalized)
    if recovery is not None and not _has_returned(known, recovery):
        # The failure handler continues: its decision began the view.
        limit = state.retired[shard.id].limit if shard.id in state.retired else _stop(state)
        state.recovering[shard.id] = Recovering(shard.id, recovery.view, limit)
        placed_as, view = "recovering", min(recovery.base, recovery.view - 1)
    state.placements[shard.id] = Placement(shard.id, view, placed_as, _replicas(known, held))


def _known(shard: ShardConfig, held: Sequence[ServerHoldings]) -> Placement:
    """Return the last recorded placement of a shard.

    Raises:
        UnavailableError: there is none, and the shard may have records.

    """
    placed = [(one.placement, one) for one in held if one.placement is not None]
    if placed:
        return max(placed, key=lambda one: (one[0].view, _has_left(one[0].state), one[1].lease))[0]
    if held and all(one.end == 1 for one in held):  # nothing was recorded, so no view began since
        replicas = tuple(
            Replica(node.name, node.endpoint, region=node.region or "") for node in shard.replicas
        )
        return Placement(shard.id, 1, "joining", replicas)
    names = ", ".join(node.name for node in shard.replicas)
    raise UnavailableError(
        f"shard {shard.id}: no directory of {names} has a record of the shard: put an up-to-date"
        " one back"
    )


def _has_left(state: ShardState) -> bool:
    return state in {"leaving", "finalized"}


def _has_returned(known: Placement, recovery: ShardRecovery) -> bool:
    """Whether a shard returned to the leases in its view; a server may know it first."""
    is_recorded = known.view == recovery.view and known.state != "recovering"
    return recovery.is_finished or is_recorded


def _is_settled(known: Placement, recovery: ShardRecovery | None) -> bool:
    return recovery is None or (_has_returned(known, recovery) and not recovery.is_under_way)


def _was_member(state: ClusterState, shard: int) -> bool:
    return any(run.first.view_of(shard) is not None for run in state.runs)


def _stop(state: ClusterState) -> int:
    return state.runs[-1].last.stop


def _replicas(known: Placement, held: Sequence[ServerHoldings]) -> tuple[Replica, ...]:
    """Return a shard's servers with the fingerprints of their directories, present or not."""
    found = {one.node: one.fingerprint for one in held}
    return tuple(
        msgspec.structs.replace(
            replica, fingerprint=replica.fingerprint or found.get(replica.name, _UNKNOWN)
        )
        for replica in known.replicas
    )


def _view(known: Placement, held: Sequence[ServerHoldings], recoveries: _Recoveries) -> int:
    """Return the view in which a shard continues.

    Raises:
        UnavailableError: a directory is needed that is missing, or was replaced.

    """
    whole = _whole(known, held)
    if not whole:
        raise UnavailableError(_needed(known, [one.name for one in known.replicas], recoveries))
    resumed = {one.view for one in whole}
    present = {one.node for one in whole} | set(recoveries.lost)
    if recoveries.is_known:
        view = _handlers_view(known, recoveries)
        recovery = recoveries.by_shard.get(known.shard)
        is_one_enough = _is_settled(known, recovery) and view in resumed
        if any(one.last_view >= view for one in whole):
            # The failure handler never takes the log of a replaced directory.
            present |= {one.node for one in held}
    else:
        view = max(known.view, *(one.last_view for one in whole), *resumed)
        is_one_enough = False
    missing = [one.name for one in known.replicas if one.name not in present]
    if missing and not is_one_enough:
        raise UnavailableError(_needed(known, missing, recoveries))
    if not recoveries.is_known and resumed != {view}:
        view += 1  # then all of its servers start in limbo
    if not recoveries.are_possible and resumed != {view}:
        limbo = ", ".join(one.node for one in whole if one.view != view)
        raise UnavailableError(
            f"shard {known.shard}: {limbo} did not stop cleanly, and the cluster has no failure"
            " handler that recovers the shard: add [[failure_handler]] to the cluster file"
        )
    return view


def _handlers_view(known: Placement, recoveries: _Recoveries) -> int:
    """Return the view of a shard by the failure handler's log.

    Raises:
        UnavailableError: a server recorded a later view.

    """
    recovery = recoveries.by_shard.get(known.shard)
    view = recovery.view if recovery is not None else known.view
    if known.view > view:
        raise UnavailableError(
            f"shard {known.shard} is in view {known.view}, but the failure handlers'"
            f" directories only have view {view}: put the latest ones back, or move them away"
        )
    return view


def _whole(known: Placement, held: Sequence[ServerHoldings]) -> list[ServerHoldings]:
    """Return the servers whose directories are those that their shard knows."""
    expected = {replica.name: replica.fingerprint for replica in known.replicas}
    return [one for one in held if expected.get(one.node) in {"", one.fingerprint}]


def _needed(known: Placement, missing: Sequence[str], recoveries: _Recoveries) -> str:
    recovery = recoveries.by_shard.get(known.shard)
    if not recoveries.is_known:
        why = "the failure handlers' directories are lost, so they cannot name an up-to-date server"
    elif not _is_settled(known, recovery):
        why = "a recovery of the shard is under way"
    else:
        why = "no other server of the shard stopped cleanly in its current view"
    return (
        f"shard {known.shard}: the directory of {' or '.join(missing)} is needed, because {why}:"
        " put it back, or give the file of `ziplog membership holdings` from its machine; or"
        f" give `--lost {missing[0]}` if it is lost for good"
    )


def _check_owners(state: ClusterState) -> None:
    """Check that the cluster file has every shard that owns positions of the log."""
    owners = {member.shard for run in state.runs for member in run.first.members}
    missing = sorted(owners - state.placements.keys())
    if missing:
        names = ", ".join(map(str, missing))
        raise UnavailableError(
            f"the log has positions of shards that the cluster file does not name: {names}. Put"
            " their [[shard]] tables and directories back"
        )
