"""Refusals of one server that decide nothing about an insert."""

from __future__ import annotations

import pytest

from tests.unit.ziplog.client.fakes import S, ack, connected, refused, sent
from ziplog.types import RecordId


@pytest.mark.parametrize("code", ["no-such-position", "too-large"])
def test_backup_alone_does_not_refuse_a_record(code: str) -> None:
    harness = connected()
    call = harness.insert(b"x", after=RecordId(5, 0))
    (insert,) = sent(harness)
    harness.give(refused(insert, 1, code))  # type: ignore[arg-type]
    harness.pass_time(S)
    assert call not in harness.answers
    harness.give(ack(insert, 0, [7]), ack(insert, 1, [7], confirmed=True))
    assert harness.answers[call] == [RecordId(7, 0)]


def test_acks_of_a_server_that_restarted_are_newer_than_those_before() -> None:
    harness = connected()
    call = harness.insert(b"x")
    (insert,) = sent(harness)
    harness.give(ack(insert, 1, [5], counter=9))
    harness.give(ack(insert, 0, [7]), ack(insert, 1, [7], incarnation=2))
    assert harness.answers[call] == [RecordId(7, 0)]
