"""Permanent refusals, and rerouting by the client (docs/protocol.md, section 13)."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
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
    refused,
    resolve,
    sent,
)
from tests.unit.ziplog.client.storms import in_a_storm, insert_all, shards_in_flight
from ziplog import wire
from ziplog.client.inserts.insert_calls import UNIT_RECORDS
from ziplog.core.distance import initial_retransmit_ns
from ziplog.core.entries import decode_body
from ziplog.core.node import BatchEnd
from ziplog.errors import DeadlineError, OutcomeUnknownError, UnavailableError
from ziplog.types import RecordId


def redirect(insert: wire.Insert, server: int, **fields: Any) -> wire.Refused:
    return msgspec.structs.replace(refused(insert, server, "redirect"), **fields)


def moved(harness: ClientHarness) -> list[int]:
    """Return the shards other than 0 that got a message."""
    return [m.shard for m in sent(harness) if m.shard]


def test_a_redirect_of_all_replicas_counts_for_every_copy() -> None:
    harness = connected()
    call = harness.insert(b"x")
    (insert,) = sent(harness)
    harness.pass_time(initial_retransmit_ns(0) + MS)
    assert len(sent(harness)) == 1, "a second copy"
    harness.give(redirect(insert, 0))
    assert not moved(harness)
    harness.give(redirect(insert, 1))
    (again,) = sent(harness)
    assert (again.shard, again.seq, again.body) == (1, 1, insert.body)
    harness.give(ack(again, 0, [2]), ack(again, 1, [2]))
    assert harness.answers[call] == [RecordId(2, 1)]
    counters = harness.core.counters
    assert (counters.redirects, counters.moved, counters.protocol_errors) == (2, 1, 0)


def test_full_refusal_counts_only_for_copies_sent_so_far() -> None:
    harness = connected()
    harness.insert(b"x")
    (insert,) = sent(harness)
    harness.pass_time(initial_retransmit_ns(0) + MS)
    (newest,) = sent(harness)
    for _ in range(2):  # The network may duplicate it.
        harness.give(refused(insert, 0, "full"), refused(insert, 1, "full"))
    assert not moved(harness), "a copy is in flight"
    harness.give(redirect(insert, 0))
    assert not moved(harness)
    harness.give(refused(newest, 1, "full"))
    assert moved(harness) == [1], "both replicas refused both copies"


def test_full_refusal_counts_for_lost_copies() -> None:
    harness = connected()
    harness.insert(b"x")
    harness.pass_time(8 * S)
    newest = sent(harness)[-1]
    assert newest.copy > 3
    harness.give(refused(newest, 0, "full"), refused(newest, 1, "full"))
    assert moved(harness) == [1]


def test_older_full_refusal_does_not_void_a_later_promise() -> None:
    harness = connected()
    harness.insert(b"x")
    (insert,) = sent(harness)
    harness.pass_time(initial_retransmit_ns(0) + MS)
    (newest,) = sent(harness)
    harness.give(refused(newest, 0, "full"), refused(insert, 0, "full"), refused(newest, 1, "full"))
    assert moved(harness) == [1]


def test_duplicate_redirect_counts_for_one_server() -> None:
    harness = connected()
    harness.insert(b"x")
    (insert,) = sent(harness)
    harness.give(redirect(insert, 0), redirect(insert, 0))
    assert not moved(harness)


def test_redirect_voids_the_guess_of_the_same_server() -> None:
    harness = connected()
    harness.insert(b"x")
    (insert,) = sent(harness)
    harness.give(ack(insert, 1, [4]), redirect(insert, 0))
    assert not moved(harness), "the backup holds it"
    harness.give(redirect(insert, 1))
    assert moved(harness) == [1]


def test_guess_that_arrives_after_its_servers_redirect_does_not_count() -> None:
    harness = connected()
    call = harness.insert(b"x")
    (insert,) = sent(harness)
    harness.give(redirect(insert, 1), ack(insert, 1, [4], 9), ack(insert, 0, [4]))
    assert call not in harness.answers, "the backup's guess is void"
    harness = connected()
    harness.insert(b"x")
    (insert,) = sent(harness)
    harness.give(redirect(insert, 1), ack(insert, 1, [4], 9), redirect(insert, 0))
    assert moved(harness) == [1]


def test_unit_with_mixed_replies_is_retransmitted_until_all_agree() -> None:
    harness = connected()
    call = harness.insert(b"x")
    (insert,) = sent(harness)
    harness.give(ack(insert, 1, [4]), redirect(insert, 0))
    harness.pass_time(initial_retransmit_ns(0) + MS)
    assert {m.seq for m in sent(harness)} == {insert.seq}, "the same again, at the same shard"
    assert call not in harness.answers
    harness.give(redirect(insert, 1))
    assert moved(harness) == [1]


def test_placement_by_the_primary_is_final() -> None:
    harness = connected()
    call = harness.insert(b"x")
    (insert,) = sent(harness)
    harness.give(ack(insert, 0, [4]), redirect(insert, 0), redirect(insert, 1))
    assert not moved(harness)
    harness.give(ack(insert, 1, [4], confirmed=True))
    assert harness.answers[call] == [RecordId(4, 0)]
    assert harness.core.counters.moved == 0


def test_view_change_voids_promises_of_the_older_view() -> None:
    harness = connected()
    harness.insert(b"x")
    (insert,) = sent(harness)
    harness.give(redirect(insert, 0))
    learn(harness, 1, "recovering")
    learn(harness, 2, "leaving")
    harness.pass_time(1)
    (again,) = sent(harness)
    assert (again.shard, again.view, again.seq) == (0, 2, insert.seq)
    harness.pass_time(2 * initial_retransmit_ns(0))
    assert len(sent(harness)) == 1, "one copy more than is refused below"
    harness.give(redirect(insert, 1), redirect(again, 1))
    assert not moved(harness), "the primary of view 2 may accept it"
    harness.give(redirect(again, 0, view=3))
    assert not moved(harness), "a promise of view 1 does not count in view 2"
    harness.give(redirect(again, 0))
    assert moved(harness) == [1]


def test_unknown_outcome_ends_with_redirects_of_all_replicas() -> None:
    harness = connected(pinned)
    call = harness.insert(b"x", timeout=1 * S)
    (insert,) = sent(harness)
    harness.give(ack(insert, 1, [4]))
    harness.pass_time(1 * S)
    error = harness.answers[call]
    assert isinstance(error, OutcomeUnknownError)
    answer = resolve(harness, error, 5 * S)
    harness.give(redirect(insert, 0))
    assert answer not in harness.answers
    harness.give(redirect(insert, 1))
    assert harness.answers[answer] == [None]


def test_redirected_pinned_insert_waits_for_its_shard_with_a_new_identity() -> None:
    harness = connected(pinned)
    call = harness.insert(b"x")
    (insert,) = sent(harness)
    harness.give(redirect(insert, 0), redirect(insert, 1))
    harness.take(wire.Hello)
    harness.pass_time(200 * MS)
    assert not sent(harness), "the placements are refreshed first"
    harness.inform(placement(0, state="parked"), placement(1))
    harness.pass_time(5 * S)
    assert not sent(harness)
    harness.inform(placement(0), placement(1))
    (again,) = sent(harness)
    assert (again.shard, again.seq, again.first_incomplete) == (0, insert.seq + 1, insert.seq + 1)
    harness.give(ack(again, 0, [8]), ack(again, 1, [8]))
    assert harness.answers[call] == [RecordId(8, 0)]
    assert harness.core.counters.moved == 0


def test_parked_shard_gets_units_in_flight_and_reports_them_absent() -> None:
    """A copy, or a refusal, may have been lost; the shard may be unavailable for a minute."""
    harness = connected()
    call = harness.insert(b"x")
    (insert,) = sent(harness)
    harness.give(redirect(insert, 1))
    harness.pass_time(200 * MS)
    harness.inform(placement(insert.shard, state="parked"), placement(1 - insert.shard))
    sent(harness)
    harness.pass_time(1 * S)
    copies = sent(harness)
    assert copies, "the primary may not have got it"
    assert {(copy.shard, copy.seq, copy.view) for copy in copies} == {(insert.shard, insert.seq, 1)}
    harness.give(redirect(insert, 0))
    (moved,) = sent(harness)
    assert moved.shard == 1 - insert.shard
    harness.give(ack(moved, 0, [8]), ack(moved, 1, [8]))
    assert harness.answers[call] == [RecordId(8, moved.shard)]


def test_recovered_parked_shard_gets_units_in_flight() -> None:
    harness = connected()
    harness.insert(b"x")
    (insert,) = sent(harness)
    other = placement(1 - insert.shard)
    for state in ("recovering", "parked"):
        harness.core._routing.update_placements([placement(insert.shard, state=state), other])
        harness.step(BatchEnd())
        harness.core.check()
        harness.pass_time(2 * S)
        assert bool(sent(harness)) == (state == "parked")


def test_redirect_of_a_live_shard_waits_for_the_next_refresh() -> None:
    harness = connected(pinned)
    calls = [harness.insert(b"x", timeout=4 * S) for _ in range(100)]
    count = 0
    for _ in range(2000):
        for insert in sent(harness):
            count += 1
            harness.give(redirect(insert, 0), redirect(insert, 1))
        if harness.take(wire.Hello):
            harness.sent.append(("", wire.Hello(CLUSTER, harness.core._context._last_request)))
            harness.inform(placement(0), placement(1))
        harness.pass_time(1 * MS)
    assert 1000 <= count <= 100 * 21, "each refreshes ten times a second"
    harness.pass_time(2 * S)
    assert all(isinstance(harness.answers[call], UnavailableError) for call in calls)


def test_many_unassigned_calls_cost_no_more_messages_than_few() -> None:
    choices: list[int] = []

    def policy(payload: bytes, key: bytes | None, live: Any) -> int:
        choices.append(pinned(payload, key, live))
        return choices[-1]

    harness = connected(policy)
    for _ in range(100):
        harness.insert(b"x")
    for insert in sent(harness):
        harness.give(redirect(insert, 0), redirect(insert, 1))
    harness.pass_time(100 * MS)
    harness.inform(placement(0, state="leaving"), placement(1))
    assert not sent(harness)
    assert len(choices) <= 500, "one refresh retries each call once"


def half_placed(**options: Any) -> tuple[ClientHarness, int, list[int]]:
    """Return a call of three units at shard 0, with only the first one placed, and its gsns."""
    harness = ClientHarness()
    harness.connect(placement(0), placement(1), limits=wire.Limits(max_unsettled_units=2))
    payloads = [b"%d" % index for index in range(3 * UNIT_RECORDS)]
    call = harness.insert(*payloads, **options)
    first, second = sent(harness)
    assert first.shard == 0
    gsns = list(range(1, UNIT_RECORDS + 1))
    harness.give(ack(first, 0, gsns))
    harness.give(redirect(second, 0), redirect(second, 1))
    assert call not in harness.answers, "the first part may be placed, or not"
    harness.give(ack(first, 1, gsns))
    for insert in sent(harness):
        assert insert.shard == 0
        harness.give(redirect(insert, 0), redirect(insert, 1))
    assert call not in harness.answers
    # The client requests the placements.
    harness.pass_time(200 * MS)
    return harness, call, gsns


def test_partly_placed_call_waits_for_its_shard_and_continues_after_its_placed_part() -> None:
    harness, call, gsns = half_placed()
    harness.inform(placement(0, state="parked"), placement(1))
    harness.pass_time(5 * S)
    assert not sent(harness), "the call is at one shard"
    harness.inform(placement(0), placement(1))
    rids = [RecordId(gsn, 0) for gsn in gsns]
    for index, insert in enumerate(sent(harness), 1):
        assert (insert.shard, insert.after) == (0, gsns[-1])
        payloads = decode_body(insert.body, insert.count).payloads
        assert payloads == [b"%d" % n for n in range(index * 256, (index + 1) * 256)]
        places = [1000 * index + n for n in range(UNIT_RECORDS)]
        harness.give(ack(insert, 0, places), ack(insert, 1, places))
        rids += [RecordId(gsn, 0) for gsn in places]
    assert harness.answers[call] == rids
    assert harness.core.counters.moved == 0


def test_partly_placed_call_reports_its_placed_part_at_the_deadline() -> None:
    harness, call, gsns = half_placed(timeout=2 * S)
    harness.inform(placement(0, state="parked"), placement(1))
    harness.pass_time(2 * S)
    error = harness.answers[call]
    assert type(error) is UnavailableError
    assert error.results == [RecordId(gsn, 0) for gsn in gsns] + [None] * (2 * UNIT_RECORDS)
    assert not error.retriable, "a retry of the whole call would duplicate records"
    assert "512 of the 768 records before the deadline" in str(error)
    harness.inform(placement(0), placement(1))
    harness.pass_time(1 * S)
    assert not sent(harness), "the call has ended"


def test_partly_placed_call_of_a_removed_shard_fails_at_once() -> None:
    harness, call, gsns = half_placed()
    harness.inform(placement(0, state="leaving"), placement(1))
    error = harness.answers[call]
    assert type(error) is UnavailableError
    assert error.results == [RecordId(gsn, 0) for gsn in gsns] + [None] * (2 * UNIT_RECORDS)
    assert not error.retriable, "a retry of the whole call would duplicate records"
    assert "512 of the 768 records" in str(error)
    assert not shards_in_flight(harness)
    harness.pass_time(5 * S)
    assert not sent(harness)


def test_partly_placed_call_of_a_leaving_full_shard_is_sent_again() -> None:
    harness = ClientHarness()
    harness.connect(placement(0), placement(1))
    call = harness.insert(*[b"x"] * (2 * UNIT_RECORDS))
    first, second = sent(harness)
    gsns = list(range(1, UNIT_RECORDS + 1))
    harness.give(ack(first, 0, gsns), ack(first, 1, gsns))
    harness.pass_time(600 * MS)
    harness.inform(placement(0, state="leaving"), placement(1))
    newest = [second, *sent(harness)][-1]
    harness.give(refused(newest, 0, "full"), refused(newest, 1, "full"))
    assert call not in harness.answers, "a leaving shard still accepts it"
    harness.pass_time(1 * S)
    again = sent(harness)[-1]
    assert (again.shard, again.seq) == (0, second.seq)
    later = [gsn + 1000 for gsn in gsns]
    harness.give(ack(again, 0, later), ack(again, 1, later))
    assert harness.answers[call] == [RecordId(gsn, 0) for gsn in gsns + later]


class ReshapedCluster(FakeCluster):
    """Shards leave, or have no positions for a while; backups guess units that are not placed."""

    def __init__(self, harness: ClientHarness, seed: int) -> None:
        super().__init__(harness, seed, shards=3)
        #: The shards without positions now, and those that ever had none.
        self.out: set[int] = set()
        self.was_out: set[int] = set()
        #: The copies that arrived at a server, and those that it promised never to accept.
        self.seen: set[tuple[int, int, int]] = set()
        self.promised: set[tuple[int, int, int]] = set()

    def insert(self, server: int, message: wire.Insert) -> None:
        key, promise = (message.shard, message.seq), (message.shard, message.seq, server)
        is_placed = key in self.placed
        predecessor = (message.shard, message.predecessor, server)
        # A backup does not know the primary's refusals; asked again, it refuses, too.
        is_stranded = server and message.shard in self.was_out and promise in self.seen
        self.seen.add(promise)
        if not is_placed and (
            message.shard in self.out or is_stranded or {promise, predecessor} & self.promised
        ):
            self.promised.add(promise)
            self.reply(redirect(message, server))
            return
        if server and not is_placed and self.random.random() < 0.5:
            guess = self.frontiers[message.shard] + 3 * self.random.randrange(3)
            gsns = list(range(guess, guess + 3 * message.count, 3))
            self.reply(ack(message, server, gsns, next(self.counter)))
        if self.states[message.shard] == "leaving" and not server:
            self.reply(wire.Leaving(CLUSTER, message.shard, 1))
        super().insert(server, message)

    def begin(self, shard: int, *, for_good: bool) -> None:
        """Let a shard leave, or be parked for a while; shard 2 stays."""
        if self.states[shard] != "live":
            return
        if for_good:
            self.states[shard] = "leaving"
            self.later(self.random.randrange(1, 300), lambda: self.run_out(shard))
            self.later(600, lambda: self.states.update({shard: "finalized"}))
        else:
            self.states[shard] = "parked"
            self.run_out(shard)
            self.later(self.random.randrange(1, 500), lambda: self.end(shard))

    def run_out(self, shard: int) -> None:
        self.out.add(shard)
        self.was_out.add(shard)

    def end(self, shard: int) -> None:
        self.states[shard] = "live"
        self.out.discard(shard)


@examples(60)
@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.05, 0.3]),
    repetition=st.sampled_from([0.0, 0.3]),
    pin=st.booleans(),
    changes=st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 1), st.booleans()), min_size=1, max_size=6
    ),
)
def test_every_record_is_in_the_log_once_while_shards_leave(
    seed: int, loss: float, repetition: float, pin: bool, changes: list[tuple[int, int, bool]]
) -> None:
    cluster = in_a_storm(ReshapedCluster, seed, loss, repetition, pin=pin)
    for ms, shard, for_good in changes:
        cluster.later(ms, partial(cluster.begin, shard, for_good=for_good))

    def is_plausible(error: UnavailableError) -> bool:
        # Within a second, at that loss, the client may not know that its shard has left.
        is_late = loss > 0 and isinstance(error, DeadlineError)
        return pin or bool(error.results) or is_late  # Unpinned calls find another shard.

    insert_all(cluster, 20 * S, is_plausible)
    assert not cluster.harness.core.counters.protocol_errors
