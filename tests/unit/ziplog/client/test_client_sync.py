"""`sync`: waiting for stable storage (docs/protocol.md, sections 4 and 5)."""

from __future__ import annotations

from typing import Any

from tests.unit.ziplog.client.fakes import (
    CLUSTER,
    MS,
    ClientHarness,
    S,
    ack,
    connected,
    learn,
    pinned,
    resolve,
    sent,
)
from tests.unit.ziplog.client.test_client_recovery import located, with_pending_insert
from ziplog import wire
from ziplog.client.common.requests import SyncRequest
from ziplog.client.inserts.insert_calls import UNIT_RECORDS
from ziplog.errors import DeadlineError, NoSuchRecordError, OutcomeUnknownError
from ziplog.types import RID_GENESIS, RecordId


def synced(sync: wire.Sync, durable: int, view: int = 1) -> wire.Synced:
    return wire.Synced(CLUSTER, sync.shard, view, sync.request, durable)


def with_records(policy: Any = None) -> ClientHarness:
    """Return a client with a record at gsn 3 of shard 0 and at gsn 8 of shard 1."""
    shards = iter([0, 1])
    glass = connected(lambda _p, _k, _l: next(shards))
    for gsn in (3, 8):
        glass.insert(b"x")
        (insert,) = sent(glass)
        glass.give(ack(insert, 0, [gsn]), ack(insert, 1, [gsn]))
    glass.core.set_policy(policy or pinned)
    return glass


def test_sync_of_nothing() -> None:
    glass = connected()
    call = glass.call(SyncRequest(glass.until()))
    assert glass.answers[call] == RID_GENESIS
    assert not glass.sent


def test_sync_waits_for_all_shards_where_this_client_has_records() -> None:
    glass = with_records()
    call = glass.call(SyncRequest(glass.until()))
    questions = dict(glass.take(wire.Sync))
    assert {(name, m.shard, m.gsn) for name, m in questions.items()} == {
        ("s0r0:1", 0, 3), ("s1r0:1", 1, 8),
    }  # fmt: skip
    first, second = questions["s0r0:1"], questions["s1r0:1"]
    glass.give(synced(first, 3), synced(second, 8))
    assert call not in glass.answers, "`durable` is exclusive"
    glass.give(synced(second, 9))
    assert call not in glass.answers
    glass.pass_time(25 * MS)
    assert {name for name, _ in glass.take(wire.Sync)} == {"s0r0:1"}
    glass.give(synced(first, 4))
    assert glass.answers[call] == RecordId(8, 1)


def test_sync_is_retried_with_growing_backoff_and_at_once_in_a_new_view() -> None:
    glass = with_records()
    call = glass.call(SyncRequest(glass.until(30 * S)))
    for question in [m for _, m in glass.take(wire.Sync) if m.shard == 1]:
        glass.give(synced(question, 9))
    learn(glass)
    glass.pass_time(10 * S)
    assert 20 < len(glass.take(wire.Sync)) < 30
    learn(glass, 2, "live")
    glass.pass_time(1)
    ((name, question),) = glass.take(wire.Sync)
    assert (name, question.view) == ("s0r0:1", 2)
    glass.give(wire.Refused(CLUSTER, 0, 2, 0, question.request, "wrong-view"))
    glass.give(synced(question, 4))
    assert glass.answers[call] == RecordId(8, 1)
    glass.pass_time(200 * MS)
    assert glass.take(wire.Hello), "a refusal refreshes the placements"


def test_sync_ends_at_its_deadline_and_names_the_shard() -> None:
    glass = with_records()
    call = glass.call(SyncRequest(glass.until(1 * S)))
    learn(glass)
    for question in [m for _, m in glass.take(wire.Sync) if m.shard == 1]:
        glass.give(synced(question, 9))
    glass.pass_time(1 * S)
    error = glass.answers[call]
    assert isinstance(error, DeadlineError)
    assert "shard 0 (recovering)" in str(error)
    assert "shard 1" not in str(error)
    cancelled = glass.call(SyncRequest(glass.until(1 * S)))
    glass.cancel(cancelled)
    glass.take(wire.Sync)
    glass.pass_time(3 * S)
    assert not glass.take(wire.Sync)
    assert cancelled not in glass.answers


def test_sync_covers_inserts_that_a_recovery_placed() -> None:
    glass, call, insert = with_pending_insert()
    glass.give(located(insert, 2, [7]))
    assert call in glass.answers
    glass.take(wire.Sync)
    glass.call(SyncRequest(glass.until()))
    assert {m.gsn for _, m in glass.take(wire.Sync)} == {7}


def sync_reports_loss(glass: ClientHarness) -> int:
    """Call `sync`, and refuse what it asks for as lost; return the lost gsn."""
    call = glass.call(SyncRequest(glass.until()))
    ((_, question),) = glass.take(wire.Sync)
    glass.give(wire.Refused(CLUSTER, 0, 2, 0, question.request, "no-such-position"))
    assert isinstance(glass.answers[call], NoSuchRecordError)
    gsn: int = question.gsn
    return gsn


def test_loss_is_reported_again_after_an_insert_has_returned_the_record() -> None:
    glass = connected(pinned)
    many = glass.insert(*[b"x"] * (UNIT_RECORDS + 1))
    first, second = sent(glass)
    placed = list(range(10, 10 + UNIT_RECORDS))
    glass.give(ack(first, 0, placed), ack(first, 1, placed))
    assert sync_reports_loss(glass) == placed[-1]
    call = glass.call(SyncRequest(glass.until()))
    assert glass.answers[call] == RID_GENESIS, "the caller knows of no record"
    learn(glass, 2, "live")
    glass.pass_time(S)
    again = [message for message in sent(glass) if message.seq == second.seq][-1]
    assert again.view == 2
    glass.give(ack(again, 0, [900]), ack(again, 1, [900]))
    assert glass.answers[many][0] == RecordId(10, 0)
    call = glass.call(SyncRequest(glass.until()))
    asked = [question.gsn for _, question in glass.take(wire.Sync)]
    assert sorted(asked) == [placed[-1], 900]


def test_sync_result_never_decreases() -> None:
    """A reply about an older view may arrive after one of this view with a later record."""
    glass, lost, insert = with_pending_insert(timeout=1 * S)
    glass.pass_time(1 * S)
    error = glass.answers[lost]
    assert isinstance(error, OutcomeUnknownError)
    learn(glass, 2, "live")
    glass.insert(b"y")
    glass.pass_time(1)
    (later,) = [message for message in sent(glass) if message.seq != insert.seq]
    glass.give(ack(later, 0, [9]), ack(later, 1, [9]))
    resolved = resolve(glass, error)
    glass.give(located(insert, 2, [7]))
    assert glass.answers[resolved] == [RecordId(7, 0)]
    for _ in range(2):
        call = glass.call(SyncRequest(glass.until()))
        for _, question in glass.take(wire.Sync):
            glass.give(synced(question, question.gsn + 1, 2))
        assert glass.answers[call] == RecordId(9, 0)
