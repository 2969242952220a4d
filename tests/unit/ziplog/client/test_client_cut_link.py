"""Inserts of a client that does not reach one replica of a live shard (docs/protocol.md, 4)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.ziplog.client.fakes import (
    CLIENT,
    CLUSTER,
    ClientHarness,
    S,
    ack,
    connected,
    learn,
    sent,
)
from ziplog import wire
from ziplog.core.units import NEVER
from ziplog.types import RecordId


def present(locate: wire.Locate, server: int, gsn: int, view: int = 1) -> wire.Located:
    return wire.Located(CLUSTER, locate.shard, view, server, CLIENT, locate.seq, "present", [gsn])


def with_silent_replica(silent: int) -> tuple[ClientHarness, int, wire.Insert]:
    """Return a client with an insert that one replica acked; the shard is avoided by now."""
    harness = connected()
    call = harness.insert(b"x", timeout=NEVER - harness.now)
    (insert,) = sent(harness)
    other = 1 - silent
    harness.give(ack(insert, other, [7]))
    harness.pass_time(5 * S)
    return harness, call, insert


@pytest.mark.parametrize("silent", [0, 1])
def test_an_insert_is_located_at_the_replica_that_acked_it(silent: int) -> None:
    harness, call, insert = with_silent_replica(silent)
    locates = [m for _, m in harness.take(wire.Locate)]
    assert {one.seq for one in locates} == {insert.seq}
    harness.give(present(locates[0], 1 - silent, 7))
    assert harness.answers[call] == [RecordId(7, 0)]
    counters = harness.core.counters
    assert (counters.inserts, counters.located, counters.slow_path) == (1, 1, 1)


def test_the_shard_is_avoided_until_the_silent_replica_acks_the_unit() -> None:
    harness, _, insert = with_silent_replica(1)
    (_, locate), *_ = harness.take(wire.Locate)
    harness.give(present(locate, 0, 7), present(locate, 0, 7))
    sent(harness)
    for gsn in range(8, 14):
        harness.pass_time(3 * S)
        assert {one.seq for one in sent(harness)} <= {insert.seq}
        harness.insert(b"y")
        (other,) = sent(harness)
        assert other.shard == 1
        harness.give(ack(other, 0, [gsn]), ack(other, 1, [gsn]))
    assert not harness.take(wire.Locate), "its outcome is known"
    last = replace(insert, copy=harness.core._inserts.windows[0].inflight[insert.seq].copies)
    harness.give(ack(last, 0, [7], 2), ack(last, 1, [7]))
    assert not harness.core._inserts.windows[0].inflight
    assert harness.core.counters.located == 1


def test_a_located_unit_ends_with_its_view() -> None:
    harness, _, insert = with_silent_replica(1)
    (_, locate), *_ = harness.take(wire.Locate)
    harness.give(present(locate, 0, 7))
    sent(harness)
    learn(harness, view=2, state="live")
    harness.pass_time(1 * S)
    assert not sent(harness), "it is not sent in another view"
    assert {one.seq for _, one in harness.take(wire.Locate)} == {insert.seq}
    harness.give(present(locate, 0, 7, view=2))
    assert not harness.core._inserts.windows[0].inflight
    assert harness.core.counters.inserts == 1
