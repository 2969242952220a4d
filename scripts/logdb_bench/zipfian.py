"""Key distributions of the YCSB core workloads (Cooper et al., SoCC 2010).

Rule: the arithmetic equals YCSB's bit by bit, except for the random source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random

#: YCSB's constant: 0 is uniform, the nearer to 1 the more skewed.
THETA: Final = 0.99
#: Item count of the scrambled generator, independent of the number of keys, and its zeta.
_SCRAMBLED_ITEMS: Final = 10_000_000_000
_SCRAMBLED_ZETA: Final = 26.46902820178302
_FNV_OFFSET: Final = 0xCBF29CE484222325
_FNV_PRIME: Final = 1099511628211
_MASK: Final = 2**64 - 1


def zeta(items: int) -> float:
    """Return the sum of 1/i^`THETA` over i from 1 to `items`."""
    return sum(1 / i**THETA for i in range(1, items + 1))


class Zipfian:
    """Numbers from 0 on, each more seldom than the one before: `ZipfianGenerator`."""

    def __init__(self, rng: random.Random, items: int, zeta_n: float | None = None) -> None:
        """Draw from `items` numbers; `zeta_n`: their zeta, if it is known."""
        self._random: Final = rng.random
        self._items: Final = items
        self._zeta: Final = zeta(items) if zeta_n is None else zeta_n
        self._second: Final = 1 + 0.5**THETA
        self._alpha: Final = 1 / (1 - THETA)
        self._eta: Final = (1 - (2 / items) ** (1 - THETA)) / (1 - zeta(2) / self._zeta)

    def draw(self) -> int:
        """Return the next number (Gray et al., SIGMOD 1994)."""
        chance = self._random()
        scaled = chance * self._zeta
        if scaled < 1:
            return 0
        if scaled < self._second:
            return 1
        return int(self._items * (self._eta * chance - self._eta + 1) ** self._alpha)


def fnv_hash(value: int) -> int:
    """Return the 64-bit FNV hash of a number's eight bytes, as YCSB's `Utils.fnvhash64`."""
    hashed = _FNV_OFFSET
    for _ in range(8):
        hashed = ((hashed ^ (value & 0xFF)) * _FNV_PRIME) & _MASK
        value >>= 8
    return abs(hashed - 2**64 if hashed >> 63 else hashed)


class ScrambledZipfian:
    """Zipfian, with the frequent numbers all over the range: `ScrambledZipfianGenerator`."""

    def __init__(self, rng: random.Random, items: int) -> None:
        """Draw from `items` numbers."""
        self._zipfian: Final = Zipfian(rng, _SCRAMBLED_ITEMS, zeta_n=_SCRAMBLED_ZETA)
        self._items: Final = items

    def draw(self) -> int:
        """Return the next number."""
        return fnv_hash(self._zipfian.draw()) % self._items


class Uniform:
    """Every number as often as any other."""

    def __init__(self, rng: random.Random, items: int) -> None:
        """Draw from `items` numbers."""
        self._draw: Final = rng.randrange
        self._items: Final = items

    def draw(self) -> int:
        """Return the next number."""
        return self._draw(self._items)
