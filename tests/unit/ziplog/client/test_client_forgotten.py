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
from ziplog.client.inserts import sending
from ziplog.client.inserts.insert_calls import UNIT_RECORDS
from ziplog.core.distance import initial_retransmit_ns
from ziplog.errors import OutcomeUnknownError
from ziplog.types import RecordId


def expired(insert: wire.Insert, server: int, since: int = 50) -> wire.Refused:
    return msgspec.structs.replace(refused(insert, server, "expired"), since=since)


def test_units_carry_the_decided_position_of_their_creation() -> None:
    harness = connected(pinned)
    harness.insert(b"x")
    (first,) = sent(harness)
    assert first.since == 1, "the client knows no position of the shard"
    harness.give(ack(first, 0, [7]), ack(first, 1, [7]))
    harness.insert(b"y")
    (second,) = sent(harness)
    assert second.since == 8
    harness.pass_time(initial_retransmit_ns(0) + MS)
    (copy,) = sent(harness)
    assert (copy.copy, copy.since) == (2, 8), "all copies of a unit have the same `since`"


def test_first_unit_uses_the_frontier_of_the_membership_service() -> None:
    harness = ClientHarness(pinned)
    harness.connect(placement(0))
    news = msgspec.structs.replace(info(99, [placement(0), placement(1)], []), frontiers=[40, 0])
    harness.core._routing.update(news)
    harness.insert(b"x")
    (insert,) = sent(harness)
    assert insert.since == 40


def test_unit_that_all_replicas_refuse_gets_a_new_identity_at_once() -> None:
    harness = connected(pinned)
    call = harness.insert(b"x")
    (insert,) = sent(harness)
    harness.give(expired(insert, 0, 50))
    assert not sent(harness), "the other replica may have accepted it"
    harness.give(expired(insert, 1, 48))
    (again,) = sent(harness)
    assert (again.shard, again.seq, again.since, again.first_incomplete) == (0, 2, 50, 2)
    assert again.body == insert.body
    harness.give(ack(again, 0, [51]), ack(again, 1, [51]))
    assert harness.answers[call] == [RecordId(51, 0)]
    assert harness.core.counters.moved == 0


def test_unit_that_is_known_to_be_absent_may_be_refused_as_expired_later() -> None:
    """The client was suspended between the two refusals."""
    harness = connected(pinned)
    call = harness.insert(b"x", timeout=2000 * S)
    (insert,) = sent(harness)
    harness.give(refused(insert, 0, "full"), refused(insert, 1, "full"))
    harness.now += 601 * S
    harness.core._context.now = harness.now  # No step expires the session.
    harness.give(expired(insert, 0), expired(insert, 1))
    (again,) = sent(harness)
    assert again.seq > insert.seq, "no server holds a copy, so the record gets a new identity"
    harness.give(ack(again, 0, [51]), ack(again, 1, [51]))
    assert harness.answers[call] == [RecordId(51, 0)]


def test_call_of_many_units_restarts_as_a_whole() -> None:
    harness = connected(pinned)
    call = harness.insert(*[b"x"] * (2 * UNIT_RECORDS))
    first, second = sent(harness)
    harness.give(expired(first, 0), expired(first, 1), expired(second, 0))
    assert not sent(harness)
    harness.give(expired(second, 1))
    again = sent(harness)
    assert [(unit.seq, unit.predecessor, unit.since) for unit in again] == [(3, 0, 50), (4, 3, 50)]
    assert call not in harness.answers


def test_one_replica_that_forgot_more_than_the_others_changes_nothing() -> None:
    harness = connected(pinned)
    call = harness.insert(b"x")
    (insert,) = sent(harness)
    harness.give(expired(insert, 1), ack(insert, 0, [9]))
    harness.pass_time(initial_retransmit_ns(0) + MS)
    (copy,) = sent(harness)
    assert copy.seq == insert.seq
    harness.give(ack(copy, 1, [9], confirmed=True))
    assert harness.answers[call] == [RecordId(9, 0)]


def test_ack_of_the_backup_keeps_a_unit_at_its_shard() -> None:
    """The backup's guess may become the decision of a recovery."""
    harness = connected(pinned)
    call = harness.insert(b"x")
    (insert,) = sent(harness)
    harness.give(ack(insert, 1, [9]), expired(insert, 0))
    harness.pass_time(5 * S)
    assert {unit.seq for unit in sent(harness)} == {insert.seq}
    assert call not in harness.answers


@pytest.mark.parametrize("server", [0, 1])
def test_unit_that_was_sent_long_ago_is_never_sent_again(server: int) -> None:
    """A client that runs, but was offline: the unit may be in the log, and forgotten."""
    harness = connected(pinned)
    call = harness.insert(b"x", timeout=3600 * S)
    (insert,) = sent(harness)
    for _ in range(601):
        harness.pass_time(1 * S)
    sent(harness)
    harness.give(expired(insert, server))
    error = harness.answers[call]
    assert isinstance(error, OutcomeUnknownError)
    assert "session" in str(error)
    again = harness.answers[resolve(harness, error)]
    assert isinstance(again, OutcomeUnknownError)
    harness.pass_time(60 * S)
    assert not sent(harness)
    harness.insert(b"y")
    (fresh,) = sent(harness)
    assert (fresh.seq, fresh.first_incomplete, fresh.since) == (2, 2, 50)


def with_pending_resolve() -> tuple[ClientHarness, wire.Insert, int]:
    """Return a client that waits for an unknown outcome, its unit and that call."""
    harness = connected(pinned)
    call = harness.insert(b"x", timeout=1 * S)
    (insert,) = sent(harness)
    harness.pass_time(1 * S)
    error = harness.answers[call]
    assert isinstance(error, OutcomeUnknownError)
    return harness, insert, resolve(harness, error, 10_000 * S)


@pytest.mark.parametrize("is_suspended", [False, True])
def test_resolve_ends_once_the_outcome_can_no_longer_be_known(*, is_suspended: bool) -> None:
    harness, insert, asked = with_pending_resolve()
    if is_suspended:
        harness.now += 601 * S
    else:
        for _ in range(601):
            harness.pass_time(1 * S)
        assert asked not in harness.answers
        harness.give(expired(insert, 0))
    harness.pass_time(0)
    error = harness.answers[asked]
    assert isinstance(error, OutcomeUnknownError)
    assert "session" in str(error)


def test_resolve_ends_at_a_protocol_violation() -> None:
    harness, insert, asked = with_pending_resolve()
    harness.give(refused(insert, 0, "identity-reused"))
    error = harness.answers[asked]
    assert isinstance(error, OutcomeUnknownError)
    assert isinstance(harness.answers[resolve(harness, error)], OutcomeUnknownError)


def test_insert_that_waited_during_a_suspension_is_as_new_as_its_first_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is sent once the units before it are forgotten, so all replicas may refuse it as old."""
    harness = connected(pinned)
    monkeypatch.setattr(sending, "MAX_INFLIGHT_BYTES", 1)
    first = harness.insert(b"x", timeout=2000 * S)
    waiting = harness.insert(b"y", b"z", timeout=2000 * S)
    assert len(sent(harness)) == 1, "the window is full"
    harness.now += 601 * S
    harness.pass_time(0)
    assert isinstance(harness.answers[first], OutcomeUnknownError)
    (insert,) = sent(harness)
    harness.give(expired(insert, 0), expired(insert, 1))
    (again,) = sent(harness)
    assert (again.since, waiting in harness.answers) == (50, False)


def test_unknown_outcome_of_an_expired_unit_resolves_to_absent() -> None:
    harness = connected(pinned)
    call = harness.insert(b"x", timeout=1 * S)
    (insert,) = sent(harness)
    harness.pass_time(1 * S)
    error = harness.answers[call]
    assert isinstance(error, OutcomeUnknownError)
    asked = resolve(harness, error)
    harness.give(expired(insert, 0), expired(insert, 1))
    assert harness.answers[asked] == [None]


def test_locate_carries_the_decided_position_of_the_unit() -> None:
    harness = connected(pinned)
    harness.insert(b"x")
    (insert,) = sent(harness)
    harness.give(refused(insert, 0, "not-ready"))
    harness.pass_time(100 * MS)
    requests = [request for _, request in harness.take(wire.Locate)]
    assert requests
    assert all(request.since == insert.since for request in requests)
