"""The pipeline's pure parts: the feed, the answers that Spark's are held against, the tables."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from spark_pipeline import answers, feed, live, report
from spark_pipeline.answers import Anomaly, Delays, LostLegs, Session, Total
from spark_pipeline.run import Answered, Outcome, Plan, Streamed

from ziplog.demo.flights import Event


class Aircraft:
    """Makes an aircraft's events, numbered; times are of one day."""

    def __init__(self, name: str = "N1", flight: str = "UA1") -> None:
        self.name, self.flight, self.leg = name, flight, 0

    def event(self, event: str, time: str, **fields: Any) -> Event:
        self.leg += 1
        values = {"flight": self.flight, "origin": "JFK", "dest": "BOS"} | fields
        return Event(event, f"2013-07-01T{time}Z", self.name, self.leg, **values)


# --- the feed ---


def feed_of(aircraft: int, legs: int) -> list[Event]:
    planes = [Aircraft(f"N{number}") for number in range(aircraft)]
    return [plane.event("scheduled", "10:00") for _ in range(legs) for plane in planes]


def test_a_delayed_event_comes_after_the_next_of_its_aircraft() -> None:
    events = feed_of(aircraft=5, legs=200)
    sent = list(feed.held_back(events, one_in=10, seed=1))
    assert Counter(sent) == Counter(events)
    late = answers.anomalies(sent)
    assert 50 < len(late) < 150
    assert {kind for kind, _, _ in late} == {"late"}
    for _, aircraft, leg in late:
        own = [event.leg for event in sent if event.aircraft == aircraft]
        place = own.index(leg)
        assert own[place - 1] == leg + 1


def test_a_delayed_last_event_of_an_aircraft_is_not_lost() -> None:
    events = feed_of(aircraft=3, legs=1)
    assert list(feed.held_back(events, one_in=1, seed=1)) == events


def test_the_seed_selects_the_delayed_events() -> None:
    events = feed_of(aircraft=5, legs=50)
    one, again, other = (list(feed.held_back(events, 5, seed)) for seed in (1, 1, 2))
    assert one == again != other
    assert list(feed.held_back(events, 0, 1)) == events


def test_an_aircraft_keeps_the_key_of_the_carrier_that_it_flew_for_first() -> None:
    plane, other = Aircraft("N1", "DL7"), Aircraft("N2", "FL3")
    events = [plane.event("scheduled", "10:00"), other.event("scheduled", "10:00")]
    plane.flight = "FL8"
    events += [plane.event("scheduled", "11:00"), other.event("scheduled", "11:00")]
    cut = list(feed.batches(events, size=3))
    decode = msgspec.json.Decoder(Event).decode
    output = [(batch.key, [decode(payload).leg for payload in batch.payloads]) for batch in cut]
    assert output == [("DL", [1, 2]), ("FL", [1]), ("FL", [2])]
    assert answers.keys(events) == [("DL", 2, 1), ("FL", 2, 1)]


# --- delays ---


def test_delays_are_grouped_by_carrier_and_planned_hour_in_new_york() -> None:
    plane = Aircraft()
    # 14:30 UTC is 10:30 in New York in summer; the third was planned for 9:50.
    events = [
        plane.event("departed", "14:30", delay=20),
        plane.event("departed", "14:31", delay=-4),
        plane.event("departed", "14:30", delay=40),
        plane.event("cancelled", "14:30"),
        Aircraft("N2", "DL1").event("departed", "14:30", delay=15),
    ]
    assert answers.delays(events) == [
        Delays("DL", 10, 1, 15, 0, 15, 15, 15),
        Delays("UA", 9, 1, 40, 1, 40, 40, 40),
        Delays("UA", 10, 2, 16, 1, -4, 20, 20),
    ]


@pytest.mark.parametrize(
    ("count", "share", "expected"), [(1, 0.5, 1), (2, 0.5, 1), (3, 0.5, 2), (10, 0.9, 9), (1, 0, 1)]
)
def test_a_percentile_is_the_least_value_of_such_a_rank(
    count: int, share: float, expected: int
) -> None:
    assert answers.at_share(list(range(count, 0, -1)), share) == expected


def test_totals_sum_up_every_event() -> None:
    plane = Aircraft()
    events = [plane.event("departed", "14:30", delay=-5), plane.event("departed", "14:30", delay=7)]
    events += [plane.event("arrived", "15:30"), plane.event("departed", "14:30", delay=40)]
    assert answers.totals(events) == [
        Total("arrived", "UA", 11, 1, 3, 0),
        Total("departed", "UA", 9, 1, 4, 40),
        Total("departed", "UA", 10, 2, 3, 2),
    ]


# --- sessions ---


def test_a_session_ends_after_a_longer_gap() -> None:
    plane, other = Aircraft(), Aircraft("N2")
    events = [
        plane.event("scheduled", "10:00"),
        other.event("arrived", "10:30"),
        plane.event("departed", "11:00"),
        plane.event("arrived", "12:01"),
    ]
    ten = answers.minute("2013-07-01T10:00Z")
    assert answers.sessions(events, gap=60) == [
        Session("N1", 1, 2, ten, ten + 60, 1),
        Session("N1", 3, 3, ten + 121, ten + 121, 0),
        Session("N2", 1, 1, ten + 30, ten + 30, 0),
    ]
    assert answers.sessions(events, gap=61)[0] == Session("N1", 1, 3, ten, ten + 121, 1)


def test_sessions_do_not_depend_on_the_order_of_arrival() -> None:
    plane = Aircraft()
    events = [plane.event("scheduled", time) for time in ("10:00", "10:30", "11:20", "13:00")]
    assert answers.sessions([events[i] for i in (1, 0, 3, 2)], 60) == answers.sessions(events, 60)


# --- lost legs, and what cannot be ---


def flown(plane: Aircraft, origin: str, dest: str) -> list[Event]:
    way = {"origin": origin, "dest": dest}
    return [
        plane.event("departed", "10:00", delay=0, **way),
        plane.event("arrived", "11:00", **way),
    ]


def test_a_leg_is_lost_if_an_aircraft_leaves_from_where_it_did_not_arrive() -> None:
    plane, other = Aircraft(), Aircraft("N2")
    events = flown(plane, "JFK", "BOS") + flown(other, "JFK", "ORD")
    assert answers.lost_legs(events) == []
    events += flown(plane, "BOS", "LGA") + flown(other, "LGA", "ORD") + flown(plane, "EWR", "BOS")
    events += flown(other, "LGA", "ORD")
    assert answers.lost_legs(events) == [LostLegs("LGA", "EWR", 1), LostLegs("ORD", "LGA", 2)]


def test_a_flight_without_an_arrival_loses_no_leg_but_is_reported() -> None:
    plane = Aircraft()
    events = [*flown(plane, "JFK", "BOS"), plane.event("departed", "12:00", origin="BOS", delay=0)]
    events.append(plane.event("departed", "13:00", origin="LGA", delay=0))
    assert answers.lost_legs(events) == []
    assert answers.anomalies(events) == [Anomaly("no arrival", "N1", 4)]


def test_an_arrival_before_its_departure_in_the_log_is_reported() -> None:
    departed, arrived = flown(Aircraft(), "JFK", "BOS")
    assert answers.anomalies([departed, arrived]) == []
    assert answers.anomalies([arrived, departed]) == [
        Anomaly("late", "N1", 1),
        Anomaly("no departure", "N1", 2),
    ]


def test_an_arrival_belongs_to_the_flight_that_departed_last() -> None:
    plane = Aircraft()
    events = flown(plane, "JFK", "BOS")
    other = plane.event("arrived", "12:00", flight="UA9")
    assert answers.anomalies([*events, other]) == [Anomaly("no departure", "N1", 3)]
    assert answers.anomalies([events[0], other]) == [Anomaly("no departure", "N1", 3)]


# --- reports ---


def test_differences_between_answers_are_described() -> None:
    assert answers.difference([(1, 2)], [(1, 2)]) == ""
    found = answers.difference([(1, 2), (3, 4)], [(1, 2), (1, 2), (5, 6)])
    assert found == "1 rows missing, the first: (3, 4); 2 rows too many, the first: (1, 2)"
    assert answers.difference([(1,), (2,)], [(2,), (1,)]) == "the same rows in another order"


def outcome(fault: str = "", stream_fault: str = "") -> Outcome:
    plane = Aircraft()
    events = flown(plane, "JFK", "BOS") + flown(plane, "LGA", "BOS")
    names = ("keys", "delays", "sessions", "lost_legs", "anomalies", "totals")
    answered = {name: Answered(getattr(answers, name)(events), "", 1.0, 0.5) for name in names}
    answered["delays"] = answered["delays"]._replace(fault=fault)
    steps = [(101.0, 2), (104.0, 4)]
    streamed = Streamed(live.Killed(1, 102.0), (100.0, 103.0), steps, stream_fault)
    return Outcome(Plan(4), 400, 2.0, answered, streamed)


def test_the_tables_show_results_and_equality() -> None:
    output = list(report.lines(outcome()))
    assert output[-1] == "equal"
    assert "  BOS-LGA 1" in output
    assert any(line.startswith("UA ") and line.split()[1] == "2" for line in output)
    for spoilt in (outcome(fault="1 rows missing"), outcome(stream_fault="1 rows missing")):
        output = list(report.lines(spoilt))
        assert output[-1] == "NOT EQUAL"
        assert any(line.endswith("1 rows missing") for line in output)


def test_the_figures_of_the_stream_count_from_its_first_start() -> None:
    stream = report.figures(outcome())["stream"]
    assert (stream["killed_s"], stream["again_s"]) == (2.0, 3.0)
    assert stream["steps"] == [[1.0, 2], [4.0, 4]]
