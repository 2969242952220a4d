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
    glass = BarrierReader()
    glass.deliver(0, 1, 9)
    glass.deliver(1, 1, 4)
    return glass


def test_slowest_shard_bounds_all_readers_by_its_next_position() -> None:
    glass = slow_shard_reader()
    call = glass.ask()
    questions = glass.questions()
    assert sorted(questions) == ["s1r0:1", "s1r1:1"]
    glass.answer(questions["s1r0:1"], 0, 21)
    assert call not in glass.answers, "a replaced replica may reply, but not all can"
    glass.answer(questions["s1r1:1"], 1, 17)
    # Shard 0 owns 17. The backup has not even decided 18, so no reader has passed it.
    assert glass.answers.pop(call).gsn == 18
    assert not glass.core._is_waiting()


def test_barrier_needs_replies_of_all_replicas_in_the_newest_known_view() -> None:
    glass = slow_shard_reader()
    call = glass.ask()
    tail = glass.questions()["s1r0:1"]
    glass.answer(tail, 0, 5)
    glass.answer(tail, 1, 31, view=2)
    assert call not in glass.answers
    glass.answer(tail, 0, 33, view=2)
    assert glass.answers.pop(call).gsn == 32


def test_reply_of_an_earlier_round_is_ignored() -> None:
    glass = slow_shard_reader()
    call = glass.ask()
    first = glass.questions()["s1r0:1"]
    glass.answer(first, 0, 5)
    glass.pass_time(15 * MS)
    second = glass.questions()["s1r0:1"]
    assert second.request != first.request
    glass.answer(first, 1, 5)
    glass.answer(second, 1, 9)
    assert call not in glass.answers
    glass.answer(second, 0, 9)
    assert glass.answers.pop(call).gsn == 10


def test_shard_without_known_later_positions_gives_no_bound() -> None:
    """Its end may be where it left the leases; other shards and readers may have continued."""
    glass = BarrierReader(
        leases=[run_of(lease([0, 1], size=10)), run_of(lease([0], 2, 11, size=100))]
    )
    glass.deliver(0, 1, 9)
    glass.deliver(1, 1, 4)
    call = glass.ask()
    tail = glass.questions()["s1r0:1"]
    glass.answer(tail, 0, 11)
    glass.answer(tail, 1, 11)
    assert call not in glass.answers
    # It has left the leases: the next round asks the other shard.
    glass.deliver(1, 4, 11)
    glass.pass_time(30 * MS)
    questions: dict[str, Any] = glass.questions()
    assert sorted(questions)[:2] == ["s0r0:1", "s0r1:1"]
    for server in range(2):
        glass.answer(questions[f"s0r{server}:1"], server, 40)
    assert glass.answers.pop(call).gsn == 40


def test_barrier_is_retried_until_its_deadline() -> None:
    glass = slow_shard_reader()
    call = glass.ask(S)
    glass.questions()
    glass.pass_time(500 * MS)
    assert len(glass.take(wire.Tail)) >= 4
    glass.pass_time(600 * MS)
    error = glass.answers.pop(call)
    assert isinstance(error, DeadlineError)
    assert "shard 1" in str(error)
    assert not glass.core._is_waiting()


def test_refused_barrier_refreshes_the_placements() -> None:
    glass = slow_shard_reader()
    glass.pass_time(S)
    glass.questions()
    glass.ask()
    glass.take(wire.Hello)
    tail = glass.questions()["s1r0:1"]
    glass.give(refused(tail, 0, "wrong-view", tail.request))
    glass.pass_time(S // 2)
    assert glass.take(wire.Hello)
    glass.learn(placement(1, view=2))
    glass.pass_time(S // 4)
    assert {tail.view for _, tail in glass.take(wire.Tail)[-2:]} == {2}


def test_barrier_of_a_closed_subscription_fails() -> None:
    glass = slow_shard_reader()
    waiting = glass.ask()
    glass.call(UnsubscribeRequest(glass.until(), glass.subscription))
    late = glass.ask()
    assert isinstance(glass.answers.pop(late), ClosedError)
    glass.pass_time(20 * MS)
    assert isinstance(glass.answers.pop(waiting), ClosedError)


def test_cancelled_barrier_gets_no_result() -> None:
    glass = slow_shard_reader()
    call = glass.ask()
    tail = glass.questions()["s1r0:1"]
    glass.cancel(call)
    assert not glass.core._is_waiting()
    glass.answer(tail, 0, 5)
    glass.answer(tail, 1, 5)
    assert call not in glass.answers
