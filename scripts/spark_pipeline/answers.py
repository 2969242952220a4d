"""The pipeline's questions, answered in plain Python: what Spark's answers are held against.

Neither the log nor Spark has a part in these: they go over the feed once, event by event, and keep
a dictionary. Rule: an answer is a list of rows of text and whole numbers, ordered, so that equal
answers are equal lists. Minutes are since 1970 (UTC) where they are a time. Pure.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zoneinfo import ZoneInfo

from spark_pipeline.feed import carrier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ziplog.demo.flights import Event

#: Time zone of the departures; hours of the day are in this zone.
ZONE: Final = "America/New_York"
#: A departure counts as late from here on.
LATE_MINUTES: Final = 15
#: Gap between two events of an aircraft that ends a session, in minutes.
GAP_MINUTES: Final = 12 * 60

_zone: Final = ZoneInfo(ZONE)

Rows = list[tuple[Any, ...]]


class Key(NamedTuple):
    """Number of records of a key, and number of shards that hold them."""

    key: str
    records: int
    shards: int


class Delays(NamedTuple):
    """Departure delays of a carrier's flights planned for one hour of the day."""

    carrier: str
    hour: int
    departed: int
    minutes: int
    late: int
    median: int
    p90: int
    worst: int


class Session(NamedTuple):
    """A stretch of an aircraft's events without a long gap."""

    aircraft: str
    first_leg: int
    last_leg: int
    begins: int
    ends: int
    departures: int


class LostLegs(NamedTuple):
    """Number of aircraft that arrived at one airport and left next from another."""

    arrived: str
    departed: str
    times: int


class Anomaly(NamedTuple):
    """An event that cannot follow what the log has of its aircraft before it."""

    kind: str
    aircraft: str
    leg: int


class Total(NamedTuple):
    """Sums over all events of a kind, of a carrier, in an hour of the day."""

    event: str
    carrier: str
    hour: int
    events: int
    legs: int
    minutes: int


@lru_cache(maxsize=1 << 16)
def minute(text: str) -> int:
    """Return an event's time as minutes since 1970."""
    return int(datetime.strptime(text, "%Y-%m-%dT%H:%MZ").replace(tzinfo=UTC).timestamp()) // 60


@lru_cache(maxsize=1 << 16)
def local_hour(at: int) -> int:
    """Return the hour of the day in New York, 0 to 23."""
    return datetime.fromtimestamp(at * 60, _zone).hour


def keys(events: Iterable[Event]) -> Rows:
    """Count the records of each key, all of them in one shard."""
    home: dict[str, str] = {}
    found = Counter(home.setdefault(event.aircraft, carrier(event)) for event in events)
    return sorted(Key(key, records, 1) for key, records in found.items())


def delays(events: Iterable[Event]) -> Rows:
    """Return the delays of each carrier and planned hour."""
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    for event in events:
        if event.delay is not None:
            planned = minute(event.time) - event.delay
            found[carrier(event), local_hour(planned)].append(event.delay)
    return sorted(
        Delays(
            *group,
            len(late),
            sum(late),
            sum(minutes > LATE_MINUTES for minutes in late),
            at_share(late, 0.5),
            at_share(late, 0.9),
            max(late),
        )
        for group, late in found.items()
    )


def at_share(values: Sequence[int], share: float) -> int:
    """Return the least value with `share` of the values at or below it (`percentile_disc`)."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def sessions(events: Iterable[Event], gap: int = GAP_MINUTES) -> Rows:
    """Cut each aircraft's events, in the order of its legs, where more than `gap` minutes pass."""
    by_aircraft: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_aircraft[event.aircraft].append(event)
    found = []
    for aircraft, own in by_aircraft.items():
        stretch: list[Event] = []
        for event in sorted(own, key=lambda event: event.leg):
            if stretch and minute(event.time) - minute(stretch[-1].time) > gap:
                found.append(_session(aircraft, stretch))
                stretch = []
            stretch.append(event)
        found.append(_session(aircraft, stretch))
    return sorted(found)


def _session(aircraft: str, events: list[Event]) -> Session:
    first, last = events[0], events[-1]
    departures = sum(event.event == "departed" for event in events)
    return Session(aircraft, first.leg, last.leg, minute(first.time), minute(last.time), departures)


def lost_legs(events: Iterable[Event]) -> Rows:
    """Count, by both airports, departures from where the aircraft had not arrived."""
    where: dict[str, str] = {}
    lost: Counter[tuple[str, str]] = Counter()
    for event in events:
        if event.event == "departed":
            arrived = where.pop(event.aircraft, event.origin)
            lost[arrived, event.origin] += arrived != event.origin
        elif event.event == "arrived":
            where[event.aircraft] = event.dest
    return sorted(LostLegs(*way, times) for way, times in lost.items() if times)


def anomalies(events: Iterable[Event]) -> Rows:
    """Find what cannot be, going by the order of the log.

    `late`: the aircraft's later events are in the log before it. `no arrival`: it departs, and has
    not arrived since it departed last. `no departure`: it arrives with a flight other than the one
    that it departed with last, or has arrived since.
    """
    latest: Counter[str] = Counter()
    flying: dict[str, str] = {}
    found = []
    for event in events:
        aircraft = event.aircraft
        if event.leg < latest[aircraft]:
            found.append(Anomaly("late", aircraft, event.leg))
        latest[aircraft] = max(latest[aircraft], event.leg)
        if event.event == "departed":
            if aircraft in flying:
                found.append(Anomaly("no arrival", aircraft, event.leg))
            flying[aircraft] = event.flight
        elif event.event == "arrived" and flying.pop(aircraft, "") != event.flight:
            found.append(Anomaly("no departure", aircraft, event.leg))
    return sorted(found)


def totals(events: Iterable[Event]) -> Rows:
    """Return counts and sums over all events: the final answer of the stream."""
    found: dict[tuple[str, str, int], list[int]] = defaultdict(lambda: [0, 0, 0])
    for event in events:
        late = event.delay or 0
        sums = found[event.event, carrier(event), local_hour(minute(event.time) - late)]
        for index, value in enumerate((1, event.leg, late)):
            sums[index] += value
    return sorted(Total(*group, *sums) for group, sums in found.items())


def difference(expected: Rows, found: Rows) -> str:
    """Say how two answers differ, or "" if they are equal."""
    if expected == found:
        return ""
    lacking, beside = Counter(expected) - Counter(found), Counter(found) - Counter(expected)
    parts = [
        f"{sum(rows.values())} rows {what}, the first: {min(rows)}"
        for what, rows in (("missing", lacking), ("too many", beside))
        if rows
    ]
    return "; ".join(parts) or "the same rows in another order"
