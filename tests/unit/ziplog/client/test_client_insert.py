"""Inserts (docs/protocol.md, section 4; D8, D13)."""

from __future__ import annotations

from asyncio import CancelledError
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.properties import examples
from tests.unit.ziplog.client.fakes import (
    MS,
    ClientHarness,
    FakeCluster,
    S,
    ack,
    endpoint,
    placement,
    refused,
)
from ziplog import wire
from ziplog.client.inserts.inflight import MAX_INFLIGHT_BYTES
from ziplog.client.inserts.insert_calls import UNIT_BYTES, UNIT_RECORDS, split_into_units
from ziplog.client.inserts.retransmission import MAX_DOUBLED_NS
from ziplog.core.distance import initial_retransmit_ns
from ziplog.core.entries import decode_body
from ziplog.core.node import SHORTAGE, ConnectionChanged
from ziplog.errors import (
    DeadlineError,
    NoSuchRecordError,
    OutcomeUnknownError,
    ProtocolError,
    RecordTooLargeError,
    UnavailableError,
)
from ziplog.types import RecordId


def connected(*, shards: int = 1, replicas: int = 2, policy: Any = None) -> ClientHarness:
    harness = ClientHarness(policy)
    harness.connect(*(placement(shard, replicas) for shard in range(shards)))
    return harness


def sent_insert(harness: ClientHarness) -> wire.Insert:
    inserts = harness.take(wire.Insert)
    assert inserts
    message: wire.Insert = inserts[0][1]
    assert all(other is message for _, other in inserts), "encoded more than once"
    return message


def test_an_insert_goes_to_all_replicas_and_completes_when_all_name_the_same_gsn() -> None:
    harness = connected(replicas=3)
    call = harness.insert(b"x")
    names = [name for name, _ in harness.sent]
    insert = sent_insert(harness)
    assert names == ["s0r0:1", "s0r1:1", "s0r2:1"], "the primary comes first"
    harness.give(ack(insert, 1, [4]), ack(insert, 0, [4]))
    assert not harness.answers
    harness.give(ack(insert, 2, [4]))
    assert harness.answers[call] == [RecordId(4, 0)]
    assert harness.core.counters.fast_path == harness.core.counters.inserts == 1


def test_a_wrong_guess_does_not_complete_and_its_correction_is_the_slow_path() -> None:
    harness = connected()
    call = harness.insert(b"x")
    insert = sent_insert(harness)
    harness.give(ack(insert, 1, [6]), ack(insert, 0, [4]))
    assert not harness.answers
    harness.give(ack(insert, 1, [4], 2, confirmed=True))
    assert harness.answers[call] == [RecordId(4, 0)]
    assert harness.core.counters.slow_path == 1
    assert harness.core.counters.fast_path == 0


def test_no_majority_without_the_primary() -> None:
    harness = connected(replicas=3)
    harness.insert(b"x")
    insert = sent_insert(harness)
    harness.give(ack(insert, 1, [4]), ack(insert, 2, [4]), ack(insert, 1, [4], 2))
    assert not harness.answers


def test_acks_of_two_views_are_never_combined() -> None:
    harness = connected()
    call = harness.insert(b"x")
    insert = sent_insert(harness)
    harness.give(ack(insert, 0, [4]), ack(insert, 1, [4], view=2))
    assert not harness.answers
    harness.pass_time(120 * MS)
    harness.inform(placement(0, view=2))
    harness.pass_time(1)
    again = harness.take(wire.Insert)[-1][1]
    assert (again.view, again.seq, again.body) == (2, insert.seq, insert.body)
    harness.give(ack(again, 0, [9]))
    assert not harness.answers, "the ack of view 1 counted in view 2"
    harness.give(ack(again, 1, [9]))
    assert harness.answers[call] == [RecordId(9, 0)]


def test_an_older_ack_that_comes_late_changes_nothing() -> None:
    harness = connected()
    call = harness.insert(b"x")
    insert = sent_insert(harness)
    harness.give(ack(insert, 1, [4], 7, confirmed=True), ack(insert, 1, [6], 3))
    harness.give(ack(insert, 0, [4]))
    assert harness.answers[call] == [RecordId(4, 0)]


def test_silent_shard_gets_the_same_identity_again_with_growing_backoff() -> None:
    harness = connected()
    harness.insert(b"x", timeout=30 * S)
    first = sent_insert(harness)
    times = []
    start = harness.now
    for _ in range(2000):
        harness.pass_time(5 * MS)
        for _, again in harness.take(wire.Insert):
            assert again.seq == first.seq
            times.append((harness.now - start) // MS)
    sends = sorted(set(times))
    assert sends[0] == initial_retransmit_ns(0) // MS
    pauses = [b - a for a, b in pairwise(sends)]
    assert pauses == sorted(pauses), "the backoff shrank"
    assert pauses[-1] == MAX_DOUBLED_NS // MS
    assert harness.core.counters.retries == len(sends)


def test_first_incomplete_is_the_lowest_seq_in_flight() -> None:
    harness = connected()
    inserts = []
    for _ in range(3):
        harness.insert(b"x")
        inserts.append(sent_insert(harness))
    assert [i.seq for i in inserts] == [1, 2, 3]
    assert [i.first_incomplete for i in inserts] == [1, 1, 1]
    harness.give(*(ack(inserts[1], server, [4]) for server in (0, 1)))
    harness.insert(b"x")
    assert sent_insert(harness).first_incomplete == 1
    harness.give(*(ack(inserts[0], server, [2]) for server in (0, 1)))
    harness.insert(b"x")
    assert sent_insert(harness).first_incomplete == 3


def test_many_payloads_become_chained_units_and_results_keep_their_order() -> None:
    harness = connected()
    call = harness.insert(*(b"%d" % i for i in range(2 * UNIT_RECORDS + 1)))
    units = [m for name, m in harness.take(wire.Insert) if name == "s0r0:1"]
    assert [u.count for u in units] == [UNIT_RECORDS, UNIT_RECORDS, 1]
    assert [u.predecessor for u in units] == [0, units[0].seq, units[1].seq]
    gsn = 1
    placed = []
    for unit in units:
        placed.append(list(range(gsn, gsn + unit.count)))
        gsn += unit.count + 10
    for unit, gsns in reversed(list(zip(units, placed, strict=True))):
        harness.give(ack(unit, 0, gsns), ack(unit, 1, gsns))
    assert harness.answers[call] == [RecordId(g, 0) for gsns in placed for g in gsns]


@given(sizes=st.lists(st.integers(0, 400_000), min_size=1, max_size=600), has_keys=st.booleans())
def test_unit_ranges_cover_all_payloads_within_their_limits(
    sizes: list[int], *, has_keys: bool
) -> None:
    """The sizes are of payloads, or half of each size is that of a key."""
    of_keys = [size // 2 if has_keys else 0 for size in sizes]
    zeros = memoryview(bytes(400_000))
    payloads = [zeros[: size - of_key] for size, of_key in zip(sizes, of_keys, strict=True)]
    keys = [zeros[:of_key] or None for of_key in of_keys] if has_keys else None
    cuts = split_into_units(payloads, keys)  # type: ignore[arg-type]
    assert cuts[0][0] == 0
    assert cuts[-1][1] == len(sizes)
    for (start, stop), (following, _) in zip(cuts, [*cuts[1:], (len(sizes), 0)], strict=True):
        assert stop == following
        assert 1 <= stop - start <= UNIT_RECORDS
        assert stop - start == 1 or sum(sizes[start:stop]) <= UNIT_BYTES


def test_window_limits_the_units_in_flight() -> None:
    harness = ClientHarness()
    harness.connect(placement(0), limits=wire.Limits(max_unsettled_units=4))
    calls = [harness.insert(b"x") for _ in range(6)]
    inserts = [m for name, m in harness.take(wire.Insert) if name == "s0r0:1"]
    assert [i.seq for i in inserts] == [1, 2, 3, 4]
    harness.give(*(ack(inserts[1], server, [2]) for server in (0, 1)))
    assert not harness.take(wire.Insert), "seq 5 is too far from the open seq 1"
    harness.give(*(ack(inserts[0], server, [1]) for server in (0, 1)))
    assert {(m.seq, m.count) for _, m in harness.take(wire.Insert)} == {(5, 2)}
    assert calls[1] in harness.answers


def test_window_limits_the_bytes_in_flight() -> None:
    harness = connected()
    harness.insert(*[bytes(200_000)] * 100)
    sent = sum(len(m.body) for name, m in harness.take(wire.Insert) if name == "s0r0:1")
    assert MAX_INFLIGHT_BYTES <= sent <= MAX_INFLIGHT_BYTES + UNIT_BYTES


def test_small_calls_do_not_wait_for_the_end_of_a_large_one() -> None:
    harness = connected()
    harness.insert(*[bytes(200_000)] * 100)
    first = [m for name, m in harness.take(wire.Insert) if name == "s0r0:1"]
    small = harness.insert(b"small")
    for number in (0, 1):
        gsns = [number + 1]
        harness.give(*(ack(first[number], server, gsns) for server in (0, 1)))
    sent = [m for name, m in harness.take(wire.Insert) if name == "s0r0:1"]
    assert any(decode_body(m.body, m.count).payloads == [b"small"] for m in sent)
    assert small not in harness.answers


# --- refusals ---


@pytest.mark.parametrize("code", ["full", "redirect"])
def test_a_refused_insert_goes_to_another_shard_under_a_new_identity(
    code: wire.RefusalCode,
) -> None:
    harness = connected(shards=2)
    call = harness.insert(b"x")
    insert = sent_insert(harness)
    harness.give(refused(insert, 0, code))
    assert not harness.take(wire.Insert), "one refusal proves nothing"
    harness.give(refused(insert, 1, code))
    moved = sent_insert(harness)
    assert (moved.shard, moved.body) == (1, insert.body)
    harness.give(*(ack(moved, server, [2]) for server in (0, 1)))
    assert harness.answers[call] == [RecordId(2, 1)]
    harness.core.set_policy(lambda _p, _k, _l: 0)
    harness.insert(b"y")
    assert sent_insert(harness).first_incomplete == 2, "servers may forget the rerouted unit"
    assert harness.core.counters.redirects == (2 if code == "redirect" else 0)


def test_error_names_the_lack_of_descriptors_for_connections_to_the_shard() -> None:
    harness = connected()
    first, second = harness.insert(b"x", timeout=1 * S), harness.insert(b"y", timeout=3 * S)
    server = endpoint(0, 1).encode()
    harness.step(ConnectionChanged(server, f"{SHORTAGE}too many open files"))
    harness.pass_time(2 * S)
    cause = "(this process cannot open a connection: too many open files)"
    assert cause in str(harness.answers[first])
    harness.step(ConnectionChanged(server, ""))
    harness.pass_time(2 * S)
    assert "this process" not in str(harness.answers[second])


def test_the_lack_of_descriptors_is_forgotten_with_the_connection() -> None:
    harness = connected()
    harness.insert(b"x", timeout=1 * S)
    server = endpoint(0, 1).encode()
    harness.step(ConnectionChanged(server, f"{SHORTAGE}too many open files"))
    former = placement(0)
    moved = replace(former.replicas[1], endpoint="elsewhere:1")
    routing = harness.core._routing
    for view, replicas in ((2, (former.replicas[0], moved)), (3, former.replicas)):
        routing.update_placements([replace(former, view=view, replicas=replicas)])
    assert routing.route(0) is not None
    assert "this process" not in routing.describe(0)


@pytest.mark.parametrize(
    "code", ["not-ready", "wrong-view", "wrong-shard", "wrong-cluster", "full"]
)
def test_refusal_without_a_promise_does_not_reroute(code: wire.RefusalCode) -> None:
    """The same copy may have arrived before, or arrive again, when the server accepts records."""
    harness = connected(shards=2)
    call = harness.insert(b"x", timeout=1 * S)
    insert = sent_insert(harness)
    for server in (0, 1, 0, 1):
        harness.give(msgspec.structs.replace(refused(insert, server, code), copies=0))
    harness.pass_time(1 * S)
    assert {(m.shard, m.seq) for _, m in harness.take(wire.Insert)} == {(0, insert.seq)}
    assert isinstance(harness.answers[call], OutcomeUnknownError)


def test_each_copy_carries_its_number() -> None:
    harness = connected()
    harness.insert(b"x")
    harness.pass_time(2 * S)
    copies = [m.copy for name, m in harness.take(wire.Insert) if name == "s0r1:1"]
    assert copies == list(range(1, len(copies) + 1))
    assert len(copies) > 2
    harness.insert(b"y")
    assert sent_insert(harness).copy == 1


def test_insert_that_one_server_acked_stays_although_the_other_refuses() -> None:
    harness = connected(shards=2)
    call = harness.insert(b"x", timeout=2 * S)
    insert = sent_insert(harness)
    harness.give(ack(insert, 1, [1]), refused(insert, 0, "redirect"))
    harness.pass_time(3 * S)
    assert {m.shard for _, m in harness.take(wire.Insert)} == {0}
    assert isinstance(harness.answers[call], OutcomeUnknownError)


def test_duplicate_refusal_does_not_count_for_the_other_server() -> None:
    harness = connected(shards=2)
    harness.insert(b"x")
    insert = sent_insert(harness)
    harness.give(ack(insert, 1, [1]), refused(insert, 0, "full"), refused(insert, 0, "full"))
    harness.pass_time(100 * MS)
    assert {m.shard for _, m in harness.take(wire.Insert)} == {0}


def test_a_pinned_insert_waits_for_its_shard_with_the_same_identity() -> None:
    harness = connected(shards=2, policy=lambda _p, _k, _l: 0)
    call = harness.insert(b"x")
    insert = sent_insert(harness)
    for _ in range(3):
        harness.give(refused(insert, 0, "not-ready"), refused(insert, 1, "not-ready"))
        harness.pass_time(2 * S)
        assert {(m.shard, m.seq) for _, m in harness.take(wire.Insert)} == {(0, insert.seq)}
    harness.give(*(ack(insert, server, [1]) for server in (0, 1)))
    assert harness.answers[call] == [RecordId(1, 0)]


def test_refused_by_all_until_the_deadline_is_unavailable_and_retriable() -> None:
    harness = connected(policy=lambda _p, _k, _l: 0)
    call = harness.insert(b"x", timeout=1 * S)
    while not harness.answers:
        for name, insert in harness.take(wire.Insert):
            harness.give(refused(insert, int(name[3]), "full"))
        harness.pass_time(MS)
    error = harness.answers[call]
    assert type(error) is UnavailableError
    assert error.retriable
    assert "fake" in str(error)


def test_no_ack_until_the_deadline_is_an_unknown_outcome() -> None:
    harness = connected()
    call = harness.insert(b"x", timeout=1 * S)
    insert = sent_insert(harness)
    harness.pass_time(1 * S)
    error = harness.answers.pop(call)
    assert isinstance(error, OutcomeUnknownError)
    assert not error.retriable
    assert (error.shard, error.seq) == (0, insert.seq)
    harness.take(wire.Insert)
    harness.pass_time(6 * S)
    assert {m.seq for _, m in harness.take(wire.Insert)} == {insert.seq}, (
        "its outcome is not known yet"
    )
    harness.give(*(ack(insert, server, [1]) for server in (0, 1)))
    harness.inform(placement(0))
    harness.pass_time(60 * S)
    harness.take(wire.Settled)
    assert not harness.sent, "an idle client sends nothing"


def test_an_insert_that_was_never_sent_ends_as_a_deadline() -> None:
    harness = ClientHarness()
    harness.connect()
    call = harness.insert(b"x", timeout=1 * S)
    harness.pass_time(1 * S)
    assert type(harness.answers[call]) is DeadlineError
    assert "is live" in str(harness.answers[call])
    harness = connected(policy=lambda _p, _k, _l: 9)
    call = harness.insert(b"x", timeout=1 * S)
    harness.pass_time(1 * S)
    assert type(harness.answers[call]) is DeadlineError
    assert "shard 9" in str(harness.answers[call])


def test_insert_waits_for_the_shard_of_the_policy() -> None:
    harness = connected(policy=lambda _p, _k, _l: 1)
    harness.insert(b"x")
    harness.pass_time(150 * MS)
    harness.inform(placement(0), placement(1))
    assert sent_insert(harness).shard == 1


def test_insert_after_a_position_without_an_owner_fails() -> None:
    harness = connected()
    after = RecordId(10**15, 3)
    call = harness.insert(b"x", after=after)
    insert = sent_insert(harness)
    harness.give(refused(insert, 0, "no-such-position"))
    error = harness.answers[call]
    assert isinstance(error, NoSuchRecordError)
    assert error.rid == after


def test_no_such_position_waits_for_copies_in_flight() -> None:
    harness = connected()
    call = harness.insert(b"x", after=RecordId(10**15, 3))
    insert = sent_insert(harness)
    harness.pass_time(initial_retransmit_ns(0) + MS)
    assert harness.take(wire.Insert)
    harness.give(refused(insert, 0, "no-such-position"))
    assert not harness.answers
    harness.give(ack(insert, 0, [10**15 + 1]), ack(insert, 1, [10**15 + 1]))
    assert harness.answers[call] == [RecordId(10**15 + 1, 0)]
    call = harness.insert(b"x", after=RecordId(10**15, 3))
    insert = sent_insert(harness)
    harness.pass_time(initial_retransmit_ns(0) + MS)
    harness.give(refused(insert, 0, "no-such-position"))
    harness.pass_time(initial_retransmit_ns(0) + MS)
    assert isinstance(harness.answers[call], NoSuchRecordError)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("too-large", RecordTooLargeError),
        ("malformed", ProtocolError),
        ("identity-reused", ProtocolError),
    ],
)
def test_some_refusals_are_final(code: wire.RefusalCode, kind: type) -> None:
    harness = connected()
    call = harness.insert(b"x")
    insert = sent_insert(harness)
    harness.give(refused(insert, 1, code), refused(insert, 0, code))
    assert isinstance(harness.answers[call], kind)


def test_refusal_of_a_backup_with_a_lower_limit_does_not_fail_an_insert() -> None:
    harness = connected()
    call = harness.insert(b"x")
    insert = sent_insert(harness)
    harness.give(refused(insert, 1, "too-large"))
    assert not harness.answers, "the primary may place it"
    harness.give(ack(insert, 0, [5]))
    harness.pass_time(S)
    again = harness.take(wire.Insert)[-1][1]
    assert again.seq == insert.seq
    harness.give(ack(again, 1, [5], confirmed=True))
    assert harness.answers[call] == [RecordId(5, 0)]


def test_insert_that_only_the_primary_finds_too_large_fails_without_other_replies() -> None:
    harness = connected()
    call = harness.insert(b"x")
    harness.give(refused(sent_insert(harness), 0, "too-large"))
    assert not harness.answers, "the backup may have promised it a position"
    harness.pass_time(initial_retransmit_ns(0) + MS)
    assert isinstance(harness.answers[call], RecordTooLargeError)


def test_insert_with_a_promised_position_does_not_fail_as_too_large() -> None:
    harness = connected()
    call = harness.insert(b"x")
    insert = sent_insert(harness)
    harness.give(ack(insert, 1, [9]), refused(insert, 0, "too-large"))
    harness.pass_time(10 * S)
    error = harness.answers[call]
    assert isinstance(error, OutcomeUnknownError), "it is in the log if the primary fails now"


def test_position_that_a_backup_knows_exists() -> None:
    harness = connected()
    call = harness.insert(b"x", after=RecordId(5, 0))
    insert = sent_insert(harness)
    harness.give(ack(insert, 1, [7]), refused(insert, 0, "no-such-position"))
    harness.pass_time(S)
    assert not harness.answers, "the leases grew since the primary asked"
    again = harness.take(wire.Insert)[-1][1]
    harness.give(ack(again, 0, [7]), ack(again, 1, [7]))
    assert harness.answers[call] == [RecordId(7, 0)]


def test_ack_with_invalid_positions_raises_protocol_error() -> None:
    for gsns in ([3], [5, 5], [7, 6], [6]):
        harness = connected()
        call = harness.insert(b"x", b"y", after=RecordId(5, 0))
        insert = sent_insert(harness)
        harness.give(ack(insert, 0, gsns), ack(insert, 1, gsns))
        assert isinstance(harness.answers[call], ProtocolError)
        assert harness.core.counters.protocol_errors == 1


def test_failed_insert_many_reports_the_placed_records() -> None:
    harness = connected()
    call = harness.insert(*[b"x"] * (UNIT_RECORDS + 2), timeout=1 * S)
    units = [m for name, m in harness.take(wire.Insert) if name == "s0r0:1"]
    gsns = list(range(1, UNIT_RECORDS + 1))
    harness.give(ack(units[0], 0, gsns), ack(units[0], 1, gsns))
    harness.pass_time(1 * S)
    error = harness.answers[call]
    assert isinstance(error, OutcomeUnknownError)
    assert error.results == [*(RecordId(gsn, 0) for gsn in gsns), None, None]


def test_a_silent_shard_gets_no_new_records_for_a_while() -> None:
    asked = []

    def policy(_payload: bytes, _key: bytes | None, live: Any) -> int:
        asked.append(list(live))
        return int(live[0])

    harness = connected(shards=2, policy=policy)
    harness.insert(b"x")
    harness.pass_time(initial_retransmit_ns(0) + MS)
    harness.insert(b"y")
    assert asked == [[0, 1], [1]]
    harness.take(wire.Insert)
    harness.core.set_policy(lambda _p, _k, _l: 0)
    harness.insert(b"z")
    assert sent_insert(harness).shard == 0, "a pinned record was rerouted"


def test_a_policy_that_raises_fails_the_call_with_its_own_error() -> None:
    def policy(_payload: bytes, _key: bytes | None, _live: Any) -> int:
        raise ZeroDivisionError

    harness = connected(policy=policy)
    assert isinstance(harness.answers[harness.insert(b"x")], ZeroDivisionError)
    wrong: list[Any] = ["0", None, True, 0.0, -1]
    for returned in wrong:
        harness.core.set_policy(lambda _p, _k, _l: returned)  # noqa: B023 - called at once
        error = harness.answers[harness.insert(b"x")]
        assert isinstance(error, TypeError)
        assert str(error) == f"the policy returned {returned!r}; a shard id is an int from 0 on"


@pytest.mark.parametrize(
    "raised", [SystemExit(1), KeyboardInterrupt(), CancelledError(), StopIteration()]
)
def test_a_policy_fails_the_call_also_with_what_no_future_can_have(raised: BaseException) -> None:
    def policy(_payload: bytes, _key: bytes | None, _live: Any) -> int:
        raise raised

    harness = connected(policy=policy)
    error, name = harness.answers[harness.insert(b"x")], type(raised).__name__
    assert isinstance(error, RuntimeError)
    assert str(error) == f"the policy raised {name}; it must return the id of a shard"
    assert error.__cause__ is raised
    harness.core.set_policy(lambda _p, _k, _l: 0)
    call = harness.insert(b"y")
    insert = sent_insert(harness)
    harness.give(ack(insert, 0, [1]), ack(insert, 1, [1]))
    assert harness.answers[call] == [RecordId(1, 0)]


def test_cancelled_insert_is_retransmitted_until_its_outcome_is_known() -> None:
    harness = connected()
    call = harness.insert(b"x")
    insert = sent_insert(harness)
    harness.cancel(call)
    harness.pass_time(initial_retransmit_ns(0) + MS)
    assert {m.seq for _, m in harness.take(wire.Insert)} == {insert.seq}
    harness.give(ack(insert, 0, [1]), ack(insert, 1, [1]))
    assert not harness.answers
    assert harness.core.counters.inserts == 1


# --- over a faulty network ---


@examples(40)
@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.1, 0.4]),
    repetition=st.sampled_from([0.0, 0.3]),
    counts=st.lists(st.integers(1, 700), min_size=1, max_size=12),
)
def test_every_record_is_in_the_log_once_at_its_returned_rid(
    seed: int, loss: float, repetition: float, counts: list[int]
) -> None:
    harness = ClientHarness(lambda _p, _k, live: live[seed % len(live)])
    cluster = FakeCluster(harness, seed, replicas=1 + seed % 3)
    harness.connect(*cluster.placements())
    cluster.loss, cluster.repetition = loss, repetition
    expected: dict[RecordId, bytes] = {}
    after = RecordId(0, 0)
    calls = {}
    for number, count in enumerate(counts):
        payloads = [b"%d-%d" % (number, i) for i in range(count)]
        calls[harness.insert(*payloads, after=after, timeout=600 * S)] = (payloads, after)
        if number % 3 == 2:
            last = max(calls)
            cluster.run(partial(harness.answers.__contains__, last))
            after = harness.answers[last][-1]
    for call, (payloads, floor) in calls.items():
        rids = cluster.result(call) if call not in harness.answers else harness.answers.pop(call)
        assert rids == sorted(rids)
        assert rids[0].gsn > floor.gsn
        expected |= dict(zip(rids, payloads, strict=True))
    assert cluster.log == sorted((rid.gsn, payload) for rid, payload in expected.items())
    total = harness.core.counters
    assert total.inserts == total.fast_path + total.slow_path == sum(counts)
