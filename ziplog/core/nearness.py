"""Which shards are near a client: those with servers in its region, then the quickest ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

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


def named(regions: Iterable[str]) -> str:
    """Return regions as a text."""
    return ", ".join(region or "(no region)" for region in regions)
