"""What a client knows of a unit in flight, and of the last records of a shard's views."""

from __future__ import annotations

from typing import Any, cast

from tests.unit.ziplog.client.fakes import CLUSTER, MS
from ziplog.client.common.routing import Route
from ziplog.client.inserts.inflight import InflightUnit, ShardWindow
from ziplog.errors import RecordTooLargeError
from ziplog.wire import Insert, InsertAck, Refused

ROUTE = Route(0, 1, "live", (b"primary", b"backup"), False)


def sent(copies: int = 1) -> InflightUnit:
    """Return a unit of two replicas, each of which got so many copies."""
    message = Insert(CLUSTER, 0, 1, b"c" * 16, 1, 1, 0, 0, 1, b"body", copies)
    return InflightUnit(cast("Any", None), 0, message, ROUTE, MS)


def refused(server: int, copies: int) -> Refused:
    return Refused(CLUSTER, 0, 1, server, 1, "not-ready", "", copies=copies)


def acked(unit: InflightUnit, server: int, copy: int = 1) -> None:
    unit.acks[server] = InsertAck(CLUSTER, 0, 1, server, 1, 1, 1, server == 0, [5], copy=copy)


def window() -> ShardWindow:
    return ShardWindow(0, 1, cast("Any", None))


def test_unit_that_the_primary_placed_is_not_absent_whatever_servers_promise() -> None:
    unit = sent(copies=2)
    acked(unit, 0)
    for server in (0, 1):
        unit.add_refusal(refused(server, 2))
    assert not unit.is_absent


def test_unit_is_absent_once_each_replica_refused_all_copies() -> None:
    unit = sent(copies=2)
    unit.add_refusal(refused(0, 2))
    unit.add_refusal(refused(1, 1))
    assert not unit.is_absent
    unit.add_refusal(refused(1, 2))
    assert unit.is_absent


def test_late_refusal_of_fewer_copies_withdraws_no_promise() -> None:
    unit = sent(copies=2)
    for server, copies in [(0, 2), (1, 2), (1, 1)]:
        unit.add_refusal(refused(server, copies))
    assert unit.is_absent


def test_unit_begins_in_a_new_view_without_promises_acks_and_errors_of_the_former_one() -> None:
    unit = sent()
    acked(unit, 0)
    unit.redirects, unit.too_large = frozenset({1}), frozenset({1})
    unit.pending_error = RecordTooLargeError(9, 8)
    unit.move_to_view(2, 3)
    assert (unit.acks, unit.redirects, unit.too_large) == ({}, frozenset(), frozenset())
    assert unit.pending_error is None
    assert (unit.message.view, unit.replicas) == (2, 3)


def test_last_record_of_a_view_is_the_highest_one_in_any_order_of_the_acks() -> None:
    shard = window()
    for gsn in (9, 5):
        shard.note_placed(1, gsn)
    shard.note_placed(2, 7)
    assert shard.highest_gsns == {1: 9, 2: 7}
    assert shard.since == 10


def test_lost_record_that_a_call_returns_is_reported_by_the_next_sync() -> None:
    shard = window()
    shard.note_placed(1, 9)
    shard.note_lost(1)
    shard.note_returned(10)
    assert shard.highest_gsns == {}
    shard.note_returned(9)
    assert shard.highest_gsns == {1: 9}
