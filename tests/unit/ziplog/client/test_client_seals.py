"""Seals: appends, `seal` and sealed tails wait until every shard has passed their position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.ziplog.client.fakes import CLUSTER, MS, ClientHarness, S, ack, lease, placement
from ziplog import wire
from ziplog.client.common.requests import InsertRequest, SealRequest, TailRequest
from ziplog.client.common.unknown_outcome import ResolveRequest
from ziplog.client.inserts import sending
from ziplog.client.seals.settled_prefix import FORGET_AFTER_NS, REST_AFTER_NS
from ziplog.core.node import BatchEnd
from ziplog.core.view import run_of
from ziplog.errors import DeadlineError, OutcomeUnknownError
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from ziplog.core.view import LeaseRun

FIRST = lease([0, 1], size=20)  # shard 0 owns the odd positions up to 20, shard 1 the even ones


class Sealer(ClientHarness):
    """A client of two shards, with two replicas each."""

    def __init__(self) -> None:
        super().__init__()
        self.connect(placement(0), placement(1), leases=[run_of(FIRST)])
        self.streams: dict[int, wire.Subscribe] = {}

    def seal(self, gsn: int, timeout: int = 10 * S) -> int:
        call = self.call(SealRequest(self.until(timeout), RecordId(gsn, 0)))
        self.step(BatchEnd())
        return call

    def append(self, *payloads: bytes, timeout: int = 10 * S) -> int:
        request = InsertRequest(
            self.until(timeout), list(payloads), RID_GENESIS, None, 0, len(payloads) > 1,
            sealed=True,
        )  # fmt: skip
        call = self.call(request)
        self.step(BatchEnd())
        return call

    def place(self, *gsns: int) -> None:
        """Ack the pending insert at both replicas."""
        message = self.take(wire.Insert)[0][1]
        for server in (0, 1):
            self.give(ack(message, server, gsns))

    def history(self, *runs: LeaseRun, trim: int = 0) -> None:
        question = self.take(wire.LeaseQuery)[-1][1]
        known = [placement(shard) for shard in range(3)]
        self.give(wire.LeaseHistory(CLUSTER, question.request, list(runs), known[:2], trim))

    def survey(self, *frontiers: int, filled: int = 0) -> None:
        """Reply to a tail query, the leases first."""
        self.history(run_of(FIRST))
        for shard, frontier in enumerate(frontiers):
            for name, tail in self.take_tails(shard):
                server = int(name[3])
                self.give(wire.TailReply(CLUSTER, shard, 1, server, tail.request, filled, frontier))

    def take_tails(self, shard: int) -> list[tuple[str, wire.Tail]]:
        tails = self.take(wire.Tail)
        self.sent += [item for item in tails if item[1].shard != shard]
        return [item for item in tails if item[1].shard == shard]

    def follow(self, *runs: LeaseRun, frontiers: tuple[int, int] = (1, 1)) -> None:
        """Go through the beginning, up to the open streams."""
        self.survey(*frontiers)
        self.history(*(runs or (run_of(FIRST),)))
        self.look()

    def look(self) -> list[str]:
        opened = self.take(wire.Subscribe)
        self.streams |= {message.shard: message for _, message in opened}
        return [name for name, _ in opened]

    def deliver(self, shard: int, frontier: int, **fields: Any) -> None:
        stream = self.core._seals._prefix._streams[shard]
        self.give(
            wire.Deliver(
                CLUSTER, shard, 1, 1, stream.number, stream.frontier, frontier, [],
                fields.pop("leases", []), frontier, **fields,
            )
        )  # fmt: skip


def following() -> Sealer:
    """Return a client whose streams are open."""
    harness = Sealer()
    call = harness.seal(1)
    harness.follow()
    harness.deliver(0, 3)
    harness.deliver(1, 2)
    assert harness.answers.pop(call) == RecordId(1, 0)
    return harness


def test_seal_waits_for_every_shard() -> None:
    harness = Sealer()
    call = harness.seal(5)
    harness.follow()
    assert {m.kind for m in harness.streams.values()} == {"frontier"}
    assert [m.credit for m in harness.streams.values()] == [5, 5]
    assert {m.gsn for _, m in harness.take(wire.Want)} == {5}
    harness.deliver(0, 7)
    harness.deliver(1, 4)
    assert call not in harness.answers
    harness.deliver(1, 6)
    assert harness.answers.pop(call) == RecordId(5, 0)
    assert not harness.core._is_waiting()


def test_frontier_at_the_position_does_not_seal_it() -> None:
    harness = following()
    call = harness.seal(4)
    harness.deliver(0, 5)
    harness.deliver(1, 4)
    assert call not in harness.answers
    harness.deliver(1, 6)
    assert call in harness.answers


def test_genesis_is_sealed() -> None:
    harness = Sealer()
    assert harness.answers[harness.call(SealRequest(harness.until(), RID_GENESIS))] == RID_GENESIS
    assert not harness.take(wire.LeaseQuery)


def test_append_is_an_insert_and_a_seal() -> None:
    harness = following()
    call = harness.append(b"x")
    harness.place(5)
    assert call not in harness.answers, "it is placed, and not sealed"
    assert {m.credit for _, m in harness.take(wire.Credit)} == {5}
    harness.deliver(0, 7)
    harness.deliver(1, 6)
    assert harness.answers.pop(call) == [RecordId(5, 0)]
    assert harness.core.counters.appends == 1


def test_append_of_many_seals_its_last_record() -> None:
    harness = following()
    call = harness.append(b"x", b"y")
    harness.place(5, 7)
    harness.deliver(0, 9)
    harness.deliver(1, 6)
    assert call not in harness.answers
    harness.deliver(1, 8)
    assert harness.answers.pop(call) == [RecordId(5, 0), RecordId(7, 0)]


def test_inserts_and_appends_share_units_and_not_their_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending, "IMMEDIATE_SINGLE_UNITS", 1)
    monkeypatch.setattr(sending, "MAX_SINGLE_UNITS", 2)
    harness = following()
    first, plain, sealed = harness.insert(b"a"), harness.insert(b"b"), harness.append(b"c")
    alone, group = (message for _, message in harness.take(wire.Insert)[::2])
    assert (alone.count, group.count) == (1, 2)
    for server in (0, 1):
        harness.give(ack(alone, server, [5]), ack(group, server, [7, 9]))
    assert harness.answers.pop(first) == [RecordId(5, 0)]
    assert harness.answers.pop(plain) == [RecordId(7, 0)]
    assert sealed not in harness.answers
    harness.deliver(0, 11)
    harness.deliver(1, 10)
    assert harness.answers.pop(sealed) == [RecordId(9, 0)]


def test_appends_of_one_batch_share_a_unit() -> None:
    harness = following()
    for payload in (b"a", b"b", b"c"):
        harness.call(
            InsertRequest(harness.until(), [payload], RID_GENESIS, None, 0, shard=0, sealed=True)
        )
    assert not harness.take(wire.Insert)
    harness.step(BatchEnd())
    assert [message.count for _, message in harness.take(wire.Insert)] == [3, 3]


def test_calls_share_one_question_to_each_shard() -> None:
    harness = following()
    calls = [harness.seal(gsn) for gsn in (4, 8, 6, 8)]
    harness.take(wire.Credit)
    harness.take(wire.Want)
    harness.deliver(0, 9)
    harness.deliver(1, 8)
    assert [call in harness.answers for call in calls] == [True, False, True, False]
    assert not harness.take(wire.Credit)
    harness.deliver(1, 10)
    assert all(call in harness.answers for call in calls)


@pytest.mark.parametrize(("shards", "pauses"), [(16, False), (17, True)])
def test_questions_to_many_shards_are_apart(shards: int, pauses: bool) -> None:
    harness = Sealer()
    all_shards = lease(list(range(shards)), size=20 * shards)
    harness.core._routing.update_placements([placement(shard) for shard in range(shards)])
    first = harness.seal(1)
    harness.history(run_of(all_shards))
    for shard in range(shards):
        for name, tail in harness.take_tails(shard):
            harness.give(wire.TailReply(CLUSTER, shard, 1, int(name[3]), tail.request, 0, 1))
    harness.history(run_of(all_shards))
    assert {m.gsn for _, m in harness.take(wire.Want)} == {1}
    for shard in range(shards):
        harness.deliver(shard, shards + 1)
    assert first in harness.answers
    calls = [harness.seal(gsn) for gsn in (shards + 1, shards + 2)]
    if pauses:
        assert not harness.take(wire.Credit)
        harness.pass_time(shards * 50 * MS // 1000)
        assert {m.gsn for _, m in harness.take(wire.Want)} == {shards + 2}
        assert {m.credit for _, m in harness.take(wire.Credit)} == {shards + 2}
    else:
        assert {m.credit for _, m in harness.take(wire.Credit)} == {shards + 1, shards + 2}
    for shard in range(shards):
        harness.deliver(shard, 3 * shards + 1)
    assert all(call in harness.answers for call in calls)


def test_lost_answer_is_asked_for_again() -> None:
    harness = following()
    call = harness.seal(6)
    harness.take(wire.Credit)
    harness.take(wire.Want)
    harness.pass_time(600 * MS)
    assert harness.take(wire.Credit)
    assert harness.take(wire.Want)
    assert call not in harness.answers


def test_shard_that_leaves_is_waited_for_up_to_its_last_position() -> None:
    second = lease([0], 2, 21, size=20)
    harness = following()
    call = harness.seal(25)
    harness.deliver(0, 21, leases=[run_of(second)])
    harness.deliver(0, 27)
    assert call not in harness.answers, "shard 1 owns positions below 21"
    harness.deliver(1, 20)
    assert call not in harness.answers
    harness.deliver(1, 21)
    assert harness.answers.pop(call) == RecordId(25, 0)


def test_shard_that_joins_is_waited_for() -> None:
    second = lease([0, 1, 2], 2, 21, size=20)
    harness = following()
    call = harness.seal(30)
    harness.core._routing.update_placements([placement(2)])
    harness.deliver(0, 40, leases=[run_of(second)])
    harness.deliver(1, 40)
    assert harness.look() == ["s2r1:1"]
    assert call not in harness.answers
    harness.deliver(2, 32)
    assert harness.answers.pop(call) == RecordId(30, 0)


def test_nothing_is_sealed_beyond_the_known_leases() -> None:
    harness = following()
    call = harness.seal(21)
    harness.deliver(0, 50)
    harness.deliver(1, 50)
    assert call not in harness.answers
    harness.deliver(0, 60, leases=[run_of(lease([0, 1], 2, 21, size=20))])
    assert harness.answers.pop(call) == RecordId(21, 0)


def test_tail_query_settles_nothing_beyond_its_leases() -> None:
    """A shard that joins after the query's leases may own positions there."""
    harness = Sealer()
    call = harness.seal(25)
    harness.survey(60, 60)
    second = lease([0, 1, 2], 2, 21, size=20)
    assert call not in harness.answers
    harness.core._routing.update_placements([placement(2)])
    harness.history(run_of(FIRST), run_of(second))
    assert call not in harness.answers


def test_gap_in_the_leases_begins_with_a_tail_query() -> None:
    harness = following()
    call = harness.seal(45)
    harness.deliver(0, 7, leases=[run_of(lease([0, 1], 3, 41, size=20))])
    harness.history(run_of(lease([0, 1], 3, 41, size=20)))
    assert call not in harness.answers
    assert not harness.core._seals._prefix._streams
    assert harness.take(wire.LeaseQuery), "the tail query"


def test_leases_that_begin_later_begin_with_a_tail_query() -> None:
    """The members of the leases between would be unknown."""
    harness = Sealer()
    call = harness.seal(25)
    harness.survey(21, 21)
    harness.history(run_of(lease([0], 3, 41, size=20)))
    assert harness.take(wire.LeaseQuery), "the tail query"
    assert not harness.core._seals._prefix._streams
    assert call not in harness.answers


def test_trim_begins_with_a_tail_query() -> None:
    harness = following()
    call = harness.seal(9)
    number = harness.core._seals._prefix._streams[0].number
    harness.give(wire.Trimmed(CLUSTER, 0, 1, number, 8))
    harness.follow(frontiers=(11, 8))
    harness.deliver(0, 11)
    harness.deliver(1, 10)
    assert harness.answers.pop(call) == RecordId(9, 0)


def test_shard_that_is_over_is_not_waited_for() -> None:
    """Its servers were stopped before this client had its last frontier."""
    harness = following()
    call = harness.seal(6, 30 * S)
    harness.core._routing.update_placements([placement(1, state="finalized")])
    harness.pass_time(2 * S)
    harness.history(run_of(FIRST), trim=20)
    query = harness.take(wire.LeaseQuery)[-1][1]
    second = run_of(lease([0], number=2, base=21))
    known = [placement(0), placement(1, state="finalized")]
    harness.give(wire.LeaseHistory(CLUSTER, query.request, [second], known, 20, over=[1]))
    for name, tail in harness.take_tails(0):
        server = int(name[3])
        harness.give(wire.TailReply(CLUSTER, 0, 1, server, tail.request, 0, 25))
    harness.history(second, trim=20)
    assert harness.answers.pop(call) == RecordId(6, 0)


def test_new_view_opens_the_stream_again() -> None:
    harness = following()
    call = harness.seal(6)
    before = harness.core._seals._prefix._streams[1].number
    harness.core._routing.update_placements([placement(1, view=2)])
    assert harness.core._seals._prefix._streams[1].number != before
    harness.deliver(0, 7)
    harness.deliver(1, 8)
    assert harness.answers.pop(call) == RecordId(6, 0)


def test_deadline_names_what_was_awaited() -> None:
    harness = following()
    call = harness.seal(6, timeout=S)
    harness.deliver(0, 7)
    harness.pass_time(S)
    error = harness.answers.pop(call)
    assert isinstance(error, DeadlineError)
    assert "shard 1 (silent)" in str(error)
    assert "shard 0" not in str(error)


def test_deadline_of_a_position_beyond_the_leases_blames_no_shard() -> None:
    harness = following()
    call = harness.seal(21, timeout=S)
    harness.pass_time(S)
    error = harness.answers.pop(call)
    assert isinstance(error, DeadlineError)
    assert "was given the position 21@0 yet" in str(error)
    assert "the leases end before gsn 21" in str(error)
    assert "silent" not in str(error)


@pytest.mark.parametrize("others", [0, 1])
def test_position_that_no_shard_has_does_not_hide_those_of_later_calls(others: int) -> None:
    """Primaries ignore a question about a position far behind their leases."""
    harness = following()
    far = harness.seal(10**6, S)
    waiting = [harness.seal(5, 30 * S) for _ in range(others)]
    harness.pass_time(2 * S)
    assert isinstance(harness.answers.pop(far), DeadlineError)
    harness.take(wire.Want)
    waiting.append(harness.seal(5))
    harness.pass_time(100 * MS)
    assert {m.gsn for _, m in harness.take(wire.Want)} == {5}
    harness.deliver(0, 7)
    harness.deliver(1, 6)
    assert all(harness.answers.pop(call) == RecordId(5, 0) for call in waiting)


def test_position_that_no_shard_has_hides_no_other_while_it_waits() -> None:
    harness = following()
    far = harness.seal(10**6, 60 * S)
    harness.pass_time(100 * MS)
    assert 10**6 in {m.gsn for _, m in harness.take(wire.Want)}
    near = harness.seal(5, 30 * S)
    harness.pass_time(100 * MS)
    assert 5 in {m.gsn for _, m in harness.take(wire.Want)}
    harness.pass_time(S)
    assert {m.gsn for _, m in harness.take(wire.Want)} == {5}
    harness.deliver(0, 7)
    harness.deliver(1, 6)
    assert harness.answers.pop(near) == RecordId(5, 0)
    harness.pass_time(S)
    assert {m.gsn for _, m in harness.take(wire.Want)} == {10**6}
    assert far not in harness.answers


def test_append_that_is_not_sealed_says_where_the_record_is() -> None:
    harness = following()
    call = harness.append(b"x", timeout=S)
    harness.place(5)
    harness.deliver(0, 7)
    harness.pass_time(S)
    error = harness.answers.pop(call)
    assert isinstance(error, OutcomeUnknownError)
    assert error.results == [RecordId(5, 0)]
    assert "the record is at 5@0, but shard 1 (silent) has not passed it" in str(error)
    assert harness.core.counters.unsealed == 1
    resolving = harness.call(ResolveRequest(harness.until(), error.doubt))  # type: ignore[arg-type]
    assert resolving not in harness.answers
    harness.deliver(1, 6)
    assert harness.answers.pop(resolving) == [RecordId(5, 0)]


def test_resolve_of_an_unknown_append_waits_for_the_place_and_the_seal() -> None:
    harness = following()
    call = harness.append(b"x", timeout=S)
    message = harness.take(wire.Insert)[0][1]
    harness.pass_time(S)
    error = harness.answers.pop(call)
    assert isinstance(error, OutcomeUnknownError)
    assert not error.results
    resolving = harness.call(ResolveRequest(harness.until(), error.doubt))  # type: ignore[arg-type]
    for server in (0, 1):
        harness.give(ack(message, server, [5]))
    assert resolving not in harness.answers
    harness.deliver(0, 7)
    harness.deliver(1, 6)
    assert harness.answers.pop(resolving) == [RecordId(5, 0)]


def test_sealed_tail_waits_for_its_position() -> None:
    harness = following()
    call = harness.call(TailRequest(harness.until(), sealed=True))
    harness.survey(7, 4, filled=5)
    assert call not in harness.answers
    harness.deliver(0, 7)
    harness.deliver(1, 6)
    assert harness.answers.pop(call) == RecordId(5, 1)


def test_cancelled_call_is_forgotten() -> None:
    harness = following()
    calls = [harness.seal(gsn) for gsn in range(6, 200)]
    for call in calls[1:]:
        harness.cancel(call)
    assert len(harness.core._seals._by_gsn) < 100, "ended calls use no memory for long"
    harness.deliver(0, 7)
    harness.deliver(1, 8)
    assert calls[0] in harness.answers
    assert not harness.core._is_waiting()


@pytest.mark.parametrize(
    ("pause", "is_surveyed"), [(S, False), (FORGET_AFTER_NS + 2 * REST_AFTER_NS, True)]
)
def test_streams_rest_without_calls(pause: int, is_surveyed: bool) -> None:
    harness = following()
    harness.pass_time(REST_AFTER_NS + MS)
    assert {m.shard for _, m in harness.take(wire.Unsubscribe)} == {0, 1}
    assert not harness.core._seals._prefix._streams
    for kind in (wire.Credit, wire.LeaseQuery):
        harness.take(kind)
    harness.look()
    harness.pass_time(pause)
    assert not harness.take(wire.Credit)
    call = harness.seal(6)
    assert bool(harness.take(wire.LeaseQuery)) is is_surveyed
    if not is_surveyed:
        assert sorted(harness.look()) == ["s0r1:1", "s1r1:1"]
        harness.deliver(0, 7)
        harness.deliver(1, 8)
        assert harness.answers.pop(call) == RecordId(6, 0)


def test_leases_are_requested_again_after_a_rest_at_their_end() -> None:
    """The service was silent before; only another shard has the next lease."""
    harness = following()
    call = harness.seal(20)
    harness.deliver(0, 21)
    harness.deliver(1, 21)
    assert harness.answers.pop(call) == RecordId(20, 0)
    harness.pass_time(REST_AFTER_NS + S)
    harness.core._routing.update_placements([placement(2)])
    harness.sent = []
    call = harness.seal(25)
    harness.pass_time(100 * MS)
    harness.history(run_of(lease([2], number=2, base=21)))
    assert call not in harness.answers
    harness.deliver(2, 26)
    assert harness.answers.pop(call) == RecordId(25, 0)
