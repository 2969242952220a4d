"""Subscriptions of some shards (docs/protocol.md, section 7)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.ziplog.client.fakes import CLUSTER, MS, ClientHarness, S, lease, placement
from tests.unit.ziplog.client.reader import Reader
from ziplog import wire
from ziplog.client import arguments
from ziplog.client.common.requests import NEVER, FetchRequest, SubscribeRequest
from ziplog.core.view import run_of
from ziplog.errors import ConfigError, DeadlineError
from ziplog.types import RID_GENESIS, RID_RECENT, RecordId


def test_it_reads_the_chosen_shards_and_waits_for_no_other_one() -> None:
    glass = Reader(only=frozenset({0}))
    assert glass.where == ["s0r1:1"]
    call = glass.fetch()
    glass.deliver(0, 1, 7, [1], [3, 5])
    assert [record.rid.gsn for record in glass.batch(call).records] == [1, 3, 5]
    assert glass.progress().position.gsn == 7
    assert glass.progress().caught_up
    assert not glass.take(wire.Want), "no other shard must decide anything for it"


def test_several_chosen_shards_are_merged_in_gsn_order() -> None:
    leases = [run_of(lease([0, 1, 2]))]
    glass = Reader(shards=3, leases=leases, only=frozenset({0, 2}))
    assert sorted(glass.opened) == [0, 2]
    glass.deliver(0, 1, 8, [1], [4], [7])
    assert glass.gsns() == [], "shard 2 has decided nothing"
    assert {name for name, _ in glass.take(wire.Want)} == {"s2r0:1"}
    glass.deliver(2, 1, 6, [3])
    assert glass.gsns() == [1, 3, 4]
    glass.deliver(2, 6, 12, [6], [9])
    assert glass.gsns() == [6, 7]


def test_leases_without_a_chosen_shard_are_passed_and_requested_once_a_second() -> None:
    first = run_of(lease([0, 1], size=10))
    glass = Reader(leases=[first], only=frozenset({0}))
    second = lease([1], number=2, base=11, size=100)
    glass.deliver(0, 1, 11, [9], leases=[run_of(second)])
    assert glass.gsns() == [9]
    assert glass.gsns() == []
    assert glass.progress().position.gsn == 111, "no chosen shard owns a position up to there"
    assert glass.progress().caught_up
    assert not glass.core._subscriptions._open[glass.subscription]._streams
    queries, number = 0, 2
    for _ in range(200):
        glass.pass_time(50 * MS)
        queried = sum(isinstance(message, wire.LeaseQuery) for _, message in glass.sent)
        if queried:
            queries, number = queries + queried, number + 1
            glass.give_leases(run_of(lease([1], number=number, base=100 * number - 189, size=100)))
            assert glass.gsns() == []
    assert 8 <= queries <= 11
    # The shard has positions again.
    glass.pass_time(S)
    base = 100 * number - 89
    glass.give_leases(run_of(lease([0, 1], number=number + 1, base=base, size=100)))
    assert glass.look() == ["s0r1:1"]
    assert glass.opened[0].start == base
    glass.deliver(0, base, base + 20, [base + 2])
    assert glass.gsns() == [base + 2]


def subscribe(
    glass: ClientHarness, *shards: int, start: RecordId = RID_GENESIS, follow: bool = True
) -> int:
    return glass.call(SubscribeRequest(glass.until(), start, follow, frozenset(shards)))


def test_a_shard_that_never_was_is_an_error() -> None:
    glass = ClientHarness()
    glass.connect(placement(0), placement(1))
    call = subscribe(glass, 0, 7)
    assert not glass.take(wire.LeaseQuery), "the service is asked for shard 7 first"
    glass.pass_time(100 * MS)
    glass.inform(placement(0), placement(1))
    error = glass.answers.pop(call)
    assert isinstance(error, ConfigError)
    assert "[7]" in str(error)
    assert "[0, 1]" in str(error)


def test_a_shard_that_this_client_does_not_know_yet_is_looked_up() -> None:
    glass = ClientHarness()
    glass.connect(placement(0))
    call = subscribe(glass, 1)
    glass.pass_time(100 * MS)
    glass.inform(placement(0), placement(1))
    question = glass.take(wire.LeaseQuery)[-1][1]
    known = [placement(0), placement(1)]
    glass.give(wire.LeaseHistory(CLUSTER, question.request, [run_of(lease([0, 1]))], known, 0))
    assert glass.answers.pop(call) == call
    assert [message.shard for _, message in glass.take(wire.Subscribe)] == [1]


def test_without_a_reply_about_an_unknown_shard_it_fails_at_the_deadline() -> None:
    glass = ClientHarness()
    glass.connect(placement(0))
    call = subscribe(glass, 7)
    glass.pass_time(11 * S)
    assert isinstance(glass.answers.pop(call), DeadlineError)


@pytest.mark.parametrize("start", [RID_GENESIS, RID_RECENT])
def test_the_end_is_that_of_the_chosen_shards(start: RecordId) -> None:
    glass = ClientHarness()
    glass.connect(placement(0), placement(1))
    call = subscribe(glass, 0, start=start, follow=False)
    known = [placement(0), placement(1)]
    for _, question in glass.take(wire.LeaseQuery):
        glass.give(wire.LeaseHistory(CLUSTER, question.request, [run_of(lease([0, 1]))], known, 0))
    while asked := glass.take(wire.Tail):
        assert {message.shard for _, message in asked} == {0}, "the other shard may be silent"
        for name, message in asked:
            server = int(name.split("r")[1].split(":")[0])
            glass.give(wire.TailReply(CLUSTER, 0, 1, server, message.request, 5, 7, 5, 7))
        for _, question in glass.take(wire.LeaseQuery):
            runs = [run_of(lease([0, 1]))]
            glass.give(wire.LeaseHistory(CLUSTER, question.request, runs, known, 0))
    assert glass.answers.pop(call) == call
    ((_, opened),) = glass.take(wire.Subscribe)
    fetch = glass.call(FetchRequest(NEVER, call, 10))
    first = opened.start
    assert first == (1 if start is RID_GENESIS else 5)
    glass.give(wire.Deliver(CLUSTER, 0, 1, 1, opened.subscription, first, 7, [], [], 7))
    answer: Any = glass.answers.pop(fetch)
    assert answer.ended


@pytest.mark.parametrize("shards", [[], (), "0", b"0", 0, [-1], [True], ["0"], [2**31], {None}])
def test_shards_that_are_no_shard_numbers_are_refused(shards: Any) -> None:
    with pytest.raises(ConfigError):
        arguments.subscribe(RID_GENESIS, NEVER, follow=True, shards=shards)


def test_any_collection_of_shard_numbers_is_accepted() -> None:
    for shards in ([1, 0], (0, 1), {0, 1}, frozenset({0, 1}), {0: "a", 1: "b"}, range(2)):
        request = arguments.subscribe(RID_GENESIS, NEVER, follow=True, shards=shards)
        assert request.shards == {0, 1}
