"""Where the log ends, and trims: what a client asks of servers and the service."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.unit.ziplog.client.fakes import (
    CLUSTER,
    MS,
    ClientHarness,
    S,
    placement,
)
from ziplog import wire
from ziplog.client.common.requests import (
    StatusRequest,
    SubscribeRequest,
    TailRequest,
    TrimRequest,
)
from ziplog.core.units import NEVER
from ziplog.errors import (
    DeadlineError,
    NoSuchRecordError,
)
from ziplog.types import RID_GENESIS, RID_RECENT, RecordId
from ziplog.wire.service import Finalized


def tailing(deadline: int = 10 * S) -> tuple[ClientHarness, int]:
    harness = ClientHarness()
    harness.connect(placement(0), placement(1))
    call = harness.call(TailRequest(harness.until(deadline)))
    request = harness.take(wire.LeaseQuery)[-1][1]
    known = [placement(0), placement(1), placement(2)]
    harness.give(wire.LeaseHistory(CLUSTER, request.request, [], known, 0))
    return harness, call


def tail_reply(tail: wire.Tail, server: int, filled: int, view: int = 1) -> wire.TailReply:
    return wire.TailReply(CLUSTER, tail.shard, view, server, tail.request, filled, 50)


def test_the_tail_is_asked_of_all_replicas_of_all_members() -> None:
    harness, call = tailing()
    tails = harness.take(wire.Tail)
    assert sorted(name for name, _ in tails) == sorted(
        f"s{shard}r{server}:1" for shard in (0, 1, 2) for server in (0, 1)
    )
    messages = {m.shard: m for _, m in tails}
    for shard, message in messages.items():
        # The primary cannot read its last record.
        harness.give(tail_reply(message, 0, 30))
        assert call not in harness.answers
        harness.give(tail_reply(message, 1, 40 + shard))
    assert harness.answers[call] == RecordId(42, 2)


def test_the_tail_of_an_empty_log() -> None:
    harness, call = tailing()
    for name, message in harness.take(wire.Tail):
        harness.give(tail_reply(message, int(name[3]), 0))
    assert harness.answers[call] == RID_GENESIS


@pytest.mark.parametrize(("trim", "last"), [(21, RecordId(30, 1)), (41, RecordId(40, 0))])
def test_a_shard_that_is_over_is_not_asked(trim: int, last: RecordId) -> None:
    """Its servers may be gone; the records that it had were before the trim point."""
    harness = ClientHarness()
    harness.connect(placement(0), placement(1))
    call = harness.call(TailRequest(harness.until(S)))
    request = harness.take(wire.LeaseQuery)[-1][1]
    former = placement(0, state="finalized")
    replicas = tuple(replace(one, fingerprint="f" * 32) for one in former.replicas)
    known = [replace(former, replicas=replicas), placement(1)]
    harness.give(wire.LeaseHistory(CLUSTER, request.request, [], known, trim, over=[0]))
    tails = harness.take(wire.Tail)
    assert [message.shard for _, message in tails] == [1, 1]
    for name, message in tails:
        harness.give(tail_reply(message, int(name[3]), 30))
    assert harness.answers[call] == last


@pytest.mark.parametrize(("trim", "last"), [(21, RecordId(20, 0)), (10, None)])
def test_a_shard_that_is_over_meanwhile_is_not_waited_for(trim: int, last: RecordId | None) -> None:
    """Its servers are stopped after the query asked them, and before they reply."""
    harness, call = with_finalized(TailRequest(NEVER))
    for name, message in harness.take(wire.Tail):
        if message.shard == 1:
            harness.give(tail_reply(message, int(name[3]), 15))
    harness.pass_time(60 * MS)
    assert call not in harness.answers
    query = harness.take(wire.LeaseQuery)[-1][1]
    over = [0] if trim > 20 else []
    harness.give(wire.LeaseHistory(CLUSTER, query.request, [], [], trim, over=over))
    assert harness.answers.get(call) == last


def with_finalized(request: TailRequest | SubscribeRequest) -> tuple[ClientHarness, int]:
    """A call about the end of a log whose shard 0 is finalized at position 20."""
    harness = ClientHarness()
    harness.connect(placement(0), placement(1))
    call = harness.call(request)
    query = harness.take(wire.LeaseQuery)[-1][1]
    left = placement(0, state="finalized")
    replicas = tuple(msgspec.structs.replace(one, fingerprint="f") for one in left.replicas)
    known = [msgspec.structs.replace(left, replicas=replicas), placement(1)]
    harness.give(
        wire.LeaseHistory(
            CLUSTER, query.request, [], known, 0, finalized=[Finalized(shard=0, limit=20)]
        )
    )
    return harness, call


@pytest.mark.parametrize(("filled", "is_known"), [(15, False), (30, True)])
def test_the_tail_waits_for_a_finalized_shard_only_if_it_may_have_the_last_record(
    filled: int, is_known: bool
) -> None:
    harness, call = with_finalized(TailRequest(ClientHarness().until(S)))
    tails = harness.take(wire.Tail)
    assert sorted(message.shard for _, message in tails) == [0, 0, 1, 1]
    for name, message in tails:
        if message.shard == 1:
            harness.give(tail_reply(message, int(name[3]), filled))
    assert (call in harness.answers) == is_known
    for name, message in tails:
        if message.shard == 0:
            harness.give(tail_reply(message, int(name[3]), 17))
    assert harness.answers[call] == (RecordId(30, 1) if is_known else RecordId(17, 0))


def test_a_query_for_the_last_stable_record_waits_for_a_finalized_shard_only_if_needed() -> None:
    request = SubscribeRequest(ClientHarness().until(S), RID_RECENT, follow=False)
    harness, _ = with_finalized(request)
    for below, last_below in ((0, 0), (50, 40)):
        tails = harness.take(wire.Tail)
        assert {message.below for _, message in tails} == {below}
        for name, message in tails:
            if message.shard == 1:
                reply = tail_reply(message, int(name[3]), 60)
                harness.give(msgspec.structs.replace(reply, last_below=last_below))
    assert harness.take(wire.LeaseQuery)[-1][1].gsn == 40, "the subscription begins there"


def test_a_replica_without_a_tail_reply_is_asked_again() -> None:
    harness, call = tailing(2 * S)
    assert harness.core.waiting_for == [], "no replica is late yet"
    for name, message in harness.take(wire.Tail):
        if name != "s1r1:1":
            harness.give(tail_reply(message, int(name[3]), 5))
    assert not harness.answers
    harness.pass_time(60 * MS)
    assert [name for name, _ in harness.take(wire.Tail)] == ["s1r1:1"]
    assert harness.core.waiting_for == ["shard 1 (silent)"]
    harness.pass_time(2 * S)
    error = harness.answers[call]
    assert isinstance(error, DeadlineError)


def test_tail_query_waits_for_a_recovering_shard_until_a_replica_joined_its_new_view() -> None:
    """The other replica may be lost for good; its reply of the old view does not count."""
    harness, call = tailing()
    harness.core._routing.update_placements([placement(2, state="recovering")])
    for name, message in harness.take(wire.Tail):
        if message.shard != 2:
            harness.give(tail_reply(message, int(name[3]), 5))
    harness.pass_time(4 * S)
    asked = [m for _, m in harness.take(wire.Tail) if m.shard == 2]
    assert harness.core.waiting_for == ["shard 2 (recovering)"]
    assert 10 < len(asked) < 60, "a dead shard is asked with growing intervals"
    number = asked[-1]
    harness.give(tail_reply(number, 1, 9, 1))
    assert call not in harness.answers
    harness.give(tail_reply(number, 0, 8, 2))
    assert harness.answers[call] == RecordId(8, 2)


def test_tail_query_asks_a_replica_again_that_replied_before_its_recovery() -> None:
    """It is the only one left, and joins the next view, which the service does not have yet."""
    harness, call = tailing()
    for name, message in harness.take(wire.Tail):
        if message.shard != 2 or name == "s2r1:1":
            harness.give(tail_reply(message, int(name[3]), 5))
    harness.pass_time(1 * S)
    (again,) = [m for name, m in harness.take(wire.Tail) if name == "s2r1:1"][-1:]
    harness.give(tail_reply(again, 1, 5, 2))
    assert harness.answers[call] == RecordId(5, 2)


def test_view_change_voids_earlier_tail_replies() -> None:
    harness, call = tailing()
    first, *others = harness.take(wire.Tail)
    for name, message in others:
        harness.give(tail_reply(message, int(name[3]), 5))
    harness.insert(b"x")
    harness.pass_time(40 * MS)
    harness.call(StatusRequest(harness.until()))
    harness.core._routing.update_placements([placement(2, view=2)])
    harness.give(tail_reply(first[1], 0, 5))
    assert call not in harness.answers, "shard 2 replied in its older view"
    harness.pass_time(20 * MS)
    again = harness.take(wire.Tail)
    assert {(name, m.view) for name, m in again} == {("s2r0:1", 2), ("s2r1:1", 2)}
    for name, message in again:
        harness.give(tail_reply(message, int(name[3]), 7, 2))
    assert harness.answers[call] == RecordId(7, 2)


def test_other_replicas_forward_the_query_to_one_that_the_client_does_not_reach() -> None:
    harness, call = tailing()
    first = harness.take(wire.Tail)
    for name, message in first:
        if name != "s2r0:1":
            harness.give(tail_reply(message, int(name[3]), 5))
    harness.pass_time(120 * MS)
    assert {name for name, _ in harness.take(wire.Tail)} == {"s2r0:1"}
    harness.pass_time(100 * MS)
    (again,) = [message for name, message in harness.take(wire.Tail) if name == "s2r1:1"]
    assert again in {message for _, message in first}, "a copy has the same number"
    harness.give(tail_reply(again, 0, 7))
    assert harness.answers[call] == RecordId(7, 2)


def test_silent_replica_is_asked_again_and_named_at_the_deadline() -> None:
    harness, call = tailing(120 * MS)
    for name, message in harness.take(wire.Tail):
        if name != "s1r1:1":
            harness.give(tail_reply(message, int(name[3]), 5))
    harness.pass_time(60 * MS)
    assert [name for name, _ in harness.take(wire.Tail)] == ["s1r1:1"]
    harness.pass_time(60 * MS)
    assert "s1r1:1" in str(harness.answers[call])


@pytest.mark.parametrize("error", ["", "no-such-position"])
def test_trims(error: Any) -> None:
    harness = ClientHarness()
    harness.connect(placement(0))
    call = harness.call(TrimRequest(harness.until(), RecordId(9, 0)))
    trim = harness.take(wire.Trim)[-1][1]
    assert trim.gsn == 9
    harness.give(wire.TrimReply(CLUSTER, trim.request, 9, error))
    assert isinstance(harness.answers[call], NoSuchRecordError if error else type(None))


def test_trim_of_an_unstable_position_is_retried() -> None:
    harness = ClientHarness()
    harness.connect(placement(0))
    call = harness.call(TrimRequest(harness.until(), RecordId(9, 0)))
    for error in ("not-stable", ""):
        trim = harness.take(wire.Trim)[-1][1]
        harness.give(wire.TrimReply(CLUSTER, trim.request, 9, error))
        harness.pass_time(110 * MS)
    assert harness.answers[call] is None


@pytest.mark.parametrize(
    ("trim", "obstacle", "known"),
    [
        (9, "s1r1 is full", "the deadline. It will happen, but s1r1 is full"),
        (8, "shard 1 is slow", "the deadline. It may still happen, but shard 1 is slow"),
        (8, "", "before the deadline"),  # The reply of an older release.
    ],
)
def test_the_error_of_a_trim_states_what_is_known_of_it(
    trim: int, obstacle: str, known: str
) -> None:
    harness = ClientHarness()
    harness.connect(placement(0))
    call = harness.call(TrimRequest(harness.until(5 * S), RecordId(9, 0)))
    request = harness.take(wire.Trim)[-1][1].request
    harness.give(wire.TrimReply(CLUSTER, request, trim, "not-stable", obstacle))
    harness.pass_time(6 * S)
    assert isinstance(harness.answers[call], DeadlineError)
    assert str(harness.answers[call]).endswith(known)
