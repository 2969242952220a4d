"""Moves of cursors by their owner, and the releases behind them."""

from __future__ import annotations

import pytest

from tests.unit.ziplog.client.fakes import CLUSTER, S
from tests.unit.ziplog.client.owner import Owner, cursor
from ziplog import wire
from ziplog.client.common.requests import (
    ClaimQuery,
    CommitRequest,
    FetchRequest,
    ReleaseRequest,
    UnsubscribeRequest,
)
from ziplog.client.cursors.claims import COMMIT_INTERVAL_NS
from ziplog.core.cursors import MAX_MOVES, Cursor, CursorMove
from ziplog.core.node import Closing
from ziplog.core.units import NEVER
from ziplog.errors import (
    ClosedError,
    ConfigError,
    CursorLostError,
    DeadlineError,
    NoSuchRecordError,
)
from ziplog.types import RecordId


@pytest.mark.parametrize("reads", [True, False])
def test_move_is_part_of_the_state(reads: bool) -> None:
    owner = Owner()
    call = owner.own() if reads else owner.own_without_reading()
    assert not owner.state(call).has_moved
    owner.commit(call, 5)
    owner.moved()
    assert owner.state(call).has_moved


def test_commit_returns_once_the_service_confirms_it() -> None:
    owner = Owner()
    call = owner.own()
    move = owner.commit(call, 9, b"m")
    assert move not in owner.answers
    request = owner.moved()
    assert (request.term, request.move, request.position, request.mark) == (1, 1, 9, b"m")
    assert owner.answers[move] == RecordId(9, 0)
    assert owner.state(call)[2:4] == (RecordId(9, 0), b"m")


def test_moves_are_numbered() -> None:
    owner = Owner()
    call = owner.own()
    owner.commit(call, 9)
    owner.commit(call, 10)
    assert [[one.move for one in moves] for moves in owner.moves()] == [[1], [2]]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("is_soon", [False, True])
def test_move_below_one_that_was_sent_is_refused(is_late: bool, is_soon: bool) -> None:
    """A copy of the first one may still arrive, also after its deadline."""
    owner = Owner()
    call = owner.own()
    first = owner.call(CommitRequest(owner.until(S), call, RecordId(9, 0), b"m"))
    if is_late:
        owner.pass_time(2 * S)
        assert isinstance(owner.answers[first], DeadlineError)
    lower = owner.call(CommitRequest(owner.until(S), call, RecordId(8, 0), b"n", is_soon))
    assert "gsn 9 or later" in str(owner.answers[lower])
    assert isinstance(owner.answers[lower], ConfigError)
    again = owner.call(CommitRequest(owner.until(S), call, RecordId(9, 0), b"n"))
    owner.moved()
    assert owner.answers[again] == RecordId(9, 0)


def test_move_may_be_below_one_that_was_refused() -> None:
    owner = Owner()
    call = owner.own()
    beyond = owner.commit(call, 900)
    owner.moved(cursor(), "no-such-position")
    assert isinstance(owner.answers[beyond], NoSuchRecordError)
    move = owner.commit(call, 9)
    owner.moved()
    assert owner.answers[move] == RecordId(9, 0)


def test_refusal_of_a_move_back_is_an_error() -> None:
    owner = Owner()
    call = owner.own()
    move = owner.commit(call, 9)
    owner.moved(cursor(position=12), "goes-back")
    assert "gsn 12 or later" in str(owner.answers[move])
    assert owner.state(call).mark == b""


@pytest.mark.parametrize(
    ("error", "now", "reason"),
    [
        ("stale-term", cursor(term=2, owner=b"other:9"), "other:9 claimed it"),
        ("stale-term", cursor(term=2, owner=b"", seek=1, position=3), "set to gsn 3"),
        ("stale-term", cursor(term=2, owner=b""), "released by an operator"),
        ("no-such-cursor", None, "deleted"),
    ],
)
def test_refused_move_ends_the_claim(error: str, now: Cursor | None, reason: str) -> None:
    owner = Owner()
    call = owner.own()
    fetch = owner.call(FetchRequest(NEVER, call, 10))
    move = owner.commit(call, 9)
    owner.moved(now, error)
    for lost in (owner.answers[move], owner.answers[fetch]):
        assert isinstance(lost, CursorLostError)
        assert reason in lost.reason
        assert (lost.name, lost.term) == ("x", 1)
    assert isinstance(owner.answers[owner.commit(call, 10)], CursorLostError)
    assert not owner.core.has_claims


def test_soon_moves_share_a_message() -> None:
    owner = Owner()
    call = owner.own()
    for gsn in (6, 7, 8):
        assert owner.answers[owner.commit(call, gsn, soon=True)] == RecordId(gsn, 0)
    assert owner.moves() == []
    owner.pass_time(COMMIT_INTERVAL_NS)
    assert owner.moves() == [[CursorMove("x", 1, 1, 8, b"")]]


def test_soon_moves_wait_until_the_last_ones_are_answered() -> None:
    owner = Owner()
    call = owner.own()
    for gsn in range(6, 66):
        owner.commit(call, gsn, soon=True)
        owner.pass_time(COMMIT_INTERVAL_NS)
    sent = [message for _, message in owner.take(wire.CursorMoves)]
    assert {message.moves[0].position for message in sent} == {6}
    owner.give(wire.CursorsMoved(CLUSTER, sent[-1].request))
    owner.pass_time(COMMIT_INTERVAL_NS)
    assert owner.moves() == [[CursorMove("x", 1, 2, 65, b"")]]


def test_soon_moves_of_all_claims_leave_together() -> None:
    owner = Owner()
    first, second = owner.own(), owner.own_without_reading(name="y")
    owner.commit(first, 6, soon=True)
    owner.pass_time(COMMIT_INTERVAL_NS // 2)
    owner.commit(second, 7, soon=True)
    assert owner.moves() == []
    owner.pass_time(COMMIT_INTERVAL_NS // 2)
    assert [[one.name for one in moves] for moves in owner.moves()] == [["x", "y"]]


def test_message_has_at_most_so_many_moves() -> None:
    owner = Owner()
    for number in range(MAX_MOVES + 1):
        owner.commit(owner.own_without_reading(name=f"c{number}"), 6, soon=True)
    owner.pass_time(COMMIT_INTERVAL_NS)
    assert [len(moves) for moves in owner.moves()] == [MAX_MOVES, 1]


def test_refused_move_ends_only_its_own_claim() -> None:
    owner = Owner()
    first, second = owner.own_without_reading(), owner.own_without_reading(name="y")
    for call in (first, second):
        owner.commit(call, 6, soon=True)
    owner.pass_time(COMMIT_INTERVAL_NS)
    owner.moved(cursor(term=2, owner=b"other:9"), "stale-term")
    assert owner.state(first).lost == "other:9 claimed it"
    assert (owner.state(second).lost, owner.state(second).position) == ("", RecordId(6, 0))


def test_commit_takes_the_place_of_a_soon_move() -> None:
    owner = Owner()
    call = owner.own()
    owner.commit(call, 6, soon=True)
    owner.commit(call, 8)
    owner.moved()
    owner.pass_time(2 * S)
    assert owner.moves() == []


# --- the end ---


def test_release_sends_the_last_move_first() -> None:
    owner = Owner()
    call = owner.own()
    owner.commit(call, 6, soon=True)
    release = owner.call(ReleaseRequest(owner.until(), call))
    assert owner.take(wire.CursorRelease) == []
    owner.moved()
    owner.reply(wire.CursorRelease, cursor(owner=b""))
    assert owner.answers[release] is None
    assert isinstance(owner.answers[owner.commit(call, 7)], ClosedError)


def test_release_overtakes_no_soon_move_that_has_no_reply() -> None:
    owner = Owner()
    call = owner.own()
    owner.commit(call, 6, b"m", soon=True)
    owner.pass_time(COMMIT_INTERVAL_NS)
    owner.moves()  # They are lost.
    release = owner.call(ReleaseRequest(owner.until(), call))
    assert owner.take(wire.CursorRelease) == []
    assert owner.moved() == CursorMove("x", 1, 2, 6, b"m")
    owner.reply(wire.CursorRelease, cursor(owner=b""))
    assert owner.answers[release] is None


@pytest.mark.parametrize("is_late", [True, False])
def test_release_overtakes_no_commit_that_has_no_reply(is_late: bool) -> None:
    owner = Owner()
    call = owner.own()
    commit = owner.commit(call, 6, b"m")
    owner.moves()  # They are lost.
    if is_late:
        owner.pass_time(10 * S)
        assert isinstance(owner.answers[commit], DeadlineError)
        owner.moves()
    release = owner.call(ReleaseRequest(owner.until(), call))
    assert owner.take(wire.CursorRelease) == []
    assert owner.moved() == CursorMove("x", 1, 2, 6, b"m")
    owner.reply(wire.CursorRelease, cursor(owner=b""))
    assert owner.answers[release] is None


@pytest.mark.parametrize("has_commit", [True, False])
def test_release_repeats_no_move_that_is_confirmed_or_replaced(has_commit: bool) -> None:
    owner = Owner()
    call = owner.own()
    owner.commit(call, 6, b"former", soon=True)
    owner.pass_time(COMMIT_INTERVAL_NS)
    if has_commit:
        owner.commit(call, 6, b"newer")
    owner.moved()
    owner.call(ReleaseRequest(owner.until(), call))
    assert owner.moves() == []
    assert len(owner.take(wire.CursorRelease)) == 1


def test_release_without_an_answer_ends_at_its_deadline() -> None:
    owner = Owner()
    call = owner.own()
    release = owner.call(ReleaseRequest(owner.until(S), call))
    owner.pass_time(2 * S)
    assert isinstance(owner.answers[release], DeadlineError)


@pytest.mark.parametrize("is_closed", [True, False])
def test_dropped_cursor_is_moved_and_released(is_closed: bool) -> None:
    owner = Owner()
    call = owner.own()
    owner.commit(call, 6, soon=True)
    if is_closed:
        owner.step(Closing())
    else:
        owner.call(UnsubscribeRequest(NEVER, call))
    assert owner.moves()[0][0].position == 6
    assert owner.take(wire.CursorRelease)[0][1].term == 1
    assert not owner.core.has_claims


@pytest.mark.parametrize("is_closed", [True, False])
def test_dropped_claim_without_a_subscription_is_released(is_closed: bool) -> None:
    owner = Owner()
    call = owner.own_without_reading()
    watch = owner.watch(call)
    owner.commit(call, 6, soon=True)
    if is_closed:
        owner.step(Closing())
    else:
        owner.call(UnsubscribeRequest(NEVER, call))
    assert owner.moves()[0][0].position == 6
    assert owner.take(wire.CursorRelease)[0][1].term == 1
    assert isinstance(owner.answers[watch], ClosedError)


def test_late_cancellation_of_a_granted_claim_leaves_it() -> None:
    owner = Owner()
    call = owner.own_without_reading()
    owner.cancel(call)
    assert owner.core.has_claims
    owner.call(ReleaseRequest(owner.until(), call))
    owner.reply(wire.CursorRelease, cursor(owner=b""))
    assert isinstance(owner.answers[owner.call(ClaimQuery(NEVER, call))], ClosedError)


def test_release_forgets_a_lost_claim_without_a_subscription() -> None:
    owner = Owner()
    call = owner.own_without_reading()
    owner.pass_time(S)
    owner.renewed(deleted=["x"])
    assert owner.answers[owner.call(ReleaseRequest(owner.until(), call))] is None
    assert isinstance(owner.answers[owner.call(ClaimQuery(NEVER, call))], ClosedError)


def test_release_overtakes_no_move_although_an_earlier_one_has_its_reply() -> None:
    owner = Owner()
    call = owner.own()
    owner.commit(call, 7)
    owner.commit(call, 9)
    (_, first), (_, second) = owner.take(wire.CursorMoves)
    owner.give(wire.CursorsMoved(CLUSTER, first.request, []))
    owner.call(ReleaseRequest(owner.until(), call))
    assert owner.take(wire.CursorRelease) == []
    owner.give(wire.CursorsMoved(CLUSTER, second.request, []))
    assert owner.moved().position == 9
    assert len(owner.take(wire.CursorRelease)) == 1


def test_late_reply_to_an_earlier_move_takes_no_position_back() -> None:
    owner = Owner()
    call = owner.own()
    owner.commit(call, 7, b"former")
    owner.commit(call, 9, b"newer")
    (_, first), (_, second) = owner.take(wire.CursorMoves)
    owner.give(wire.CursorsMoved(CLUSTER, second.request, []))
    owner.give(wire.CursorsMoved(CLUSTER, first.request, []))
    assert (owner.state(call).position.gsn, owner.state(call).mark) == (9, b"newer")
