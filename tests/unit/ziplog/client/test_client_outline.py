"""Outlines: a shard's size and archives (docs/protocol.md, section 14)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.unit.ziplog.client.fakes import (
    CLUSTER,
    MS,
    ClientHarness,
    S,
    connected,
    learn,
    placement,
    refused,
)
from ziplog import ShardOutline, wire
from ziplog.client.common.requests import OutlineRequest
from ziplog.core.distance import outline_grace_ns
from ziplog.errors import ConfigError, DeadlineError

if TYPE_CHECKING:
    from ziplog.core.message import Message


def start_query(harness: ClientHarness, shard: int = 0) -> tuple[int, wire.Outline]:
    call = harness.call(OutlineRequest(harness.until(), shard, 5, 100))
    return call, harness.take(wire.Outline)[-1][1]


def reply(asked: wire.Outline, server: int, *steps: tuple[int, int], **fields: Any) -> Message:
    made = wire.Outlined(
        CLUSTER, asked.shard, asked.view, server, asked.request, 0,
        [wire.Step(*step) for step in steps], 9000 + server,
    )  # fmt: skip
    return msgspec.structs.replace(made, **fields)


def test_outline_uses_the_farthest_reply_of_all_replicas() -> None:
    harness = connected()
    call = harness.call(OutlineRequest(harness.until(), 0, 5, 100))
    asked = harness.take(wire.Outline)
    assert [name for name, _ in asked] == ["s0r0:1", "s0r1:1"]
    request = asked[0][1]
    assert (request.start, request.stop, request.view) == (5, 100, 1)
    harness.give(reply(request, 0, (50, 10), (100, 20), trim=7, segments=4))
    assert not harness.answers, "the other replica may have an archive, too"
    harness.give(reply(request, 1, (90, 30), archive_port=0, trim=3, segments=3))
    expected = ShardOutline(0, 7, [(50, 10), (100, 20)], [("s0r0", 9000)], segments=7)
    assert harness.answers[call] == expected


def test_silent_replica_is_left_out_after_the_grace_period() -> None:
    harness = connected()
    call, request = start_query(harness)
    harness.pass_time(40 * MS)
    harness.give(reply(request, 1, (100, 20)))
    harness.pass_time(outline_grace_ns(0) - 1)
    assert not harness.answers
    harness.pass_time(1)
    assert harness.answers[call].archives == [("s0r1", 9001)]


def test_outline_completes_at_the_deadline_within_the_grace_period() -> None:
    harness = connected()
    call = harness.call(OutlineRequest(harness.until(100 * MS), 0, 5, 100))
    request = harness.take(wire.Outline)[-1][1]
    harness.give(reply(request, 0))
    harness.pass_time(100 * MS)
    assert harness.answers[call] == ShardOutline(0, 0, [], [("s0r0", 9000)])


def test_outline_does_not_wait_for_a_replica_that_refuses() -> None:
    harness = connected()
    call, request = start_query(harness)
    harness.give(refused(request, 1, "not-ready"))
    assert not harness.answers
    harness.give(reply(request, 0, (9, 1)))
    assert harness.answers[call].steps == [(9, 1)]


def test_outline_is_retried_while_all_replicas_refuse() -> None:
    harness = connected()
    call, request = start_query(harness)
    harness.give(refused(request, 0, "not-ready"), refused(request, 1, "not-ready"))
    assert not harness.answers
    harness.pass_time(60 * MS)
    assert [name for name, _ in harness.take(wire.Outline)] == ["s0r0:1", "s0r1:1"]
    harness.give(refused(request, 0, "not-ready"), reply(request, 1, (9, 1)))
    assert harness.answers[call].steps == [(9, 1)]


def test_outline_restarts_in_another_view() -> None:
    harness = connected()
    call, request = start_query(harness)
    harness.give(reply(request, 0, (50, 10)))
    learn(harness, view=2, state="live")
    harness.pass_time(0)
    again = harness.take(wire.Outline)[-1][1]
    assert again.view == 2
    harness.give(reply(request, 0, (50, 10)), reply(request, 1, (60, 10)))
    harness.pass_time(outline_grace_ns(0))
    assert not harness.answers, "they are of an older view"
    harness.give(reply(again, 0, (70, 10)), reply(again, 1, (80, 10)))
    assert harness.answers[call].steps == [(80, 10)]


def test_reply_of_a_later_view_counts_and_refreshes_the_placements() -> None:
    harness = connected()
    harness.pass_time(1 * S)
    call, request = start_query(harness)
    harness.give(reply(request, 0, (50, 10), view=2))
    assert harness.take(wire.Hello)
    assert not harness.answers
    harness.pass_time(outline_grace_ns(0))
    assert harness.answers[call].steps == [(50, 10)]


def test_reply_of_a_former_view_does_not_count() -> None:
    harness = connected()
    learn(harness, view=2, state="live")
    call, request = start_query(harness)
    harness.give(*(reply(request, server, (50, 10), view=1) for server in (0, 1)))
    harness.pass_time(outline_grace_ns(0))
    assert call not in harness.answers


def test_reply_with_unordered_steps_is_ignored() -> None:
    harness = connected()
    call, request = start_query(harness)
    harness.give(reply(request, 0, (50, 10), (50, 10)))
    assert harness.core.counters.protocol_errors == 1
    harness.give(reply(request, 1, (9, 1)))
    harness.pass_time(outline_grace_ns(0))
    assert harness.answers[call].steps == [(9, 1)]


def test_reply_to_another_request_is_ignored() -> None:
    harness = connected()
    call, request = start_query(harness)
    wrong = reply(request, 0, (50, 10), shard=1)
    harness.give(wrong, reply(request, 0, (50, 10), request=request.request + 1))
    harness.pass_time(outline_grace_ns(0))
    assert call not in harness.answers


@pytest.mark.parametrize("is_there", [True, False])
def test_unknown_shard_is_looked_up(is_there: bool) -> None:
    harness = connected()
    call = harness.call(OutlineRequest(harness.until(), 2, 5, 100))
    harness.list_shards(placement(0), placement(1), *([placement(2)] if is_there else []))
    if is_there:
        harness.pass_time(0)
        assert len(harness.take(wire.Outline)) == 2
        assert not harness.answers
    else:
        assert isinstance(harness.answers[call], ConfigError)
        assert "one of [0, 1]" in str(harness.answers[call])


def test_outline_ends_at_its_deadline_or_cancellation() -> None:
    harness = connected()
    call, _ = start_query(harness)
    other, _ = start_query(harness)
    harness.cancel(other)
    harness.pass_time(10 * S)
    assert isinstance(harness.answers[call], DeadlineError)
    assert "shard 0" in str(harness.answers[call])
    assert other not in harness.answers
    harness.sent.clear()
    harness.pass_time(10 * S)
    assert not harness.take(wire.Outline)


@pytest.mark.parametrize(("trim", "is_over"), [(100, True), (99, False)])
def test_outline_of_a_removed_shard_needs_no_server_once_the_range_is_trimmed(
    trim: int, is_over: bool
) -> None:
    harness = connected()
    learn(harness, state="finalized")
    call, _ = start_query(harness)
    harness.pass_time(60 * MS)
    question = harness.take(wire.LeaseQuery)[-1][1]
    harness.give(wire.LeaseHistory(CLUSTER, question.request, [], [], trim))
    assert harness.answers == ({call: ShardOutline(0, 100, [], [])} if is_over else {})
