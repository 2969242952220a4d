"""Retransmission: the timeout, evidence of a loss, and the budget of copies."""

from __future__ import annotations

from typing import Any

from tests.unit.ziplog.client.fakes import (
    MS,
    ClientHarness,
    S,
    ack,
    connected,
    pinned,
    placement,
    refused,
    sent,
)
from ziplog import wire
from ziplog.client.common.requests import ReadRequest
from ziplog.client.inserts.retransmission import (
    MAX_DOUBLED_NS,
    SAVED_COPIES,
    UNITS_PER_COPY,
    Budget,
    RetransmitTimeout,
)
from ziplog.core.distance import initial_retransmit_ns, min_retransmit_ns
from ziplog.types import RecordId


def settle(harness: ClientHarness, insert: Any, *servers: int, copy: int | None = None) -> None:
    for server in servers or (0, 1):
        gsn = 2 * insert.seq
        harness.give(ack(insert, server, [gsn], copy=insert.copy if copy is None else copy))


def test_the_timeout_follows_the_samples_and_how_much_they_differ() -> None:
    timeout = RetransmitTimeout()
    assert timeout.ns == initial_retransmit_ns(0)
    timeout.observe_latency(400 * MS)
    assert timeout.ns == 400 * MS + 4 * 200 * MS, "the first sample counts"
    for _ in range(100):
        timeout.observe_latency(400 * MS)
    assert 400 * MS <= timeout.ns < 410 * MS
    timeout.observe_latency(3 * S)
    assert timeout.ns > 3 * S, "an outlier raises the timeout"
    for _ in range(200):
        timeout.observe_latency(1 * MS)
    assert timeout.ns == min_retransmit_ns(0)


def test_a_timeout_doubles_until_there_is_a_sample_or_another_view() -> None:
    timeout = RetransmitTimeout()
    timeout.observe_latency(100 * MS)
    first = timeout.ns
    timeout.back_off()
    assert timeout.ns == 2 * first
    for _ in range(10):
        timeout.back_off()
    assert timeout.ns == MAX_DOUBLED_NS
    assert timeout.is_longest
    timeout.reset()
    assert timeout.ns == first


def test_long_samples_are_not_cut_off_by_the_longest_back_off() -> None:
    timeout = RetransmitTimeout()
    timeout.observe_latency(10 * S)
    timeout.back_off()
    assert timeout.ns == 30 * S


def test_copies_are_a_share_of_the_acks_and_a_few() -> None:
    budget = Budget()
    assert sum(budget.spend() for _ in range(100)) == SAVED_COPIES
    for _ in range(UNITS_PER_COPY - 1):
        budget.earn()
    assert not budget.spend()
    budget.earn()
    assert budget.spend()
    budget.refund()
    assert budget.spend(), "a useful copy costs nothing"
    for _ in range(1000):
        budget.earn()
    assert sum(budget.spend() for _ in range(100)) == SAVED_COPIES


def test_a_unit_that_was_sent_twice_gives_a_sample_only_if_the_copy_is_known() -> None:
    harness = connected(pinned)
    harness.insert(b"x", timeout=60 * S)
    (first,) = sent(harness)
    harness.pass_time(initial_retransmit_ns(0) + 100 * MS)
    (again,) = sent(harness)
    assert again.copy == 2
    timeout = harness.core._inserts.windows[0].retransmit_timeout
    assert timeout.ns == 2 * initial_retransmit_ns(0)
    settle(harness, again, copy=0)  # the acks do not name their copy
    assert timeout.ns == 2 * initial_retransmit_ns(0), "it stays doubled"
    harness.insert(b"y", timeout=60 * S)
    sent(harness)
    harness.pass_time(2 * initial_retransmit_ns(0) + 100 * MS)
    (again,) = sent(harness)
    settle(harness, again, copy=1)
    assert timeout.ns > 3 * initial_retransmit_ns(0), "the first copy took that long"
    assert first.seq != again.seq


def test_nothing_is_retransmitted_while_acks_of_other_units_arrive() -> None:
    harness = connected(pinned)
    for _ in range(40):
        harness.insert(b"x", timeout=60 * S)
    waiting = sent(harness)
    while waiting:
        harness.pass_time(initial_retransmit_ns(0) - 100 * MS)
        settle(harness, waiting.pop(0))
    assert harness.core.counters.retries == 0


def test_unit_that_a_server_passed_over_is_retransmitted() -> None:
    harness = connected(pinned)
    harness.insert(b"lost", timeout=60 * S)
    (lost,) = sent(harness)
    for _ in range(20):
        harness.pass_time(50 * MS)
        harness.insert(b"x", timeout=60 * S)
        for insert in sent(harness):
            if insert.seq != lost.seq:
                settle(harness, insert)
    assert harness.core.counters.retries >= 1


def test_one_of_many_possibly_queued_units_is_retransmitted() -> None:
    harness = connected(pinned)
    for _ in range(100):
        harness.insert(b"x", timeout=60 * S)
    sent(harness)
    harness.pass_time(initial_retransmit_ns(0) + MS)
    (probe,) = sent(harness)
    harness.pass_time(initial_retransmit_ns(0))
    assert not sent(harness), "the timeout has doubled"
    settle(harness, probe)
    harness.pass_time(2 * initial_retransmit_ns(0))
    assert len({insert.seq for insert in sent(harness)}) == 99, (
        "the copy was answered: they are lost"
    )


def test_a_client_without_acks_sends_few_copies_and_never_stops() -> None:
    harness = connected(pinned)
    for _ in range(100):
        harness.insert(b"x", timeout=600 * S)
    sent(harness)
    harness.pass_time(60 * S)
    early = len(sent(harness))
    assert SAVED_COPIES < early <= SAVED_COPIES + 60 * S // MAX_DOUBLED_NS
    harness.pass_time(60 * S)
    assert len(sent(harness)) >= 10


def test_a_copy_that_was_refused_needs_no_evidence() -> None:
    harness = connected(pinned)
    harness.insert(b"x", timeout=60 * S)
    (insert,) = sent(harness)
    harness.give(ack(insert, 1, [2]), refused(insert, 0, "full"))
    harness.pass_time(20 * MS)
    assert [again.copy for again in sent(harness)] == [2]


def test_a_server_that_acks_again_proves_no_loss() -> None:
    harness = connected(pinned)
    harness.insert(b"x", timeout=60 * S)
    (insert,) = sent(harness)
    settle(harness, insert, 0)
    harness.pass_time(initial_retransmit_ns(0) + MS)
    (again,) = sent(harness)
    harness.give(ack(again, 0, [2], counter=2))
    assert harness.core._inserts.windows[0].retransmit_timeout.ns == 2 * initial_retransmit_ns(0)
    harness.give(ack(again, 1, [2]))
    assert harness.core._inserts.windows[0].retransmit_timeout.ns < 2 * initial_retransmit_ns(0)


def test_no_copy_is_sent_within_two_round_trips() -> None:
    timeout = RetransmitTimeout(rtt_ms=300)
    assert timeout.ns == 1200 * MS
    for _ in range(200):
        timeout.observe_latency(300 * MS)
    assert timeout.ns == 600 * MS


def test_a_client_learns_the_round_trip_from_the_cluster() -> None:
    harness = ClientHarness()
    harness.connect(placement(0), limits=wire.Limits(rtt_ms=120))
    harness.call(ReadRequest(harness.until(), RecordId(1, 0)))
    assert len(harness.take(wire.Read)) == 1
    harness.pass_time(239 * MS)
    assert harness.take(wire.Read) == []
    harness.pass_time(2 * MS)
    assert harness.take(wire.Read)
