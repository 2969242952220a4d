"""Inserts through the failure of their shard (docs/protocol.md, sections 4 and 11; D13)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from tests.unit.ziplog.client.fakes import (
    CLIENT,
    CLUSTER,
    MS,
    ClientHarness,
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
from ziplog import wire
from ziplog.client.inserts.inflight import MAX_INFLIGHT_BYTES
from ziplog.client.inserts.insert_calls import UNIT_RECORDS
from ziplog.client.inserts.locate import MAX_LOCATES
from ziplog.core.distance import initial_retransmit_ns
from ziplog.core.entries import decode_body
from ziplog.errors import DeadlineError, OutcomeUnknownError, UnavailableError
from ziplog.types import RecordId


def sent_locates(harness: ClientHarness) -> list[wire.Locate]:
    return [m for _, m in harness.take(wire.Locate)]


def located(
    insert: wire.Insert | wire.Locate, view: int, gsns: list[int] | None = None, **fields: Any
) -> wire.Located:
    """Return a server's report: present at the gsns, absent without gsns."""
    verdict = fields.pop("verdict", "present" if gsns else "absent")
    return wire.Located(
        CLUSTER, insert.shard, view, 1, fields.pop("client", CLIENT), insert.seq, verdict,
        gsns or [],
    )  # fmt: skip


def with_pending_insert(
    *, policy: Any = None, timeout: int = 10 * S
) -> tuple[ClientHarness, int, wire.Insert]:
    """Return a client with one insert at shard 0, which then becomes unavailable."""
    harness = connected(policy)
    call = harness.insert(b"x", timeout=timeout)
    (insert,) = sent(harness)
    learn(harness)
    harness.pass_time(1)
    return harness, call, insert


# --- locate ---


def test_unit_of_a_recovering_shard_is_located_and_not_sent() -> None:
    harness, _, insert = with_pending_insert()
    times: list[int] = []
    start = harness.now
    for _ in range(400):
        for name, request in harness.take(wire.Locate):
            assert (request.shard, request.view, request.client, request.seq) == (
                0, 1, CLIENT, insert.seq,
            )  # fmt: skip
            times.append((harness.now - start) // MS)
            assert name in {"s0r0:1", "s0r1:1"}
        harness.pass_time(10 * MS)
    assert not sent(harness)
    looks = sorted(set(times))
    assert len(times) == 2 * len(looks), "all replicas are asked"
    pauses = [b - a for a, b in pairwise(looks)]
    assert pauses[0] <= 60
    assert pauses == sorted(pauses)
    assert pauses[-1] == 500


def test_present_from_any_server_places_the_unit() -> None:
    harness, call, insert = with_pending_insert()
    harness.give(located(insert, 1, [7]))
    assert harness.answers[call] == [RecordId(7, 0)]
    counters = harness.core.counters
    assert (counters.inserts, counters.located, counters.slow_path) == (1, 1, 1)
    harness.give(located(insert, 2))
    sent_locates(harness)
    harness.pass_time(5 * S)
    assert not sent_locates(harness)


def test_present_at_invalid_positions_raises_protocol_error() -> None:
    harness = connected()
    call = harness.insert(b"x", after=RecordId(9, 0))
    (insert,) = sent(harness)
    learn(harness)
    harness.give(located(insert, 2, [7]))
    assert harness.core.counters.protocol_errors == 1
    assert "placed" in str(harness.answers[call])


def test_unit_absent_in_a_newer_view_is_rerouted() -> None:
    harness, call, insert = with_pending_insert()
    harness.give(located(insert, 2))
    (moved,) = sent(harness)
    assert (moved.shard, moved.body, moved.seq) == (1, insert.body, 1)
    harness.give(ack(moved, 0, [2]), ack(moved, 1, [2]))
    assert harness.answers[call] == [RecordId(2, 1)]
    assert harness.core.counters.moved == 1
    learn(harness, 2, "live")
    harness.core.set_policy(pinned)
    harness.insert(b"y")
    (later,) = sent(harness)
    assert (later.seq, later.first_incomplete) == (2, 2), "the rerouted unit leaves the window"


@pytest.mark.parametrize("word", ["same view", "pending", "another client", "another seq"])
def test_inconclusive_located_replies_do_not_reroute(word: str) -> None:
    harness, call, insert = with_pending_insert()
    messages = {
        "same view": located(insert, 1),
        "pending": located(insert, 2, verdict="pending"),
        "another client": located(insert, 2, client=b"d" * 16),
        "another seq": wire.Located(CLUSTER, 0, 2, 1, CLIENT, 99, "absent", []),
    }
    harness.give(messages[word])
    harness.pass_time(2 * S)
    assert not sent(harness)
    assert call not in harness.answers


def test_locate_names_the_view_of_the_newest_copy() -> None:
    """An `absent` of view 2 proves nothing once a copy of view 2 is in flight."""
    harness, call, insert = with_pending_insert()
    old = sent_locates(harness)[0]
    learn(harness, 2, "live")
    harness.pass_time(1)
    (again,) = sent(harness)
    assert (again.view, again.seq, again.body) == (2, insert.seq, insert.body)
    learn(harness, 2, "recovering")
    harness.pass_time(1)
    assert {request.view for request in sent_locates(harness)} == {2}
    harness.give(located(old, 2))
    harness.pass_time(1 * S)
    assert not sent(harness), "a copy of view 2 may still be placed"
    harness.give(located(old, 3))
    assert [m.shard for m in sent(harness)] == [1]
    assert call not in harness.answers


def test_pinned_insert_waits_for_its_shard_and_is_sent_in_its_new_view() -> None:
    harness, call, insert = with_pending_insert(policy=pinned)
    harness.give(located(insert, 2), located(insert, 2))
    sent_locates(harness)
    harness.pass_time(3 * S)
    assert not sent(harness)
    assert not sent_locates(harness), "it is known to be absent"
    learn(harness, 2, "live")
    harness.pass_time(1)
    (again,) = sent(harness)
    assert (again.view, again.seq) == (2, insert.seq)
    harness.give(refused(again, 0, "not-ready"))
    harness.give(ack(again, 1, [5]), ack(again, 0, [5]))
    assert harness.answers[call] == [RecordId(5, 0)]


def test_shard_unavailable_in_its_next_view_has_no_copy_of_that_view() -> None:
    harness, _, insert = with_pending_insert()
    learn(harness, 2, "parked")
    harness.pass_time(100 * MS)
    assert {request.view for request in sent_locates(harness)} == {1}
    harness.give(located(insert, 2))
    assert [m.shard for m in sent(harness)] == [1]


def test_absent_unit_may_be_placed_after_a_retransmission() -> None:
    harness, call, insert = with_pending_insert(policy=pinned, timeout=2 * S)
    harness.give(located(insert, 2))
    learn(harness, 2, "live")
    harness.pass_time(1)
    assert sent(harness)
    harness.pass_time(2 * S)
    assert isinstance(harness.answers[call], OutcomeUnknownError)


def test_partly_placed_call_is_never_rerouted() -> None:
    harness = connected()
    call = harness.insert(*[b"x"] * (UNIT_RECORDS + 1))
    first, second = sent(harness)
    learn(harness)
    gsns = list(range(1, UNIT_RECORDS + 1))
    harness.give(located(first, 2, gsns), located(second, 2))
    harness.pass_time(2 * S)
    assert not sent(harness)
    learn(harness, 2, "live")
    harness.pass_time(1)
    (again,) = sent(harness)
    assert (again.shard, again.seq, again.view) == (0, second.seq, 2)
    harness.give(ack(again, 0, [1000]), ack(again, 1, [1000]))
    assert harness.answers[call] == [RecordId(gsn, 0) for gsn in [*gsns, 1000]]


def test_call_is_rerouted_only_when_all_its_units_are_absent() -> None:
    harness = connected()
    harness.insert(*[b"x"] * (UNIT_RECORDS + 1))
    first, second = sent(harness)
    learn(harness)
    harness.give(located(second, 2))
    assert not sent(harness)
    harness.give(located(first, 2))
    assert [(m.shard, m.body) for m in sent(harness)] == [(1, first.body), (1, second.body)]


def test_absent_call_goes_to_the_first_available_shard() -> None:
    harness, _, insert = with_pending_insert()
    learn(harness, shard=1)
    harness.give(located(insert, 2))
    harness.pass_time(1 * S)
    assert not sent(harness), "no shard is live"
    learn(harness, 2, "live", shard=1)
    assert [(m.shard, m.view) for m in sent(harness)] == [(1, 2)]


def test_long_call_is_not_continued_while_its_shard_is_unavailable() -> None:
    harness = connected(pinned)
    harness.insert(*[bytes(200_000)] * 60)
    first = sent(harness)
    learn(harness)
    for number, insert in enumerate(first):
        harness.give(located(insert, 2, [number + 1]))
    harness.pass_time(1 * S)
    assert not sent(harness)
    assert harness.take(wire.Hello), "the client refreshes the placements"
    learn(harness, 2, "live")
    assert sum(len(m.body) for m in sent(harness)) >= MAX_INFLIGHT_BYTES


def test_refusal_of_a_server_outside_its_view_starts_locate() -> None:
    """The membership service has not reported the recovery yet; one server has."""
    harness = connected()
    call = harness.insert(b"x")
    (insert,) = sent(harness)
    harness.give(ack(insert, 1, [7]))
    harness.give(refused(insert, 0, "not-ready"))
    harness.pass_time(1)
    assert {request.view for request in sent_locates(harness)} == {1}
    harness.give(located(insert, 2, [7]))
    assert harness.answers[call] == [RecordId(7, 0)]


def test_duplicate_refusal_counts_for_one_server() -> None:
    harness = connected()
    harness.insert(b"x")
    (insert,) = sent(harness)
    harness.give(refused(insert, 0, "full"), refused(insert, 0, "full"))
    assert not sent(harness)
    harness.give(refused(insert, 1, "full"))
    assert [m.shard for m in sent(harness)] == [1]


def test_duplicate_refusal_does_not_count_for_a_later_copy() -> None:
    """Found by the simulator (seed 2034): the second copy was accepted too: a duplicate."""
    harness = ClientHarness(pinned)
    harness.connect(placement(0, 1), placement(1, 1))
    call = harness.insert(b"x")
    (insert,) = sent(harness)
    wrong = msgspec.structs.replace(refused(insert, 0, "wrong-view"), view=2)
    harness.give(wrong)
    harness.pass_time(100 * MS)
    harness.inform(placement(0, 1, 2), placement(1, 1))
    harness.pass_time(1)
    again = sent(harness)[-1]
    assert (again.shard, again.view, again.seq) == (0, 2, insert.seq)
    harness.core.set_policy(lambda _p, _k, _l: 1)
    harness.give(wrong)
    assert not sent(harness), "a copy of the new view is in flight"
    harness.give(ack(again, 0, [5]))
    assert harness.answers[call] == [RecordId(5, 0)]


# --- message counts ---


def test_dead_shard_costs_few_messages_whatever_waits_for_it() -> None:
    harness = connected(pinned)
    for _ in range(1100):
        harness.insert(b"x", timeout=60 * S)
    sent(harness)
    learn(harness)
    harness.pass_time(4 * S)
    harness.sent.clear()
    harness.pass_time(10 * S)
    assert not sent(harness)
    requests = sent_locates(harness)
    assert 0 < len(requests) <= 2 * MAX_LOCATES * 21
    assert len({request.seq for request in requests}) >= 1000, "every unit is located"
    assert len(harness.sent) <= 110, "at most ten refreshes a second"


def test_located_replies_trigger_the_next_locates() -> None:
    harness = connected(pinned)
    for _ in range(1000):
        harness.insert(b"x", timeout=60 * S)
    sent(harness)
    learn(harness)
    count = 0
    for _ in range(1000 // MAX_LOCATES + 1):
        harness.pass_time(1 * MS)
        requests = {m.seq: m for m in sent_locates(harness)}
        count += len(requests)
        for request in requests.values():
            harness.give(located(request, 2, [request.seq]), located(request, 2, [request.seq]))
    assert len(harness.answers) == 1000
    assert count <= 1100


def test_more_units_are_located_when_the_last_ones_are_known() -> None:
    harness = connected(pinned)
    for _ in range(200):
        harness.insert(b"x", timeout=60 * S)
    sent(harness)
    learn(harness)
    harness.pass_time(1)
    first = {m.seq: m for m in sent_locates(harness)}
    assert len(first) == MAX_LOCATES
    *most, last = first.values()
    for request in most:
        harness.give(located(request, 2, [request.seq]))
        harness.pass_time(1)
    assert not sent_locates(harness)
    harness.give(located(last, 2, [last.seq]))
    harness.pass_time(1)
    second = {m.seq for m in sent_locates(harness)}
    assert len(second) == MAX_LOCATES
    assert not second & first.keys()


def test_queued_calls_of_a_silent_shard_are_rerouted() -> None:
    choices: list[int] = []

    def policy(_payload: bytes, _key: bytes | None, live: Any) -> int:
        choices.append(int(live[0]))
        return choices[-1]

    harness = ClientHarness(policy)
    harness.connect(placement(0), placement(1), limits=wire.Limits(max_unsettled_units=2))
    calls = [harness.insert(b"%d" % number) for number in range(5)]
    assert [m.shard for m in sent(harness)] == [0, 0]
    harness.pass_time(initial_retransmit_ns(0) + MS)
    moved = [m for m in sent(harness) if m.shard == 1]
    assert [decode_body(m.body, 1).payloads for m in moved] == [[b"2"], [b"3"]]
    for m in moved:
        harness.give(ack(m, 0, [m.seq * 2]), ack(m, 1, [m.seq * 2]))
    assert harness.answers.keys() == set(calls[2:4])


def test_a_shard_is_avoided_for_as_long_as_it_is_silent() -> None:
    harness = connected()
    harness.insert(b"x", timeout=60 * S)
    sent(harness)
    for _ in range(40):
        harness.pass_time(600 * MS)
        call = harness.insert(b"y", timeout=60 * S)
        (insert,) = [m for m in sent(harness) if decode_body(m.body, 1).payloads == [b"y"]]
        assert insert.shard == 1
        harness.give(ack(insert, 0, [2 * insert.seq]), ack(insert, 1, [2 * insert.seq]))
        assert call in harness.answers


# --- the fast path ---


def test_backup_that_waited_for_the_primarys_decision_is_the_slow_path() -> None:
    harness = connected()
    harness.insert(b"x")
    (insert,) = sent(harness)
    harness.give(ack(insert, 0, [4]), ack(insert, 1, [4], confirmed=True, waited=True))
    counters = harness.core.counters
    assert (counters.fast_path, counters.slow_path) == (0, 1)


def test_backup_that_knew_the_primarys_decision_is_the_fast_path() -> None:
    """Its ack answers the client's own copy: two message delays."""
    harness = connected()
    harness.insert(b"x")
    (insert,) = sent(harness)
    harness.give(ack(insert, 0, [4]), ack(insert, 1, [4], confirmed=True))
    counters = harness.core.counters
    assert (counters.fast_path, counters.slow_path) == (1, 0)


# --- unknown outcomes ---


def with_unknown_outcome(
    *payloads: bytes, policy: Any = pinned
) -> tuple[ClientHarness, OutcomeUnknownError, Any]:
    """Return a client with an insert of unknown outcome."""
    harness = connected(policy)
    call = harness.insert(*(payloads or [b"x"]), timeout=1 * S)
    inserts = sent(harness)
    harness.pass_time(1 * S)
    error = harness.answers.pop(call)
    assert isinstance(error, OutcomeUnknownError)
    harness.sent.clear()
    return harness, error, inserts


def test_unknown_outcome_is_resolved_by_acks() -> None:
    harness, error, (insert,) = with_unknown_outcome()
    call = resolve(harness, error)
    harness.pass_time(1)
    assert [m.seq for m in sent(harness)] == [insert.seq], "it is retransmitted at once"
    harness.give(ack(insert, 0, [4]))
    assert call not in harness.answers
    harness.give(ack(insert, 1, [4]))
    assert harness.answers[call] == [RecordId(4, 0)]
    again = resolve(harness, error)
    assert harness.answers[again] == [RecordId(4, 0)], "the outcome is kept"


def test_outcome_known_before_resolve_is_returned_at_once() -> None:
    harness, error, (insert,) = with_unknown_outcome()
    learn(harness)
    harness.give(located(insert, 2, [4]))
    for _ in range(2000):
        call = harness.insert(b"y", timeout=0)
        harness.pass_time(0)
        del harness.answers[call]
    assert harness.answers[resolve(harness, error)] == [RecordId(4, 0)]


def test_unit_of_an_ended_call_is_not_sent_in_a_newer_view() -> None:
    harness, error, (insert,) = with_unknown_outcome()
    learn(harness, 2, "live")
    call = resolve(harness, error)
    harness.pass_time(1)
    assert not sent(harness)
    assert {request.view for request in sent_locates(harness)} == {1}
    harness.give(located(insert, 2))
    assert harness.answers[call] == [None]
    harness.insert(b"y")
    assert sent(harness)[0].first_incomplete == 2
    assert harness.answers[resolve(harness, error)] == [None]


def test_unknown_unit_that_all_replicas_refuse_resolves_to_absent() -> None:
    harness, error, (insert,) = with_unknown_outcome()
    call = resolve(harness, error)
    harness.pass_time(1)
    newest = sent(harness)[-1]
    assert (newest.seq, newest.copy > 1) == (insert.seq, True)
    harness.give(*(refused(older, s, "full") for older in (insert, insert) for s in (0, 1)))
    harness.give(refused(newest, 0, "full"))
    assert not harness.answers
    harness.give(refused(newest, 1, "full"))
    assert harness.answers[call] == [None]


@pytest.mark.parametrize("answer", ["identity-reused", "misplaced"])
def test_outcome_stays_unknown_after_contradictory_replies(answer: str) -> None:
    """To report that the record will never exist would be a guess."""
    harness, error, (insert,) = with_unknown_outcome()
    call = resolve(harness, error, 1 * S)
    if answer == "misplaced":
        harness.give(located(insert, 2, [4, 5]))
    else:
        harness.give(refused(insert, 1, "identity-reused"))
    harness.pass_time(1 * S)
    assert isinstance(harness.answers[call], OutcomeUnknownError)
    assert harness.core.counters.protocol_errors == 1
    assert "contradictory" in str(harness.answers[call])


def test_shard_with_an_unknown_outcome_is_avoided_until_its_next_ack() -> None:
    harness, _, (insert,) = with_unknown_outcome(policy=lambda _p, _k, live: live[0])
    for _ in range(60):
        harness.pass_time(500 * MS)
        call = harness.insert(b"y")
        other = next(m for m in sent(harness) if b"y" in m.body)
        assert other.shard == 1
        harness.give(*(ack(other, server, [2 * other.seq]) for server in (0, 1)))
        assert call in harness.answers
    harness.give(ack(insert, 0, [4]), ack(insert, 1, [4]))
    harness.insert(b"z")
    assert next(m.shard for m in sent(harness) if b"z" in m.body) == 0


def test_outcome_stays_unknown_when_resolve_times_out() -> None:
    harness, error, (insert,) = with_unknown_outcome()
    learn(harness)
    call = resolve(harness, error, 2 * S)
    harness.pass_time(2 * S)
    again = harness.answers[call]
    assert isinstance(again, OutcomeUnknownError)
    assert (again.shard, again.seq) == (0, insert.seq)
    assert "recovering" in str(again)
    later = resolve(harness, again)
    harness.give(located(insert, 2, [9]))
    assert harness.answers[later] == [RecordId(9, 0)]


def test_unknown_outcome_of_a_long_call_covers_its_sent_unplaced_units() -> None:
    harness, error, (first, second, third) = with_unknown_outcome(*[b"x"] * (2 * UNIT_RECORDS + 1))
    learn(harness)
    call = resolve(harness, error, 5 * S)
    gsns = list(range(1, UNIT_RECORDS + 1))
    harness.give(located(first, 2, gsns), located(third, 2))
    assert call not in harness.answers
    harness.pass_time(5 * S)
    partly = harness.answers[call]
    placed = [RecordId(gsn, 0) for gsn in gsns]
    assert partly.results == [*placed, *[None] * (UNIT_RECORDS + 1)]
    assert partly.seq == second.seq
    call = resolve(harness, partly)
    harness.give(located(second, 2))
    assert harness.answers[call] == [*placed, *[None] * (UNIT_RECORDS + 1)]


def test_cancelled_resolve_gets_no_result() -> None:
    harness, error, (insert,) = with_unknown_outcome()
    call, other = resolve(harness, error), resolve(harness, error)
    harness.cancel(call)
    harness.give(ack(insert, 0, [4]), ack(insert, 1, [4]))
    assert harness.answers == {other: [RecordId(4, 0)]}


def test_client_with_an_expired_session_retransmits_nothing() -> None:
    """Servers expire the session of a silent client; they would accept a copy as a new insert."""
    harness, error, (insert,) = with_unknown_outcome()
    pending = harness.insert(b"y", timeout=3600 * S)
    harness.sent.clear()
    harness.now += 601 * S
    fresh = harness.insert(b"z", timeout=1 * S)
    (new,) = sent(harness)
    assert (new.seq, new.first_incomplete) == (3, 3)
    assert isinstance(harness.answers[pending], OutcomeUnknownError)
    harness.give(located(insert, 2), ack(insert, 0, [4]), ack(insert, 1, [4]))
    call = resolve(harness, error)
    again = harness.answers[call]
    assert isinstance(again, OutcomeUnknownError)
    assert "session" in str(again)
    harness.give(ack(new, 0, [5]), ack(new, 1, [5]))
    assert harness.answers[fresh] == [RecordId(5, 0)]
    harness.sent.clear()
    harness.pass_time(60 * S)
    assert not sent(harness)


def test_absent_unit_survives_an_expired_session() -> None:
    harness, call, insert = with_pending_insert(policy=pinned, timeout=3600 * S)
    harness.give(located(insert, 2))
    harness.now += 601 * S
    learn(harness, 2, "live")
    harness.pass_time(1)
    (again,) = sent(harness)
    harness.give(ack(again, 0, [5]), ack(again, 1, [5]))
    assert harness.answers[call] == [RecordId(5, 0)]


def test_errors_state_that_the_shard_recovers() -> None:
    harness, call, insert = with_pending_insert(policy=pinned, timeout=1 * S)
    harness.give(located(insert, 2))
    unassigned = harness.insert(b"y", timeout=1 * S)
    harness.pass_time(1 * S)
    error = harness.answers[call]
    assert type(error) is UnavailableError
    assert error.retriable
    assert "shard 0 (recovering)" in str(error)
    assert type(harness.answers[unassigned]) is DeadlineError
    assert "shard 0 (recovering)" in str(harness.answers[unassigned])
    assert "[1]" in str(harness.answers[unassigned])


def test_pinned_inserts_succeed_when_their_shard_is_available_again() -> None:
    harness, _, _ = with_pending_insert(policy=pinned)
    call = harness.insert(b"y")
    harness.pass_time(4 * S)
    assert not sent(harness)
    learn(harness, 2, "live")
    insert = next(m for m in sent(harness) if decode_body(m.body, 1).payloads == [b"y"])
    assert insert.view == 2
    harness.give(ack(insert, 0, [9]), ack(insert, 1, [9]))
    assert harness.answers[call] == [RecordId(9, 0)]
