"""Subscriptions (docs/protocol.md, section 7; D43, D44, D49)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tests.unit.ziplog.client.fakes import (
    CLUSTER,
    MS,
    ClientHarness,
    FakeCluster,
    S,
    lease,
    placement,
    refused,
)
from tests.unit.ziplog.client.reader import Reader
from ziplog import wire
from ziplog.client.common.requests import (
    Blocked,
    Fetched,
    FetchRequest,
    Progress,
    ProgressRequest,
    SubscribeRequest,
    UnsubscribeRequest,
)
from ziplog.client.reads.shard_stream import FIRST_CREDIT_BYTES, WINDOW_BYTES
from ziplog.core.entries import Body, Unit, encode_body
from ziplog.core.node import BatchEnd
from ziplog.core.units import NEVER
from ziplog.core.view import run_of
from ziplog.errors import ClosedError, DeadlineError, ProtocolError, TrimmedError
from ziplog.types import RID_RECENT, RecordId


def test_lost_fetch_result_is_returned_again() -> None:
    harness = Reader()

    def fetch(after: int, max_records: int = 2) -> list[int]:
        call = harness.call(FetchRequest(NEVER, harness.subscription, max_records, after))
        return [record.rid.gsn for record in harness.batch(call).records]

    def position(after: int) -> int:
        request = ProgressRequest(NEVER, harness.subscription, after)
        progress: Any = harness.answers.pop(harness.call(request))
        return int(progress.position.gsn)

    harness.deliver(0, 1, 7, (1,), (3,), (5,))
    harness.deliver(1, 1, 6, (2,), (4,))
    assert fetch(0) == [1, 2]
    assert (position(0), position(1), position(2)) == (1, 2, 3)
    assert fetch(0) == fetch(0) == [1, 2], "the answers were lost"
    assert fetch(2) == fetch(2) == [3, 4]
    assert fetch(1, 10) == [2, 3, 4, 5], "earlier results do not matter"
    harness.deliver(1, 6, 8, (6,))
    assert fetch(4, 10) == [5], "nothing is merged before the reader has all"
    assert position(4) == 5
    assert fetch(5) == fetch(5) == [6]
    # A cancelled fetch that is completed all the same takes nothing from the next one.
    waiting = [harness.call(FetchRequest(NEVER, harness.subscription, 9, 6)) for _ in range(2)]
    harness.deliver(1, 8, 12)
    harness.deliver(0, 7, 11, (7,), (9,))
    assert [[r.rid.gsn for r in harness.batch(call).records] for call in waiting] == [[7, 9]] * 2
    assert fetch(7) == [9]
    assert harness.core.counters.delivered == 8


def test_subscription_closed_while_opening_completes_its_call() -> None:
    harness = ClientHarness()
    harness.connect(placement(0))
    call = harness.call(SubscribeRequest(harness.until(), RecordId(1, 0), True))
    harness.call(UnsubscribeRequest(NEVER, call))
    assert harness.answers.pop(call) == call
    assert not harness.core._subscriptions.waiting


def test_it_opens_a_stream_of_each_shard_from_the_start_on() -> None:
    harness = Reader(start=5)
    assert {m.shard: m.start for m in harness.opened.values()} == {0: 5, 1: 5}


@pytest.mark.parametrize(("replicas", "best", "next_best"), [(1, 0, 0), (2, 1, 0), (3, 0, 1)])
def test_subscription_of_two_replicas_reads_from_the_backup(
    replicas: int, best: int, next_best: int
) -> None:
    harness = Reader(shards=1, leases=[run_of(lease([0]))], replicas=replicas)
    assert harness.where == [f"s0r{best}:1"]
    harness.deliver(0, 1, 5, [1])
    harness.pass_time(2000 * MS)
    assert harness.look() == [f"s0r{next_best}:1"], "it did not answer a credit"
    assert harness.opened[0].start == 5
    harness.learn(placement(0, replicas, view=2))
    assert harness.look() == [f"s0r{best}:1"], "a new view resets the failed replicas"


def test_want_goes_to_the_primary_while_the_backup_is_read() -> None:
    harness = Reader()
    assert harness.where == ["s0r1:1", "s1r1:1"]
    harness.fetch()
    harness.deliver(1, 1, 8, [4], [6], server=1)
    assert [name for name, _ in harness.take(wire.Want)] == ["s0r0:1"]
    assert harness.progress().blocked_on == Blocked(0, 0)
    assert not harness.progress().caught_up
    harness.deliver(0, 1, 8, server=1)
    harness.deliver(1, 8, 8, server=1)
    assert harness.progress() == Progress(RecordId(8, 1), caught_up=True, blocked_on=None)


def test_records_below_all_frontiers_are_returned_in_gsn_order() -> None:
    harness = Reader()
    call = harness.fetch()
    harness.deliver(0, 1, 7, [1], [3, 5])
    assert not harness.answers, "shard 1 may still have gsn 2"
    harness.deliver(1, 1, 4, [2])
    records = harness.batch(call).records
    assert [(r.rid, r.payload) for r in records] == [
        (RecordId(1, 0), b"1"),
        (RecordId(2, 1), b"2"),
        (RecordId(3, 0), b"3"),
    ]
    harness.deliver(1, 4, 8)
    assert harness.gsns() == [5]


def test_a_start_inside_a_unit() -> None:
    harness = Reader(start=5)
    harness.deliver(0, 5, 9, [3, 5, 7])
    harness.deliver(1, 5, 8, [6])
    assert harness.gsns() == [5, 6, 7]


def test_frontier_within_a_unit_splits_it() -> None:
    harness = Reader()
    harness.deliver(0, 1, 9, [1, 3, 5, 7])
    harness.deliver(1, 1, 4)
    assert harness.gsns() == [1, 3]
    harness.deliver(1, 4, 8)
    assert harness.gsns() == [5, 7]


def test_a_gap_is_never_passed() -> None:
    harness = Reader()
    harness.deliver(0, 1, 3, [1])
    harness.deliver(0, 5, 7, [5])
    assert harness.look() == ["s0r1:1"], "the stream was not reopened"
    assert harness.opened[0].start == 3
    harness.deliver(1, 1, 8)
    assert harness.gsns() == [1]
    harness.deliver(0, 3, 7, [3], [5])
    assert harness.gsns() == [3, 5]


def test_duplicates_and_messages_of_old_streams_are_ignored() -> None:
    harness = Reader()
    old = harness.opened[0].subscription
    harness.deliver(0, 1, 3, [1])
    harness.deliver(0, 1, 3, [1])
    harness.deliver(0, 5, 7)
    harness.look()
    harness.deliver(0, 3, 5, [3], number=old)
    harness.deliver(1, 1, 8)
    assert harness.gsns() == [1]
    assert not harness.look()


@pytest.mark.parametrize(
    "units", [[[3], [1]], [[1], [1]], [[5, 3]], [[9]], [[7, 9]]], ids=lambda u: f"{u}"
)
def test_units_out_of_order_or_range_are_refused(units: list[list[int]]) -> None:
    harness = Reader(start=3)
    harness.deliver(0, 3, 9, *units)
    assert harness.look() == ["s0r0:1"], "the next replica is asked"
    assert harness.core.counters.protocol_errors == 1
    harness.deliver(1, 3, 10)
    assert harness.gsns() == []


def test_malformed_body_ends_only_its_subscription() -> None:
    harness = Reader(shards=1, leases=[run_of(lease([0]))])
    call = harness.fetch()
    harness.deliver(0, 1, 9, Unit(0, [1], b"nonsense"))
    assert isinstance(harness.answers.pop(call), ProtocolError)


# --- credit and silence ---


def test_credit_is_renewed_as_records_are_returned() -> None:
    harness = Reader(shards=1, leases=[run_of(lease([0], size=10_000))])
    first = harness.opened[0].credit
    assert first == FIRST_CREDIT_BYTES
    body = encode_body(Body(0, None, [bytes(30_000)]))
    for gsn in range(1, 9):
        harness.deliver(0, gsn, gsn + 1, Unit(0, [gsn], body))
    assert not harness.take(wire.Credit), "nothing was returned yet"
    assert harness.gsns() == list(range(1, 9))
    credits_sent = [m.credit for _, m in harness.take(wire.Credit)]
    assert credits_sent == [2 * first + 8 * (len(body) + 64)]


def test_credit_is_renewed_as_the_progress_merges_records() -> None:
    """A player queries it before it fetches what follows."""
    harness = Reader(shards=1, leases=[run_of(lease([0], size=10_000))])
    body = encode_body(Body(0, None, [bytes(30_000)]))
    for gsn in range(1, 9):
        harness.deliver(0, gsn, gsn + 1, Unit(0, [gsn], body))
    harness.call(ProgressRequest(NEVER, harness.subscription))
    assert not harness.take(wire.Credit)
    harness.step(BatchEnd())
    [(_, credit)] = harness.take(wire.Credit)
    assert credit.credit == 2 * FIRST_CREDIT_BYTES + 8 * (len(body) + 64)


@pytest.mark.parametrize("delay", [900 * MS, 1500 * MS, 3500 * MS])
def test_busy_servers_are_waited_for_longer_once_all_were_silent(delay: int) -> None:
    """Otherwise each answer would come after its stream was reopened, and be ignored."""
    harness = Reader(shards=1, leases=[run_of(lease([0]))])
    arriving = [(harness.now + delay, harness.opened[0])]
    call, end = harness.fetch(), harness.now + 20 * S
    while call not in harness.answers:
        assert harness.now < end, "no answer counted"
        harness.pass_time(100 * MS)
        arriving += [(harness.now + delay, m) for _, m in harness.take(wire.Subscribe)]
        while arriving and arriving[0][0] <= harness.now:
            _, opened = arriving.pop(0)
            harness.deliver(0, 1, 2, [1], number=opened.subscription)
    assert [record.rid.gsn for record in harness.batch(call).records] == [1]


def test_credit_doubles_with_each_renewal_up_to_the_window() -> None:
    harness = Reader(shards=1, leases=[run_of(lease([0], size=10_000))])
    body = encode_body(Body(0, None, [bytes(FIRST_CREDIT_BYTES)]))
    ahead = [harness.opened[0].credit]
    for gsn in range(1, 31):
        harness.deliver(0, gsn, gsn + 1, Unit(0, [gsn], body))
        assert harness.gsns() == [gsn]
        ahead += [m.credit - gsn * (len(body) + 64) for _, m in harness.take(wire.Credit)]
    assert ahead[:5] == [FIRST_CREDIT_BYTES << doubled for doubled in range(5)]
    assert set(ahead[5:]) == {WINDOW_BYTES}


def test_reopened_stream_gets_at_most_one_window() -> None:
    harness = Reader()
    body = encode_body(Body(0, None, [bytes(30_000)]))
    for gsn in range(1, 11, 2):
        harness.deliver(0, gsn, gsn + 2, Unit(0, [gsn], body))
    harness.deliver(0, 99, 101)
    harness.look()
    assert harness.opened[0].credit == FIRST_CREDIT_BYTES - 5 * (len(body) + 64)


def test_credit_is_sent_regularly_and_silence_changes_the_replica() -> None:
    harness = Reader(shards=1, leases=[run_of(lease([0]))])
    harness.deliver(0, 1, 3, [1])
    harness.pass_time(600 * MS)
    assert [m.subscription for _, m in harness.take(wire.Credit)] == [
        harness.opened[0].subscription
    ]
    harness.deliver(0, 3, 3)
    harness.pass_time(1600 * MS)
    assert harness.look() == ["s0r0:1"]
    assert harness.opened[0].start == 3


def test_a_server_that_forgot_the_subscription() -> None:
    harness = Reader()
    harness.deliver(0, 1, 3, [1])
    message = harness.opened[0]
    harness.give(refused(message, 0, "unknown-subscription", message.subscription))
    assert harness.look() == ["s0r1:1"]
    assert harness.opened[0].start == 3
    assert harness.opened[0].subscription != message.subscription


def test_subscription_changes_to_the_next_replica_after_a_refusal() -> None:
    harness = Reader()
    message = harness.opened[0]
    harness.give(refused(message, 0, "not-ready", message.subscription))
    assert not harness.look()
    harness.pass_time(25 * MS)
    assert harness.look() == ["s0r0:1"]


def test_new_view_reopens_the_stream_at_its_position() -> None:
    harness = Reader()
    harness.deliver(0, 1, 5, [1])
    harness.fetch()
    harness.pass_time(1100 * MS)
    harness.look()
    harness.inform(placement(0, view=2), placement(1))
    harness.look()
    assert (harness.opened[0].view, harness.opened[0].start) == (2, 5)


def test_records_of_an_older_view_count_and_another_replica_takes_over() -> None:
    harness = Reader()
    harness.deliver(1, 1, 8)
    harness.learn(placement(0, view=2))
    assert harness.look() == ["s0r1:1"]
    harness.deliver(0, 1, 5, [1], [3])
    assert harness.gsns() == [1, 3], "stable records stay stable"
    assert not harness.look(), "only after a backoff"
    harness.pass_time(25 * MS)
    assert harness.look() == ["s0r0:1"]
    assert harness.opened[0].start == 5
    harness.deliver(0, 5, 7, [5], view=2, server=1)
    harness.pass_time(100 * MS)
    assert not harness.look()
    assert harness.gsns() == [5]


def test_outdated_servers_are_asked_in_turn_with_growing_backoff() -> None:
    harness = Reader()
    harness.learn(placement(0, view=2))
    opened = 0
    for _ in range(500):
        if "0" in {name[1] for name in harness.look()}:
            opened += 1
            harness.deliver(0, 1, 1)
        harness.pass_time(20 * MS)
    assert 10 <= opened <= 20


def test_recovering_shard_blocks_a_subscription_and_is_named() -> None:
    harness = Reader()
    harness.deliver(1, 1, 8, [4], [6])
    harness.deliver(0, 1, 3, [1])
    harness.learn(placement(0, state="recovering"))
    assert harness.gsns() == [1]
    assert harness.progress().blocked_on == Blocked(0, 0)
    harness.take(wire.Want)
    harness.fetch()
    for _ in range(5):
        harness.pass_time(1 * S)
        for shard in (0, 1):
            harness.deliver(shard, harness.stream(shard).frontier, harness.stream(shard).frontier)
    assert 5 <= len(harness.take(wire.Want)) <= 15, "an unavailable shard is asked less often"


# --- wants and progress ---


def test_want_is_repeated_to_the_blocking_shard() -> None:
    harness = Reader()
    harness.fetch()
    harness.deliver(1, 1, 8, [4], [6])
    assert [(n, m.shard, m.gsn) for n, m in harness.take(wire.Want)] == [("s0r0:1", 0, 6)]
    harness.deliver(1, 8, 10, [8])
    assert not harness.take(wire.Want), "one is outstanding"
    harness.pass_time(50 * MS)
    assert [m.gsn for _, m in harness.take(wire.Want)] == [8]
    harness.deliver(0, 1, 9)
    harness.pass_time(200 * MS)
    assert not harness.take(wire.Want)


def test_no_want_is_sent_for_records_in_flight() -> None:
    harness = Reader()
    harness.fetch()
    harness.deliver(0, 1, 3, [1], stable=100)
    harness.deliver(1, 1, 8, [4], [6])
    assert {m.shard for _, m in harness.take(wire.Want)} == {1}


def test_progress() -> None:
    harness = Reader()
    assert harness.progress() == Progress(RecordId(1, 0), caught_up=False, blocked_on=None)
    harness.deliver(0, 1, 7, [1], [5])
    harness.deliver(1, 1, 4)
    assert harness.progress().position == RecordId(1, 0), "gsn 1 is still to come"
    assert harness.gsns() == [1]
    assert harness.progress() == Progress(RecordId(4, 1), caught_up=False, blocked_on=Blocked(1, 0))
    harness.deliver(1, 4, 8)
    assert harness.gsns() == [5]
    assert harness.progress() == Progress(RecordId(7, 0), caught_up=True, blocked_on=None)


def test_the_backlog_is_what_servers_reported_and_the_reader_has_not_got() -> None:
    harness = Reader()
    assert harness.backlog == (1, 1)
    harness.deliver(0, 1, 7, [1], [5], stable=20)
    assert harness.backlog == (1, 20)
    harness.deliver(1, 1, 4)
    assert harness.gsns() == [1]
    assert harness.backlog == (4, 20)
    harness.deliver(0, 7, 20)
    harness.deliver(1, 4, 24)
    assert harness.backlog == (4, 24), "gsn 5 was not fetched"
    assert harness.gsns() == [5]
    assert harness.backlog == (20, 20)
    assert harness.core.backlog(harness.subscription + 1) == (0, 0)


# --- trims, ends, errors ---


def test_a_trimmed_start_is_an_error_that_names_the_first_position() -> None:
    harness = ClientHarness()
    harness.connect(placement(0), placement(1))
    number = harness.call(SubscribeRequest(harness.until(), RecordId(0, 0), True))
    question = harness.take(wire.LeaseQuery)[-1][1]
    runs = [run_of(lease([0, 1]))]
    harness.give(wire.LeaseHistory(CLUSTER, question.request, runs, [], 8))
    error = harness.answers[number]
    assert isinstance(error, TrimmedError)
    assert error.first == RecordId(8, 1)
    harness.pass_time(5 * S)
    assert not harness.take(wire.Credit), "its streams are still open"


def test_trim_past_a_running_subscription_ends_it() -> None:
    harness = Reader()
    harness.deliver(0, 1, 3, [1])
    harness.deliver(1, 1, 4)
    number = harness.opened[0].subscription
    call = harness.fetch(max_records=1)
    assert [r.rid.gsn for r in harness.batch(call).records] == [1]
    call = harness.fetch()
    harness.give(wire.Trimmed(CLUSTER, 0, 1, number, 8))
    harness.give_leases(run_of(lease([0, 1])))
    error = harness.answers[call]
    assert isinstance(error, TrimmedError)
    assert error.first == RecordId(8, 1)


def test_owner_of_a_trimmed_position_is_requested_once_and_not_after_the_end() -> None:
    harness = Reader()
    harness.look()
    harness.sent.clear()
    for shard in (0, 1, 0):
        harness.give(wire.Trimmed(CLUSTER, shard, 1, harness.opened[shard].subscription, 8))
    assert len(harness.take(wire.LeaseQuery)) == 1
    harness.call(UnsubscribeRequest(NEVER, harness.subscription))
    harness.sent.clear()
    harness.pass_time(60 * S)
    assert harness.take(wire.LeaseQuery) == []


def test_stream_of_a_new_shard_continues_after_a_trim() -> None:
    """The stream was opened far ahead, when the lease with the shard arrived; it is still empty."""
    runs = [run_of(lease([0], size=10)), run_of(lease([0, 1], number=2, base=11, size=100))]
    harness = Reader(leases=runs)
    assert harness.opened[1].start == 1
    harness.deliver(0, 1, 13, [1], [9])
    assert harness.gsns() == [1, 9]
    harness.give(wire.Trimmed(CLUSTER, 1, 1, harness.opened[1].subscription, 8))
    assert len(harness.look()) == 1
    assert harness.opened[1].start == 11, "everything before it was returned"
    harness.deliver(1, 11, 14, [12])
    assert harness.gsns() == [12]


def test_subscription_without_follow_ends_at_the_initial_tail() -> None:
    harness = Reader()
    number = harness.call(SubscribeRequest(harness.until(), RecordId(1, 0), False))
    known = [placement(0), placement(1)]
    for _, question in harness.take(wire.LeaseQuery):
        runs = [run_of(lease([0, 1]))]
        harness.give(wire.LeaseHistory(CLUSTER, question.request, runs, known, 0))
    for name, tail in harness.take(wire.Tail):
        server, filled = int(name[3]), 3 if tail.shard == 0 else 2
        harness.give(wire.TailReply(CLUSTER, tail.shard, 1, server, tail.request, filled, 1))
    assert harness.answers.pop(number) == number
    harness.subscription = number
    harness.look()
    harness.deliver(0, 1, 3, [1])
    harness.deliver(1, 1, 2)
    assert harness.gsns() == [1]
    assert harness.progress().blocked_on == Blocked(1, 0), "it must get as far as gsn 3"
    harness.deliver(0, 3, 9, [3], [5])
    harness.deliver(1, 2, 10, [2], [4])
    assert harness.gsns() == [2, 3]
    assert harness.progress().blocked_on is None
    call = harness.fetch()
    assert harness.batch(call) == Fetched([], ended=True)


def test_a_fetch_ends_at_its_deadline() -> None:
    harness = Reader()
    call = harness.fetch(2 * S)
    harness.pass_time(2 * S - 1)
    assert not harness.answers
    harness.pass_time(1)
    assert harness.batch(call) == Fetched([], ended=False)


def test_subscription_without_leases_ends_at_its_deadline() -> None:
    harness = ClientHarness()
    harness.connect(placement(0))
    call = harness.call(SubscribeRequest(harness.until(2 * S), RecordId(1, 0), True))
    harness.pass_time(2 * S)
    assert isinstance(harness.answers[call], DeadlineError)


def test_closing_ends_the_streams_and_the_readers() -> None:
    harness = Reader()
    call = harness.fetch()
    harness.call(UnsubscribeRequest(NEVER, harness.subscription))
    assert harness.batch(call) == Fetched([], ended=True)
    assert {m.shard for _, m in harness.take(wire.Unsubscribe)} == {0, 1}
    assert isinstance(harness.answers.pop(harness.fetch()), ClosedError)
    harness.sent.clear()
    harness.pass_time(60 * S)
    assert not harness.sent


# --- over a faulty network ---


@examples(40)
@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.2, 0.4]),
    repetition=st.sampled_from([0.0, 0.3]),
    shards=st.integers(1, 4),
    counts=st.lists(st.integers(1, 300), max_size=10),
    start=st.integers(0, 300),
)
def test_a_reader_gets_the_whole_log_in_order_each_record_once(
    seed: int, loss: float, repetition: float, shards: int, counts: list[int], start: int
) -> None:
    harness = ClientHarness(lambda payload, _k, live: live[len(payload) % len(live)])
    cluster = FakeCluster(harness, seed, shards)
    harness.connect(*cluster.placements())
    follower = cluster.subscribe(follow=True)
    cluster.loss, cluster.repetition = loss, repetition
    for number, count in enumerate(counts):
        payloads = [b"x" * number + b"%d" % i for i in range(count)]
        rids = cluster.result(harness.insert(*payloads, timeout=600 * S))
        assert len(rids) == count
    late = cluster.subscribe(RecordId(start, 0))
    expected = [(gsn, payload) for gsn, payload in cluster.log if gsn >= start]
    assert [(r.rid.gsn, r.payload) for r in cluster.fetch_all(late)] == expected
    followed: list[tuple[int, bytes]] = []
    while len(followed) < len(cluster.log):
        batch = cluster.result(harness.call(FetchRequest(NEVER, follower, 100)))
        followed += [(r.rid.gsn, r.payload) for r in batch.records]
    assert followed == cluster.log


@examples(10)
@given(seed=st.integers(0, 2**32))
def test_recent_begins_with_the_last_record(seed: int) -> None:
    harness = ClientHarness(lambda payload, _k, live: live[len(payload) % len(live)])
    cluster = FakeCluster(harness, seed)
    harness.connect(*cluster.placements())
    assert cluster.fetch_all(cluster.subscribe(RID_RECENT)) == []
    for payload in (b"1", b"22", b"333"):
        cluster.result(harness.insert(payload))
    for message in (wire.Want(CLUSTER, shard, 0, 50) for shard in (0, 1)):
        cluster.serve("s0r0:1", message)
    records = cluster.fetch_all(cluster.subscribe(RID_RECENT))
    assert [record.payload for record in records] == [cluster.log[-1][1]]


@pytest.mark.parametrize("follow", [True, False])
def test_recent_begins_at_the_trim_point_once_the_last_record_is_trimmed(follow: bool) -> None:
    harness = ClientHarness()
    cluster = FakeCluster(harness, 0)
    harness.connect(*cluster.placements())
    cluster.result(harness.insert(b"trimmed"))
    for message in (wire.Want(CLUSTER, shard, 0, 50) for shard in (0, 1)):
        cluster.serve("s0r0:1", message)
    cluster.trim = cluster.log[-1][0] + 1
    subscription = cluster.subscribe(RID_RECENT, follow=follow)
    progress = cluster.result(harness.call(ProgressRequest(NEVER, subscription, 0)))
    assert progress.position.gsn >= cluster.trim
