"""A rebuild of the membership service, as `ziplog membership rebuild` does it (section 16).

All nodes stop or die, the membership service's state is gone, and maybe more. The new state is made
from the storage servers' disks. Then the supervisor starts all nodes.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, NamedTuple

from failure_handler import holdings as handler_holdings
from failure_handler.state import HandlerState
from mms.rebuild import rebuild as rebuilt
from shard import holdings
from tests.simulator.consensus import OrderedLog
from tests.simulator.disk import Disk
from ziplog.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Collection

    from mms.state import ClusterState
    from tests.sim.cluster import SimCluster
    from ziplog.core.holdings import HandlerHoldings, ServerHoldings


class Loss(NamedTuple):
    """What happens beside the loss of the membership service."""

    #: Some servers are killed instead of stopped.
    kills: bool
    #: The failure handlers' directories are lost, if the rebuild can do without them.
    handlers: bool
    #: A server of each shard loses its directory, if the rebuild can do without it.
    servers: bool
    #: All machines lose power, and what they had not synced.
    power: bool

    @classmethod
    def of(cls, amount: int) -> Loss:
        """Decode the amount of a fault; 16: nothing else is lost."""
        return cls(bool(amount & 1), bool(amount & 2), bool(amount & 4), bool(amount & 8))

    @staticmethod
    def without_records(amount: int) -> int:
        """Return the part of an amount that costs no record at level `memory`: `servers`."""
        return amount & 4 or 16


def can_rebuild(state: ClusterState) -> bool:
    """Whether a rebuild keeps all removed shards: those without a record are forgotten."""
    return state.last is not None and not any(
        0 < retired.limit <= max(state.trim, 1) for retired in state.retired.values()
    )


def rebuild(cluster: SimCluster, loss: Loss, rotten: Collection[str] = ()) -> list[int]:
    """Stop all nodes, and rebuild the membership service from the disks.

    `rotten`: the servers that may need another one's copy of a damaged entry.

    Returns:
        The shards that the service forgets, as no server recorded that they joined.

    """
    random = Random(f"rebuild {cluster.plan.seed} {cluster.kernel.now}")
    for name, process in cluster.nodes.items():
        server = cluster.server(name)
        is_stopped = not loss.power and (not loss.kills or random.random() < 1 / 2)
        if server is not None and is_stopped and not process.is_paused:
            process.from_inside(server.stop)
        if process.is_up:
            process.kill()
    if loss.power:
        for disk in cluster.disks.values():
            disk.power_cut()
    found = _holdings(cluster)
    if not any(one.runs for one in found.values()):
        return []  # no server recorded a lease yet: the membership service keeps its state
    handlers = _handlers(cluster)
    if loss.handlers and _is_enough(cluster, found, []):
        handlers = []
        cluster.handlers.refound(HandlerState().snapshot())
    if loss.servers:
        found = _without_some(cluster, found, handlers, rotten, random)
    state = rebuilt(cluster.config, list(found.values()), handlers).state
    state.check()
    assert isinstance(cluster.mms, OrderedLog)
    cluster.mms.refound(state.snapshot())
    return [shard.id for shard in cluster.config.shards if shard.id not in state.placements]


def _holdings(cluster: SimCluster) -> dict[str, ServerHoldings]:
    found = {}
    for name, disk in cluster.disks.items():
        path = disk.path(name)
        if path.exists():
            found[name] = holdings.read(path, cluster.config.name, name, wire=1)
    return found


def _handlers(cluster: SimCluster) -> list[HandlerHoldings]:
    group = cluster.handlers
    assert isinstance(group, OrderedLog)
    machine = group.machine
    assert isinstance(machine, HandlerState)
    return [handler_holdings.holdings(name, machine, 1, 1) for name in group.names]


def _without_some(
    cluster: SimCluster,
    found: dict[str, ServerHoldings],
    handlers: list[HandlerHoldings],
    rotten: Collection[str],
    random: Random,
) -> dict[str, ServerHoldings]:
    """Lose the directory of a server of each shard, where the rebuild accepts that.

    A shard with a damaged disk keeps the others: no server may have the damaged entry otherwise.
    """
    for shard in cluster.config.shards:
        lost = random.choice(shard.replicas).name
        rest = {name: one for name, one in found.items() if name != lost}
        if len(shard.replicas) < 2 or lost not in found:
            continue
        if any(peer in rotten for peer in cluster.peers(lost)):
            continue
        if _is_enough(cluster, rest, handlers):
            found = rest
            cluster.disks[lost] = Disk(cluster.kernel.random)
    return found


def _is_enough(
    cluster: SimCluster, found: dict[str, ServerHoldings], handlers: list[HandlerHoldings]
) -> bool:
    """Whether the rebuild accepts what is left; if not, an operator puts the directory back."""
    try:
        rebuilt(cluster.config, list(found.values()), handlers)
    except UnavailableError:
        return False
    return True
