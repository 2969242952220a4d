"""Shards that join, leave and are finalized, at a client (docs/protocol.md, section 13)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.unit.ziplog.client.fakes import (
    CLUSTER,
    MS,
    ClientHarness,
    FakeCluster,
    S,
    ack,
    connected,
    learn,
    pinned,
    placement,
    sent,
)
from ziplog import wire
from ziplog.client import placement_arguments
from ziplog.client.common.requests import ReadRequest, SyncRequest, TailRequest
from ziplog.client.inserts.insert_calls import UNIT_RECORDS
from ziplog.core.entries import decode_body
from ziplog.core.view import Replica
from ziplog.errors import ConfigError, DeadlineError, UnavailableError
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.core.view import Placement


def leave(harness: ClientHarness, shard: int = 0, view: int = 1) -> None:
    harness.give(wire.Leaving(CLUSTER, shard, view))


def joined(where: Placement) -> Placement:
    """Return the placement of a shard that was a member: its servers' directories are known."""
    replicas = tuple(msgspec.structs.replace(r, fingerprint="f") for r in where.replicas)
    return msgspec.structs.replace(where, replicas=replicas)


def payloads(insert: wire.Insert) -> list[bytes]:
    return decode_body(insert.body, insert.count).payloads


# --- a shard that leaves ---


def test_leaving_shard_finishes_units_in_flight_and_gets_no_new_ones() -> None:
    harness = connected()
    call = harness.insert(b"old")
    (old,) = sent(harness)
    harness.pass_time(10 * MS)
    leave(harness)
    harness.pass_time(1)
    assert not sent(harness), "nothing is retransmitted for it"
    harness.insert(b"new")
    assert [(m.shard, payloads(m)) for m in sent(harness)] == [(1, [b"new"])]
    harness.give(ack(old, 0, [4]), ack(old, 1, [4]))
    assert harness.answers[call] == [RecordId(4, 0)]


def test_unsent_calls_are_rerouted_and_started_calls_finish_at_their_shard() -> None:
    def policy(_payload: bytes, _key: bytes | None, live: Any) -> int:
        return int(live[0])

    harness = ClientHarness(policy)
    harness.connect(placement(0), placement(1), limits=wire.Limits(max_unsettled_units=1))
    long = harness.insert(*[b"x"] * (UNIT_RECORDS + 1))
    harness.insert(b"waits")
    (first,) = sent(harness)
    leave(harness)
    assert [(m.shard, payloads(m)) for m in sent(harness)] == [(1, [b"waits"])]
    gsns = list(range(1, UNIT_RECORDS + 1))
    harness.give(ack(first, 0, gsns), ack(first, 1, gsns))
    (second,) = sent(harness)
    assert (second.shard, second.count) == (0, 1)
    harness.give(ack(second, 0, [900]), ack(second, 1, [900]))
    assert harness.answers[long] == [RecordId(gsn, 0) for gsn in [*gsns, 900]]


@pytest.mark.parametrize(
    ("word", "is_believed"),
    [((0, 2), True), ((0, 3), True), ((0, 1), False), ((7, 1), False)],
)
def test_leaving_counts_only_in_the_newest_known_view(
    word: tuple[int, int], is_believed: bool
) -> None:
    harness = ClientHarness()
    harness.connect(placement(0, view=2), placement(1))
    leave(harness, *word)
    harness.insert(b"x")
    assert [m.shard for m in sent(harness)] == [1 if is_believed else 0]


def test_leaving_refreshes_the_placements() -> None:
    harness = connected()
    leave(harness)
    harness.pass_time(100 * MS)
    assert harness.take(wire.Hello)


@pytest.mark.parametrize("state", ["recovering", "finalized"])
def test_leaving_does_not_change_a_recovering_or_finalized_shard(state: str) -> None:
    harness = connected()
    learn(harness, 1, state)
    leave(harness)
    assert harness.core._routing.state(0) == state


def test_removed_shard_never_becomes_live_again() -> None:
    """A reply of the service may be older than a server's report."""
    harness = connected()
    leave(harness)
    for state in ("live", "parked", "joining"):
        learn(harness, 1, state)
        assert harness.core._routing.state(0) == "leaving"
    for view, state in ((1, "recovering"), (2, "leaving"), (2, "finalized")):
        learn(harness, view, state)
        assert harness.core._routing.state(0) == state
        for old in ("live", "parked"):
            learn(harness, view, old)
            assert harness.core._routing.state(0) == state
    assert harness.core._routing.live == (1,)


@pytest.mark.parametrize("state", ["leaving", "finalized"])
def test_insert_pinned_to_a_removed_shard_fails_at_its_deadline(
    state: str,
) -> None:
    harness = connected(pinned)
    learn(harness, 1, state)
    call = harness.insert(b"x", timeout=2 * S)
    harness.pass_time(2 * S)
    assert not sent(harness)
    error = harness.answers[call]
    assert isinstance(error, UnavailableError)
    assert f"shard 0 ({state})" in str(error)
    assert "[1]" in str(error), "it names the live shards"


def test_a_running_client_uses_a_shard_that_joined_a_second_later() -> None:
    harness = connected(lambda _p, _k, live: live[-1])
    harness.call(ReadRequest(harness.until(60 * S), RecordId(1, 0)))
    harness.take(wire.Hello)
    harness.pass_time(1000 * MS)
    harness.inform(placement(0), placement(1), placement(2))
    harness.insert(b"x")
    assert [m.shard for m in sent(harness)] == [2]


class LeftCluster(FakeCluster):
    def placements(self) -> list[Placement]:
        return [joined(where) for where in super().placements()]


@pytest.mark.parametrize("state", ["leaving", "finalized"])
def test_records_of_a_removed_shard_can_be_read(state: str) -> None:
    harness = ClientHarness(lambda payload, _k, _live: int(payload))
    cluster = LeftCluster(harness, 1)
    harness.connect(*cluster.placements())
    rids = [cluster.result(harness.insert(b"%d" % (n % 2)))[0] for n in range(6)]
    cluster.states[0] = state
    learn(harness, 1, state)
    read = cluster.result(harness.call(ReadRequest(harness.until(), rids[0])))
    assert (read.rid, read.payload) == (rids[0], b"0")
    tail = cluster.result(harness.call(TailRequest(harness.until())))
    assert tail == max(rids)
    assert [r.rid for r in cluster.fetch_all(cluster.subscribe())] == sorted(rids)
    assert cluster.result(harness.call(SyncRequest(harness.until()))) == max(rids)


def test_the_tail_is_not_asked_of_a_shard_that_never_had_a_position() -> None:
    harness = connected()
    call = harness.call(TailRequest(harness.until()))
    question = harness.take(wire.LeaseQuery)[-1][1]
    known = [
        placement(0), joined(placement(1, state="finalized")), placement(2, state="joining"),
        placement(3, state="finalized"), placement(4, state="recovering"),
    ]  # fmt: skip
    harness.give(wire.LeaseHistory(CLUSTER, question.request, [], known, 0))
    for name, tail in harness.take(wire.Tail):
        filled = 5 + tail.shard
        assert tail.shard < 2, "its servers may never have run"
        harness.give(
            wire.TailReply(CLUSTER, tail.shard, 1, int(name[3]), tail.request, filled, filled + 1)
        )
    assert harness.answers[call] == RecordId(6, 1)


# --- changing shards ---

SERVERS = {"a": "127.0.0.1:1", "b": "127.0.0.1:2"}


def change(
    harness: ClientHarness, what: Any, shard: int = 2, *, timeout: int = 10 * S
) -> tuple[int, wire.ChangeShard]:
    """Start a change; return the call, and the request to the service."""
    request = placement_arguments.change(shard, what, harness.until(timeout), SERVERS)
    call = harness.call(request)
    ((_, message),) = harness.take(wire.ChangeShard)
    return call, message


def changed(harness: ClientHarness, message: wire.ChangeShard, error: Any = "") -> None:
    harness.give(wire.ShardChanged(CLUSTER, message.request, message.shard, error))


def test_client_uses_the_shard_that_it_added() -> None:
    harness = connected(lambda _p, _k, live: live[-1])
    call, message = change(harness, "add")
    assert (message.shard, message.change) == (2, "add")
    assert message.replicas == [Replica("a", "127.0.0.1:1"), Replica("b", "127.0.0.1:2")]
    harness.pass_time(100 * MS)
    ((_, again),) = harness.take(wire.ChangeShard)
    assert again == message, "the request is retried until its reply"
    harness.take(wire.Hello)
    changed(harness, message)
    changed(harness, message)
    assert call not in harness.answers
    harness.inform(placement(0), placement(1), placement(2))
    assert harness.answers[call] is None
    harness.insert(b"x")
    assert [m.shard for m in sent(harness)] == [2]


@pytest.mark.parametrize("what", ["remove", "finalize"])
def test_client_does_not_use_the_shard_that_it_removed(what: str) -> None:
    harness = connected()
    call, message = change(harness, what, 0)
    assert (message.shard, message.change, message.replicas) == (0, what, [])
    changed(harness, message)
    harness.inform(placement(0, state="leaving"), placement(1))
    assert harness.answers[call] is None
    harness.insert(b"x")
    assert [m.shard for m in sent(harness)] == [1]


def test_a_change_follows_the_leader() -> None:
    harness = connected()
    call, message = change(harness, "remove", 0)
    harness.give(wire.NotLeader(CLUSTER, message.request, "mms:2"))
    ((name, again),) = harness.take(wire.ChangeShard)
    assert (name, again) == ("mms:2", message)
    changed(harness, message)
    ((name, hello),) = harness.take(wire.Hello)
    assert name == "mms:2"
    harness.sent.append((name, hello))
    harness.inform(placement(0, state="leaving"), placement(1))
    assert call in harness.answers


@pytest.mark.parametrize(
    ("what", "shard", "error", "words"),
    [
        ("remove", 7, "no-such-shard", ["shard is 7", "[0, 1]"]),
        ("remove", 0, "last-shard", ["shard 0", "add another one first"]),
        ("add", 2, "wrong-size", ["['a', 'b']", "every shard of the cluster has 3"]),
        ("add", 0, "retired", ["shard 0", "such as 2", "never comes back"]),
        ("add", 0, "exists", ["shard 0 exists", "such as 2", "s0r0:1"]),
    ],
)
def test_refused_change_names_the_reason(
    what: str, shard: int, error: str, words: Sequence[str]
) -> None:
    harness = connected()
    call, message = change(harness, what, shard)
    changed(harness, message, error)
    assert call not in harness.answers, "the error needs the current placements"
    harness.inform(placement(0, 3), placement(1, 3))
    answer = harness.answers[call]
    assert isinstance(answer, ConfigError)
    assert f"cannot {what} shard {shard}" in str(answer)
    for word in words:
        assert word in str(answer)


def test_a_number_that_is_in_use_is_named_although_some_of_the_servers_are_its_own() -> None:
    harness = connected()
    mine = placement_arguments.change(
        0, "add", harness.until(), {"s0r0:1": "s0r0:1", "b": "127.0.0.1:2"}
    )
    call = harness.call(mine)
    ((_, message),) = harness.take(wire.ChangeShard)
    changed(harness, message, "exists")
    harness.inform(placement(0), placement(1))
    assert "shard 0 exists with the servers" in str(harness.answers[call])


@pytest.mark.parametrize("theirs", [Replica("a", "127.0.0.1:9"), Replica("c", "127.0.0.1:1")])
def test_a_server_that_another_shard_has_is_named(theirs: Replica) -> None:
    harness = connected()
    call, message = change(harness, "add")
    changed(harness, message, "exists")
    other = msgspec.structs.replace(placement(1), replicas=(theirs, Replica("d", "d:1")))
    harness.inform(placement(0), other)
    answer = harness.answers[call]
    assert isinstance(answer, ConfigError)
    assert "a=127.0.0.1:1 conflicts with shard 1" in str(answer)
    assert "shard 1, which has" in str(answer)


@pytest.mark.parametrize(
    ("what", "state", "words"),
    [
        ("add", None, ["shard 2 (unknown)", "was not live", "did not confirm"]),
        ("add", "joining", ["shard 2 (joining)", "s2r0:1 at s2r0:1", "must run"]),
        ("remove", "leaving", ["shard 2 (leaving)", "is on all of them"]),
        ("finalize", "leaving", ["shard 2 (leaving)", "was not finalized", "stable storage"]),
        ("finalize", "recovering", ["shard 2 (recovering)", "recovered first"]),
    ],
)
def test_change_at_its_deadline_names_the_reason(
    what: str, state: str | None, words: Sequence[str]
) -> None:
    harness = connected()
    call, _ = change(harness, what, timeout=3 * S)
    for _ in range(2):
        harness.take(wire.Hello)
        while not any(isinstance(message, wire.Hello) for _, message in harness.sent):
            harness.pass_time(10 * MS)
        harness.inform(*[placement(2, state=state)] if state else [placement(1)])
    harness.pass_time(3 * S)
    answer = harness.answers[call]
    assert isinstance(answer, DeadlineError)
    for word in words:
        assert word in str(answer)
    harness.sent.clear()
    harness.pass_time(60 * S)
    assert not harness.sent, "no call is pending"


def test_finished_change_completes_without_new_placements() -> None:
    harness = connected()
    call, message = change(harness, "remove", 0)
    changed(harness, message)
    harness.pass_time(10 * S)
    assert harness.answers[call] is None


def test_cancelled_change_is_not_retried() -> None:
    harness = connected()
    call, message = change(harness, "remove", 0)
    harness.cancel(call)
    changed(harness, message)
    harness.sent.clear()
    harness.pass_time(60 * S)
    assert not harness.sent
    assert not harness.answers


@pytest.mark.parametrize("shard", [-1, 2**31, "1", 1.0, True, None])
def test_a_bad_shard_id_is_refused(shard: Any) -> None:
    for what in ("add", "remove", "finalize"):
        with pytest.raises(ConfigError, match="shard is"):
            placement_arguments.change(shard, what, 0, SERVERS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "replicas",
    [
        None, {}, [("a", "h:1")], "a=h:1", {"": "h:1"}, {"n" * 129: "h:1"}, {"a": "h"}, {"a": 1},
        {"a": "h:0"}, {"a": "h:65536"}, {1: "h:1"}, {"a": "h:1", "b": "h:1"},
        {str(i): f"h:{i + 1}" for i in range(17)},
    ],
)  # fmt: skip
def test_bad_servers_are_refused(replicas: Any) -> None:
    with pytest.raises(ConfigError, match="replicas is"):
        placement_arguments.change(2, "add", 0, replicas)
