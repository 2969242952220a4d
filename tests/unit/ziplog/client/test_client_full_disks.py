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


def fill_both(glass: ClientHarness) -> int:
    """Insert a record that both shards refuse; return the call."""
    call = glass.insert(b"x")
    for _ in range(2):
        (insert,) = sent(glass)
        glass.give(*no_space(insert))
    return call


def test_another_shard_gets_the_record() -> None:
    glass = connected()
    call = glass.insert(b"x")
    (insert,) = sent(glass)
    glass.give(*no_space(insert))
    (again,) = sent(glass)
    assert (insert.shard, again.shard) == (0, 1)
    glass.give(ack(again, 0, [2]), ack(again, 1, [2]))
    assert glass.answers[call] == [RecordId(2, 1)]


def test_an_insert_fails_at_once_if_no_shard_has_space() -> None:
    glass = connected()
    error = glass.answers[fill_both(glass)]
    assert type(error) is UnavailableError
    assert str(error) == (f"shards 0, 1 refuse records, because disks are full ({REASON})")
    assert error.retriable
    assert not glass.core._inserts.waiting


def test_later_inserts_fail_at_once_without_a_message_until_the_shards_are_tried_again() -> None:
    glass = connected()
    fill_both(glass)
    assert isinstance(glass.answers[glass.insert(b"y")], UnavailableError)
    assert not sent(glass)
    glass.pass_time(S)
    call = glass.insert(b"z")
    (insert,) = sent(glass)
    glass.give(ack(insert, 0, [2]), ack(insert, 1, [2]))
    assert glass.answers[call] == [RecordId(2, insert.shard)]
    assert glass.insert(b"next") not in glass.answers, "it was sent"


def test_a_pinned_insert_fails_at_once_if_its_shard_has_no_space() -> None:
    glass = connected()
    request = InsertRequest(glass.until(10 * S), [b"x"], RID_GENESIS, None, 0, shard=1)
    call = glass.call(request)
    (insert,) = sent(glass)
    glass.give(*no_space(insert))
    error = glass.answers[call]
    assert "shard 1 refuses records, because a disk is full" in str(error)
    assert not sent(glass), "the other shard gets no pinned record"


def test_other_refusals_for_lack_of_room_do_not_fail_an_insert() -> None:
    glass = connected()
    call = glass.insert(b"x")
    for _ in range(2):
        (insert,) = sent(glass)
        glass.give(refused(insert, 0, "full"), refused(insert, 1, "full"))
    assert call not in glass.answers


def test_a_record_that_one_replica_may_hold_is_not_reported_as_refused() -> None:
    glass = connected(pinned)
    call = glass.insert(b"x")
    (insert,) = sent(glass)
    primary, _ = no_space(insert)
    glass.give(primary, ack(insert, 1, [2]))
    assert call not in glass.answers
    glass.pass_time(100 * MS)
    assert call not in glass.answers


@pytest.mark.parametrize("order", ["guess, primary, backup", "backup, guess, primary"])
def test_a_guess_for_a_copy_that_its_backup_refuses_does_not_count(order: str) -> None:
    glass = connected()
    glass.insert(b"x")
    (insert,) = sent(glass)
    primary, backup = no_space(insert)
    replies = {"guess": ack(insert, 1, [2]), "primary": primary, "backup": backup}
    glass.give(*(replies[name] for name in order.split(", ")))
    (again,) = sent(glass)
    assert (insert.shard, again.shard) == (0, 1), "no server of the first shard has it"


def test_a_guess_for_a_later_copy_than_the_refused_one_counts() -> None:
    glass = connected(pinned)
    call = glass.insert(b"x")
    (insert,) = sent(glass)
    primary, backup = no_space(insert)
    glass.give(backup)
    glass.pass_time(100 * MS)
    (again,) = sent(glass)
    assert again.copy == 2
    glass.give(ack(again, 1, [2]), backup, primary, ack(again, 0, [2]))
    assert glass.answers[call] == [RecordId(2, 0)]


def test_the_primarys_decision_counts_although_its_backup_refused_the_copy() -> None:
    glass = connected(pinned)
    call = glass.insert(b"x")
    (insert,) = sent(glass)
    _, backup = no_space(insert)
    glass.give(ack(insert, 1, [2], confirmed=True), backup, ack(insert, 0, [2]))
    assert glass.answers[call] == [RecordId(2, 0)]


def test_a_disk_that_fills_in_the_middle_of_a_call_ends_it_with_what_is_placed() -> None:
    glass = connected(pinned)
    payloads = [b"x"] * (UNIT_RECORDS + 1)
    request = InsertRequest(glass.until(10 * S), payloads, RID_GENESIS, None, 0, many=True)
    call = glass.call(request)
    first, second = sent(glass)
    gsns = list(range(2, 2 + UNIT_RECORDS))
    glass.give(ack(first, 0, gsns), ack(first, 1, gsns), *no_space(second))
    error = glass.answers[call]
    assert isinstance(error, UnavailableError)
    assert "a disk is full" in str(error)
    assert error.results == [*(RecordId(gsn, 0) for gsn in gsns), None]
    assert not error.retriable
