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


def start_query(glass: ClientHarness, shard: int = 0) -> tuple[int, wire.Outline]:
    call = glass.call(OutlineRequest(glass.until(), shard, 5, 100))
    return call, glass.take(wire.Outline)[-1][1]


def reply(asked: wire.Outline, server: int, *steps: tuple[int, int], **fields: Any) -> Message:
    made = wire.Outlined(
        CLUSTER, asked.shard, asked.view, server, asked.request, 0,
        [wire.Step(*step) for step in steps], 9000 + server,
    )  # fmt: skip
    return msgspec.structs.replace(made, **fields)


def test_outline_uses_the_farthest_reply_of_all_replicas() -> None:
    glass = connected()
    call = glass.call(OutlineRequest(glass.until(), 0, 5, 100))
    asked = glass.take(wire.Outline)
    assert [name for name, _ in asked] == ["s0r0:1", "s0r1:1"]
    request = asked[0][1]
    assert (request.start, request.stop, request.view) == (5, 100, 1)
    glass.give(reply(request, 0, (50, 10), (100, 20), trim=7, segments=4))
    assert not glass.answers, "the other replica may have an archive, too"
    glass.give(reply(request, 1, (90, 30), archive_port=0, trim=3, segments=3))
    expected = ShardOutline(0, 7, [(50, 10), (100, 20)], [("s0r0", 9000)], segments=7)
    assert glass.answers[call] == expected


def test_silent_replica_is_left_out_after_the_grace_period() -> None:
    glass = connected()
    call, request = start_query(glass)
    glass.pass_time(40 * MS)
    glass.give(reply(request, 1, (100, 20)))
    glass.pass_time(outline_grace_ns(0) - 1)
    assert not glass.answers
    glass.pass_time(1)
    assert glass.answers[call].archives == [("s0r1", 9001)]


def test_outline_completes_at_the_deadline_within_the_grace_period() -> None:
    glass = connected()
    call = glass.call(OutlineRequest(glass.until(100 * MS), 0, 5, 100))
    request = glass.take(wire.Outline)[-1][1]
    glass.give(reply(request, 0))
    glass.pass_time(100 * MS)
    assert glass.answers[call] == ShardOutline(0, 0, [], [("s0r0", 9000)])


def test_outline_does_not_wait_for_a_replica_that_refuses() -> None:
    glass = connected()
    call, request = start_query(glass)
    glass.give(refused(request, 1, "not-ready"))
    assert not glass.answers
    glass.give(reply(request, 0, (9, 1)))
    assert glass.answers[call].steps == [(9, 1)]


def test_outline_is_retried_while_all_replicas_refuse() -> None:
    glass = connected()
    call, request = start_query(glass)
    glass.give(refused(request, 0, "not-ready"), refused(request, 1, "not-ready"))
    assert not glass.answers
    glass.pass_time(60 * MS)
    assert [name for name, _ in glass.take(wire.Outline)] == ["s0r0:1", "s0r1:1"]
    glass.give(refused(request, 0, "not-ready"), reply(request, 1, (9, 1)))
    assert glass.answers[call].steps == [(9, 1)]


def test_outline_restarts_in_another_view() -> None:
    glass = connected()
    call, request = start_query(glass)
    glass.give(reply(request, 0, (50, 10)))
    learn(glass, view=2, state="live")
    glass.pass_time(0)
    again = glass.take(wire.Outline)[-1][1]
    assert again.view == 2
    glass.give(reply(request, 0, (50, 10)), reply(request, 1, (60, 10)))
    glass.pass_time(outline_grace_ns(0))
    assert not glass.answers, "they are of an older view"
    glass.give(reply(again, 0, (70, 10)), reply(again, 1, (80, 10)))
    assert glass.answers[call].steps == [(80, 10)]


def test_reply_of_a_later_view_counts_and_refreshes_the_placements() -> None:
    glass = connected()
    glass.pass_time(1 * S)
    call, request = start_query(glass)
    glass.give(reply(request, 0, (50, 10), view=2))
    assert glass.take(wire.Hello)
    assert not glass.answers
    glass.pass_time(outline_grace_ns(0))
    assert glass.answers[call].steps == [(50, 10)]


def test_reply_of_a_former_view_does_not_count() -> None:
    glass = connected()
    learn(glass, view=2, state="live")
    call, request = start_query(glass)
    glass.give(*(reply(request, server, (50, 10), view=1) for server in (0, 1)))
    glass.pass_time(outline_grace_ns(0))
    assert call not in glass.answers


def test_reply_with_unordered_steps_is_ignored() -> None:
    glass = connected()
    call, request = start_query(glass)
    glass.give(reply(request, 0, (50, 10), (50, 10)))
    assert glass.core.counters.protocol_errors == 1
    glass.give(reply(request, 1, (9, 1)))
    glass.pass_time(outline_grace_ns(0))
    assert glass.answers[call].steps == [(9, 1)]


def test_reply_to_another_request_is_ignored() -> None:
    glass = connected()
    call, request = start_query(glass)
    wrong = reply(request, 0, (50, 10), shard=1)
    glass.give(wrong, reply(request, 0, (50, 10), request=request.request + 1))
    glass.pass_time(outline_grace_ns(0))
    assert call not in glass.answers


@pytest.mark.parametrize("is_there", [True, False])
def test_unknown_shard_refreshes_the_placements(is_there: bool) -> None:
    glass = connected()
    call = glass.call(OutlineRequest(glass.until(), 2, 5, 100))
    glass.pass_time(100 * MS)
    glass.inform(placement(0), placement(1), *([placement(2)] if is_there else []))
    if is_there:
        glass.pass_time(0)
        assert len(glass.take(wire.Outline)) == 2
        assert not glass.answers
    else:
        assert isinstance(glass.answers[call], ConfigError)
        assert "one of [0, 1]" in str(glass.answers[call])


def test_outline_ends_at_its_deadline_or_cancellation() -> None:
    glass = connected()
    call, _ = start_query(glass)
    other, _ = start_query(glass)
    glass.cancel(other)
    glass.pass_time(10 * S)
    assert isinstance(glass.answers[call], DeadlineError)
    assert "shard 0" in str(glass.answers[call])
    assert other not in glass.answers
    glass.sent.clear()
    glass.pass_time(10 * S)
    assert not glass.take(wire.Outline)
