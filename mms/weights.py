"""Weights of shards, from the rates of their inserts.

A shard's weight is its rate in multiples of the slowest one's, rounded to a power of two, and it
changes only when the rate leaves a band around it, seen twice: so noise makes no new schedule, and
equal leases stay equal (D32). Invariant: every weight is at least 1, and their sum fits a round.

See docs/protocol.md, section 2.
"""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING, Final

from ziplog.gsn import MAX_ROUND

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Below this rate, in records a second, shards count as equally slow.
_SLOW: Final = 64
#: The greatest weight is 2 to this power.
_MAX_EXPONENT: Final = 8
#: Half the width of the band, in powers of two; rounding alone would be 0.5.
_BAND: Final = 0.75
#: Rates that keep changing are followed after so many looks all the same.
_PATIENCE: Final = 5


class Weights:
    """Turns observed rates into weights that are quiet."""

    def __init__(self) -> None:
        self._exponents: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._unsettled = 0

    def observe(self, rates: Mapping[int, int]) -> None:
        """Look at the rates (records a second) of all shards that work; about once a second."""
        slowest = max(min(rates.values(), default=0), _SLOW)
        fresh = {shard: self._exponent(shard, rate / slowest) for shard, rate in rates.items()}
        self._unsettled = 0 if fresh == self._seen else self._unsettled + 1
        if fresh == self._seen or self._unsettled >= _PATIENCE:
            self._exponents = fresh
        self._seen = fresh

    def _exponent(self, shard: int, ratio: float) -> int:
        power = log2(max(ratio, 1.0))
        held = self._exponents.get(shard)
        if held is not None and abs(power - held) < _BAND:
            return held
        return min(round(power), _MAX_EXPONENT)

    def of(self, shards: Sequence[int]) -> list[int]:
        """Return the weights of these shards, the least of them 1."""
        exponents = [self._exponents.get(shard, 0) for shard in shards]
        least, most = min(exponents, default=0), max(exponents, default=0)
        weights = [1 << exponent - least for exponent in exponents]
        while sum(weights) > MAX_ROUND:
            most -= 1
            weights = [min(weight, 1 << most - least) for weight in weights]
        return weights
