"""Reads (docs/protocol.md, section 6; D19, D42)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tests.unit.ziplog.client.fakes import (
    CLUSTER,
    MS,
    ClientHarness,
    FakeCluster,
    S,
    connected,
    info,
    lease,
    placement,
    refused,
)
from ziplog import wire
from ziplog.client.common.requests import ReadRequest
from ziplog.core.node import BatchEnd
from ziplog.core.view import run_of
from ziplog.errors import DeadlineError, NoSuchRecordError, TrimmedError, UnavailableError
from ziplog.types import Record, RecordId

RID = RecordId(5, 0)


def reading(rid: RecordId = RID, *, replicas: int = 2) -> tuple[ClientHarness, int]:
    harness = ClientHarness()
    harness.connect(placement(0, replicas), placement(1, replicas))
    return harness, harness.call(ReadRequest(harness.until(), rid))


def asked(harness: ClientHarness) -> tuple[list[str], wire.Read]:
    reads = harness.take(wire.Read)
    return [name for name, _ in reads], reads[-1][1]


def reply(read: wire.Read, server: int, answer: wire.Answer, **fields: Any) -> wire.ReadReply:
    stable = fields.pop("stable", True)
    made = wire.ReadReply(
        CLUSTER, read.shard, read.view, server, read.request, read.gsn, answer, stable,
        0, 3, 77, b"k", b"payload",
    )  # fmt: skip
    return msgspec.structs.replace(made, **fields)


RECORD = Record(RID, b"payload", b"k", 77, 3)


def test_stable_reply_of_one_replica_suffices() -> None:
    harness, call = reading()
    names, read = asked(harness)
    assert names == ["s0r0:1"]
    harness.give(reply(read, 0, "record"))
    assert harness.answers[call] == RECORD


def test_unstable_reply_counts_only_if_all_replicas_agree() -> None:
    harness, call = reading(replicas=3)
    _, read = asked(harness)
    harness.give(reply(read, 0, "record", stable=False))
    names, _ = asked(harness)
    assert names == ["s0r0:1", "s0r1:1", "s0r2:1"]
    harness.give(reply(read, 1, "record", stable=False), reply(read, 1, "record", stable=False))
    assert not harness.answers
    harness.give(reply(read, 2, "record", stable=False))
    assert harness.answers[call] == RECORD


@pytest.mark.parametrize(
    ("answer", "stable"), [("record", True), ("not-yet", False), ("unknown", True)]
)
def test_replies_of_servers_that_the_shard_does_not_have_are_ignored(
    answer: wire.Answer, stable: bool
) -> None:
    harness, call = reading()
    _, read = asked(harness)
    harness.give(reply(read, 1, "not-yet", stable=False))
    for server in (2, 7):
        harness.give(reply(read, server, answer, stable=stable))
    assert call not in harness.answers


def test_replicas_that_differ_are_asked_again_until_it_is_stable() -> None:
    harness, call = reading()
    _, read = asked(harness)
    harness.give(
        reply(read, 0, "record", stable=False),
        reply(read, 1, "record", stable=False, payload=b"other"),
    )
    harness.take(wire.Read)
    assert not harness.answers
    harness.pass_time(3 * MS)
    assert asked(harness)[0] == ["s0r0:1", "s0r1:1"]
    harness.give(reply(read, 1, "record"))
    assert harness.answers[call] == RECORD


def test_a_backups_guess_is_not_a_record() -> None:
    harness, call = reading()
    _, read = asked(harness)
    harness.give(reply(read, 1, "record", stable=False), reply(read, 0, "not-yet", stable=False))
    assert isinstance(harness.answers[call], NoSuchRecordError)


def test_replies_of_two_views_are_not_combined() -> None:
    harness, _ = reading()
    _, read = asked(harness)
    harness.give(
        reply(read, 0, "record", stable=False),
        reply(read, 1, "record", stable=False, view=2),
    )
    assert not harness.answers


@pytest.mark.parametrize("backup", ["not-yet", "record"])
def test_not_yet_counts_after_all_replicas_replied_in_the_primarys_view(
    backup: wire.Answer,
) -> None:
    harness, call = reading()
    _, read = asked(harness)
    harness.give(reply(read, 0, "not-yet", stable=False))
    assert asked(harness)[0] == ["s0r0:1", "s0r1:1"]
    assert not harness.answers
    harness.give(reply(read, 1, backup, stable=False))
    assert isinstance(harness.answers[call], NoSuchRecordError)


@pytest.mark.parametrize(
    "survivor",
    [{"answer": "unknown"}, {"answer": "not-yet", "view": 2}, {"answer": "record", "view": 2}],
)
def test_not_yet_of_a_replaced_primary_does_not_count(survivor: dict[str, Any]) -> None:
    """A replaced primary may be the last server to learn of the new view."""
    harness, _ = reading()
    _, read = asked(harness)
    harness.give(reply(read, 0, "not-yet", stable=False))
    harness.give(reply(read, 1, stable=False, **survivor))
    harness.give(reply(read, 0, "not-yet", stable=False))
    assert not harness.answers


@pytest.mark.parametrize("answer", ["no-op", "wrong-shard"])
def test_positions_without_a_record(answer: wire.Answer) -> None:
    harness, call = reading()
    _, read = asked(harness)
    harness.give(reply(read, 0, answer))
    error = harness.answers[call]
    assert isinstance(error, NoSuchRecordError)
    assert error.rid == RID


def test_an_unknown_shard_is_looked_up_once() -> None:
    harness, call = reading(RecordId(5, 9))
    harness.list_shards(placement(0), placement(1))
    error = harness.answers[call]
    assert isinstance(error, NoSuchRecordError)
    assert "[0, 1]" in str(error)


def test_read_of_a_new_shard() -> None:
    harness, _ = reading(RecordId(5, 9))
    harness.list_shards(placement(0), placement(9))
    assert asked(harness)[0] == ["s9r0:1"]


def test_reply_from_before_the_read_does_not_prove_that_there_is_no_shard() -> None:
    """A client whose calls block reads the reply with its next call, which may be much later."""
    harness = connected()
    harness.insert(b"x")
    harness.pass_time(S)
    older = harness.take(wire.Hello)[-1][1]
    call = harness.call(ReadRequest(harness.until(), RecordId(5, 9)))
    harness.give(info(older.request, [placement(0), placement(1)], [run_of(lease([0, 1]))]))
    assert call not in harness.answers, "shard 9 may have joined since then"
    harness.list_shards(placement(0), placement(1), placement(9))
    assert asked(harness)[0] == ["s9r0:1"]


def test_a_trimmed_position_names_the_first_one_and_its_owner() -> None:
    harness, call = reading()
    _, read = asked(harness)
    harness.give(reply(read, 0, "trimmed", first=8))
    question = harness.take(wire.LeaseQuery)[-1][1]
    assert question.gsn == 8
    runs = [run_of(lease([0, 1]))]
    harness.give(wire.LeaseHistory(CLUSTER, question.request, runs, [], 8))
    error = harness.answers[call]
    assert isinstance(error, TrimmedError)
    assert error.first == RecordId(8, 1)


def test_owner_of_the_first_position_is_requested_once_and_not_after_the_deadline() -> None:
    harness, call = reading()
    _, read = asked(harness)
    for server in (0, 1, 0):
        harness.give(reply(read, server, "trimmed", first=8))
    assert len(harness.take(wire.LeaseQuery)) == 1
    harness.pass_time(60 * S)
    error = harness.answers[call]
    assert isinstance(error, TrimmedError)
    assert error.first == RecordId(8, 0), "the owner is unknown"
    harness.sent.clear()
    harness.pass_time(60 * S)
    assert harness.take(wire.LeaseQuery) == []


def test_a_first_position_that_was_trimmed_meanwhile_has_no_known_owner() -> None:
    harness, call = reading()
    _, read = asked(harness)
    harness.give(reply(read, 0, "trimmed", first=8))
    question = harness.take(wire.LeaseQuery)[-1][1]
    runs = [run_of(lease([0, 1], number=3, base=2001))]
    harness.give(wire.LeaseHistory(CLUSTER, question.request, runs, [], 2100))
    error = harness.answers[call]
    assert isinstance(error, TrimmedError)
    assert error.first == RecordId(8, 0)


def test_trimmed_position_of_a_shard_whose_servers_are_gone() -> None:
    """A shard that is over needs no servers, so the service is asked; not for each read."""
    harness, call = reading(RecordId(7, 0))
    later = harness.call(ReadRequest(60 * S, RecordId(12, 0)))
    harness.pass_time(4 * S)
    questions = harness.take(wire.LeaseQuery)
    assert {question.gsn for _, question in questions} == {7}
    runs = [run_of(lease([0, 1]))]
    harness.give(wire.LeaseHistory(CLUSTER, questions[0][1].request, runs, [], 12, over=[0]))
    error = harness.answers[call]
    assert isinstance(error, TrimmedError)
    assert error.first == RecordId(12, 1)
    assert later not in harness.answers, "its record may be there"


def test_damaged_copy_is_read_from_the_other_replica() -> None:
    harness, call = reading()
    _, read = asked(harness)
    harness.give(reply(read, 0, "unknown"))
    assert not harness.answers
    assert asked(harness)[0] == ["s0r0:1", "s0r1:1"]
    harness.give(reply(read, 1, "record"))
    assert harness.answers[call] == RECORD


def test_damaged_copies_at_all_replicas_are_an_error() -> None:
    harness, call = reading()
    _, read = asked(harness)
    harness.give(reply(read, 0, "unknown"), reply(read, 1, "unknown"))
    assert isinstance(harness.answers[call], UnavailableError)


def test_a_silent_or_unready_primary() -> None:
    harness, call = reading()
    _, read = asked(harness)
    harness.give(refused(read, 0, "not-ready"))
    harness.pass_time(60 * MS)
    assert "s0r1:1" in asked(harness)[0]
    harness.give(reply(read, 1, "record"))
    assert harness.answers[call] == RECORD


def test_read_without_a_reply_ends_at_its_deadline() -> None:
    harness, call = reading()
    harness.pass_time(10 * S)
    error = harness.answers[call]
    assert isinstance(error, DeadlineError)
    assert "5@0" in str(error)
    harness.sent.clear()
    harness.pass_time(60 * S)
    assert not harness.take(wire.Read)


def test_a_slow_primary_is_not_asked_again_before_the_others() -> None:
    harness, call = reading(replicas=3)
    _, read = asked(harness)
    harness.pass_time(60 * MS)
    assert asked(harness)[0] == ["s0r1:1", "s0r2:1"]
    harness.pass_time(100 * MS)
    assert asked(harness)[0] == ["s0r0:1", "s0r1:1", "s0r2:1"]
    harness.give(reply(read, 0, "record"))
    assert harness.answers[call] == RECORD


def test_single_silent_replica_is_asked_again() -> None:
    harness, _ = reading(replicas=1)
    asked(harness)
    harness.pass_time(60 * MS)
    assert asked(harness)[0] == ["s0r0:1"]


def test_silent_replicas_are_asked_with_growing_intervals() -> None:
    """A server that is slow under load does not get much more load."""
    harness, _ = reading()
    times = []
    for at in range(0, 9_900, 10):
        if "s0r0:1" in [name for name, _ in harness.take(wire.Read)]:
            times.append(at)
        harness.pass_time(10 * MS)
    pauses = [after - before for before, after in pairwise(times)]
    assert pauses == sorted(pauses)
    assert pauses[-1] >= 500
    assert 9 < len(times) < 18


@pytest.mark.parametrize("answer", ["unstable", "refused"])
def test_reply_resets_the_retransmission_timeout(answer: str) -> None:
    harness, _ = reading()
    _, read = asked(harness)
    harness.pass_time(4 * S)
    harness.take(wire.Read)
    if answer == "unstable":
        harness.give(*(reply(read, s, "record", stable=False, payload=b"%d" % s) for s in (0, 1)))
    else:
        harness.give(refused(read, 0, "not-ready"))
    harness.pass_time(51 * MS)
    assert asked(harness)[0][:2] == ["s0r0:1", "s0r1:1"]
    harness.pass_time(60 * MS)
    assert asked(harness)[0], "the retransmission timeout is reset"


def test_a_new_primary_is_asked_at_once() -> None:
    harness, _ = reading()
    asked(harness)
    recovering(harness, 2, "live")
    harness.pass_time(1)
    assert asked(harness)[0] == ["s0r0:1", "s0r1:1"]


def test_a_cancelled_read_sends_nothing_more() -> None:
    harness, call = reading()
    harness.sent.clear()
    harness.cancel(call)
    harness.pass_time(30 * S)
    assert not harness.sent
    assert not harness.answers


@examples(25)
@given(seed=st.integers(0, 2**32), loss=st.sampled_from([0.0, 0.3]))
def test_every_record_that_was_inserted_can_be_read(seed: int, loss: float) -> None:
    harness = ClientHarness(lambda payload, _k, live: live[len(payload) % len(live)])
    cluster = FakeCluster(harness, seed)
    harness.connect(*cluster.placements())
    cluster.loss = loss
    for payload in (b"", b"1", b"22", b"333"):
        rids = cluster.result(harness.insert(payload, key=b"k", timeout=600 * S))
        record = cluster.result(harness.call(ReadRequest(harness.until(600 * S), rids[0])))
        assert record == Record(rids[0], payload, b"k", 0, 0)


# --- while the shard recovers ---


def recovering(harness: ClientHarness, view: int = 1, state: str = "recovering") -> None:
    harness.core._routing.update_placements([placement(0, view=view, state=state)])
    harness.step(BatchEnd())


def test_not_yet_of_a_recovering_primary_is_not_final() -> None:
    harness, call = reading()
    _, read = asked(harness)
    recovering(harness)
    harness.give(reply(read, 0, "not-yet", stable=False))
    harness.give(reply(read, 1, "not-yet", stable=False))
    assert not harness.answers
    recovering(harness, 2, "live")
    harness.pass_time(1)
    _, read = asked(harness)
    assert read.view == 2
    harness.give(*(reply(read, server, "not-yet", stable=False) for server in (0, 1)))
    assert isinstance(harness.answers[call], NoSuchRecordError)


def test_recovering_replicas_are_asked_again_with_the_others() -> None:
    harness, call = reading()
    _, read = asked(harness)
    harness.give(reply(read, 0, "unknown", stable=False))
    assert asked(harness)[0] == ["s0r0:1", "s0r1:1"]
    harness.give(*(reply(read, server, "unknown", stable=False) for server in (0, 1)))
    assert not harness.answers, "that is not damage: a recovery will decide"
    harness.pass_time(100 * MS)
    assert asked(harness)[0][:2] == ["s0r0:1", "s0r1:1"]
    harness.give(reply(read, 1, "record"))
    assert harness.answers[call] == RECORD


def test_recovering_shard_is_asked_with_growing_intervals_until_the_deadline() -> None:
    harness, call = reading()
    recovering(harness)
    asked(harness)
    harness.pass_time(5 * S)
    assert 2 * 9 < len(asked(harness)[0]) < 2 * 25
    harness.pass_time(5 * S)
    assert isinstance(harness.answers[call], DeadlineError)
    assert "shard 0 (recovering)" in str(harness.answers[call])
