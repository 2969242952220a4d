"""`sync`: waiting for stable storage (docs/protocol.md, sections 4 and 5)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.ziplog.client.fakes import (
    CLUSTER,
    MS,
    ClientHarness,
    S,
    ack,
    connected,
    learn,
    lease,
    pinned,
    placement,
    resolve,
    sent,
)
from tests.unit.ziplog.client.test_client_recovery import located, with_pending_insert
from ziplog import wire
from ziplog.client.common.requests import SyncRequest
from ziplog.client.inserts.insert_calls import UNIT_RECORDS
from ziplog.core.view import run_of
from ziplog.errors import DeadlineError, NoSuchRecordError, OutcomeUnknownError
from ziplog.types import RID_GENESIS, RecordId


def synced(sync: wire.Sync, durable: int, view: int = 1) -> wire.Synced:
    return wire.Synced(CLUSTER, sync.shard, view, sync.request, durable)


def with_records(policy: Any = None) -> ClientHarness:
    """Return a client with a record at gsn 3 of shard 0 and at gsn 8 of shard 1."""
    shards = iter([0, 1])
    harness = connected(lambda _p, _k, _l: next(shards))
    for gsn in (3, 8):
        harness.insert(b"x")
        (insert,) = sent(harness)
        harness.give(ack(insert, 0, [gsn]), ack(insert, 1, [gsn]))
    harness.core.set_policy(policy or pinned)
    return harness


def test_sync_of_nothing() -> None:
    harness = connected()
    call = harness.call(SyncRequest(harness.until()))
    assert harness.answers[call] == RID_GENESIS
    assert not harness.sent


def test_sync_waits_for_all_shards_where_this_client_has_records() -> None:
    harness = with_records()
    call = harness.call(SyncRequest(harness.until()))
    questions = dict(harness.take(wire.Sync))
    assert {(name, m.shard, m.gsn) for name, m in questions.items()} == {
        ("s0r0:1", 0, 3), ("s1r0:1", 1, 8),
    }  # fmt: skip
    first, second = questions["s0r0:1"], questions["s1r0:1"]
    harness.give(synced(first, 3), synced(second, 8))
    assert call not in harness.answers, "`durable` is exclusive"
    harness.give(synced(second, 9))
    assert call not in harness.answers
    harness.pass_time(25 * MS)
    assert {name for name, _ in harness.take(wire.Sync)} == {"s0r0:1"}
    harness.give(synced(first, 4))
    assert harness.answers[call] == RecordId(8, 1)


def test_sync_asks_no_shard_about_a_record_that_an_earlier_one_found_stable() -> None:
    """The servers of a shard that is over may be gone."""
    harness = with_records()
    call = harness.call(SyncRequest(harness.until()))
    first, second = (message for _, message in harness.take(wire.Sync))
    harness.give(synced(first, first.gsn + 1), synced(second, second.gsn + 1))
    assert harness.answers[call] == RecordId(8, 1)
    call = harness.call(SyncRequest(harness.until()))
    assert harness.answers[call] == RecordId(8, 1)
    assert not harness.take(wire.Sync)


@pytest.mark.parametrize("state", ["finalized", "recovering"])
def test_sync_does_not_wait_for_a_shard_that_is_over(state: Any) -> None:
    """Its recovery began when the first of its servers was stopped."""
    harness = with_records()
    learn(harness, state=state)
    call = harness.call(SyncRequest(harness.until()))
    second = next(m for _, m in harness.take(wire.Sync) if m.shard == 1)
    harness.give(synced(second, 9))
    harness.pass_time(25 * MS)
    (query,) = (m for _, m in harness.take(wire.LeaseQuery))
    known = [placement(0, state=state), placement(1)]
    answer = wire.LeaseHistory(CLUSTER, query.request, [run_of(lease())], known, 0)
    harness.give(answer)
    assert call not in harness.answers, "its servers still have records"
    harness.pass_time(1 * S)
    query = next(m for _, m in harness.take(wire.LeaseQuery))
    harness.give(replace(answer, request=query.request, over=[0]))
    assert harness.answers[call] == RecordId(8, 1)


def test_sync_also_waits_for_given_records_of_other_clients() -> None:
    harness = connected()
    call = harness.call(SyncRequest(harness.until(), (RecordId(5, 0), RecordId(8, 1))))
    first, second = (message for _, message in harness.take(wire.Sync))
    assert {first.gsn, second.gsn} == {5, 8}
    harness.give(synced(first, first.gsn + 1))
    assert call not in harness.answers
    detail = "it was lost"
    refused = wire.Refused(CLUSTER, second.shard, 1, 0, second.request, "no-such-position", detail)
    harness.give(refused)
    assert isinstance(harness.answers[call], NoSuchRecordError)
    call = harness.call(SyncRequest(harness.until()))
    assert harness.answers[call] == RID_GENESIS


def test_sync_is_retried_with_growing_backoff_and_at_once_in_a_new_view() -> None:
    harness = with_records()
    call = harness.call(SyncRequest(harness.until(30 * S)))
    for question in [m for _, m in harness.take(wire.Sync) if m.shard == 1]:
        harness.give(synced(question, 9))
    learn(harness)
    harness.pass_time(10 * S)
    assert 20 < len(harness.take(wire.Sync)) < 30
    learn(harness, 2, "live")
    harness.pass_time(1)
    ((name, question),) = harness.take(wire.Sync)
    assert (name, question.view) == ("s0r0:1", 2)
    harness.give(wire.Refused(CLUSTER, 0, 2, 0, question.request, "wrong-view"))
    harness.give(synced(question, 4))
    assert harness.answers[call] == RecordId(8, 1)
    harness.pass_time(200 * MS)
    assert harness.take(wire.Hello), "a refusal refreshes the placements"


def test_sync_ends_at_its_deadline_and_names_the_shard() -> None:
    harness = with_records()
    call = harness.call(SyncRequest(harness.until(1 * S)))
    learn(harness)
    for question in [m for _, m in harness.take(wire.Sync) if m.shard == 1]:
        harness.give(synced(question, 9))
    harness.pass_time(1 * S)
    error = harness.answers[call]
    assert isinstance(error, DeadlineError)
    assert "shard 0 (recovering)" in str(error)
    assert "shard 1" not in str(error)
    cancelled = harness.call(SyncRequest(harness.until(1 * S)))
    harness.cancel(cancelled)
    harness.take(wire.Sync)
    harness.pass_time(3 * S)
    assert not harness.take(wire.Sync)
    assert cancelled not in harness.answers


def test_sync_covers_inserts_that_a_recovery_placed() -> None:
    harness, call, insert = with_pending_insert()
    harness.give(located(insert, 2, [7]))
    assert call in harness.answers
    harness.take(wire.Sync)
    harness.call(SyncRequest(harness.until()))
    assert {m.gsn for _, m in harness.take(wire.Sync)} == {7}


def sync_reports_loss(harness: ClientHarness) -> int:
    """Call `sync`, and refuse what it asks for as lost; return the lost gsn."""
    call = harness.call(SyncRequest(harness.until()))
    ((_, question),) = harness.take(wire.Sync)
    harness.give(wire.Refused(CLUSTER, 0, 2, 0, question.request, "no-such-position"))
    assert isinstance(harness.answers[call], NoSuchRecordError)
    gsn: int = question.gsn
    return gsn


def test_loss_is_reported_again_after_an_insert_has_returned_the_record() -> None:
    harness = connected(pinned)
    many = harness.insert(*[b"x"] * (UNIT_RECORDS + 1))
    first, second = sent(harness)
    placed = list(range(10, 10 + UNIT_RECORDS))
    harness.give(ack(first, 0, placed), ack(first, 1, placed))
    assert sync_reports_loss(harness) == placed[-1]
    call = harness.call(SyncRequest(harness.until()))
    assert harness.answers[call] == RID_GENESIS, "the caller knows of no record"
    learn(harness, 2, "live")
    harness.pass_time(S)
    again = [message for message in sent(harness) if message.seq == second.seq][-1]
    assert again.view == 2
    harness.give(ack(again, 0, [900]), ack(again, 1, [900]))
    assert harness.answers[many][0] == RecordId(10, 0)
    call = harness.call(SyncRequest(harness.until()))
    asked = [question.gsn for _, question in harness.take(wire.Sync)]
    assert sorted(asked) == [placed[-1], 900]


def test_sync_result_never_decreases() -> None:
    """A reply about an older view may arrive after one of this view with a later record."""
    harness, lost, insert = with_pending_insert(timeout=1 * S)
    harness.pass_time(1 * S)
    error = harness.answers[lost]
    assert isinstance(error, OutcomeUnknownError)
    learn(harness, 2, "live")
    harness.insert(b"y")
    harness.pass_time(1)
    (later,) = [message for message in sent(harness) if message.seq != insert.seq]
    harness.give(ack(later, 0, [9]), ack(later, 1, [9]))
    resolved = resolve(harness, error)
    harness.give(located(insert, 2, [7]))
    assert harness.answers[resolved] == [RecordId(7, 0)]
    for _ in range(2):
        call = harness.call(SyncRequest(harness.until()))
        for _, question in harness.take(wire.Sync):
            harness.give(synced(question, question.gsn + 1, 2))
        assert harness.answers[call] == RecordId(9, 0)


def test_loss_is_reported_although_a_later_record_is_durable_first() -> None:
    """A sync that ends before the reply about the older view leaves the loss to the next one."""
    harness = connected(pinned)
    for view, gsn in ((1, 5), (2, 10)):
        learn(harness, view, "live")
        harness.insert(b"x")
        (insert,) = sent(harness)
        assert insert.view == view
        harness.give(ack(insert, 0, [gsn]), ack(insert, 1, [gsn]))
    call = harness.call(SyncRequest(harness.until(1 * S)))
    questions = {question.gsn: question for _, question in harness.take(wire.Sync)}
    assert questions.keys() == {5, 10}
    harness.give(synced(questions[10], 11, view=2))
    harness.pass_time(1 * S)
    assert isinstance(harness.answers[call], DeadlineError), "the first position has no answer"
    harness.take(wire.Sync)
    call = harness.call(SyncRequest(harness.until()))
    again = {question.gsn: question for _, question in harness.take(wire.Sync)}
    assert 5 in again, "its record may be lost"
    harness.give(wire.Refused(CLUSTER, 0, 2, 0, again[5].request, "no-such-position"))
    assert isinstance(harness.answers[call], NoSuchRecordError)
