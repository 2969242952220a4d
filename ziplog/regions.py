"""Regions: what a cluster survives if whole regions are lost, and which shards survive most. Pure.

A region is a label of a server: servers that fail together have the same one, and servers without
a label share the region "". A shard *spans* the regions of its replicas. An insert is complete when
all replicas of its shard ack, so the record is then in all regions that the shard spans.

Invariant: `survey` has a verdict for each single region. See docs/protocol.md, section 20.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import TYPE_CHECKING, Any, Final

from ziplog.core.nearness import named
from ziplog.errors import ConfigError
from ziplog.status_document import needed_shards

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ziplog.config import ClusterConfig

#: Sets of lost regions of one size are surveyed if there are no more of them than this.
_MAX_SETS: Final = 1000
#: Shards that a text names.
_SHOWN: Final = 3
#: Shards in these states take no records, and hold only what they held.
_REMOVED: Final = frozenset({"leaving", "finalized"})


@dataclass(frozen=True)
class Layout:
    """The regions of all nodes of a cluster."""

    mms: tuple[str, ...]
    failure_handlers: tuple[str, ...]
    #: By shard: the region of each replica, the primary's first.
    shards: Mapping[int, tuple[str, ...]]
    min_regions: int
    #: The shards that take no records any more.
    removed: frozenset[int] = frozenset()

    @property
    def regions(self) -> tuple[str, ...]:
        """All regions, sorted."""
        replicas = (region for regions in self.shards.values() for region in regions)
        return tuple(sorted({*self.mms, *self.failure_handlers, *replicas}))


@dataclass(frozen=True)
class Verdict:
    """What still works while some regions are lost."""

    lost: tuple[str, ...]
    #: The membership service and the failure handler have a majority.
    services: bool
    #: Some shard takes records.
    writes: bool
    #: Each shard has a replica.
    kept: bool
    #: Each shard can start a confirmed view, so readers continue.
    readers: bool
    #: Each reason why one of these is false.
    why: tuple[str, ...]

    @property
    def is_survived(self) -> bool:
        """Whether inserts and readers continue without an operator."""
        return self.services and self.writes and self.kept and self.readers


def layout_of(config: ClusterConfig) -> Layout:
    """Return the layout of a cluster file."""
    return Layout(
        tuple(node.region or "" for node in config.mms),
        tuple(node.region or "" for node in config.failure_handlers),
        {shard.id: tuple(node.region or "" for node in shard.replicas) for shard in config.shards},
        config.required_regions,
    )


def survey(layout: Layout) -> list[Verdict]:
    """Return a verdict for each set of lost regions: single ones, then larger sets.

    The largest sets leave `min_regions` regions, and there are at most 1,000 sets of one size.
    """
    regions = layout.regions
    largest = max(1, len(regions) - layout.min_regions)
    sizes = [k for k in range(1, largest + 1) if k == 1 or comb(len(regions), k) <= _MAX_SETS]
    return [_verdict(layout, lost) for k in sizes for lost in combinations(regions, k)]


def _verdict(layout: Layout, lost: tuple[str, ...]) -> Verdict:
    gone = set(lost)
    where = named(lost)
    membership = _majority_problem(layout.mms, gone, "membership service", "no lease is granted")
    handler = "failure handler", "no shard is recovered"
    handlers = _majority_problem(layout.failure_handlers, gone, *handler)
    taking = [shard for shard in layout.shards if shard not in layout.removed]
    writes = any(gone.isdisjoint(layout.shards[shard]) for shard in taking)
    alone = [s for s, regions in layout.shards.items() if gone.issuperset(regions)]
    stuck = [
        shard
        for shard, regions in layout.shards.items()
        if shard not in alone and len(regions) > 2 and sum(one in gone for one in regions) > 1
    ]
    why = [problem for problem in (membership, handlers) if problem]
    if not writes:
        why.append(f"every shard has a server in {where}: no shard takes records")
    if alone:
        why.append(
            f"all servers of {_shards(alone)} are in {where}: its records cannot be read, and"
            " readers wait there"
        )
    if stuck:
        why.append(
            f"{_shards(stuck)} lost more than one server: readers wait until one of them is back,"
            " or an operator gives the lost regions up (ziplog region lost)"
        )
    return Verdict(
        lost, not (membership or handlers), writes, not alone, not (alone or stuck), tuple(why)
    )


def _majority_problem(nodes: Sequence[str], gone: set[str], name: str, effect: str) -> str:
    """Return why a service has no majority without some regions; "": it has one."""
    left = sum(region not in gone for region in nodes)
    if 2 * left > len(nodes) or not nodes:
        return ""
    return f"{left} of {len(nodes)} nodes of the {name} are left, no majority: {effect}"


def _shards(shards: Sequence[int]) -> str:
    some = ", ".join(map(str, shards[:_SHOWN]))
    more = ", ..." if len(shards) > _SHOWN else ""
    return f"shard {some}" if len(shards) == 1 else f"shards {some}{more}"


def warnings(layout: Layout) -> list[str]:
    """Return what an operator should know about a layout with more than one region."""
    regions = layout.regions
    if len(regions) < 2:
        return []
    found = []
    if "" in regions:
        found.append("some nodes have no region: they count as one region of their own")
    for shard, placed in layout.shards.items():
        if len(set(placed)) < layout.min_regions:
            found.append(
                f"shard {shard} spans {len(set(placed))} of {layout.min_regions} regions"
                f" ({named(sorted(set(placed)))}): inserts that require more use other shards"
            )
    for verdict in survey(layout):
        if len(verdict.lost) == 1:
            found += [f"if {named(verdict.lost)} is lost: {reason}" for reason in verdict.why]
    return found


def config_warnings(config: ClusterConfig) -> list[str]:
    """Return what an operator should know about the regions and round trips of a cluster file."""
    found = warnings(layout_of(config))
    if config.rtt_ms and config.epoch_ms == 1:
        found.append(
            f"epoch_ms is 1 and rtt_ms is {config.rtt_ms}: an idle shard with readers may send a"
            " thousand no-ops a second over the WAN, and a record arrives only milliseconds"
            " earlier; with epoch_ms = 10 it sends at most a hundred"
        )
    return found


def layout_of_status(document: Mapping[str, Any]) -> Layout:
    """Return the layout of a running cluster, from its status document."""
    shards = needed_shards(document)
    return Layout(
        tuple(node["region"] for node in document["mms"]),
        tuple(node["region"] for node in document["failure_handlers"]),
        {shard["id"]: tuple(node["region"] for node in shard["replicas"]) for shard in shards},
        document["min_regions"],
        frozenset(shard["id"] for shard in shards if shard["state"] in _REMOVED),
    )


def plan(
    regions: Sequence[str], f: int, rtt_ms: Mapping[frozenset[str], float]
) -> list[tuple[str, ...]]:
    """Return the regions of each shard's replicas, the primary's first, so that most is survived.

    Each region has the primary of a shard whose other replicas are in the nearest regions. More
    shards follow, so that the loss of any one region leaves a shard that takes records.

    Args:
        regions: the names of the regions, each once.
        f: failures of a shard that acknowledged records survive, 1 or more.
        rtt_ms: round trips between pairs of regions; without one, the next region in `regions` is
            the nearest.

    Raises:
        ConfigError: there are fewer than f + 1 regions, or a name occurs twice.

    """
    count = len(regions)
    if len(set(regions)) < count:
        raise ConfigError("regions", list(regions), "names that occur once")
    if count < f + 1:
        raise ConfigError("regions", list(regions), f"at least f + 1 = {f + 1} regions")

    def distance(first: str, second: str) -> tuple[float, int]:
        steps = (regions.index(second) - regions.index(first)) % count
        return rtt_ms.get(frozenset((first, second)), float("inf")), steps

    def shard_of(primary: str, without: str = "") -> tuple[str, ...]:
        others = [one for one in regions if one not in {primary, without}]
        nearest = sorted(others, key=lambda one: distance(primary, one))[:f]
        return (primary, *nearest)

    shards = [shard_of(region) for region in regions]
    for lost in regions:
        if count > f + 1 and all(lost in shard for shard in shards):
            candidates = [shard_of(one, lost) for one in regions if one != lost]
            shards.append(min(candidates, key=lambda shard: distance(shard[0], shard[-1])))
    return shards
