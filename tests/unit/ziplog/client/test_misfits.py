"""Inserts that no server can place (docs/protocol.md, section 4)."""

from __future__ import annotations

from tests.unit.ziplog.client.fakes import connected, refused, sent
from ziplog.client.common.requests import InsertRequest
from ziplog.core.view import NO_DIGEST, Lease, Member
from ziplog.errors import RecordTooLargeError
from ziplog.types import RID_GENESIS


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
