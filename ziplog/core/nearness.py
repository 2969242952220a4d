"""Which shards and servers are near a client: those in its region, then the quickest ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

#: Shards are about as near as the nearest one up to this multiple of its latency.
_NEAR: Final = 1.5


class NearestPolicy:
    """A policy that gets only the nearest of the shards: see `ziplog.policy.nearest`."""

    def __init__(self, then: Callable[[bytes, bytes | None, Sequence[int]], int]) -> None:
        """`then` selects one of the nearest shards."""
        self._then: Final = then

    def __call__(self, payload: bytes, key: bytes | None, live: Sequence[int]) -> int:
        """Select one of the shards in `live`, which are the nearest ones."""
        return self._then(payload, key, live)


def nearest(
    live: Sequence[int],
    region: str,
    placed: Callable[[int], Sequence[str]],
    latency_ns: Callable[[int], int],
) -> Sequence[int]:
    """Return the nearest of some shards: the first of three classes that is not empty.

    The classes are: the primary is in `region`; a replica is; the least latency.

    Args:
        live: the shards.
        region: the region of the client; "": it has none, and every shard is as near.
        placed: returns the regions of a shard's replicas, the primary's first.
        latency_ns: returns the latency of inserts at a shard; 0: not measured yet.

    """
    if not region:
        return live
    primaries = [shard for shard in live if placed(shard)[:1] == (region,)]
    if primaries:
        return primaries
    replicas = [shard for shard in live if region in placed(shard)]
    if replicas:
        return replicas
    latencies = {shard: latency_ns(shard) for shard in live}
    limit = min(filter(None, latencies.values()), default=0) * _NEAR
    # A shard without a measurement gets one.
    return [shard for shard, latency in latencies.items() if latency <= limit]


def replica_order(
    regions: Sequence[str],
    region: str,
    round_trips_ns: Sequence[int],
    failed: Collection[int],
    ties: Sequence[int],
) -> list[int]:
    """Return the indices of nodes in the order in which a client tries them.

    Those that failed lately are last. Of the others, those in the client's region are first; then
    follow those without a measurement, so that they get one, and the rest by round trip.

    Args:
        regions: the region of each node.
        region: the region of the client.
        round_trips_ns: the measured round trip to each node; 0: none.
        failed: the nodes that failed lately.
        ties: a number for each node, the order of nodes that are as near.

    """

    def rank(index: int) -> tuple[bool, bool, int, int]:
        is_far = regions[index] != region
        return index in failed, is_far, round_trips_ns[index] if is_far else 0, ties[index]

    return sorted(range(len(regions)), key=rank)


def named(regions: Iterable[str]) -> str:
    """Return regions as a text."""
    return ", ".join(region or "(no region)" for region in regions)
