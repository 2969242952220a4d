"""Synthetic input: flights of a year made from a seed, for a machine without the real ones.

The same number of flights is the same input on every machine. Aircraft have several flights, some
flights are late, cancelled or diverted, as in the real data.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from ziplog.demo.flights import Flight

if TYPE_CHECKING:
    from random import Random

_SEED: Final = 1
_YEAR: Final = datetime(2013, 1, 1, 10, tzinfo=UTC)
_MINUTES: Final = 365 * 24 * 60
_ORIGINS: Final = ("EWR", "JFK", "LGA")
_DESTINATIONS: Final = ("ATL", "BOS", "IAH", "LAX", "MCO", "MIA", "ORD", "SFO")
_CARRIERS: Final = ("AA", "B6", "DL", "EV", "UA")
_FLIGHTS_OF_AN_AIRCRAFT: Final = 80
_CANCELLED: Final = 0.025
_DIVERTED: Final = 0.003
_MISSING: Final = "NA"


def flights(events: int) -> list[Flight]:
    """Return flights that make at least `events` events."""
    chance = random.Random(_SEED)  # noqa: S311 - test data
    # Each flight is scheduled, and departs or is cancelled: two events or more.
    count = events // 2 + 1
    return [_flight(chance, count // _FLIGHTS_OF_AN_AIRCRAFT + 1) for _ in range(count)]


def _flight(chance: Random, aircraft: int) -> Flight:
    planned = _YEAR + timedelta(minutes=chance.randrange(_MINUTES))
    is_cancelled, is_diverted = chance.random() < _CANCELLED, chance.random() < _DIVERTED
    delay = int(chance.gauss(0, 10) + chance.expovariate(1 / 15))
    return Flight(
        dep_time=_MISSING if is_cancelled else "0",
        dep_delay=_MISSING if is_cancelled else str(delay),
        air_time=_MISSING if is_cancelled or is_diverted else str(chance.randint(40, 360)),
        carrier=chance.choice(_CARRIERS),
        number=str(chance.randint(1, 6000)),
        tailnum=f"N{chance.randrange(aircraft):05}",
        origin=chance.choice(_ORIGINS),
        dest=chance.choice(_DESTINATIONS),
        minute=str(planned.minute),
        time_hour=planned.replace(minute=0).isoformat(),
    )
