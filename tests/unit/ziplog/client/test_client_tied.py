"""A call's units stay in order through a recovery, or its call fails (docs/protocol.md, 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.ziplog.client.fakes import (
    MS,
    ClientHarness,
    S,
    ack,
    connected,
    learn,
    pinned,
    refused,
    resolve,
    sent,
)
from tests.unit.ziplog.client.test_client_recovery import located, sent_locates
from ziplog.client.common.requests import InsertRequest
from ziplog.client.inserts import insert_calls
from ziplog.errors import OutcomeUnknownError, UnavailableError
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.wire import Insert

PAYLOADS = [b"0", b"1", b"2", b"3"]


@pytest.fixture(autouse=True)
def single_record_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each unit have one record."""
    monkeypatch.setattr(insert_calls, "UNIT_RECORDS", 1)


def with_recovered_shard(
    payloads: Sequence[bytes] = PAYLOADS, timeout: int = 60 * S
) -> tuple[ClientHarness, int, list[Insert]]:
    """Return a client with a call of several units, sent before a recovery of their shard."""
    glass = connected(pinned)
    call = glass.call(
        InsertRequest(glass.until(timeout), list(payloads), RID_GENESIS, None, 0, many=True)
    )
    units = sent(glass)
    learn(glass)
    learn(glass, 2, "live")
    glass.pass_time(1)
    return glass, call, units


def placed(insert: Insert, gsn: int) -> list[Any]:
    return [ack(insert, 0, [gsn]), ack(insert, 1, [gsn])]


def failed(glass: ClientHarness, call: int, *gsns: int) -> None:
    """Check that a call failed permanently, with these positions (0: none)."""
    glass.pass_time(1)
    sent_locates(glass)
    error = glass.answers[call]
    assert type(error) is UnavailableError, repr(error)
    assert not error.retriable
    assert error.results == [RecordId(gsn, 0) if gsn else None for gsn in gsns]
    missing = gsns.count(0)
    assert f"lost {missing} of the {len(gsns)} records" in str(error)
    assert "recovery" in str(error)
    glass.pass_time(5 * S)
    assert not sent(glass)
    assert not sent_locates(glass)
    glass.insert(b"z")
    (later,) = sent(glass)
    assert later.first_incomplete == later.seq, "nothing of it stays in flight"


def test_nothing_is_sent_while_a_later_unit_may_be_placed() -> None:
    glass, call, units = with_recovered_shard()
    assert not sent(glass)
    questions = sent_locates(glass)
    assert {q.seq for q in questions} == {unit.seq for unit in units}
    assert {q.view for q in questions} == {1}
    for unit in units[:-1]:
        glass.give(located(unit, 2))
        glass.pass_time(100 * MS)
        assert not sent(glass)
    assert call not in glass.answers
    assert {q.seq for q in sent_locates(glass)} >= {units[-1].seq}


def test_absent_unit_is_not_sent_after_a_later_unit_was_placed() -> None:
    glass, call, (a, b, c, d) = with_recovered_shard()
    glass.give(located(b, 2), located(a, 2, [3]), located(c, 2, [5]))
    glass.pass_time(1 * S)
    assert call not in glass.answers, "the last unit may be placed, too"
    glass.give(located(d, 2))
    glass.pass_time(1)
    failed(glass, call, 3, 0, 5, 0)


def test_order_of_located_replies_does_not_matter() -> None:
    glass, call, (a, b, c, d) = with_recovered_shard()
    glass.give(located(d, 2, [9]), located(c, 2), located(b, 2), located(a, 2))
    glass.pass_time(1)
    failed(glass, call, 0, 0, 0, 9)


def test_absent_last_units_are_sent_again_in_order() -> None:
    glass, call, (a, b, c, d) = with_recovered_shard()
    glass.give(located(d, 2), located(b, 2, [4]), located(c, 2))
    glass.pass_time(1)
    assert not sent(glass)
    glass.give(located(a, 2, [3]))
    glass.pass_time(1)
    again = sent(glass)
    assert [(m.seq, m.view, m.body) for m in again] == [(c.seq, 2, c.body), (d.seq, 2, d.body)]
    glass.give(*placed(again[0], 7), *placed(again[1], 8))
    assert glass.answers[call] == [RecordId(gsn, 0) for gsn in (3, 4, 7, 8)]


def test_call_without_placed_units_is_sent_again() -> None:
    glass, call, units = with_recovered_shard()
    glass.give(*(located(unit, 2) for unit in reversed(units)))
    glass.pass_time(1)
    again = sent(glass)
    assert [m.seq for m in again] == [unit.seq for unit in units]
    glass.give(*(m for index, unit in enumerate(again) for m in placed(unit, 7 + index)))
    assert glass.answers[call] == [RecordId(gsn, 0) for gsn in (7, 8, 9, 10)]


def test_first_unit_without_later_units_is_not_located() -> None:
    glass, call, (a, b) = with_recovered_shard(PAYLOADS[:2])
    glass.give(located(b, 2))
    glass.pass_time(1)
    assert [m.seq for m in sent(glass)] == [a.seq, b.seq]
    assert call not in glass.answers


def test_acks_of_the_older_view_count() -> None:
    """All replicas of a view held it, so every later view has it."""
    glass, call, (a, b) = with_recovered_shard(PAYLOADS[:2])
    glass.give(*placed(b, 6))
    glass.pass_time(1)
    assert not sent(glass)
    glass.give(located(a, 2))
    failed(glass, call, 0, 6)


def test_ack_of_the_older_view_may_complete_a_call() -> None:
    glass, call, (a, b) = with_recovered_shard(PAYLOADS[:2])
    glass.give(located(a, 2))
    glass.pass_time(1)
    glass.give(*placed(b, 6))
    failed(glass, call, 0, 6)


def test_what_was_placed_before_the_recovery_counts() -> None:
    glass = connected(pinned)
    call = glass.insert(*PAYLOADS[:2])
    a, b = sent(glass)
    glass.give(*placed(b, 6))
    learn(glass, 2, "live")
    glass.pass_time(1)
    assert not sent(glass)
    glass.give(located(a, 3))
    failed(glass, call, 0, 6)


def test_the_second_recovery_is_like_the_first() -> None:
    glass, call, units = with_recovered_shard(PAYLOADS[:2])
    glass.give(*(located(unit, 2) for unit in units))
    glass.pass_time(1)
    a, b = sent(glass)
    learn(glass, 3, "live")
    glass.give(located(a, 2), located(b, 2))
    glass.pass_time(1)
    assert not sent(glass), "copies of view 2 may be placed"
    glass.give(located(a, 3), located(b, 3, [9]))
    failed(glass, call, 0, 9)


def test_blocked_call_continues_once_its_placed_units_are_known() -> None:
    glass = connected(pinned)
    call = glass.insert(*[bytes(200_000)] * 30)
    units = sent(glass)
    assert len(units) < 30
    learn(glass, 2, "live")
    for number, unit in enumerate(units[:5]):
        glass.give(located(unit, 2, [number + 1]))
        glass.pass_time(1)
        assert not sent(glass), "not even units that were never sent"
    other = glass.insert(b"other")
    (single,) = sent(glass)
    glass.give(*placed(single, 100))
    assert glass.answers[other], "other calls do not wait for it"
    for unit in units[5:]:
        glass.give(located(unit, 2))
    glass.pass_time(1 * S)
    again = {m.seq: m for m in sent(glass)}
    assert again.keys() >= {unit.seq for unit in units[5:]}
    gsn = 200
    while again:
        for unit in again.values():
            glass.give(*placed(unit, gsn))
            gsn += 1
        again = {m.seq: m for m in sent(glass)}
    assert len(glass.answers[call]) == 30


def test_blocked_call_has_an_unknown_outcome_at_its_deadline() -> None:
    glass, call, (a, b, c) = with_recovered_shard(PAYLOADS[:3], timeout=2 * S)
    glass.give(located(b, 2), located(c, 2, [5]))
    glass.pass_time(3 * S)
    error = glass.answers[call]
    assert isinstance(error, OutcomeUnknownError)
    assert error.results == [None, None, RecordId(5, 0)]
    question = resolve(glass, error)
    assert not sent(glass)
    glass.give(located(a, 2))
    assert glass.answers[question] == [None, None, RecordId(5, 0)]


def test_calls_of_one_unit_are_sent_at_once() -> None:
    glass, _, (single,) = with_recovered_shard(PAYLOADS[:1])
    (again,) = sent(glass)
    assert (again.seq, again.view) == (single.seq, 2)


def test_unit_that_all_replicas_refused_is_not_located() -> None:
    glass = connected(pinned)
    call = glass.insert(*PAYLOADS[:2])
    a, b = sent(glass)
    glass.give(refused(a, 0, "full"), refused(a, 1, "full"))
    learn(glass, 2, "live")
    glass.pass_time(1)
    assert not sent(glass), "the second unit may be placed"
    assert {q.seq for q in sent_locates(glass)} == {b.seq}
    glass.give(located(b, 2))
    glass.pass_time(1)
    assert [m.seq for m in sent(glass)] == [a.seq, b.seq]
    assert call not in glass.answers


def test_rerouted_call_is_not_blocked() -> None:
    glass = connected()
    call = glass.insert(*PAYLOADS[:2])
    a, b = sent(glass)
    learn(glass, 2, "live")
    learn(glass, 2)
    glass.give(located(a, 2), located(b, 2))
    moved = sent(glass)
    assert [(m.shard, m.body) for m in moved] == [(1, a.body), (1, b.body)]
    learn(glass, 3, "live")
    glass.give(*placed(moved[0], 2), *placed(moved[1], 4))
    assert glass.answers[call] == [RecordId(2, 1), RecordId(4, 1)]
