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


def moved(glass: ClientHarness) -> list[int]:
    """Return the shards other than 0 that got a message."""
    return [m.shard for m in sent(glass) if m.shard]


def test_a_redirect_of_all_replicas_counts_for_every_copy() -> None:
    glass = connected()
    call = glass.insert(b"x")
    (insert,) = sent(glass)
    glass.pass_time(initial_retransmit_ns(0) + MS)
    assert len(sent(glass)) == 1, "a second copy"
    glass.give(redirect(insert, 0))
    assert not moved(glass)
    glass.give(redirect(insert, 1))
    (again,) = sent(glass)
    assert (again.shard, again.seq, again.body) == (1, 1, insert.body)
    glass.give(ack(again, 0, [2]), ack(again, 1, [2]))
    assert glass.answers[call] == [RecordId(2, 1)]
    counters = glass.core.counters
    assert (counters.redirects, counters.moved, counters.protocol_errors) == (2, 1, 0)


def test_full_refusal_counts_only_for_copies_sent_so_far() -> None:
    glass = connected()
    glass.insert(b"x")
    (insert,) = sent(glass)
    glass.pass_time(initial_retransmit_ns(0) + MS)
    (newest,) = sent(glass)
    for _ in range(2):  # The network may duplicate it.
        glass.give(refused(insert, 0, "full"), refused(insert, 1, "full"))
    assert not moved(glass), "a copy is in flight"
    glass.give(redirect(insert, 0))
    assert not moved(glass)
    glass.give(refused(newest, 1, "full"))
    assert moved(glass) == [1], "both replicas refused both copies"


def test_full_refusal_counts_for_lost_copies() -> None:
    glass = connected()
    glass.insert(b"x")
    glass.pass_time(8 * S)
    newest = sent(glass)[-1]
    assert newest.copy > 3
    glass.give(refused(newest, 0, "full"), refused(newest, 1, "full"))
    assert moved(glass) == [1]


def test_older_full_refusal_does_not_void_a_later_promise() -> None:
    glass = connected()
    glass.insert(b"x")
    (insert,) = sent(glass)
    glass.pass_time(initial_retransmit_ns(0) + MS)
    (newest,) = sent(glass)
    glass.give(refused(newest, 0, "full"), refused(insert, 0, "full"), refused(newest, 1, "full"))
    assert moved(glass) == [1]


def test_duplicate_redirect_counts_for_one_server() -> None:
    glass = connected()
    glass.insert(b"x")
    (insert,) = sent(glass)
    glass.give(redirect(insert, 0), redirect(insert, 0))
    assert not moved(glass)


def test_redirect_voids_the_guess_of_the_same_server() -> None:
    glass = connected()
    glass.insert(b"x")
    (insert,) = sent(glass)
    glass.give(ack(insert, 1, [4]), redirect(insert, 0))
    assert not moved(glass), "the backup holds it"
    glass.give(redirect(insert, 1))
    assert moved(glass) == [1]


def test_guess_that_arrives_after_its_servers_redirect_does_not_count() -> None:
    glass = connected()
    call = glass.insert(b"x")
    (insert,) = sent(glass)
    glass.give(redirect(insert, 1), ack(insert, 1, [4], 9), ack(insert, 0, [4]))
    assert call not in glass.answers, "the backup's guess is void"
    glass = connected()
    glass.insert(b"x")
    (insert,) = sent(glass)
    glass.give(redirect(insert, 1), ack(insert, 1, [4], 9), redirect(insert, 0))
    assert moved(glass) == [1]


def test_unit_with_mixed_replies_is_retransmitted_until_all_agree() -> None:
    glass = connected()
    call = glass.insert(b"x")
    (insert,) = sent(glass)
    glass.give(ack(insert, 1, [4]), redirect(insert, 0))
    glass.pass_time(initial_retransmit_ns(0) + MS)
    assert {m.seq for m in sent(glass)} == {insert.seq}, "the same again, at the same shard"
    assert call not in glass.answers
    glass.give(redirect(insert, 1))
    assert moved(glass) == [1]


def test_placement_by_the_primary_is_final() -> None:
    glass = connected()
    call = glass.insert(b"x")
    (insert,) = sent(glass)
    glass.give(ack(insert, 0, [4]), redirect(insert, 0), redirect(insert, 1))
    assert not moved(glass)
    glass.give(ack(insert, 1, [4], confirmed=True))
    assert glass.answers[call] == [RecordId(4, 0)]
    assert glass.core.counters.moved == 0


def test_view_change_voids_promises_of_the_older_view() -> None:
    glass = connected()
    glass.insert(b"x")
    (insert,) = sent(glass)
    glass.give(redirect(insert, 0))
    learn(glass, 1, "recovering")
    learn(glass, 2, "leaving")
    glass.pass_time(1)
    (again,) = sent(glass)
    assert (again.shard, again.view, again.seq) == (0, 2, insert.seq)
    glass.pass_time(2 * initial_retransmit_ns(0))
    assert len(sent(glass)) == 1, "one copy more than is refused below"
    glass.give(redirect(insert, 1), redirect(again, 1))
    assert not moved(glass), "the primary of view 2 may accept it"
    glass.give(redirect(again, 0, view=3))
    assert not moved(glass), "a promise of view 1 does not count in view 2"
    glass.give(redirect(again, 0))
    assert moved(glass) == [1]


def test_unknown_outcome_ends_with_redirects_of_all_replicas() -> None:
    glass = connected(pinned)
    call = glass.insert(b"x", timeout=1 * S)
    (insert,) = sent(glass)
    glass.give(ack(insert, 1, [4]))
    glass.pass_time(1 * S)
    error = glass.answers[call]
    assert isinstance(error, OutcomeUnknownError)
    answer = resolve(glass, error, 5 * S)
    glass.give(redirect(insert, 0))
    assert answer not in glass.answers
    glass.give(redirect(insert, 1))
    assert glass.answers[answer] == [None]


def test_redirected_pinned_insert_waits_for_its_shard_with_a_new_identity() -> None:
    glass = connected(pinned)
    call = glass.insert(b"x")
    (insert,) = sent(glass)
    glass.give(redirect(insert, 0), redirect(insert, 1))
    glass.take(wire.Hello)
    glass.pass_time(200 * MS)
    assert not sent(glass), "the placements are refreshed first"
    glass.inform(placement(0, state="parked"), placement(1))
    glass.pass_time(5 * S)
    assert not sent(glass)
    glass.inform(placement(0), placement(1))
    (again,) = sent(glass)
    assert (again.shard, again.seq, again.first_incomplete) == (0, insert.seq + 1, insert.seq + 1)
    glass.give(ack(again, 0, [8]), ack(again, 1, [8]))
    assert glass.answers[call] == [RecordId(8, 0)]
    assert glass.core.counters.moved == 0


def test_parked_shard_gets_units_in_flight_and_reports_them_absent() -> None:
    """A copy, or a refusal, may have been lost; the shard may be unavailable for a minute."""
    glass = connected()
    call = glass.insert(b"x")
    (insert,) = sent(glass)
    glass.give(redirect(insert, 1))
    glass.pass_time(200 * MS)
    glass.inform(placement(insert.shard, state="parked"), placement(1 - insert.shard))
    sent(glass)
    glass.pass_time(1 * S)
    copies = sent(glass)
    assert copies, "the primary may not have got it"
    assert {(copy.shard, copy.seq, copy.view) for copy in copies} == {(insert.shard, insert.seq, 1)}
    glass.give(redirect(insert, 0))
    (moved,) = sent(glass)
    assert moved.shard == 1 - insert.shard
    glass.give(ack(moved, 0, [8]), ack(moved, 1, [8]))
    assert glass.answers[call] == [RecordId(8, moved.shard)]


def test_recovered_parked_shard_gets_units_in_flight() -> None:
    glass = connected()
    glass.insert(b"x")
    (insert,) = sent(glass)
    other = placement(1 - insert.shard)
    for state in ("recovering", "parked"):
        glass.core._routing.update_placements([placement(insert.shard, state=state), other])
        glass.step(BatchEnd())
        glass.core.check()
        glass.pass_time(2 * S)
        assert bool(sent(glass)) == (state == "parked")


def test_redirect_of_a_live_shard_waits_for_the_next_refresh() -> None:
    glass = connected(pinned)
    calls = [glass.insert(b"x", timeout=4 * S) for _ in range(100)]
    count = 0
    for _ in range(2000):
        for insert in sent(glass):
            count += 1
            glass.give(redirect(insert, 0), redirect(insert, 1))
        if glass.take(wire.Hello):
            glass.sent.append(("", wire.Hello(CLUSTER, glass.core._context._last_request)))
            glass.inform(placement(0), placement(1))
        glass.pass_time(1 * MS)
    assert 1000 <= count <= 100 * 21, "each refreshes ten times a second"
    glass.pass_time(2 * S)
    assert all(isinstance(glass.answers[call], UnavailableError) for call in calls)


def test_many_unassigned_calls_cost_no_more_messages_than_few() -> None:
    choices: list[int] = []

    def policy(payload: bytes, key: bytes | None, live: Any) -> int:
        choices.append(pinned(payload, key, live))
        return choices[-1]

    glass = connected(policy)
    for _ in range(100):
        glass.insert(b"x")
    for insert in sent(glass):
        glass.give(redirect(insert, 0), redirect(insert, 1))
    glass.pass_time(100 * MS)
    glass.inform(placement(0, state="leaving"), placement(1))
    assert not sent(glass)
    assert len(choices) <= 500, "one refresh retries each call once"


def half_placed(**options: Any) -> tuple[ClientHarness, int, list[int]]:
    """Return a call of three units at shard 0, with only the first one placed, and its gsns."""
    glass = ClientHarness()
    glass.connect(placement(0), placement(1), limits=wire.Limits(max_unsettled_units=2))
    payloads = [b"%d" % index for index in range(3 * UNIT_RECORDS)]
    call = glass.insert(*payloads, **options)
    first, second = sent(glass)
    assert first.shard == 0
    gsns = list(range(1, UNIT_RECORDS + 1))
    glass.give(ack(first, 0, gsns))
    glass.give(redirect(second, 0), redirect(second, 1))
    assert call not in glass.answers, "the first part may be placed, or not"
    glass.give(ack(first, 1, gsns))
    for insert in sent(glass):
        assert insert.shard == 0
        glass.give(redirect(insert, 0), redirect(insert, 1))
    assert call not in glass.answers
    # The client requests the placements.
    glass.pass_time(200 * MS)
    return glass, call, gsns


def test_partly_placed_call_waits_for_its_shard_and_continues_after_its_placed_part() -> None:
    glass, call, gsns = half_placed()
    glass.inform(placement(0, state="parked"), placement(1))
    glass.pass_time(5 * S)
    assert not sent(glass), "the call is at one shard"
    glass.inform(placement(0), placement(1))
    rids = [RecordId(gsn, 0) for gsn in gsns]
    for index, insert in enumerate(sent(glass), 1):
        assert (insert.shard, insert.after) == (0, gsns[-1])
        payloads = decode_body(insert.body, insert.count).payloads
        assert payloads == [b"%d" % n for n in range(index * 256, (index + 1) * 256)]
        places = [1000 * index + n for n in range(UNIT_RECORDS)]
        glass.give(ack(insert, 0, places), ack(insert, 1, places))
        rids += [RecordId(gsn, 0) for gsn in places]
    assert glass.answers[call] == rids
    assert glass.core.counters.moved == 0


def test_partly_placed_call_reports_its_placed_part_at_the_deadline() -> None:
    glass, call, gsns = half_placed(timeout=2 * S)
    glass.inform(placement(0, state="parked"), placement(1))
    glass.pass_time(2 * S)
    error = glass.answers[call]
    assert type(error) is UnavailableError
    assert error.results == [RecordId(gsn, 0) for gsn in gsns] + [None] * (2 * UNIT_RECORDS)
    assert not error.retriable, "a retry of the whole call would duplicate records"
    assert "512 of the 768 records before the deadline" in str(error)
    glass.inform(placement(0), placement(1))
    glass.pass_time(1 * S)
    assert not sent(glass), "the call has ended"


def test_partly_placed_call_of_a_removed_shard_fails_at_once() -> None:
    glass, call, gsns = half_placed()
    glass.inform(placement(0, state="leaving"), placement(1))
    error = glass.answers[call]
    assert type(error) is UnavailableError
    assert error.results == [RecordId(gsn, 0) for gsn in gsns] + [None] * (2 * UNIT_RECORDS)
    assert not error.retriable, "a retry of the whole call would duplicate records"
    assert "512 of the 768 records" in str(error)
    assert not shards_in_flight(glass)
    glass.pass_time(5 * S)
    assert not sent(glass)


def test_partly_placed_call_of_a_leaving_full_shard_is_sent_again() -> None:
    glass = ClientHarness()
    glass.connect(placement(0), placement(1))
    call = glass.insert(*[b"x"] * (2 * UNIT_RECORDS))
    first, second = sent(glass)
    gsns = list(range(1, UNIT_RECORDS + 1))
    glass.give(ack(first, 0, gsns), ack(first, 1, gsns))
    glass.pass_time(600 * MS)
    glass.inform(placement(0, state="leaving"), placement(1))
    newest = [second, *sent(glass)][-1]
    glass.give(refused(newest, 0, "full"), refused(newest, 1, "full"))
    assert call not in glass.answers, "a leaving shard still accepts it"
    glass.pass_time(1 * S)
    again = sent(glass)[-1]
    assert (again.shard, again.seq) == (0, second.seq)
    later = [gsn + 1000 for gsn in gsns]
    glass.give(ack(again, 0, later), ack(again, 1, later))
    assert glass.answers[call] == [RecordId(gsn, 0) for gsn in gsns + later]


class ReshapedCluster(FakeCluster):
    """Shards leave, or have no positions for a while; backups guess units that are not placed."""

    def __init__(self, glass: ClientHarness, seed: int) -> None:
        super().__init__(glass, seed, shards=3)
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
    assert not cluster.glass.core.counters.protocol_errors
