"""Subscriptions that pass from one lease to the next (docs/protocol.md, section 7)."""

from __future__ import annotations

import pytest

from tests.unit.ziplog.client.fakes import CLUSTER, MS, ClientHarness, S, lease, placement
from tests.unit.ziplog.client.reader import Reader
from ziplog import wire
from ziplog.client.common.requests import SubscribeRequest, UnsubscribeRequest
from ziplog.core.units import NEVER
from ziplog.core.view import run_of
from ziplog.errors import TrimmedError
from ziplog.types import RecordId


def test_the_end_of_the_known_leases_is_not_passed() -> None:
    first = lease([0], size=10)
    harness = Reader(shards=1, leases=[run_of(first)])
    harness.deliver(0, 1, 25, [1], [9], [20])
    assert harness.gsns() == [1, 9]
    assert harness.progress().position == RecordId(11, 0)
    second = lease([0, 1], number=2, base=11, size=100)
    harness.deliver(0, 25, 25, leases=[run_of(second)])
    assert harness.look() == ["s1r1:1"], "a member that was not known before"
    assert harness.gsns() == []
    harness.deliver(1, 11, 30, [12])
    assert harness.gsns() == [12, 20]


def shard_that_joins() -> Reader:
    """Return a reader that gets a lease with a shard that it does not know."""
    harness = Reader(shards=1, leases=[run_of(lease([0], size=10))])
    harness.deliver(0, 1, 25, [1], [9], [20])
    harness.take(wire.Hello)
    second = lease([0, 9], number=2, base=11, size=100)
    harness.deliver(0, 25, 25, leases=[run_of(second)])
    assert not harness.look()
    harness.pass_time(100 * MS)
    return harness


def test_a_shard_that_joins_while_the_log_is_followed_is_read_from_its_first_position_on() -> None:
    harness = shard_that_joins()
    assert harness.gsns() == [1, 9], "positions of the new shard are not passed"
    harness.inform(placement(0), placement(9))
    assert harness.look() == ["s9r1:1"]
    assert harness.opened[9].start == 11, "with its first lease"
    assert harness.gsns() == []
    harness.deliver(9, 11, 30, [12])
    assert harness.gsns() == [12, 20]


def test_a_subscription_that_is_closed_meanwhile_opens_no_stream_of_a_shard_that_joined() -> None:
    harness = shard_that_joins()
    harness.call(UnsubscribeRequest(NEVER, harness.subscription))
    harness.inform(placement(0), placement(9))
    assert not harness.look()


def test_unannounced_leases_are_requested() -> None:
    harness = Reader(shards=1, leases=[run_of(lease([0], size=10))])
    harness.deliver(0, 1, 25, [20])
    assert harness.gsns() == []
    harness.pass_time(60 * MS)
    harness.give_leases(run_of(lease([0], number=2, base=11, size=100)))
    assert harness.gsns() == [20]


def test_missing_lease_is_requested() -> None:
    harness = Reader(shards=1, leases=[run_of(lease([0], size=10))])
    third = run_of(lease([0], number=3, base=21, size=10))
    harness.deliver(0, 1, 25, [15], leases=[third])
    assert harness.gsns() == []
    harness.give_leases(run_of(lease([0], number=2, base=11, size=10)), third)
    assert harness.gsns() == [15]


def test_start_without_an_owner_waits() -> None:
    harness = ClientHarness()
    harness.connect(placement(0))
    number = harness.call(SubscribeRequest(harness.until(), RecordId(10**9, 0), True))
    for runs in ([], [run_of(lease([0]))]):
        question = harness.take(wire.LeaseQuery)[-1][1]
        harness.give(wire.LeaseHistory(CLUSTER, question.request, runs, [placement(0)], 0))
    assert harness.answers[number] == number
    assert [m.start for _, m in harness.take(wire.Subscribe)] == [10**9]


def test_lease_of_the_start_is_requested_although_a_later_one_is_known() -> None:
    """The client stood still for two leases, so the newest one begins after the start."""
    harness = ClientHarness()
    harness.connect(placement(0), leases=[run_of(lease([0], 3, 21, size=10))])
    harness.call(SubscribeRequest(harness.until(), RecordId(11, 0), True))
    first = harness.take(wire.LeaseQuery)[-1][1]
    harness.give(wire.LeaseHistory(CLUSTER, first.request, [], [placement(0)], 0))
    assert [m.gsn for _, m in harness.take(wire.LeaseQuery)] == [11]


@pytest.mark.parametrize(("trim", "is_over"), [(9, True), (1, False)])
def test_a_subscription_does_not_wait_for_a_shard_that_is_over(trim: int, is_over: bool) -> None:
    """Its servers were stopped before the subscription had all of it; the rest was trimmed."""
    harness = Reader()
    harness.learn(placement(1, state="finalized"))
    harness.deliver(0, 1, 13, [1], [3])
    call = harness.fetch()
    harness.pass_time(2 * S)
    harness.give_leases(run_of(lease([0, 1])), trim=trim)
    if is_over:
        error = harness.answers[call]
        assert isinstance(error, TrimmedError)
        assert error.first == RecordId(9, 0)
    else:
        assert call not in harness.answers
        harness.pass_time(2 * S)
        assert harness.take(wire.LeaseQuery), "it asks again"


def test_the_trim_point_is_not_requested_for_a_shard_that_may_answer() -> None:
    harness = Reader()
    harness.fetch()
    harness.pass_time(5 * S)
    assert not harness.take(wire.LeaseQuery)
