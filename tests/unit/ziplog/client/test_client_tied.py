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
    harness = connected(pinned)
    call = harness.call(
        InsertRequest(harness.until(timeout), list(payloads), RID_GENESIS, None, 0, many=True)
    )
    units = sent(harness)
    learn(harness)
    learn(harness, 2, "live")
    harness.pass_time(1)
    return harness, call, units


def placed(insert: Insert, gsn: int) -> list[Any]:
    return [ack(insert, 0, [gsn]), ack(insert, 1, [gsn])]


def failed(harness: ClientHarness, call: int, *gsns: int) -> None:
    """Check that a call failed permanently, with these positions (0: none)."""
    harness.pass_time(1)
    sent_locates(harness)
    error = harness.answers[call]
    assert type(error) is UnavailableError, repr(error)
    assert not error.retriable
    assert error.results == [RecordId(gsn, 0) if gsn else None for gsn in gsns]
    missing = gsns.count(0)
    assert f"lost {missing} of the {len(gsns)} records" in str(error)
    assert "recovery" in str(error)
    harness.pass_time(5 * S)
    assert not sent(harness)
    assert not sent_locates(harness)
    harness.insert(b"z")
    (later,) = sent(harness)
    assert later.first_incomplete == later.seq, "nothing of it stays in flight"


def test_nothing_is_sent_while_a_later_unit_may_be_placed() -> None:
    harness, call, units = with_recovered_shard()
    assert not sent(harness)
    questions = sent_locates(harness)
    assert {q.seq for q in questions} == {unit.seq for unit in units}
    assert {q.view for q in questions} == {1}
    for unit in units[:-1]:
        harness.give(located(unit, 2))
        harness.pass_time(100 * MS)
        assert not sent(harness)
    assert call not in harness.answers
    assert {q.seq for q in sent_locates(harness)} >= {units[-1].seq}


def test_absent_unit_is_not_sent_after_a_later_unit_was_placed() -> None:
    harness, call, (a, b, c, d) = with_recovered_shard()
    harness.give(located(b, 2), located(a, 2, [3]), located(c, 2, [5]))
    harness.pass_time(1 * S)
    assert call not in harness.answers, "the last unit may be placed, too"
    harness.give(located(d, 2))
    harness.pass_time(1)
    failed(harness, call, 3, 0, 5, 0)


def test_order_of_located_replies_does_not_matter() -> None:
    harness, call, (a, b, c, d) = with_recovered_shard()
    harness.give(located(d, 2, [9]), located(c, 2), located(b, 2), located(a, 2))
    harness.pass_time(1)
    failed(harness, call, 0, 0, 0, 9)


def test_absent_last_units_are_sent_again_in_order() -> None:
    harness, call, (a, b, c, d) = with_recovered_shard()
    harness.give(located(d, 2), located(b, 2, [4]), located(c, 2))
    harness.pass_time(1)
    assert not sent(harness)
    harness.give(located(a, 2, [3]))
    harness.pass_time(1)
    again = sent(harness)
    assert [(m.seq, m.view, m.body) for m in again] == [(c.seq, 2, c.body), (d.seq, 2, d.body)]
    harness.give(*placed(again[0], 7), *placed(again[1], 8))
    assert harness.answers[call] == [RecordId(gsn, 0) for gsn in (3, 4, 7, 8)]


def test_call_without_placed_units_is_sent_again() -> None:
    harness, call, units = with_recovered_shard()
    harness.give(*(located(unit, 2) for unit in reversed(units)))
    harness.pass_time(1)
    again = sent(harness)
    assert [m.seq for m in again] == [unit.seq for unit in units]
    harness.give(*(m for index, unit in enumerate(again) for m in placed(unit, 7 + index)))
    assert harness.answers[call] == [RecordId(gsn, 0) for gsn in (7, 8, 9, 10)]


def test_first_unit_without_later_units_is_not_located() -> None:
    harness, call, (a, b) = with_recovered_shard(PAYLOADS[:2])
    harness.give(located(b, 2))
    harness.pass_time(1)
    assert [m.seq for m in sent(harness)] == [a.seq, b.seq]
    assert call not in harness.answers


def test_acks_of_the_older_view_count() -> None:
    """All replicas of a view held it, so every later view has it."""
    harness, call, (a, b) = with_recovered_shard(PAYLOADS[:2])
    harness.give(*placed(b, 6))
    harness.pass_time(1)
    assert not sent(harness)
    harness.give(located(a, 2))
    failed(harness, call, 0, 6)


def test_ack_of_the_older_view_may_complete_a_call() -> None:
    harness, call, (a, b) = with_recovered_shard(PAYLOADS[:2])
    harness.give(located(a, 2))
    harness.pass_time(1)
    harness.give(*placed(b, 6))
    failed(harness, call, 0, 6)


def test_what_was_placed_before_the_recovery_counts() -> None:
    harness = connected(pinned)
    call = harness.insert(*PAYLOADS[:2])
    a, b = sent(harness)
    harness.give(*placed(b, 6))
    learn(harness, 2, "live")
    harness.pass_time(1)
    assert not sent(harness)
    harness.give(located(a, 3))
    failed(harness, call, 0, 6)


def test_the_second_recovery_is_like_the_first() -> None:
    harness, call, units = with_recovered_shard(PAYLOADS[:2])
    harness.give(*(located(unit, 2) for unit in units))
    harness.pass_time(1)
    a, b = sent(harness)
    learn(harness, 3, "live")
    harness.give(located(a, 2), located(b, 2))
    harness.pass_time(1)
    assert not sent(harness), "copies of view 2 may be placed"
    harness.give(located(a, 3), located(b, 3, [9]))
    failed(harness, call, 0, 9)


def test_blocked_call_continues_once_its_placed_units_are_known() -> None:
    harness = connected(pinned)
    call = harness.insert(*[bytes(200_000)] * 30)
    units = sent(harness)
    assert len(units) < 30
    learn(harness, 2, "live")
    for number, unit in enumerate(units[:5]):
        harness.give(located(unit, 2, [number + 1]))
        harness.pass_time(1)
        assert not sent(harness), "not even units that were never sent"
    other = harness.insert(b"other")
    (single,) = sent(harness)
    harness.give(*placed(single, 100))
    assert harness.answers[other], "other calls do not wait for it"
    for unit in units[5:]:
        harness.give(located(unit, 2))
    harness.pass_time(1 * S)
    again = {m.seq: m for m in sent(harness)}
    assert again.keys() >= {unit.seq for unit in units[5:]}
    gsn = 200
    while again:
        for unit in again.values():
            harness.give(*placed(unit, gsn))
            gsn += 1
        again = {m.seq: m for m in sent(harness)}
    assert len(harness.answers[call]) == 30


def test_blocked_call_has_an_unknown_outcome_at_its_deadline() -> None:
    harness, call, (a, b, c) = with_recovered_shard(PAYLOADS[:3], timeout=2 * S)
    harness.give(located(b, 2), located(c, 2, [5]))
    harness.pass_time(3 * S)
    error = harness.answers[call]
    assert isinstance(error, OutcomeUnknownError)
    assert error.results == [None, None, RecordId(5, 0)]
    question = resolve(harness, error)
    assert not sent(harness)
    harness.give(located(a, 2))
    assert harness.answers[question] == [None, None, RecordId(5, 0)]


def test_calls_of_one_unit_are_sent_at_once() -> None:
    harness, _, (single,) = with_recovered_shard(PAYLOADS[:1])
    (again,) = sent(harness)
    assert (again.seq, again.view) == (single.seq, 2)


def test_unit_that_all_replicas_refused_is_not_located() -> None:
    harness = connected(pinned)
    call = harness.insert(*PAYLOADS[:2])
    a, b = sent(harness)
    harness.give(refused(a, 0, "full"), refused(a, 1, "full"))
    learn(harness, 2, "live")
    harness.pass_time(1)
    assert not sent(harness), "the second unit may be placed"
    assert {q.seq for q in sent_locates(harness)} == {b.seq}
    harness.give(located(b, 2))
    harness.pass_time(1)
    assert [m.seq for m in sent(harness)] == [a.seq, b.seq]
    assert call not in harness.answers


def test_rerouted_call_is_not_blocked() -> None:
    harness = connected()
    call = harness.insert(*PAYLOADS[:2])
    a, b = sent(harness)
    learn(harness, 2, "live")
    learn(harness, 2)
    harness.give(located(a, 2), located(b, 2))
    moved = sent(harness)
    assert [(m.shard, m.body) for m in moved] == [(1, a.body), (1, b.body)]
    learn(harness, 3, "live")
    harness.give(*placed(moved[0], 2), *placed(moved[1], 4))
    assert harness.answers[call] == [RecordId(2, 1), RecordId(4, 1)]
