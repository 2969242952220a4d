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


def sent_locates(glass: ClientHarness) -> list[wire.Locate]:
    return [m for _, m in glass.take(wire.Locate)]


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
    glass = connected(policy)
    call = glass.insert(b"x", timeout=timeout)
    (insert,) = sent(glass)
    learn(glass)
    glass.pass_time(1)
    return glass, call, insert


# --- locate ---


def test_unit_of_a_recovering_shard_is_located_and_not_sent() -> None:
    glass, _, insert = with_pending_insert()
    times: list[int] = []
    start = glass.now
    for _ in range(400):
        for name, request in glass.take(wire.Locate):
            assert (request.shard, request.view, request.client, request.seq) == (
                0, 1, CLIENT, insert.seq,
            )  # fmt: skip
            times.append((glass.now - start) // MS)
            assert name in {"s0r0:1", "s0r1:1"}
        glass.pass_time(10 * MS)
    assert not sent(glass)
    looks = sorted(set(times))
    assert len(times) == 2 * len(looks), "all replicas are asked"
    pauses = [b - a for a, b in pairwise(looks)]
    assert pauses[0] <= 60
    assert pauses == sorted(pauses)
    assert pauses[-1] == 500


def test_present_from_any_server_places_the_unit() -> None:
    glass, call, insert = with_pending_insert()
    glass.give(located(insert, 1, [7]))
    assert glass.answers[call] == [RecordId(7, 0)]
    counters = glass.core.counters
    assert (counters.inserts, counters.located, counters.slow_path) == (1, 1, 1)
    glass.give(located(insert, 2))
    sent_locates(glass)
    glass.pass_time(5 * S)
    assert not sent_locates(glass)


def test_present_at_invalid_positions_raises_protocol_error() -> None:
    glass = connected()
    call = glass.insert(b"x", after=RecordId(9, 0))
    (insert,) = sent(glass)
    learn(glass)
    glass.give(located(insert, 2, [7]))
    assert glass.core.counters.protocol_errors == 1
    assert "placed" in str(glass.answers[call])


def test_unit_absent_in_a_newer_view_is_rerouted() -> None:
    glass, call, insert = with_pending_insert()
    glass.give(located(insert, 2))
    (moved,) = sent(glass)
    assert (moved.shard, moved.body, moved.seq) == (1, insert.body, 1)
    glass.give(ack(moved, 0, [2]), ack(moved, 1, [2]))
    assert glass.answers[call] == [RecordId(2, 1)]
    assert glass.core.counters.moved == 1
    learn(glass, 2, "live")
    glass.core.set_policy(pinned)
    glass.insert(b"y")
    (later,) = sent(glass)
    assert (later.seq, later.first_incomplete) == (2, 2), "the rerouted unit leaves the window"


@pytest.mark.parametrize("word", ["same view", "pending", "another client", "another seq"])
def test_inconclusive_located_replies_do_not_reroute(word: str) -> None:
    glass, call, insert = with_pending_insert()
    messages = {
        "same view": located(insert, 1),
        "pending": located(insert, 2, verdict="pending"),
        "another client": located(insert, 2, client=b"d" * 16),
        "another seq": wire.Located(CLUSTER, 0, 2, 1, CLIENT, 99, "absent", []),
    }
    glass.give(messages[word])
    glass.pass_time(2 * S)
    assert not sent(glass)
    assert call not in glass.answers


def test_locate_names_the_view_of_the_newest_copy() -> None:
    """An `absent` of view 2 proves nothing once a copy of view 2 is in flight."""
    glass, call, insert = with_pending_insert()
    old = sent_locates(glass)[0]
    learn(glass, 2, "live")
    glass.pass_time(1)
    (again,) = sent(glass)
    assert (again.view, again.seq, again.body) == (2, insert.seq, insert.body)
    learn(glass, 2, "recovering")
    glass.pass_time(1)
    assert {request.view for request in sent_locates(glass)} == {2}
    glass.give(located(old, 2))
    glass.pass_time(1 * S)
    assert not sent(glass), "a copy of view 2 may still be placed"
    glass.give(located(old, 3))
    assert [m.shard for m in sent(glass)] == [1]
    assert call not in glass.answers


def test_pinned_insert_waits_for_its_shard_and_is_sent_in_its_new_view() -> None:
    glass, call, insert = with_pending_insert(policy=pinned)
    glass.give(located(insert, 2), located(insert, 2))
    sent_locates(glass)
    glass.pass_time(3 * S)
    assert not sent(glass)
    assert not sent_locates(glass), "it is known to be absent"
    learn(glass, 2, "live")
    glass.pass_time(1)
    (again,) = sent(glass)
    assert (again.view, again.seq) == (2, insert.seq)
    glass.give(refused(again, 0, "not-ready"))
    glass.give(ack(again, 1, [5]), ack(again, 0, [5]))
    assert glass.answers[call] == [RecordId(5, 0)]


def test_shard_unavailable_in_its_next_view_has_no_copy_of_that_view() -> None:
    glass, _, insert = with_pending_insert()
    learn(glass, 2, "parked")
    glass.pass_time(100 * MS)
    assert {request.view for request in sent_locates(glass)} == {1}
    glass.give(located(insert, 2))
    assert [m.shard for m in sent(glass)] == [1]


def test_absent_unit_may_be_placed_after_a_retransmission() -> None:
    glass, call, insert = with_pending_insert(policy=pinned, timeout=2 * S)
    glass.give(located(insert, 2))
    learn(glass, 2, "live")
    glass.pass_time(1)
    assert sent(glass)
    glass.pass_time(2 * S)
    assert isinstance(glass.answers[call], OutcomeUnknownError)


def test_partly_placed_call_is_never_rerouted() -> None:
    glass = connected()
    call = glass.insert(*[b"x"] * (UNIT_RECORDS + 1))
    first, second = sent(glass)
    learn(glass)
    gsns = list(range(1, UNIT_RECORDS + 1))
    glass.give(located(first, 2, gsns), located(second, 2))
    glass.pass_time(2 * S)
    assert not sent(glass)
    learn(glass, 2, "live")
    glass.pass_time(1)
    (again,) = sent(glass)
    assert (again.shard, again.seq, again.view) == (0, second.seq, 2)
    glass.give(ack(again, 0, [1000]), ack(again, 1, [1000]))
    assert glass.answers[call] == [RecordId(gsn, 0) for gsn in [*gsns, 1000]]


def test_call_is_rerouted_only_when_all_its_units_are_absent() -> None:
    glass = connected()
    glass.insert(*[b"x"] * (UNIT_RECORDS + 1))
    first, second = sent(glass)
    learn(glass)
    glass.give(located(second, 2))
    assert not sent(glass)
    glass.give(located(first, 2))
    assert [(m.shard, m.body) for m in sent(glass)] == [(1, first.body), (1, second.body)]


def test_absent_call_goes_to_the_first_available_shard() -> None:
    glass, _, insert = with_pending_insert()
    learn(glass, shard=1)
    glass.give(located(insert, 2))
    glass.pass_time(1 * S)
    assert not sent(glass), "no shard is live"
    learn(glass, 2, "live", shard=1)
    assert [(m.shard, m.view) for m in sent(glass)] == [(1, 2)]


def test_long_call_is_not_continued_while_its_shard_is_unavailable() -> None:
    glass = connected(pinned)
    glass.insert(*[bytes(200_000)] * 60)
    first = sent(glass)
    learn(glass)
    for number, insert in enumerate(first):
        glass.give(located(insert, 2, [number + 1]))
    glass.pass_time(1 * S)
    assert not sent(glass)
    assert glass.take(wire.Hello), "the client refreshes the placements"
    learn(glass, 2, "live")
    assert sum(len(m.body) for m in sent(glass)) >= MAX_INFLIGHT_BYTES


def test_refusal_of_a_server_outside_its_view_starts_locate() -> None:
    """The membership service has not reported the recovery yet; one server has."""
    glass = connected()
    call = glass.insert(b"x")
    (insert,) = sent(glass)
    glass.give(ack(insert, 1, [7]))
    glass.give(refused(insert, 0, "not-ready"))
    glass.pass_time(1)
    assert {request.view for request in sent_locates(glass)} == {1}
    glass.give(located(insert, 2, [7]))
    assert glass.answers[call] == [RecordId(7, 0)]


def test_duplicate_refusal_counts_for_one_server() -> None:
    glass = connected()
    glass.insert(b"x")
    (insert,) = sent(glass)
    glass.give(refused(insert, 0, "full"), refused(insert, 0, "full"))
    assert not sent(glass)
    glass.give(refused(insert, 1, "full"))
    assert [m.shard for m in sent(glass)] == [1]


def test_duplicate_refusal_does_not_count_for_a_later_copy() -> None:
    """Found by the simulator (seed 2034): the second copy was accepted too: a duplicate."""
    glass = ClientHarness(pinned)
    glass.connect(placement(0, 1), placement(1, 1))
    call = glass.insert(b"x")
    (insert,) = sent(glass)
    wrong = msgspec.structs.replace(refused(insert, 0, "wrong-view"), view=2)
    glass.give(wrong)
    glass.pass_time(100 * MS)
    glass.inform(placement(0, 1, 2), placement(1, 1))
    glass.pass_time(1)
    again = sent(glass)[-1]
    assert (again.shard, again.view, again.seq) == (0, 2, insert.seq)
    glass.core.set_policy(lambda _p, _k, _l: 1)
    glass.give(wrong)
    assert not sent(glass), "a copy of the new view is in flight"
    glass.give(ack(again, 0, [5]))
    assert glass.answers[call] == [RecordId(5, 0)]


# --- message counts ---


def test_dead_shard_costs_few_messages_whatever_waits_for_it() -> None:
    glass = connected(pinned)
    for _ in range(1100):
        glass.insert(b"x", timeout=60 * S)
    sent(glass)
    learn(glass)
    glass.pass_time(4 * S)
    glass.sent.clear()
    glass.pass_time(10 * S)
    assert not sent(glass)
    requests = sent_locates(glass)
    assert 0 < len(requests) <= 2 * MAX_LOCATES * 21
    assert len({request.seq for request in requests}) >= 1000, "every unit is located"
    assert len(glass.sent) <= 110, "at most ten refreshes a second"


def test_located_replies_trigger_the_next_locates() -> None:
    glass = connected(pinned)
    for _ in range(1000):
        glass.insert(b"x", timeout=60 * S)
    sent(glass)
    learn(glass)
    count = 0
    for _ in range(1000 // MAX_LOCATES + 1):
        glass.pass_time(1 * MS)
        requests = {m.seq: m for m in sent_locates(glass)}
        count += len(requests)
        for request in requests.values():
            glass.give(located(request, 2, [request.seq]), located(request, 2, [request.seq]))
    assert len(glass.answers) == 1000
    assert count <= 1100


def test_more_units_are_located_when_the_last_ones_are_known() -> None:
    glass = connected(pinned)
    for _ in range(200):
        glass.insert(b"x", timeout=60 * S)
    sent(glass)
    learn(glass)
    glass.pass_time(1)
    first = {m.seq: m for m in sent_locates(glass)}
    assert len(first) == MAX_LOCATES
    *most, last = first.values()
    for request in most:
        glass.give(located(request, 2, [request.seq]))
        glass.pass_time(1)
    assert not sent_locates(glass)
    glass.give(located(last, 2, [last.seq]))
    glass.pass_time(1)
    second = {m.seq for m in sent_locates(glass)}
    assert len(second) == MAX_LOCATES
    assert not second & first.keys()


def test_queued_calls_of_a_silent_shard_are_rerouted() -> None:
    choices: list[int] = []

    def policy(_payload: bytes, _key: bytes | None, live: Any) -> int:
        choices.append(int(live[0]))
        return choices[-1]

    glass = ClientHarness(policy)
    glass.connect(placement(0), placement(1), limits=wire.Limits(max_unsettled_units=2))
    calls = [glass.insert(b"%d" % number) for number in range(5)]
    assert [m.shard for m in sent(glass)] == [0, 0]
    glass.pass_time(initial_retransmit_ns(0) + MS)
    moved = [m for m in sent(glass) if m.shard == 1]
    assert [decode_body(m.body, 1).payloads for m in moved] == [[b"2"], [b"3"]]
    for m in moved:
        glass.give(ack(m, 0, [m.seq * 2]), ack(m, 1, [m.seq * 2]))
    assert glass.answers.keys() == set(calls[2:4])


def test_a_shard_is_avoided_for_as_long_as_it_is_silent() -> None:
    glass = connected()
    glass.insert(b"x", timeout=60 * S)
    sent(glass)
    for _ in range(40):
        glass.pass_time(600 * MS)
        call = glass.insert(b"y", timeout=60 * S)
        (insert,) = [m for m in sent(glass) if decode_body(m.body, 1).payloads == [b"y"]]
        assert insert.shard == 1
        glass.give(ack(insert, 0, [2 * insert.seq]), ack(insert, 1, [2 * insert.seq]))
        assert call in glass.answers


# --- the fast path ---


def test_backup_that_waited_for_the_primarys_decision_is_the_slow_path() -> None:
    glass = connected()
    glass.insert(b"x")
    (insert,) = sent(glass)
    glass.give(ack(insert, 0, [4]), ack(insert, 1, [4], confirmed=True, waited=True))
    counters = glass.core.counters
    assert (counters.fast_path, counters.slow_path) == (0, 1)


def test_backup_that_knew_the_primarys_decision_is_the_fast_path() -> None:
    """Its ack answers the client's own copy: two message delays."""
    glass = connected()
    glass.insert(b"x")
    (insert,) = sent(glass)
    glass.give(ack(insert, 0, [4]), ack(insert, 1, [4], confirmed=True))
    counters = glass.core.counters
    assert (counters.fast_path, counters.slow_path) == (1, 0)


# --- unknown outcomes ---


def with_unknown_outcome(
    *payloads: bytes, policy: Any = pinned
) -> tuple[ClientHarness, OutcomeUnknownError, Any]:
    """Return a client with an insert of unknown outcome."""
    glass = connected(policy)
    call = glass.insert(*(payloads or [b"x"]), timeout=1 * S)
    inserts = sent(glass)
    glass.pass_time(1 * S)
    error = glass.answers.pop(call)
    assert isinstance(error, OutcomeUnknownError)
    glass.sent.clear()
    return glass, error, inserts


def test_unknown_outcome_is_resolved_by_acks() -> None:
    glass, error, (insert,) = with_unknown_outcome()
    call = resolve(glass, error)
    glass.pass_time(1)
    assert [m.seq for m in sent(glass)] == [insert.seq], "it is retransmitted at once"
    glass.give(ack(insert, 0, [4]))
    assert call not in glass.answers
    glass.give(ack(insert, 1, [4]))
    assert glass.answers[call] == [RecordId(4, 0)]
    again = resolve(glass, error)
    assert glass.answers[again] == [RecordId(4, 0)], "the outcome is kept"


def test_outcome_known_before_resolve_is_returned_at_once() -> None:
    glass, error, (insert,) = with_unknown_outcome()
    learn(glass)
    glass.give(located(insert, 2, [4]))
    for _ in range(2000):
        call = glass.insert(b"y", timeout=0)
        glass.pass_time(0)
        del glass.answers[call]
    assert glass.answers[resolve(glass, error)] == [RecordId(4, 0)]


def test_unit_of_an_ended_call_is_not_sent_in_a_newer_view() -> None:
    glass, error, (insert,) = with_unknown_outcome()
    learn(glass, 2, "live")
    call = resolve(glass, error)
    glass.pass_time(1)
    assert not sent(glass)
    assert {request.view for request in sent_locates(glass)} == {1}
    glass.give(located(insert, 2))
    assert glass.answers[call] == [None]
    glass.insert(b"y")
    assert sent(glass)[0].first_incomplete == 2
    assert glass.answers[resolve(glass, error)] == [None]


def test_unknown_unit_that_all_replicas_refuse_resolves_to_absent() -> None:
    glass, error, (insert,) = with_unknown_outcome()
    call = resolve(glass, error)
    glass.pass_time(1)
    newest = sent(glass)[-1]
    assert (newest.seq, newest.copy > 1) == (insert.seq, True)
    glass.give(*(refused(older, s, "full") for older in (insert, insert) for s in (0, 1)))
    glass.give(refused(newest, 0, "full"))
    assert not glass.answers
    glass.give(refused(newest, 1, "full"))
    assert glass.answers[call] == [None]


@pytest.mark.parametrize("answer", ["identity-reused", "misplaced"])
def test_outcome_stays_unknown_after_contradictory_replies(answer: str) -> None:
    """To report that the record will never exist would be a guess."""
    glass, error, (insert,) = with_unknown_outcome()
    call = resolve(glass, error, 1 * S)
    if answer == "misplaced":
        glass.give(located(insert, 2, [4, 5]))
    else:
        glass.give(refused(insert, 1, "identity-reused"))
    glass.pass_time(1 * S)
    assert isinstance(glass.answers[call], OutcomeUnknownError)
    assert glass.core.counters.protocol_errors == 1
    assert "contradictory" in str(glass.answers[call])


def test_shard_with_an_unknown_outcome_is_avoided_until_its_next_ack() -> None:
    glass, _, (insert,) = with_unknown_outcome(policy=lambda _p, _k, live: live[0])
    for _ in range(60):
        glass.pass_time(500 * MS)
        call = glass.insert(b"y")
        other = next(m for m in sent(glass) if b"y" in m.body)
        assert other.shard == 1
        glass.give(*(ack(other, server, [2 * other.seq]) for server in (0, 1)))
        assert call in glass.answers
    glass.give(ack(insert, 0, [4]), ack(insert, 1, [4]))
    glass.insert(b"z")
    assert next(m.shard for m in sent(glass) if b"z" in m.body) == 0


def test_outcome_stays_unknown_when_resolve_times_out() -> None:
    glass, error, (insert,) = with_unknown_outcome()
    learn(glass)
    call = resolve(glass, error, 2 * S)
    glass.pass_time(2 * S)
    again = glass.answers[call]
    assert isinstance(again, OutcomeUnknownError)
    assert (again.shard, again.seq) == (0, insert.seq)
    assert "recovering" in str(again)
    later = resolve(glass, again)
    glass.give(located(insert, 2, [9]))
    assert glass.answers[later] == [RecordId(9, 0)]


def test_unknown_outcome_of_a_long_call_covers_its_sent_unplaced_units() -> None:
    glass, error, (first, second, third) = with_unknown_outcome(*[b"x"] * (2 * UNIT_RECORDS + 1))
    learn(glass)
    call = resolve(glass, error, 5 * S)
    gsns = list(range(1, UNIT_RECORDS + 1))
    glass.give(located(first, 2, gsns), located(third, 2))
    assert call not in glass.answers
    glass.pass_time(5 * S)
    partly = glass.answers[call]
    placed = [RecordId(gsn, 0) for gsn in gsns]
    assert partly.results == [*placed, *[None] * (UNIT_RECORDS + 1)]
    assert partly.seq == second.seq
    call = resolve(glass, partly)
    glass.give(located(second, 2))
    assert glass.answers[call] == [*placed, *[None] * (UNIT_RECORDS + 1)]


def test_cancelled_resolve_gets_no_result() -> None:
    glass, error, (insert,) = with_unknown_outcome()
    call, other = resolve(glass, error), resolve(glass, error)
    glass.cancel(call)
    glass.give(ack(insert, 0, [4]), ack(insert, 1, [4]))
    assert glass.answers == {other: [RecordId(4, 0)]}


def test_client_with_an_expired_session_retransmits_nothing() -> None:
    """Servers expire the session of a silent client; they would accept a copy as a new insert."""
    glass, error, (insert,) = with_unknown_outcome()
    pending = glass.insert(b"y", timeout=3600 * S)
    glass.sent.clear()
    glass.now += 601 * S
    fresh = glass.insert(b"z", timeout=1 * S)
    (new,) = sent(glass)
    assert (new.seq, new.first_incomplete) == (3, 3)
    assert isinstance(glass.answers[pending], OutcomeUnknownError)
    glass.give(located(insert, 2), ack(insert, 0, [4]), ack(insert, 1, [4]))
    call = resolve(glass, error)
    again = glass.answers[call]
    assert isinstance(again, OutcomeUnknownError)
    assert "session" in str(again)
    glass.give(ack(new, 0, [5]), ack(new, 1, [5]))
    assert glass.answers[fresh] == [RecordId(5, 0)]
    glass.sent.clear()
    glass.pass_time(60 * S)
    assert not sent(glass)


def test_absent_unit_survives_an_expired_session() -> None:
    glass, call, insert = with_pending_insert(policy=pinned, timeout=3600 * S)
    glass.give(located(insert, 2))
    glass.now += 601 * S
    learn(glass, 2, "live")
    glass.pass_time(1)
    (again,) = sent(glass)
    glass.give(ack(again, 0, [5]), ack(again, 1, [5]))
    assert glass.answers[call] == [RecordId(5, 0)]


def test_errors_state_that_the_shard_recovers() -> None:
    glass, call, insert = with_pending_insert(policy=pinned, timeout=1 * S)
    glass.give(located(insert, 2))
    unassigned = glass.insert(b"y", timeout=1 * S)
    glass.pass_time(1 * S)
    error = glass.answers[call]
    assert type(error) is UnavailableError
    assert error.retriable
    assert "shard 0 (recovering)" in str(error)
    assert type(glass.answers[unassigned]) is DeadlineError
    assert "shard 0 (recovering)" in str(glass.answers[unassigned])
    assert "[1]" in str(glass.answers[unassigned])


def test_pinned_inserts_succeed_when_their_shard_is_available_again() -> None:
    glass, _, _ = with_pending_insert(policy=pinned)
    call = glass.insert(b"y")
    glass.pass_time(4 * S)
    assert not sent(glass)
    learn(glass, 2, "live")
    insert = next(m for m in sent(glass) if decode_body(m.body, 1).payloads == [b"y"])
    assert insert.view == 2
    glass.give(ack(insert, 0, [9]), ack(insert, 1, [9]))
    assert glass.answers[call] == [RecordId(9, 0)]
