"""Subscriptions of some shards (docs/protocol.md, section 7)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.ziplog.client.fakes import CLUSTER, MS, ClientHarness, S, lease, placement
from tests.unit.ziplog.client.reader import Reader
from ziplog import wire
from ziplog.client import arguments
from ziplog.client.common.requests import FetchRequest, SubscribeRequest
from ziplog.core.units import NEVER
from ziplog.core.view import run_of
from ziplog.errors import ConfigError, DeadlineError
from ziplog.types import RID_GENESIS, RID_RECENT, RecordId


def test_it_reads_the_chosen_shards_and_waits_for_no_other_one() -> None:
    harness = Reader(only=frozenset({0}))
    assert harness.where == ["s0r1:1"]
    call = harness.fetch()
    harness.deliver(0, 1, 7, [1], [3, 5])
    assert [record.rid.gsn for record in harness.batch(call).records] == [1, 3, 5]
    assert harness.progress().position.gsn == 7
    assert harness.progress().caught_up
    assert not harness.take(wire.Want), "no other shard must decide anything for it"


def test_several_chosen_shards_are_merged_in_gsn_order() -> None:
    leases = [run_of(lease([0, 1, 2]))]
    harness = Reader(shards=3, leases=leases, only=frozenset({0, 2}))
    assert sorted(harness.opened) == [0, 2]
    harness.deliver(0, 1, 8, [1], [4], [7])
    assert harness.gsns() == [], "shard 2 has decided nothing"
    assert {name for name, _ in harness.take(wire.Want)} == {"s2r0:1"}
    harness.deliver(2, 1, 6, [3])
    assert harness.gsns() == [1, 3, 4]
    harness.deliver(2, 6, 12, [6], [9])
    assert harness.gsns() == [6, 7]


def test_leases_without_a_chosen_shard_are_passed_and_requested_once_a_second() -> None:
    first = run_of(lease([0, 1], size=10))
    harness = Reader(leases=[first], only=frozenset({0}))
    second = lease([1], number=2, base=11, size=100)
    harness.deliver(0, 1, 11, [9], leases=[run_of(second)])
    assert harness.gsns() == [9]
    assert harness.gsns() == []
    assert harness.progress().position.gsn == 111, "no chosen shard owns a position up to there"
    assert harness.progress().caught_up
    assert not harness.core._subscriptions._open[harness.subscription]._streams
    queries, number = 0, 2
    for _ in range(200):
        harness.pass_time(50 * MS)
        queried = sum(isinstance(message, wire.LeaseQuery) for _, message in harness.sent)
        if queried:
            queries, number = queries + queried, number + 1
            harness.give_leases(
                run_of(lease([1], number=number, base=100 * number - 189, size=100))
            )
            assert harness.gsns() == []
    assert 8 <= queries <= 11
    # The shard has positions again.
    harness.pass_time(S)
    base = 100 * number - 89
    harness.give_leases(run_of(lease([0, 1], number=number + 1, base=base, size=100)))
    assert harness.look() == ["s0r1:1"]
    assert harness.opened[0].start == base
    harness.deliver(0, base, base + 20, [base + 2])
    assert harness.gsns() == [base + 2]


def subscribe(
    harness: ClientHarness, *shards: int, start: RecordId = RID_GENESIS, follow: bool = True
) -> int:
    return harness.call(SubscribeRequest(harness.until(), start, follow, frozenset(shards)))


def test_a_shard_that_never_was_is_an_error() -> None:
    harness = ClientHarness()
    harness.connect(placement(0), placement(1))
    call = subscribe(harness, 0, 7)
    harness.list_shards(placement(0), placement(1))
    error = harness.answers.pop(call)
    assert isinstance(error, ConfigError)
    assert "[7]" in str(error)
    assert "[0, 1]" in str(error)


def test_a_shard_that_this_client_does_not_know_yet_is_looked_up() -> None:
    harness = ClientHarness()
    harness.connect(placement(0))
    call = subscribe(harness, 1)
    harness.list_shards(placement(0), placement(1))
    question = harness.take(wire.LeaseQuery)[-1][1]
    known = [placement(0), placement(1)]
    harness.give(wire.LeaseHistory(CLUSTER, question.request, [run_of(lease([0, 1]))], known, 0))
    assert harness.answers.pop(call) == call
    assert [message.shard for _, message in harness.take(wire.Subscribe)] == [1]


def test_without_a_reply_about_an_unknown_shard_it_fails_at_the_deadline() -> None:
    harness = ClientHarness()
    harness.connect(placement(0))
    call = subscribe(harness, 7)
    harness.pass_time(11 * S)
    assert isinstance(harness.answers.pop(call), DeadlineError)


@pytest.mark.parametrize("start", [RID_GENESIS, RID_RECENT])
def test_the_end_is_that_of_the_chosen_shards(start: RecordId) -> None:
    harness = ClientHarness()
    harness.connect(placement(0), placement(1))
    call = subscribe(harness, 0, start=start, follow=False)
    known = [placement(0), placement(1)]
    for _, question in harness.take(wire.LeaseQuery):
        harness.give(
            wire.LeaseHistory(CLUSTER, question.request, [run_of(lease([0, 1]))], known, 0)
        )
    while asked := harness.take(wire.Tail):
        assert {message.shard for _, message in asked} == {0}, "the other shard may be silent"
        for name, message in asked:
            server = int(name.split("r")[1].split(":")[0])
            harness.give(wire.TailReply(CLUSTER, 0, 1, server, message.request, 5, 7, 5, 7))
        for _, question in harness.take(wire.LeaseQuery):
            runs = [run_of(lease([0, 1]))]
            harness.give(wire.LeaseHistory(CLUSTER, question.request, runs, known, 0))
    assert harness.answers.pop(call) == call
    ((_, opened),) = harness.take(wire.Subscribe)
    fetch = harness.call(FetchRequest(NEVER, call, 10))
    first = opened.start
    assert first == (1 if start is RID_GENESIS else 5)
    harness.give(wire.Deliver(CLUSTER, 0, 1, 1, opened.subscription, first, 7, [], [], 7))
    answer: Any = harness.answers.pop(fetch)
    assert answer.ended


@pytest.mark.parametrize("shards", [[], (), "0", b"0", 0, [-1], [True], ["0"], [2**31], {None}])
def test_shards_that_are_no_shard_numbers_are_refused(shards: Any) -> None:
    with pytest.raises(ConfigError):
        arguments.subscribe(RID_GENESIS, NEVER, follow=True, shards=shards)


def test_any_collection_of_shard_numbers_is_accepted() -> None:
    for shards in ([1, 0], (0, 1), {0, 1}, frozenset({0, 1}), {0: "a", 1: "b"}, range(2)):
        request = arguments.subscribe(RID_GENESIS, NEVER, follow=True, shards=shards)
        assert request.shards == {0, 1}
