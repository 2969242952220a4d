"""Faults of whole regions: cut off, parted, slow, alone, without power, lost for some time or good.

A region may be cut off or lost if the cluster survives that by the verdict of `ziplog.regions`, and
if each shard with a server there has an undisturbed one elsewhere. Rule: a region that is lost for
good takes its machines with it, clients too; nothing there starts again. Afterwards no fault
disturbs the last servers of a shard, and the operator changes only what leaves a shard for inserts.
"""

from __future__ import annotations

from dataclasses import replace
from enum import IntFlag
from functools import partial
from typing import TYPE_CHECKING, Final

from tests.sim.plan import server_name, shard_of
from tests.sim.regions import REGIONS
from tests.simulator.consensus import OrderedLog
from ziplog.regions import layout_of, survey

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.faults import Faults
    from tests.sim.plan import Fault
    from tests.sim.regions import Regions

    Links = list[tuple[str, str]]

#: Placements in these states take no records.
_REMOVED: Final = frozenset({"leaving", "finalized"})


def cut(faults: Faults, fault: Fault) -> bool:
    """Cut a region from the others, with its clients."""
    (region,) = fault.targets
    return survives(faults, region) and _leave_alone(faults, fault, region)


def lose(faults: Faults, fault: Fault) -> bool:
    """Cut the power of a region; its machines start, and are cut off for a while."""
    (region,) = fault.targets
    if not survives(faults, region):
        return False
    faults.cut_power(_nodes(faults, region))
    return _leave_alone(faults, fault, region)


def destroy(faults: Faults, fault: Fault) -> bool:
    """Lose a region for good, with its clients."""
    (region,) = fault.targets
    cluster = faults.cluster
    names = _nodes(faults, region)
    groups = [g for g in (cluster.mms, cluster.handlers) if not isinstance(g, OrderedLog)]
    statuses = [group.status(name) for group in groups for name in group.names]
    is_survived = (
        survives(faults, region)
        and all(status is not None and status.is_voter for status in statuses)
        and all(faults.has_good_peer(name, names) for name in names if name in cluster.disks)
    )
    if not is_survived:
        return False
    cluster.lose(names)
    for name, client in faults.clients.items():
        if _places(faults).of(name) == region:
            client.lose()
    return True


def power(faults: Faults, fault: Fault) -> bool:
    """Cut the power of a region for a moment; its machines start again.

    At level `disk` the whole cluster may be there; at `memory` each server has a peer elsewhere.
    """
    (region,) = fault.targets
    names = _nodes(faults, region)
    needs_peers = [
        name for name in names
        if name in faults.cluster.disks
        and (not faults.is_at_disk or faults.cluster.has_lost_peers(name))
    ]  # fmt: skip
    if not names or not all(faults.has_good_peer(name, names) for name in needs_peers):
        return False
    faults.cut_power(names)
    return True


def part(faults: Faults, fault: Fault) -> bool:
    """Cut two regions from each other; both reach the third one."""
    one, other = fault.targets
    if faults.cluster.plan.regions is None:
        return False
    inside, outside = _names(faults, one), _names(faults, other)
    links = _links(inside, outside)
    return faults.disturb(fault, links, faults.cluster.network.cut, {*inside, *outside})


def strand(faults: Faults, fault: Fault) -> bool:
    """Cut the other two regions from a region with both services; it goes on alone.

    The amount adds up what else happens: see `Alone`.
    """
    (region,) = fault.targets
    cluster, how = faults.cluster, Alone(fault.amount)
    others = [one for one in REGIONS if one != region]
    if not _can_be_alone(faults, region):
        return False
    inside = _names(faults, *others)
    is_over = [False]
    if Alone.GIVEN_UP in how:
        for other in others:
            faults.operator.give_up(other, lambda: is_over[0])
    peers = [name for server in inside if server in cluster.disks for name in cluster.peers(server)]
    left = [name for name in _nodes(faults, region) if name in peers]

    def end() -> None:
        is_over[0] = True
        for name in left:
            if Alone.LOSES_DISK in how:
                cluster.lose_disk(name)
            elif Alone.KILLED in how:
                cluster.nodes[name].kill()

    # The supervisors of the two regions reach no failure handler, which would have servers killed.
    links = _links(inside, _names(faults, "", region)) + _links(["host"], cluster.handlers.names)
    return faults.disturb(fault, links, cluster.network.cut, set(inside), end)


class Alone(IntFlag):
    """What happens beside a cut of two regions from a third one."""

    #: The operator gives the two regions up, as soon as the membership service allows that.
    GIVEN_UP = 1
    #: At the end, the servers of the third region lose their disks, or are killed.
    LOSES_DISK = 2
    KILLED = 4
    #: Nothing else: a fault has an amount.
    NOTHING = 8


def _can_be_alone(faults: Faults, region: str) -> bool:
    """Whether a region has majorities of both services, and a good peer of each other server."""
    cluster = faults.cluster
    if cluster.plan.regions is None or cluster.lost:
        return False
    here = _nodes(faults, region)
    rest = [name for name in cluster.nodes if name not in here]
    return all(
        2 * len(set(here).intersection(group.names)) > len(group.names)
        for group in (cluster.mms, cluster.handlers)
    ) and all(faults.has_good_peer(name, rest) for name in rest if name in cluster.disks)


def slow(faults: Faults, fault: Fault) -> bool:
    """Make a region's links to the others slow and lossy."""
    (region,) = fault.targets
    slow_regions, names = faults.cluster.slow_regions, _nodes(faults, region)
    if not names or not all(faults.may_fail(name) for name in names):
        return False
    slow_regions.append(region)
    return faults.lasting(fault, partial(slow_regions.remove, region), names)


def relabel(faults: Faults, fault: Fault) -> bool:
    """Stop a server cleanly; it starts with another region in its cluster file.

    The machine stays where it is.
    """
    (name,) = fault.targets
    server, process = faults.cluster.server(name), faults.cluster.nodes[name]
    if server is None or process.is_paused or not faults.may_fail(name):
        return False
    region = REGIONS[fault.amount % len(REGIONS)]
    return faults.cluster.relabel(name, region) and faults.stop(fault)


#: The function of each kind of fault; it returns whether the fault fitted.
KINDS: Final[dict[str, Callable[[Faults, Fault], bool]]] = {
    "cut-region": cut,
    "lose-region": lose,
    "destroy-region": destroy,
    "power-region": power,
    "part-regions": part,
    "strand-region": strand,
    "slow-region": slow,
    "relabel": relabel,
}


def survives(faults: Faults, region: str) -> bool:
    """Whether the cluster survives the loss of a region now, beside those that are lost."""
    regions, cluster = faults.cluster.plan.regions, faults.cluster
    if regions is None or region in cluster.lost_regions:
        return False
    placements = cluster.state.placements.values()
    layout = replace(
        layout_of(cluster.config),
        shards={p.shard: tuple(regions.of(r.name) for r in p.replicas) for p in placements},
        removed=frozenset(_removed(faults)),
    )
    verdicts = {verdict.lost: verdict for verdict in survey(layout)}
    verdict = verdicts.get(tuple(sorted({region, *cluster.lost_regions})))
    return (
        verdict is not None
        and verdict.is_survived
        and all(faults.may_fail(name) for name in _nodes(faults, region))
    )


def can_change(faults: Faults, change: Fault) -> bool:
    """Whether the operator can request a change after a loss: its machines exist.

    Another shard without a lost server has to remain for inserts.
    """
    cluster, shard = faults.cluster, shard_of(change)
    if not cluster.lost:
        return True
    names = [server_name(shard, index) for index in range(cluster.config.f + 1)]
    if change.kind == "add-shard":
        return not any(_places(faults).of(name) in cluster.lost_regions for name in names)
    rest = cluster.state.placements.keys() - _removed(faults) - {shard}
    return any(not cluster.has_lost_servers(one) for one in rest)


def _removed(faults: Faults) -> set[int]:
    """Return the shards that take no records, or that the operator removes."""
    placements = faults.cluster.state.placements.values()
    left = {placement.shard for placement in placements if placement.state in _REMOVED}
    return left | {change.shard for change in faults.operator.open}


def _places(faults: Faults) -> Regions:
    regions = faults.cluster.plan.regions
    assert regions is not None, "no cluster without regions loses one"
    return regions


def _nodes(faults: Faults, region: str) -> list[str]:
    """Return the nodes in a region, by place, not by label."""
    regions = faults.cluster.plan.regions
    return [n for n in faults.cluster.nodes if regions is not None and regions.of(n) == region]


def _names(faults: Faults, *within: str) -> list[str]:
    """Return the nodes and clients of some regions ("": those of none)."""
    names = [*faults.cluster.nodes, *faults.clients, "operator"]
    return [name for name in names if _places(faults).of(name) in within]


def _links(inside: list[str], outside: list[str]) -> Links:
    return [pair for i in inside for o in outside for pair in ((i, o), (o, i))]


def _leave_alone(faults: Faults, fault: Fault, region: str) -> bool:
    """Cut a region from all else but the supervisor, for the duration of a fault."""
    cluster = faults.cluster
    inside = _names(faults, region)
    outside = _names(faults, "", *(one for one in REGIONS if one != region))
    apart = [
        (group, name)
        for group in (cluster.mms, cluster.handlers)
        if isinstance(group, OrderedLog)
        for name in group.names
        if name in inside
    ]
    for group, name in apart:
        group.isolate(name)

    def rejoin() -> None:
        for group, name in apart:
            group.rejoin(name)

    links = _links(inside, outside)
    return faults.disturb(fault, links, cluster.network.cut, set(inside), rejoin)
