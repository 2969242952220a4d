"""Inserts that no server can place (docs/protocol.md, section 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.ziplog.client.fakes import (
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
from ziplog.client.common.requests import InsertRequest
from ziplog.client.inserts.insert_calls import UNIT_RECORDS
from ziplog.core.view import NO_DIGEST, Lease, Member
from ziplog.errors import NoSuchRecordError, OutcomeUnknownError, RecordTooLargeError
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from ziplog import wire


def test_unit_that_no_epoch_can_hold_fails_with_both_numbers() -> None:
    """Two shards share the eight positions of an epoch; each payload is small."""
    harness = connected()
    harness.core._routing.lease = Lease(
        1, NO_DIGEST, 1, 0, 4, 8, 10, (Member(0, 1, 1), Member(1, 1, 1))
    )
    request = InsertRequest(harness.until(), [b"x"] * 5, RID_GENESIS, None, 0, many=True)
    call = harness.call(request)
    insert = sent(harness)[0]
    harness.give(refused(insert, 1, "too-large"), refused(insert, 0, "too-large"))
    error = harness.answers[call]
    assert isinstance(error, RecordTooLargeError)
    assert (error.size, error.limit, error.what) == (5, 4, "unit")
    assert str(error).startswith("5 records are placed together, but an epoch has 4 positions of")
    assert str(error).endswith("insert fewer records in one call")


def call_of_two_units(harness: ClientHarness) -> tuple[int, wire.Insert, wire.Insert]:
    call = harness.insert(*[b"x"] * (UNIT_RECORDS + 1), after=RecordId(5, 0))
    first, second = sent(harness)
    return call, first, second


def test_call_with_a_later_unit_that_a_server_holds_does_not_fail_as_too_large() -> None:
    """Servers place the later unit once the client has given up the one before it."""
    harness = connected(pinned)
    call, first, second = call_of_two_units(harness)
    harness.give(refused(first, 0, "too-large"), refused(first, 1, "too-large"))
    harness.give(ack(second, 1, [9]))
    harness.pass_time(11 * S)
    error = harness.answers[call]
    assert isinstance(error, OutcomeUnknownError)
    asked = resolve(harness, error)
    harness.pass_time(1 * S)
    again = sent(harness)[-1]
    assert again.seq == second.seq
    harness.give(ack(again, 0, [9]), ack(again, 1, [9], confirmed=True))
    assert harness.answers[asked] == [*[None] * UNIT_RECORDS, RecordId(9, 0)]


def test_error_of_a_later_unit_lists_the_records_of_the_earlier_one() -> None:
    harness = connected(pinned)
    call, first, second = call_of_two_units(harness)
    harness.give(refused(second, 0, "too-large"), refused(second, 1, "too-large"))
    assert call not in harness.answers, "the first unit may be placed"
    gsns = list(range(6, 6 + UNIT_RECORDS))
    harness.give(ack(first, 0, gsns), ack(first, 1, gsns))
    harness.pass_time(1 * S)
    error = harness.answers[call]
    assert isinstance(error, RecordTooLargeError)
    assert error.results == [*(RecordId(gsn, 0) for gsn in gsns), None]


def test_units_that_are_refused_together_fail_their_call_at_once() -> None:
    harness = connected(pinned)
    call, first, second = call_of_two_units(harness)
    harness.give(refused(first, 0, "no-such-position"), refused(second, 0, "no-such-position"))
    assert isinstance(harness.answers[call], NoSuchRecordError)
    harness.pass_time(10 * S)
    assert not sent(harness)


def test_call_ends_if_the_refusal_of_a_later_unit_was_lost() -> None:
    """The primary refuses it together with the unit before it, which it gets again."""
    harness = connected(pinned)
    call, first, _lost = call_of_two_units(harness)
    harness.give(refused(first, 0, "no-such-position"))
    harness.pass_time(2 * S)
    assert call not in harness.answers
    newest = {insert.seq: insert for insert in sent(harness)}
    harness.give(*(refused(newest[seq], 0, "no-such-position") for seq in (1, 2)))
    harness.pass_time(5 * S)
    assert isinstance(harness.answers[call], NoSuchRecordError)


@pytest.mark.parametrize("server", [0, 1])
def test_ack_after_a_refusal_keeps_the_insert(server: int) -> None:
    """The refusal answers an earlier copy; only what arrives last counts."""
    harness = connected(pinned)
    call = harness.insert(b"x")
    (insert,) = sent(harness)
    harness.give(refused(insert, 0, "too-large"), ack(insert, server, [7]))
    harness.pass_time(1 * S)
    assert call not in harness.answers, "a server may hold it"
    again = sent(harness)[-1]
    assert again.seq == insert.seq
    harness.give(ack(again, 0, [7], 2), ack(again, 1, [7], 2, confirmed=True))
    assert harness.answers[call] == [RecordId(7, 0)]


def test_refusal_of_an_older_view_does_not_fail_the_insert_in_the_next_one() -> None:
    harness = connected(pinned)
    call = harness.insert(b"x")
    (insert,) = sent(harness)
    harness.give(refused(insert, 0, "too-large"))
    learn(harness, view=2)
    learn(harness, view=2, state="live")
    harness.pass_time(0)
    (again,) = sent(harness)
    assert (again.seq, again.view) == (insert.seq, 2)
    harness.give(ack(again, 0, [7]), ack(again, 1, [7]))
    assert harness.answers[call] == [RecordId(7, 0)]
