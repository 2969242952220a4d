"""Units that servers cannot distinguish from forgotten ones (docs/protocol.md, 4, rule 13)."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.ziplog.client.fakes import (
    MS,
    ClientHarness,
    S,
    ack,
    connected,
    info,
    pinned,
    placement,
    refused,
    resolve,
    sent,
)
from ziplog import wire
from ziplog.client.inserts.insert_calls import UNIT_RECORDS
from ziplog.core.distance import initial_retransmit_ns
from ziplog.errors import OutcomeUnknownError
from ziplog.types import RecordId


def expired(insert: wire.Insert, server: int, since: int = 50) -> wire.Refused:
    return msgspec.structs.replace(refused(insert, server, "expired"), since=since)


def test_units_carry_the_decided_position_of_their_creation() -> None:
    glass = connected(pinned)
    glass.insert(b"x")
    (first,) = sent(glass)
    assert first.since == 1, "the client knows no position of the shard"
    glass.give(ack(first, 0, [7]), ack(first, 1, [7]))
    glass.insert(b"y")
    (second,) = sent(glass)
    assert second.since == 8
    glass.pass_time(initial_retransmit_ns(0) + MS)
    (copy,) = sent(glass)
    assert (copy.copy, copy.since) == (2, 8), "all copies of a unit have the same `since`"


def test_first_unit_uses_the_frontier_of_the_membership_service() -> None:
    glass = ClientHarness(pinned)
    glass.connect(placement(0))
    news = msgspec.structs.replace(info(99, [placement(0), placement(1)], []), frontiers=[40, 0])
    glass.core._routing.update(news)
    glass.insert(b"x")
    (insert,) = sent(glass)
    assert insert.since == 40


def test_unit_that_all_replicas_refuse_gets_a_new_identity_at_once() -> None:
    glass = connected(pinned)
    call = glass.insert(b"x")
    (insert,) = sent(glass)
    glass.give(expired(insert, 0, 50))
    assert not sent(glass), "the other replica may have accepted it"
    glass.give(expired(insert, 1, 48))
    (again,) = sent(glass)
    assert (again.shard, again.seq, again.since, again.first_incomplete) == (0, 2, 50, 2)
    assert again.body == insert.body
    glass.give(ack(again, 0, [51]), ack(again, 1, [51]))
    assert glass.answers[call] == [RecordId(51, 0)]
    assert glass.core.counters.moved == 0


def test_unit_that_is_known_to_be_absent_may_be_refused_as_expired_later() -> None:
    """The client was suspended between the two refusals."""
    glass = connected(pinned)
    call = glass.insert(b"x", timeout=2000 * S)
    (insert,) = sent(glass)
    glass.give(refused(insert, 0, "full"), refused(insert, 1, "full"))
    glass.now += 601 * S
    glass.core._context.now = glass.now  # No step expires the session.
    glass.give(expired(insert, 0), expired(insert, 1))
    (again,) = sent(glass)
    assert again.seq > insert.seq, "no server holds a copy, so the record gets a new identity"
    glass.give(ack(again, 0, [51]), ack(again, 1, [51]))
    assert glass.answers[call] == [RecordId(51, 0)]


def test_call_of_many_units_restarts_as_a_whole() -> None:
    glass = connected(pinned)
    call = glass.insert(*[b"x"] * (2 * UNIT_RECORDS))
    first, second = sent(glass)
    glass.give(expired(first, 0), expired(first, 1), expired(second, 0))
    assert not sent(glass)
    glass.give(expired(second, 1))
    again = sent(glass)
    assert [(unit.seq, unit.predecessor, unit.since) for unit in again] == [(3, 0, 50), (4, 3, 50)]
    assert call not in glass.answers


def test_one_replica_that_forgot_more_than_the_others_changes_nothing() -> None:
    glass = connected(pinned)
    call = glass.insert(b"x")
    (insert,) = sent(glass)
    glass.give(expired(insert, 1), ack(insert, 0, [9]))
    glass.pass_time(initial_retransmit_ns(0) + MS)
    (copy,) = sent(glass)
    assert copy.seq == insert.seq
    glass.give(ack(copy, 1, [9], confirmed=True))
    assert glass.answers[call] == [RecordId(9, 0)]


def test_ack_of_the_backup_keeps_a_unit_at_its_shard() -> None:
    """The backup's guess may become the decision of a recovery."""
    glass = connected(pinned)
    call = glass.insert(b"x")
    (insert,) = sent(glass)
    glass.give(ack(insert, 1, [9]), expired(insert, 0))
    glass.pass_time(5 * S)
    assert {unit.seq for unit in sent(glass)} == {insert.seq}
    assert call not in glass.answers


@pytest.mark.parametrize("server", [0, 1])
def test_unit_that_was_sent_long_ago_is_never_sent_again(server: int) -> None:
    """A client that runs, but was offline: the unit may be in the log, and forgotten."""
    glass = connected(pinned)
    call = glass.insert(b"x", timeout=3600 * S)
    (insert,) = sent(glass)
    for _ in range(601):
        glass.pass_time(1 * S)
    sent(glass)
    glass.give(expired(insert, server))
    error = glass.answers[call]
    assert isinstance(error, OutcomeUnknownError)
    assert "session" in str(error)
    again = glass.answers[resolve(glass, error)]
    assert isinstance(again, OutcomeUnknownError)
    glass.pass_time(60 * S)
    assert not sent(glass)
    glass.insert(b"y")
    (fresh,) = sent(glass)
    assert (fresh.seq, fresh.first_incomplete, fresh.since) == (2, 2, 50)


def test_unknown_outcome_of_an_expired_unit_resolves_to_absent() -> None:
    glass = connected(pinned)
    call = glass.insert(b"x", timeout=1 * S)
    (insert,) = sent(glass)
    glass.pass_time(1 * S)
    error = glass.answers[call]
    assert isinstance(error, OutcomeUnknownError)
    asked = resolve(glass, error)
    glass.give(expired(insert, 0), expired(insert, 1))
    assert glass.answers[asked] == [None]


def test_locate_carries_the_decided_position_of_the_unit() -> None:
    glass = connected(pinned)
    glass.insert(b"x")
    (insert,) = sent(glass)
    glass.give(refused(insert, 0, "not-ready"))
    glass.pass_time(100 * MS)
    requests = [request for _, request in glass.take(wire.Locate)]
    assert requests
    assert all(request.since == insert.since for request in requests)
