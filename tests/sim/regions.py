"""Regions of a plan: where each process runs, and the delays between regions.

Rule: a plan's regions have a random stream of their own, so all else of the plan stays as it is.
Shards obey `min_regions` of the cluster file (docs/protocol.md, section 20), apart from some that
an operator adds in vain. The supervisor and the client of the operator are in no region.
"""

from __future__ import annotations

import re
from math import ceil
from random import Random
from typing import TYPE_CHECKING, Final, NamedTuple

from tests.simulator.kernel import MS, US

if TYPE_CHECKING:
    from collections.abc import Collection

    from tests.simulator.network import Conditions

REGIONS: Final = ("ap", "eu", "us")
#: One plan of this many has regions.
_ONE_IN: Final = 6
#: Number of shards with drawn regions: more than an operator adds.
_SHARDS: Final = 8
#: Range of the delays between two regions, one way.
_DELAYS_US: Final = (5_000, 60_000)
#: A slow region's delays, in multiples of the usual ones, and the share of frames that it loses.
_SLOWDOWN: Final = 5
_SLOW_LOSS: Final = 0.05
_SERVER: Final = re.compile(r"shard-(\d+)-(\d+)")
_NUMBERED: Final = re.compile(r"[a-z]+-(\d+)")


class Regions(NamedTuple):
    """The regions of a cluster and its clients."""

    #: One-way delays in µs, without jitter: ap-eu, ap-us, eu-us.
    delays_us: tuple[int, int, int]
    #: By shard: the regions of its servers, the primary's first.
    shards: tuple[tuple[str, ...], ...]
    #: In the cluster file; 0: two.
    min_regions: int
    #: Clients have the policy `nearest`; otherwise they select a shard at random.
    is_near: bool

    def of(self, name: str) -> str:
        """Return the region of a process; "": it has none."""
        server = _SERVER.fullmatch(name)
        if server is not None:
            regions = self.shard(int(server[1]))
            return regions[int(server[2]) % len(regions)]
        numbered = _NUMBERED.fullmatch(name)
        return REGIONS[int(numbered[1]) % len(REGIONS)] if numbered is not None else ""

    def shard(self, number: int) -> tuple[str, ...]:
        """Return the regions of a shard's servers."""
        return self.shards[number % len(self.shards)]

    def delay_ns(self, src: str, dst: str) -> tuple[int, int] | None:
        """Return the minimum and maximum delay between two processes; None: they are near."""
        one, other = self.of(src), self.of(dst)
        if "" in {one, other} or one == other:
            return None
        delay_ns = self.delays_us[REGIONS.index(one) + REGIONS.index(other) - 1] * US
        return delay_ns, delay_ns + delay_ns // 10

    def slowed_ns(self, src: str, dst: str, slow: Collection[str]) -> tuple[int, int] | None:
        """Return the same while the links of these regions are slow."""
        usual = self.delay_ns(src, dst)
        if usual is None or not self.is_slow(src, dst, slow):
            return usual
        return usual[0] * _SLOWDOWN, usual[1] * _SLOWDOWN

    def loss(self, src: str, dst: str, slow: Collection[str]) -> float:
        """Return the share of frames lost between two processes because of slow regions."""
        return _SLOW_LOSS if self.is_slow(src, dst, slow) else 0.0

    def is_slow(self, src: str, dst: str, slow: Collection[str]) -> bool:
        """Whether two processes are in different regions, one of which is slow."""
        places = {self.of(src), self.of(dst)} - {""}
        return len(places) > 1 and not places.isdisjoint(slow)

    def rtt_ms(self, conditions: Conditions) -> int:
        """Return `rtt_ms` of the cluster file, which covers all round trips without stalls."""
        longest_ns = max(max(self.delays_us) * US * 11 // 10, conditions.delay_ns[1])
        return ceil(2 * longest_ns / MS)


def is_drawn(seed: int) -> bool:
    """Whether the plan of a seed has regions."""
    return Random(f"regions {seed}").random() < 1 / _ONE_IN


def draw(seed: int, f: int, shards: int) -> Regions:
    """Return the regions of a plan with `shards` shards of f+1 servers."""
    random = Random(f"places {seed}")
    low, high = _DELAYS_US
    delays_us = (random.randint(low, high), random.randint(low, high), random.randint(low, high))
    min_regions = random.choice((0, 1, 1)) if f else 1
    is_ring = f > 0 and random.random() < 1 / 2
    placed = [
        _ring(number, f) if is_ring else _placed(random, f, is_wide=not min_regions)
        for number in range(_SHARDS)
    ]
    for number in range(shards, _SHARDS):
        if random.random() < 1 / 3:  # refused, or accepted with min_regions = 1
            placed[number] = (random.choice(REGIONS),) * (f + 1)
    return Regions(delays_us, tuple(placed), min_regions, is_near=random.random() < 1 / 2)


def _ring(number: int, f: int) -> tuple[str, ...]:
    """Return the regions of a shard in the recommended shape: a region and the next ones."""
    return tuple(REGIONS[(number + i) % len(REGIONS)] for i in range(f + 1))


def _placed(random: Random, f: int, *, is_wide: bool) -> tuple[str, ...]:
    """Return regions by chance; `is_wide`: at least two."""
    found = [random.choice(REGIONS) for _ in range(f + 1)]
    if is_wide:
        found[:2] = random.sample(REGIONS, 2)
    return tuple(found)
