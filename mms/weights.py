"""Weights of shards, computed from their insert rates.

A weight is the shard's rate in quarters of the slowest rate, rounded to three significant bits,
without the common factor. The last lease's weights stay while they fit: until one shard's rate per
weight certainly (allowing for Poisson noise) exceeds another's by a factor of `TOLERANCE`. So noise
causes no new schedule, and common changes of all rates do not matter. New weights replace them only
if they fit better.

Invariant: every weight is at least 1 and at most 256 times another, and their sum fits a round. Of
weights computed together, a faster shard's is never lower. See docs/protocol.md, section 13.
"""

from __future__ import annotations

from math import frexp, gcd, sqrt
from typing import TYPE_CHECKING, Final

from ziplog.core.gsn import MAX_ROUND

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ziplog.core.view import Member

#: Rate, in records a second, below which shards count as equally slow.
_SLOW: Final = 64
#: Maximum ratio of two rates.
_MAX_RATIO: Final = 256
#: Weights that fit within this factor are not worth a new lease.
TOLERANCE: Final = 1.15
#: New weights must fit better by this factor, so that weights do not oscillate.
_GAIN: Final = 1.12
#: The noise allowed for in a rate r is this times the root of r: three standard deviations of the
#: inserts of four seconds, over which heartbeats are averaged.
_NOISE: Final = 1.5
#: The share of one heartbeat, with the inserts of the last second, in the average.
_FRESH: Final = 1 / 8
#: A heartbeat that differs by more than this times the root of the rate shows a changed rate: five
#: standard deviations of the inserts of a second.
_JUMP: Final = 5


class Weights:
    """Weights of the last lease, rates of its shards, and the weights for the next lease."""

    def __init__(self) -> None:
        self._rates: dict[int, float] = {}
        self._members: tuple[Member, ...] = ()
        self._held: dict[int, int] = {}
        # Bounds of the held weights' rates per weight: one is certainly at most `_least`, one
        # certainly at least `_most`. Between two exact computations, the two only move apart.
        self._least, self._most = float("inf"), 0.0
        # The spread when no better weights were known.
        self._tried = 0.0

    def on_granted(self, members: tuple[Member, ...]) -> None:
        """Hold the weights of a committed lease."""
        if members != self._members:
            self._members = members
            self._held = {member.shard: member.weight for member in members}
            self._tried = 0.0
            self._least, self._most = 0.0, 1.0  # unknown: `are_outdated` computes them

    def set_rate(self, shard: int, per_s: int) -> None:
        """Store a rate, in records a second, that has certainly changed."""
        self._set(shard, float(max(per_s, _SLOW)))

    def observe(self, shard: int, per_s: int) -> None:
        """Store a rate, in records a second, that is measured continuously."""
        rate, before = float(max(per_s, _SLOW)), self._rates.get(shard)
        if before is not None and abs(rate - before) < _JUMP * sqrt(before):
            rate = before + (rate - before) * _FRESH
        self._set(shard, rate)

    def _set(self, shard: int, rate: float) -> None:
        self._rates[shard] = rate
        weight = self._held.get(shard)
        if weight is not None:
            low, high = _bounds(rate, weight)
            self._least, self._most = min(self._least, high), max(self._most, low)

    def forget_rates(self) -> None:
        """Forget all rates: they date from the last time that this node led."""
        self._rates.clear()
        self._update_bounds()

    def are_outdated(self) -> bool:
        """Whether the last lease's weights no longer fit, and better ones are known.

        It takes constant time, unless a shard's rate has moved further than any did before.
        """
        if self._most <= self._least * max(TOLERANCE, self._tried * _GAIN):
            return False
        spread = self._update_bounds()
        shards = list(self._held)
        if spread <= TOLERANCE or not self._fit_better(self._computed(shards), shards, spread):
            self._tried = spread
            return False
        return True

    def for_shards(self, shards: Sequence[int]) -> list[int]:
        """Return the weights of these shards for the next lease."""
        if not all(shard in self._held for shard in shards):
            return self._computed(shards)
        held = [self._held[shard] for shard in shards]
        if self._most > self._least * TOLERANCE:
            spread = self._spread(zip(shards, held, strict=True))
            fresh = self._computed(shards)
            if spread > TOLERANCE and self._fit_better(fresh, shards, spread):
                return fresh
        return _reduced(held)

    def _fit_better(self, fresh: list[int], shards: Sequence[int], spread: float) -> bool:
        return self._spread(zip(shards, fresh, strict=True)) * _GAIN < spread

    def _update_bounds(self) -> float:
        """Compute the exact bounds of the held weights; return the spread."""
        self._least, self._most = self._extremes(self._held.items())
        return _spread(self._least, self._most)

    def _spread(self, weights: Iterable[tuple[int, int]]) -> float:
        """Return a lower bound of the largest ratio of two shards' rates per weight."""
        return _spread(*self._extremes(weights))

    def _extremes(self, weights: Iterable[tuple[int, int]]) -> tuple[float, float]:
        """Return bounds of the rates per weight: one is at most the first, one at least the second.

        A rate counts as at most `_MAX_RATIO` times the lowest, because no weights express more.
        """
        rates = self._rates
        known = [(rates[s], w) for s, w in weights if s in rates]
        ceiling = min((rate for rate, _ in known), default=0.0) * _MAX_RATIO
        bounds = [_bounds(min(rate, ceiling), weight) for rate, weight in known]
        least = min((high for _, high in bounds), default=float("inf"))
        return least, max((low for low, _ in bounds), default=0.0)

    def _computed(self, shards: Sequence[int]) -> list[int]:
        """Return weights for the rates that are known now."""
        known, held = self._rates, self._held
        # A shard without a report since this node leads counts by its weight.
        unit = 0.0 if all(shard in known for shard in shards) else self._unit()
        rates = [known.get(shard) or max(unit * held.get(shard, 0), _SLOW) for shard in shards]
        slowest = min(rates, default=1.0)
        weights = [_rounded(4 * min(rate / slowest, _MAX_RATIO)) for rate in rates]
        while sum(weights) > MAX_ROUND:
            weights = [max(weight // 2, 1) for weight in weights]
        return _reduced(weights)

    def _unit(self) -> float:
        """Return the rate for which a held weight of one stands."""
        known = [(self._rates[s], w) for s, w in self._held.items() if s in self._rates]
        weight = sum(weight for _, weight in known)
        return sum(rate for rate, _ in known) / weight if weight else _SLOW

    def check(self, members: tuple[Member, ...]) -> None:
        """Assert that the held weights are those of the last lease."""
        assert self._members == members
        assert self._held == {member.shard: member.weight for member in members}


def _bounds(rate: float, weight: int) -> tuple[float, float]:
    """Return bounds that almost certainly contain the true rate per weight."""
    noise = _NOISE * sqrt(rate)
    return (rate - noise) / weight, (rate + noise) / weight


def _spread(least: float, most: float) -> float:
    return most / least if most else 1.0


def _rounded(value: float) -> int:
    """Round to three significant bits: 4, 5, 6 or 7 times a power of two; 4 or more."""
    shift = frexp(value)[1] - 3
    return round(value / (1 << shift)) << shift


def _reduced(weights: list[int]) -> list[int]:
    """Remove the common factor."""
    common = gcd(*weights)
    return [weight // common for weight in weights] if common > 1 else weights
