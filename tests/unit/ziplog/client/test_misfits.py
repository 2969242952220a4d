"""Inserts that no server can place (docs/protocol.md, section 4)."""

from __future__ import annotations

import pytest

from tests.unit.ziplog.client.fakes import S, ack, connected, learn, pinned, refused, sent
from ziplog.client.common.requests import InsertRequest
from ziplog.core.view import NO_DIGEST, Lease, Member
from ziplog.errors import RecordTooLargeError
from ziplog.types import RID_GENESIS, RecordId


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
