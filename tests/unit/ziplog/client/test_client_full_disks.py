"""Inserts while disks are full: another shard gets them, or they fail at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from tests.unit.ziplog.client.fakes import (
    MS,
    ClientHarness,
    S,
    ack,
    connected,
    pinned,
    refused,
    sent,
)
from ziplog.client.common.requests import InsertRequest
from ziplog.client.inserts.insert_calls import UNIT_RECORDS
from ziplog.errors import UnavailableError
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from ziplog import wire

REASON = "shard-0-0: 41.0 MiB free, the limit is 256.0 MiB (disk_reserve_bytes)"


def no_space(insert: wire.Insert) -> list[wire.Refused]:
    """Return the refusals of both replicas."""
    found = [refused(insert, server, "no-space") for server in (0, 1)]
    return [msgspec.structs.replace(one, detail=REASON) for one in found]


def fill_both(harness: ClientHarness) -> int:
    """Insert a record that both shards refuse; return the call."""
    call = harness.insert(b"x")
    for _ in range(2):
        (insert,) = sent(harness)
        harness.give(*no_space(insert))
    return call


def test_another_shard_gets_the_record() -> None:
    harness = connected()
    call = harness.insert(b"x")
    (insert,) = sent(harness)
    harness.give(*no_space(insert))
    (again,) = sent(harness)
    assert (insert.shard, again.shard) == (0, 1)
    harness.give(ack(again, 0, [2]), ack(again, 1, [2]))
    assert harness.answers[call] == [RecordId(2, 1)]


def test_an_insert_fails_at_once_if_no_shard_has_space() -> None:
    harness = connected()
    error = harness.answers[fill_both(harness)]
    assert type(error) is UnavailableError
    assert str(error) == (f"shards 0, 1 refuse records, because disks are full ({REASON})")
    assert error.retriable
    assert not harness.core._inserts.waiting


def test_later_inserts_fail_at_once_without_a_message_until_the_shards_are_tried_again() -> None:
    harness = connected()
    fill_both(harness)
    assert isinstance(harness.answers[harness.insert(b"y")], UnavailableError)
    assert not sent(harness)
    harness.pass_time(S)
    call = harness.insert(b"z")
    (insert,) = sent(harness)
    harness.give(ack(insert, 0, [2]), ack(insert, 1, [2]))
    assert harness.answers[call] == [RecordId(2, insert.shard)]
    assert harness.insert(b"next") not in harness.answers, "it was sent"


def test_a_pinned_insert_fails_at_once_if_its_shard_has_no_space() -> None:
    harness = connected()
    request = InsertRequest(harness.until(10 * S), [b"x"], RID_GENESIS, None, 0, shard=1)
    call = harness.call(request)
    (insert,) = sent(harness)
    harness.give(*no_space(insert))
    error = harness.answers[call]
    assert "shard 1 refuses records, because a disk is full" in str(error)
    assert not sent(harness), "the other shard gets no pinned record"


def test_other_refusals_for_lack_of_room_do_not_fail_an_insert() -> None:
    harness = connected()
    call = harness.insert(b"x")
    for _ in range(2):
        (insert,) = sent(harness)
        harness.give(refused(insert, 0, "full"), refused(insert, 1, "full"))
    assert call not in harness.answers


def test_a_record_that_one_replica_may_hold_is_not_reported_as_refused() -> None:
    harness = connected(pinned)
    call = harness.insert(b"x")
    (insert,) = sent(harness)
    primary, _ = no_space(insert)
    harness.give(primary, ack(insert, 1, [2]))
    assert call not in harness.answers
    harness.pass_time(100 * MS)
    assert call not in harness.answers


@pytest.mark.parametrize("order", ["guess, primary, backup", "backup, guess, primary"])
def test_a_guess_for_a_copy_that_its_backup_refuses_does_not_count(order: str) -> None:
    harness = connected()
    harness.insert(b"x")
    (insert,) = sent(harness)
    primary, backup = no_space(insert)
    replies = {"guess": ack(insert, 1, [2]), "primary": primary, "backup": backup}
    harness.give(*(replies[name] for name in order.split(", ")))
    (again,) = sent(harness)
    assert (insert.shard, again.shard) == (0, 1), "no server of the first shard has it"


def test_a_guess_for_a_later_copy_than_the_refused_one_counts() -> None:
    harness = connected(pinned)
    call = harness.insert(b"x")
    (insert,) = sent(harness)
    primary, backup = no_space(insert)
    harness.give(backup)
    harness.pass_time(100 * MS)
    (again,) = sent(harness)
    assert again.copy == 2
    harness.give(ack(again, 1, [2]), backup, primary, ack(again, 0, [2]))
    assert harness.answers[call] == [RecordId(2, 0)]


def test_the_primarys_decision_counts_although_its_backup_refused_the_copy() -> None:
    harness = connected(pinned)
    call = harness.insert(b"x")
    (insert,) = sent(harness)
    _, backup = no_space(insert)
    harness.give(ack(insert, 1, [2], confirmed=True), backup, ack(insert, 0, [2]))
    assert harness.answers[call] == [RecordId(2, 0)]


def test_a_disk_that_fills_in_the_middle_of_a_call_ends_it_with_what_is_placed() -> None:
    harness = connected(pinned)
    payloads = [b"x"] * (UNIT_RECORDS + 1)
    request = InsertRequest(harness.until(10 * S), payloads, RID_GENESIS, None, 0, many=True)
    call = harness.call(request)
    first, second = sent(harness)
    gsns = list(range(2, 2 + UNIT_RECORDS))
    harness.give(ack(first, 0, gsns), ack(first, 1, gsns), *no_space(second))
    error = harness.answers[call]
    assert isinstance(error, UnavailableError)
    assert "a disk is full" in str(error)
    assert error.results == [*(RecordId(gsn, 0) for gsn in gsns), None]
    assert not error.retriable
