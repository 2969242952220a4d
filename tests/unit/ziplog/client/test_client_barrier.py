"""Read barriers: an upper bound of all readers (docs/protocol.md, section 7)."""

from __future__ import annotations

from typing import Any

from tests.unit.ziplog.client.fakes import CLUSTER, MS, S, lease, placement, refused
from tests.unit.ziplog.client.reader import Reader
from ziplog import wire
from ziplog.client.common.requests import BarrierRequest, UnsubscribeRequest
from ziplog.core.view import run_of
from ziplog.errors import ClosedError, DeadlineError


class BarrierReader(Reader):
    """A reader of shard 0, which owns odd positions, and shard 1, which owns even ones."""

    def ask(self, timeout: int = S) -> int:
        return self.call(BarrierRequest(self.until(timeout), self.subscription))

    def questions(self) -> dict[str, wire.Tail]:
        return dict(self.take(wire.Tail))

    def answer(self, tail: wire.Tail, server: int, end: int, view: int = 1) -> None:
        self.give(wire.TailReply(CLUSTER, tail.shard, view, server, tail.request, 900, 900, 0, end))


def slow_shard_reader() -> BarrierReader:
    """Return a subscription with shard 1 as the slowest shard."""
    harness = BarrierReader()
    harness.deliver(0, 1, 9)
    harness.deliver(1, 1, 4)
    return harness


def test_slowest_shard_bounds_all_readers_by_its_next_position() -> None:
    harness = slow_shard_reader()
    call = harness.ask()
    questions = harness.questions()
    assert sorted(questions) == ["s1r0:1", "s1r1:1"]
    harness.answer(questions["s1r0:1"], 0, 21)
    assert call not in harness.answers, "a replaced replica may reply, but not all can"
    harness.answer(questions["s1r1:1"], 1, 17)
    # Shard 0 owns 17. The backup has not even decided 18, so no reader has passed it.
    assert harness.answers.pop(call).gsn == 18
    assert not harness.core._is_waiting()


def test_barrier_needs_replies_of_all_replicas_in_the_newest_known_view() -> None:
    harness = slow_shard_reader()
    call = harness.ask()
    tail = harness.questions()["s1r0:1"]
    harness.answer(tail, 0, 5)
    harness.answer(tail, 1, 31, view=2)
    assert call not in harness.answers
    harness.answer(tail, 0, 33, view=2)
    assert harness.answers.pop(call).gsn == 32


def test_late_replies_of_busy_servers_count() -> None:
    """Servers with a queue may take longer than the interval between two copies of a request."""
    harness = slow_shard_reader()
    call = harness.ask(10 * S)
    first = harness.questions()["s1r0:1"]
    harness.pass_time(50 * MS)
    assert {tail.request for _, tail in harness.take(wire.Tail)} == {first.request}
    harness.answer(first, 0, 9)
    harness.pass_time(50 * MS)
    assert {name for name, _ in harness.take(wire.Tail)} == {"s1r1:1"}, "the missing one"
    harness.pass_time(500 * MS)
    again = {name for name, _ in harness.take(wire.Tail)}
    assert again == {"s1r0:1", "s1r1:1"}, "the one that replied may forward the question"
    harness.answer(first, 1, 17)
    assert harness.answers.pop(call).gsn == 10


def test_replies_of_a_shard_that_is_not_the_slowest_any_more_count() -> None:
    harness = slow_shard_reader()
    call = harness.ask(10 * S)
    first = harness.questions()["s1r0:1"]
    harness.deliver(1, 4, 30)
    harness.pass_time(15 * MS)
    assert {tail.shard for _, tail in harness.take(wire.Tail)} == {0}
    for server in (0, 1):
        harness.answer(first, server, 31)
    assert harness.answers.pop(call).gsn == 32


def test_leases_that_come_after_the_replies_give_the_bound() -> None:
    harness = BarrierReader(leases=[run_of(lease([0, 1], size=10))])
    harness.deliver(0, 1, 9)
    harness.deliver(1, 1, 4)
    call = harness.ask()
    tail = harness.questions()["s1r0:1"]
    for server in (0, 1):
        harness.answer(tail, server, 11)
    assert call not in harness.answers
    harness.deliver(1, 4, 5, leases=[run_of(lease([0, 1], 2, 11, size=100))])
    harness.pass_time(30 * MS)
    assert harness.answers.pop(call).gsn == 12


def test_shard_without_known_later_positions_gives_no_bound() -> None:
    """Its end may be where it left the leases; other shards and readers may have continued."""
    harness = BarrierReader(
        leases=[run_of(lease([0, 1], size=10)), run_of(lease([0], 2, 11, size=100))]
    )
    harness.deliver(0, 1, 9)
    harness.deliver(1, 1, 4)
    call = harness.ask()
    tail = harness.questions()["s1r0:1"]
    harness.answer(tail, 0, 11)
    harness.answer(tail, 1, 11)
    assert call not in harness.answers
    # It has left the leases: the next round asks the other shard.
    harness.deliver(1, 4, 11)
    harness.pass_time(30 * MS)
    questions: dict[str, Any] = harness.questions()
    assert sorted(questions)[:2] == ["s0r0:1", "s0r1:1"]
    for server in range(2):
        harness.answer(questions[f"s0r{server}:1"], server, 40)
    assert harness.answers.pop(call).gsn == 40


def test_barrier_is_retried_until_its_deadline() -> None:
    harness = slow_shard_reader()
    call = harness.ask(S)
    harness.questions()
    harness.pass_time(500 * MS)
    assert len(harness.take(wire.Tail)) >= 4
    harness.pass_time(600 * MS)
    error = harness.answers.pop(call)
    assert isinstance(error, DeadlineError)
    assert "shard 1" in str(error)
    assert not harness.core._is_waiting()


def test_refused_barrier_refreshes_the_placements() -> None:
    harness = slow_shard_reader()
    harness.pass_time(S)
    harness.questions()
    harness.ask()
    harness.take(wire.Hello)
    tail = harness.questions()["s1r0:1"]
    harness.give(refused(tail, 0, "wrong-view", tail.request))
    harness.pass_time(S // 2)
    assert harness.take(wire.Hello)
    harness.learn(placement(1, view=2))
    harness.pass_time(S // 4)
    assert {tail.view for _, tail in harness.take(wire.Tail)[-2:]} == {2}


def test_barrier_of_a_closed_subscription_fails() -> None:
    harness = slow_shard_reader()
    waiting = harness.ask()
    harness.call(UnsubscribeRequest(harness.until(), harness.subscription))
    late = harness.ask()
    assert isinstance(harness.answers.pop(late), ClosedError)
    harness.pass_time(20 * MS)
    assert isinstance(harness.answers.pop(waiting), ClosedError)


def test_cancelled_barrier_gets_no_result() -> None:
    harness = slow_shard_reader()
    call = harness.ask()
    tail = harness.questions()["s1r0:1"]
    harness.cancel(call)
    assert not harness.core._is_waiting()
    harness.answer(tail, 0, 5)
    harness.answer(tail, 1, 5)
    assert call not in harness.answers
