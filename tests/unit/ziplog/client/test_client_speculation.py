"""Speculations: a guess of the log, compared with the truth (docs/protocol.md, section 18)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tests.unit.ziplog.client.fakes import CLUSTER, MS, ClientHarness, S, lease, placement
from tests.unit.ziplog.client.reader import unit
from ziplog import wire
from ziplog.client.common.requests import (
    EventBatch,
    EventsRequest,
    Progress,
    ProgressRequest,
    SpeculateRequest,
    UnsubscribeRequest,
)
from ziplog.core.entries import Body, Origin, Unit, encode_body
from ziplog.core.node import BatchEnd
from ziplog.core.units import NEVER
from ziplog.core.view import run_of
from ziplog.errors import ClosedError, TrimmedError
from ziplog.types import Confirmed, Delivery, Event, Failed, RecordId


def other(*gsns: int) -> Unit:
    """Return a unit at the same positions as `unit`, with other payloads."""
    return Unit(0, list(gsns), encode_body(Body(0, None, [b"other %d" % gsn for gsn in gsns])))


def written(gsn: int, batch: int, row: int = 0) -> Unit:
    """Return a unit with one row of a writer."""
    body = Body(0, None, [b"%d" % batch], Origin(b"w" * 16, batch, row))
    return Unit(0, [gsn], encode_body(body))


class Speculator(ClientHarness):
    """A client node with one speculation, over shards that own the gsns in turn."""

    def __init__(
        self, start: int = 1, *, shards: int = 1, max_pending: int = 100, guesses: bool = True
    ) -> None:
        super().__init__()
        self.shards = shards
        self.placements = [placement(shard) for shard in range(shards)]
        self.connect(*self.placements)
        request = SpeculateRequest(self.until(), RecordId(start, 0), True, max_pending=max_pending)
        self.number = self.call(request)
        question = self.take(wire.LeaseQuery)[-1][1]
        runs = [run_of(lease(range(shards)))]
        self.give(wire.LeaseHistory(CLUSTER, question.request, runs, self.placements, 0))
        assert self.answers.pop(self.number) == self.number
        #: The streams of the truth and of the guess, by shard, and the server of each.
        self.opened: dict[tuple[str, int], wire.Subscribe] = {}
        self.places: dict[tuple[str, int], str] = {}
        self.got: list[Event] = []
        self.look()
        if guesses:
            for shard in range(shards):
                self.truth(start, start, shard=shard)

    def look(self) -> None:
        """Record the streams that were opened."""
        for name, message in self.take(wire.Subscribe):
            self.opened[message.kind, message.shard] = message
            self.places[message.kind, message.shard] = name

    def truth(self, start: int, frontier: int, *units: Any, **fields: Any) -> None:
        """Deliver stable units."""
        self._deliver(wire.Deliver, "units", start, frontier, units, **fields)

    def early(self, start: int, frontier: int, *units: Any, **fields: Any) -> None:
        """Deliver decided units."""
        self._deliver(wire.Early, "early", start, frontier, units, **fields)

    def _deliver(
        self, message: Any, kind: str, start: int, frontier: int, units: Any,
        shard: int = 0, view: int = 1, stable: int = 0, number: int = 0,
    ) -> None:  # fmt: skip
        made = [u if isinstance(u, Unit) else unit(*u) for u in units]
        number = number or self.opened[kind, shard].subscription
        stable = stable or frontier
        self.give(message(CLUSTER, shard, view, 0, number, start, frontier, made, [], stable))
        self.look()

    def fetch(self, max_events: int = 1000, after: int | None = None, timeout: int = 0) -> Any:
        """Return the available events."""
        after = len(self.got) if after is None else after
        call = self.call(EventsRequest(self.until(timeout), self.number, max_events, after))
        self.step(BatchEnd())
        self.pass_time(timeout)
        self.look()
        batch = self.answers.pop(call)
        if isinstance(batch, EventBatch):
            self.got[batch.first :] = batch.events
        return batch

    def events(self) -> list[Any]:
        """Return the available events, in short."""
        return [short(event) for event in self.fetch().events]

    def progress(self, after: int | None = None) -> Progress:
        after = len(self.got) if after is None else after
        answer = self.answers.pop(self.call(ProgressRequest(NEVER, self.number, after)))
        assert isinstance(answer, Progress)
        return answer

    def learn(self, *placements: Any) -> None:
        self.core._routing.update_placements(placements)
        self.step(BatchEnd())
        self.look()


def short(event: Event) -> Any:
    """Return an event in short: (gsn, speculative), =gsn or !gsn."""
    if isinstance(event, Delivery):
        return event.record.rid.gsn, event.speculative
    return f"={event.upto.gsn}" if isinstance(event, Confirmed) else f"!{event.after.gsn}"


# --- the streams ---


def test_guess_begins_when_the_truth_has_caught_up() -> None:
    harness = Speculator(guesses=False)
    assert set(harness.opened) == {("units", 0)}
    harness.truth(1, 3, [1], [2], stable=5)
    assert set(harness.opened) == {("units", 0)}, "the server has more to send"
    harness.truth(3, 5, [3], [4])
    assert harness.opened["early", 0].start == 5
    assert harness.places["early", 0] == "s0r0:1", "only the primary decides"
    assert harness.places["units", 0] == "s0r1:1"
    assert harness.events() == [(1, False), (2, False), (3, False), (4, False), "=4"]


def test_guess_begins_with_what_the_truth_has_received() -> None:
    harness = Speculator(shards=2)
    harness.truth(1, 9, [1], [3, 5, 7])
    harness.early(1, 8, [2], shard=1)
    harness.early(1, 9, [1], [3, 5, 7])
    assert harness.events() == [(1, True), (2, True), (3, True), (5, True), (7, True)]
    harness.learn(placement(1, view=2))
    assert (harness.opened["early", 0].start, harness.opened["early", 1].start) == (9, 1)
    harness.truth(1, 8, [2], shard=1, view=2)
    assert harness.events() == ["=7"]
    harness.early(1, 10, [2], [8], shard=1, view=2)
    assert harness.events() == [(8, True)], "what was delivered does not come again"


def test_records_are_delivered_below_the_decided_frontiers_of_all_shards() -> None:
    harness = Speculator(shards=2)
    harness.early(1, 7, [1], [3], [5])
    assert harness.events() == []
    harness.early(1, 4, [2], shard=1)
    assert harness.events() == [(1, True), (2, True), (3, True)]


def test_waiting_guess_asks_a_shard_to_decide() -> None:
    harness = Speculator(shards=2)
    harness.early(1, 7, [1], [3], [5])
    assert ("s1r0:1", 5) in [(name, want.gsn) for name, want in harness.take(wire.Want)]


@pytest.mark.parametrize("kind", ["units", "early"])
def test_message_of_the_other_kind_reopens_the_stream(kind: str) -> None:
    harness = Speculator()
    message = wire.Early if kind == "units" else wire.Deliver
    former = harness.opened[kind, 0].subscription
    harness._deliver(message, kind, 1, 3, [[1]])
    assert harness.core.counters.protocol_errors == 1
    assert harness.opened[kind, 0].subscription != former
    assert harness.events() == []


def test_refused_early_stream_delays_nothing() -> None:
    harness = Speculator()
    number = harness.opened["early", 0].subscription
    harness.give(wire.Refused(CLUSTER, 0, 1, 0, number, "not-ready"))
    harness.truth(1, 3, [1])
    assert harness.events() == [(1, False), "=1"]
    harness.pass_time(25 * MS)
    harness.look()
    assert harness.opened["early", 0].subscription != number, "it is opened again"
    assert harness.places["early", 0] == "s0r0:1"


# --- events ---


def test_early_records_are_confirmed_by_the_truth() -> None:
    harness = Speculator()
    harness.early(1, 4, [1], [2, 3])
    assert harness.events() == [(1, True), (2, True), (3, True)]
    harness.truth(1, 3, [1])
    harness.truth(3, 4, [2, 3])
    assert harness.events() == ["=3"]
    counters = harness.core.counters
    assert (counters.speculated, counters.confirmed, counters.failures) == (3, 3, 0)
    assert counters.delivered == 3


def test_truth_that_was_first_is_final() -> None:
    harness = Speculator()
    harness.truth(1, 3, [1], [2])
    assert harness.events() == [(1, False), (2, False), "=2"]
    harness.early(1, 4, [1], [2], [3])
    assert harness.events() == [(3, True)], "nothing is delivered twice"


def test_other_record_withdraws_all_from_there_on() -> None:
    harness = Speculator()
    harness.early(1, 5, [1], [2], [3], [4])
    assert harness.events() == [(gsn, True) for gsn in (1, 2, 3, 4)]
    harness.truth(1, 4, [1], other(2), [3])
    assert harness.events() == ["!1", (2, False), (3, False), "=3"]
    payloads = [e.record.payload for e in harness.got if isinstance(e, Delivery)]
    assert payloads[-2:] == [b"other 2", b"3"]
    counters = harness.core.counters
    assert (counters.confirmed, counters.failures, counters.withdrawn) == (1, 1, 3)
    assert harness.opened["early", 0].start == 4, "the guess begins again"


def test_record_that_the_truth_passes_is_withdrawn() -> None:
    harness = Speculator()
    harness.early(1, 5, [1], [3], [4])
    assert harness.events() == [(1, True), (3, True), (4, True)]
    harness.truth(1, 4, [1])
    assert harness.events() == ["!2", "=1"]
    assert harness.progress().position.gsn == 4


def test_record_that_was_not_delivered_early_withdraws_later_ones() -> None:
    harness = Speculator()
    harness.early(1, 6, [1], [5])
    assert harness.events() == [(1, True), (5, True)]
    harness.truth(1, 4, [1], [2])
    assert harness.events() == ["!1", (2, False), "=2"]


def test_positions_without_records_withdraw_without_a_confirmation() -> None:
    harness = Speculator()
    harness.early(1, 3, [2])
    assert harness.events() == [(2, True)]
    harness.truth(1, 3)
    assert harness.events() == ["!1"]
    assert harness.core.counters.withdrawn == 1


def test_guess_of_a_former_view_is_dropped() -> None:
    harness = Speculator()
    harness.early(1, 4, [1], [2], [3])
    assert harness.events() == [(1, True), (2, True), (3, True)]
    former = harness.opened["early", 0].subscription
    harness.learn(placement(0, view=2))
    assert harness.opened["early", 0].view == 2
    harness.early(4, 6, [4], [5], number=former)
    assert harness.events() == []
    harness.truth(1, 3, [1], [2], view=2)
    harness.early(1, 6, [1], [2], [4], [5], view=2)
    assert harness.events() == ["=2", (4, True), (5, True)]
    harness.truth(3, 6, [4], [5], view=2)
    assert harness.events() == ["!2", (4, False), (5, False), "=5"]


def test_next_guess_delivers_nothing_twice() -> None:
    harness = Speculator()
    harness.early(1, 4, [1], [2], [3])
    assert harness.events() == [(1, True), (2, True), (3, True)]
    harness.learn(placement(0, view=2))
    harness.early(1, 6, [1], [2], [3], [5], view=2)
    assert harness.events() == [(5, True)]
    harness.truth(1, 6, [1], [2], [3], [5], view=2)
    assert harness.events() == ["=5"]


def test_failure_of_the_guess_is_no_failure_of_the_speculation() -> None:
    harness = Speculator()
    harness.early(1, 3, [1], Unit(0, [2], b"\x91"))
    assert harness.events() == []
    harness.truth(1, 3, [1], [2])
    assert harness.events() == [(1, False), (2, False), "=2"]
    former = harness.opened["early", 0].subscription
    harness.pass_time(1100 * MS)
    harness.look()
    assert harness.opened["early", 0].subscription != former, "it begins again"
    assert harness.opened["early", 0].start == 3


def test_error_of_the_truth_is_raised_after_the_events() -> None:
    harness = Speculator()
    harness.early(1, 4, [1], [2], [3])
    assert len(harness.fetch().events) == 3
    harness.truth(1, 2, [1])
    harness.call(EventsRequest(NEVER, harness.number, 10, 3))  # the result is lost
    number = harness.opened["units", 0].subscription
    harness.give(wire.Trimmed(CLUSTER, 0, 1, number, 9))
    question = harness.take(wire.LeaseQuery)[-1][1]
    harness.give(wire.LeaseHistory(CLUSTER, question.request, [run_of(lease([0]))], [], 0))
    assert harness.events() == ["=1"]
    assert isinstance(harness.fetch(), TrimmedError)
    assert harness.progress().pending == 2, "they stay unconfirmed"


# --- repetitions ---


def test_guess_drops_the_repetitions_that_the_truth_drops() -> None:
    harness = Speculator(guesses=False)
    call = harness.call(EventsRequest(NEVER, harness.number, 10, 0))
    harness.truth(1, 3, written(1, 1), written(2, 2))
    batch = harness.answers.pop(call)
    assert isinstance(batch, EventBatch)
    assert [short(event) for event in batch.events] == [(1, False), (2, False), "=2"]
    harness.got += batch.events
    assert harness.opened["early", 0].start == 3, (
        "the guess begins when the truth has returned them"
    )
    harness.early(3, 6, written(3, 2), written(4, 1), written(5, 3))
    assert harness.events() == [(5, True)]
    harness.truth(3, 6, written(3, 2), written(4, 1), written(5, 3))
    assert harness.events() == ["=5"]


def test_guess_that_was_passed_keeps_its_writers() -> None:
    harness = Speculator()
    harness.truth(1, 3, written(1, 1), written(2, 2))
    assert harness.events() == [(1, False), (2, False), "=2"]
    harness.early(1, 5, written(1, 1), written(2, 2), written(3, 2), written(4, 3))
    assert harness.events() == [(4, True)]
    harness.truth(3, 5, written(3, 2), written(4, 3))
    assert harness.events() == ["=4"]


def test_stream_that_was_passed_is_reopened_where_it_was() -> None:
    harness = Speculator()
    harness.truth(1, 4, written(1, 1), written(2, 2), written(3, 3))
    assert len(harness.events()) == 4
    number = harness.opened["early", 0].subscription
    for ms in (25, 45):
        harness.give(wire.Refused(CLUSTER, 0, 1, 0, number, "not-ready"))
        harness.pass_time(ms * MS)
        harness.look()
        assert harness.opened["early", 0].subscription != number, "the backoff doubles"
        number = harness.opened["early", 0].subscription
        assert harness.opened["early", 0].start == 1
    harness.early(1, 6, written(1, 1), written(2, 2), written(3, 3), written(4, 2), written(5, 4))
    assert harness.events() == [(5, True)]


def test_trimmed_guess_begins_where_the_truth_is() -> None:
    harness = Speculator()
    harness.truth(1, 4, [1], [2], [3])
    assert len(harness.events()) == 4
    number = harness.opened["early", 0].subscription
    harness.give(wire.Trimmed(CLUSTER, 0, 1, number, 3))
    harness.look()
    assert harness.opened["early", 0].start == 4
    assert harness.events() == []


# --- bounds, losses, the end ---


def test_early_deliveries_are_bounded() -> None:
    harness = Speculator(max_pending=2)
    harness.early(1, 6, [1], [2], [3], [4], [5])
    assert harness.events() == [(1, True), (2, True)]
    assert harness.progress().pending == 2
    assert harness.events() == []
    harness.truth(1, 2, [1])
    assert harness.events() == ["=1", (3, True)]
    harness.truth(2, 6, [2], [3], [4], [5])
    assert harness.events() == [(4, False), (5, False), "=5"]


def test_lost_events_are_returned_again() -> None:
    harness = Speculator()
    harness.early(1, 4, [1], [2], [3])
    assert len(harness.fetch(2).events) == 2
    harness.got.clear()
    assert [short(e) for e in harness.fetch(2, after=0).events] == [(1, True), (2, True)]
    assert [short(e) for e in harness.fetch(2, after=1).events] == [(2, True), (3, True)]
    harness.truth(1, 4, [1], [2], [3])
    assert [short(e) for e in harness.fetch(9, after=3).events] == ["=3"]
    assert [short(e) for e in harness.fetch(9, after=3).events] == ["=3"]


def test_position_is_behind_what_the_returned_events_confirm() -> None:
    harness = Speculator()
    harness.early(1, 4, [1], [2], [3])
    harness.fetch()
    assert harness.progress() == Progress(
        RecordId(1, 0), caught_up=True, blocked_on=None, pending=3
    )
    harness.truth(1, 3, [1], [2])
    harness.fetch(1)
    assert harness.progress().position == RecordId(3, 0)
    assert harness.progress().pending == 1
    harness.truth(3, 6, [3])
    harness.early(4, 7, [6])
    assert harness.progress(3).position == RecordId(3, 0), "the caller has fewer events"
    harness.fetch(1)
    assert harness.progress().position.gsn == 4


def test_closed_speculation_ends() -> None:
    harness = Speculator()
    call = harness.call(EventsRequest(NEVER, harness.number, 10, 0))
    harness.call(UnsubscribeRequest(NEVER, harness.number))
    assert harness.answers.pop(call) == EventBatch([], 0, ended=True)
    assert len(harness.take(wire.Unsubscribe)) >= 2
    assert isinstance(harness.fetch(), ClosedError)
    assert not harness.core._subscriptions._open


def test_chosen_shards_are_those_of_both() -> None:
    harness = ClientHarness()
    harness.connect(placement(0), placement(1))
    request = SpeculateRequest(harness.until(), RecordId(1, 0), True, frozenset([1]))
    harness.call(request)
    question = harness.take(wire.LeaseQuery)[-1][1]
    placements = [placement(0), placement(1)]
    harness.give(
        wire.LeaseHistory(CLUSTER, question.request, [run_of(lease(range(2)))], placements, 0)
    )
    (stream,) = [message for _, message in harness.take(wire.Subscribe)]
    harness.give(wire.Deliver(CLUSTER, 1, 1, 0, stream.subscription, 1, 2, [], [], 2))
    assert [(m.kind, m.shard) for _, m in harness.take(wire.Subscribe)] == [("early", 1)]


# --- all rules, with any messages ---


ACTIONS = ["decide", "decide", "stable", "early", "early", "fetch", "fetch", "view"]


class Oracle:
    """Checks the promises W1 to W5 against the log that the truth has."""

    def __init__(self) -> None:
        self.open: list[tuple[int, bytes]] = []
        self.final: list[tuple[int, bytes]] = []
        self.confirmed = 0

    def add(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Delivery(record, _):
                    above = self.open[-1][0] if self.open else self.confirmed
                    assert record.rid.gsn > above, "W1: deliveries rise"
                    self.open.append((record.rid.gsn, record.payload))
                case Confirmed(upto):
                    assert upto.gsn > self.confirmed, "W2: confirmations rise"
                    self.confirmed = upto.gsn
                    count = sum(gsn <= upto.gsn for gsn, _ in self.open)
                    self.final += self.open[:count]
                    del self.open[:count]
                case Failed(after):
                    assert after.gsn >= self.confirmed, "W3: nothing confirmed fails"
                    kept = [row for row in self.open if row[0] <= after.gsn]
                    assert len(kept) < len(self.open), "W4: a failure withdraws something"
                    self.open = kept


@examples(200, derandomize=True)
@given(st.data())
def test_events_keep_their_promises(data: st.DataObject) -> None:
    """The views change at any time; a view's end may lose or replace decisions."""
    harness = Speculator(max_pending=data.draw(st.integers(1, 6)))
    oracle = Oracle()
    log: list[tuple[int, bytes] | None] = [None]  # by gsn: the records; None: a no-op
    stable, view = 1, 1

    def units(start: int) -> list[Unit]:
        return [
            Unit(0, [gsn], encode_body(Body(0, None, [entry[1]])))
            for gsn, entry in enumerate(log)
            if entry is not None and gsn >= start
        ]

    def tell(kind: str, end: int) -> None:
        """Send a stream the log below `end`, if it is open in this view and has less."""
        message = harness.opened[kind, 0]
        start = sent.get(message.subscription, message.start)
        if (kind == "units" or message.view == view) and end > start:
            found = [u for u in units(start) if u.gsns[0] < end]
            maker = wire.Deliver if kind == "units" else wire.Early
            harness._deliver(maker, kind, start, end, found, view=view)
            sent[message.subscription] = end

    sent: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(ACTIONS)):
            case "decide":
                gsn = len(log)
                is_hole = data.draw(st.integers(0, 4)) == 0
                log.append(None if is_hole else (gsn, b"%d in %d" % (gsn, view)))
            case "stable":
                stable = data.draw(st.integers(stable, len(log)))
                tell("units", stable)
            case "early":
                tell("early", data.draw(st.integers(1, len(log))))
            case "fetch":
                oracle.add(harness.fetch(data.draw(st.integers(1, 9))).events)
            case "view":
                # Decisions that are not stable are lost, or kept.
                kept = data.draw(st.integers(stable, len(log)))
                del log[kept:]
                view += 1
                harness.learn(placement(0, view=view))
    log += [None] * 30  # the log goes on behind all that was ever decided
    tell("units", len(log))
    while events := harness.fetch().events:
        oracle.add(events)
    harness.core.check()
    expected = [entry for entry in log if entry is not None]
    assert oracle.final == expected, "W2: what is confirmed is the log"
    assert not oracle.open, "W5: each delivery is confirmed or void"
    counters = harness.core.counters
    assert counters.speculated == counters.confirmed + counters.withdrawn


def test_silent_primary_is_asked_again() -> None:
    harness = Speculator()
    former = harness.opened["early", 0].subscription
    harness.pass_time(2 * S)
    harness.look()
    assert harness.opened["early", 0].subscription != former
    assert harness.places["early", 0] == "s0r0:1"
