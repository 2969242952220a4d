"""Single inserts that share a unit: each keeps its own position, deadline, result and error."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tests.unit.ziplog.client.fakes import (
    MS,
    ClientHarness,
    S,
    ack,
    connected,
    learn,
    pinned,
    refused,
    resolve,
    sent,
)
from tests.unit.ziplog.client.storms import in_a_storm, shards_in_flight
from tests.unit.ziplog.client.test_client_redirect import ReshapedCluster, redirect
from ziplog import wire
from ziplog.client.common.requests import InsertRequest
from ziplog.client.inserts import sending
from ziplog.client.inserts.insert_calls import (
    UNIT_BYTES,
    UNIT_RECORDS,
    InsertCall,
    InsertGroup,
)
from ziplog.core.entries import Body, decode_body
from ziplog.core.node import BatchEnd, Received
from ziplog.errors import (
    NoSuchRecordError,
    OutcomeUnknownError,
    ProtocolError,
    UnavailableError,
)
from ziplog.types import RID_GENESIS, RecordId


@pytest.fixture(autouse=True, scope="module")
def _groups(_no_groups: None) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sending, "IMMEDIATE_SINGLE_UNITS", 1)
        patch.setattr(sending, "MAX_SINGLE_UNITS", 2)
        yield


def body(insert: wire.Insert) -> Body:
    return decode_body(insert.body, insert.count)


def payloads(insert: wire.Insert) -> list[bytes]:
    return body(insert).payloads


def place(harness: ClientHarness, insert: wire.Insert, *gsns: int) -> None:
    harness.give(ack(insert, 0, gsns), ack(insert, 1, gsns))


def group_of(
    harness: ClientHarness, *records: bytes, **options: Any
) -> tuple[list[int], wire.Insert]:
    """Insert records that share a unit in flight; the window has no other unit."""
    first = harness.insert(b"first")
    (alone,) = sent(harness)
    calls = [harness.insert(record, **options) for record in records]
    harness.step(BatchEnd())
    (shared,) = sent(harness)
    assert payloads(shared) == [*records]
    place(harness, alone, 2)
    assert harness.answers.pop(first) == [RecordId(2, 0)]
    return calls, shared


def test_inserts_wait_while_two_units_are_in_flight_and_then_share_one() -> None:
    harness = connected()
    first = harness.insert(b"first")
    (alone,) = sent(harness)
    assert payloads(alone) == [b"first"], "a lone insert is sent at once"
    second = [harness.insert(b"%d" % number) for number in range(3)]
    assert not sent(harness), "more may come in this batch"
    harness.step(BatchEnd())
    (shared,) = sent(harness)
    assert payloads(shared) == [b"0", b"1", b"2"]
    third = [harness.insert(b"%d" % number) for number in (3, 4)]
    harness.step(BatchEnd())
    assert not sent(harness), "two units are in flight"
    place(harness, shared, 4, 6, 8)
    (last,) = sent(harness)
    assert payloads(last) == [b"3", b"4"]
    place(harness, alone, 2)
    place(harness, last, 10, 12)
    assert [harness.answers[call] for call in (first, *second, *third)] == [
        [RecordId(gsn, 0)] for gsn in (2, 4, 6, 8, 10, 12)
    ]
    assert harness.core.counters.inserts == harness.core.counters.fast_path == 6


def test_group_that_one_server_refused_as_expired_is_sent_nowhere_else() -> None:
    harness = connected()
    calls, shared = group_of(harness, b"0", b"1")
    harness.core.set_policy(lambda _p, _k, _l: 1)
    harness.give(refused(shared, 1, "expired"))
    harness.step(BatchEnd())
    assert not [insert for insert in sent(harness) if insert.shard == 1], "the primary may have it"
    harness.give(ack(shared, 0, (4, 6)), ack(shared, 1, (4, 6), confirmed=True))
    assert [harness.answers[call] for call in calls] == [[RecordId(4, 0)], [RecordId(6, 0)]]


def test_inserts_in_the_batch_of_a_placed_group_wait_for_its_end() -> None:
    harness = connected()
    _, shared = group_of(harness, b"0", b"1")
    for server in (0, 1):
        harness.step(Received(b"server", ack(shared, server, [4, 6])))
    harness.insert(b"2")
    assert not sent(harness), "others of the group's tasks may follow"
    harness.insert(b"3")
    harness.step(BatchEnd())
    (again,) = sent(harness)
    assert payloads(again) == [b"2", b"3"]
    place(harness, again, 8, 10)
    harness.insert(b"4")
    assert [payloads(each) for each in sent(harness)] == [[b"4"]], "the batch has ended"


def insert_calls() -> list[object]:
    return [each for each in gc.get_objects() if type(each) in {InsertCall, InsertGroup}]


@pytest.mark.parametrize(("gsns", "result"), [((4, 6), list), ((6, 4), ProtocolError)])
def test_group_with_its_acks_leaves_nothing_to_the_garbage_collector(
    gsns: tuple[int, ...], result: type
) -> None:
    """It is placed, or positions that fall violate the protocol."""
    harness = connected()
    gc.collect()
    gc.disable()
    try:
        of_other_tests = insert_calls()
        calls, shared = group_of(harness, b"0", b"1")
        place(harness, shared, *gsns)
        assert [type(harness.answers.pop(call)) for call in calls] == [result, result]
        assert len(insert_calls()) == len(of_other_tests)
    finally:
        gc.enable()


def test_group_is_limited_in_records_and_bytes() -> None:
    harness = connected()
    sizes = [1] * 300 + [100_000] * 3 + [UNIT_BYTES + 1] * 2
    for size in (1, *sizes):
        harness.insert(bytes(size))
    units = sent(harness)
    found = []
    while units:
        found += units
        for unit in units:
            base = unit.seq * 1000
            place(harness, unit, *range(base, base + unit.count))
        units = sent(harness)
    assert [insert.count for insert in found] == [1, UNIT_RECORDS, 300 - 256 + 2, 1, 1, 1]
    assert len(harness.answers) == len(sizes) + 1


def test_each_record_keeps_its_key_and_the_unit_the_latest_time_and_position() -> None:
    harness = connected()
    place(harness, (harness.insert(b"known"), sent(harness)[0])[1], 40)
    harness.insert(b"first")
    sent(harness)
    for gsn, key, time in ((0, b"k", 7), (40, None, 9), (2, b"l", 8)):
        request = InsertRequest(harness.until(), [b"x"], RecordId(gsn, 0), key, time)
        harness.call(request)
    harness.step(BatchEnd())
    (shared,) = sent(harness)
    assert (shared.after, body(shared).keys, body(shared).timestamp_us) == (
        40, [b"k", None, b"l"], 9,
    )  # fmt: skip


def test_insert_after_an_unknown_position_is_sent_alone() -> None:
    harness = connected()
    harness.insert(b"first")
    sent(harness)
    harness.insert(b"a")
    harness.insert(b"b", after=RecordId(100, 0))
    harness.step(BatchEnd())
    assert [(payloads(insert), insert.after) for insert in sent(harness)] == [
        ([b"a"], 0),
        ([b"b"], 100),
    ]


def test_call_at_its_deadline_has_an_unknown_outcome_and_the_others_a_result() -> None:
    harness = connected()
    first = harness.insert(b"first")
    sent(harness)
    late = harness.insert(b"a", timeout=1 * S)
    calls = [harness.insert(b"b"), harness.insert(b"c")]
    harness.step(BatchEnd())
    harness.pass_time(1100 * MS)
    error = harness.answers.pop(late)
    assert isinstance(error, OutcomeUnknownError)
    pending = resolve(harness, error)
    shared = next(insert for insert in reversed(sent(harness)) if insert.count == 3)
    place(harness, shared, 4, 6, 8)
    assert harness.answers[pending] == [RecordId(4, 0)]
    assert [harness.answers[call] for call in calls] == [[RecordId(6, 0)], [RecordId(8, 0)]]
    assert first not in harness.answers


def test_outcomes_of_all_calls_of_a_group_can_be_resolved() -> None:
    harness = connected()
    calls, _ = group_of(harness, b"a", b"b", timeout=1 * S)
    harness.pass_time(1100 * MS)
    pending = [resolve(harness, harness.answers[call]) for call in calls]
    again = sent(harness)[-1]
    place(harness, again, 4, 6)
    assert [harness.answers[call] for call in pending] == [[RecordId(4, 0)], [RecordId(6, 0)]]


def test_cancelled_calls_of_a_group_affect_no_other() -> None:
    harness = connected()
    calls, shared = group_of(harness, b"a", b"b", b"c")
    harness.cancel(calls[1])
    place(harness, shared, 4, 6, 8)
    assert [harness.answers.get(call) for call in calls] == [
        [RecordId(4, 0)], None, [RecordId(8, 0)],
    ]  # fmt: skip
    calls, shared = group_of(harness, b"a", b"b")
    for call in calls:
        harness.cancel(call)
    place(harness, shared, 10, 12)
    assert not shards_in_flight(harness)


def test_cancelled_call_that_waits_is_not_sent() -> None:
    harness = connected()
    harness.insert(b"first")
    sent(harness)
    harness.cancel(harness.insert(b"a"))
    harness.insert(b"b")
    harness.step(BatchEnd())
    assert [payloads(insert) for insert in sent(harness)] == [[b"b"]]


def test_group_that_is_refused_is_sent_again_as_single_inserts() -> None:
    harness = connected()
    calls, shared = group_of(harness, b"a", b"b")
    harness.give(refused(shared, 0, "no-such-position"))
    alone = sent(harness)
    assert [payloads(insert) for insert in alone] == [[b"a"], [b"b"]]
    harness.give(refused(alone[0], 0, "no-such-position"))
    place(harness, alone[1], 6)
    assert isinstance(harness.answers[calls[0]], NoSuchRecordError)
    assert harness.answers[calls[1]] == [RecordId(6, 0)]


def test_group_that_the_primary_placed_is_not_sent_again_if_a_backup_has_a_lower_limit() -> None:
    """While servers restart with other limits, one may refuse what another one accepts."""
    harness = connected()
    calls, shared = group_of(harness, b"a", b"b")
    harness.give(ack(shared, 0, [4, 6]), refused(shared, 1, "too-large"))
    harness.pass_time(S)
    again = harness.take(wire.Insert)
    assert {message.seq for _, message in again} == {shared.seq}, "records would be there twice"
    harness.give(ack(again[-1][1], 1, [4, 6], confirmed=True))
    assert [harness.answers[call] for call in calls] == [[RecordId(4, 0)], [RecordId(6, 0)]]


def test_group_of_a_protocol_violation_fails_all_its_calls() -> None:
    harness = connected()
    calls, shared = group_of(harness, b"a", b"b")
    place(harness, shared, 6, 4)
    assert all(isinstance(harness.answers[call], ProtocolError) for call in calls)


def test_group_is_sent_elsewhere_if_its_shard_has_no_positions() -> None:
    harness = connected()
    calls, shared = group_of(harness, b"a", b"b")
    learn(harness, state="leaving")
    harness.give(redirect(shared, 0), redirect(shared, 1))
    harness.step(BatchEnd())
    moved = [m for name, m in harness.take(wire.Insert) if name == "s1r0:1"]
    assert [record for insert in moved for record in payloads(insert)] == [b"a", b"b"]
    for insert in moved:
        place(harness, insert, *range(11, 11 + 2 * insert.count, 2))
    assert all(harness.answers[call][0].shard == 1 for call in calls)
    assert harness.core.counters.moved == 2


def test_group_that_no_server_accepts_now_is_sent_again_as_it_was() -> None:
    harness = connected(pinned)
    calls, shared = group_of(harness, b"a", b"b")
    harness.give(refused(shared, 0, "full"), refused(shared, 1, "full"))
    harness.pass_time(100 * MS)
    (again,) = sent(harness)
    assert (again.seq, again.body) == (shared.seq, shared.body)
    place(harness, again, 4, 6)
    assert [harness.answers[call] for call in calls] == [[RecordId(4, 0)], [RecordId(6, 0)]]


def test_call_that_ends_while_no_server_accepts_its_group_is_not_inserted_later() -> None:
    harness = connected(pinned)
    first = harness.insert(b"first")
    (alone,) = sent(harness)
    late = harness.insert(b"a", timeout=1 * S)
    other = harness.insert(b"b")
    harness.step(BatchEnd())
    (shared,) = sent(harness)
    place(harness, alone, 2)
    while late not in harness.answers:
        harness.give(refused(shared, 0, "full"), refused(shared, 1, "full"))
        harness.pass_time(10 * MS)
        (*_, shared) = [shared, *sent(harness)]
    error = harness.answers[late]
    assert isinstance(error, UnavailableError)
    assert not isinstance(error, OutcomeUnknownError)
    harness.step(BatchEnd())
    (*_, again) = [shared, *sent(harness)]
    assert payloads(again) == [b"b"], "its record may be inserted again by the caller"
    place(harness, again, 6)
    assert harness.answers[other] == [RecordId(6, 0)]
    assert harness.answers[first] == [RecordId(2, 0)]


def test_outcome_is_known_when_the_last_call_of_its_group_ends_and_no_server_holds_it() -> None:
    harness = connected(pinned)
    first = harness.insert(b"first")
    (alone,) = sent(harness)
    early, late = harness.insert(b"a", timeout=1 * S), harness.insert(b"b", timeout=2 * S)
    harness.step(BatchEnd())
    (shared,) = sent(harness)
    place(harness, alone, 2)
    harness.pass_time(1100 * MS)
    error = harness.answers.pop(early)
    assert isinstance(error, OutcomeUnknownError)
    pending = resolve(harness, error)
    while late not in harness.answers:
        (*_, shared) = [shared, *sent(harness)]
        harness.give(refused(shared, 0, "full"), refused(shared, 1, "full"))
        harness.pass_time(10 * MS)
    assert isinstance(harness.answers[late], UnavailableError)
    assert harness.answers[pending] == [None]
    assert first in harness.answers


def test_policy_that_fails_fails_its_own_call_only() -> None:
    calls: list[bytes] = []

    def policy(payload: bytes, _key: bytes | None, live: Any) -> int:
        calls.append(payload)
        if payload == b"a" and calls.count(b"a") > 1:
            raise ValueError("a again")
        return int(live[0])

    harness = connected(policy)
    (bad, good), shared = group_of(harness, b"a", b"b")
    learn(harness, state="leaving")
    harness.give(redirect(shared, 0), redirect(shared, 1))
    assert isinstance(harness.answers[bad], ValueError)
    moved = [m for name, m in harness.take(wire.Insert) if name == "s1r0:1"]
    assert [payloads(insert) for insert in moved] == [[b"b"]]
    place(harness, moved[0], 11)
    assert harness.answers[good] == [RecordId(11, 1)]


def test_policy_that_fails_while_calls_of_a_group_end_fails_each_once() -> None:
    """One call ends its group, so the policy is called for the other, whose deadline is over."""
    fails = False

    def policy(_payload: bytes, _key: bytes | None, _live: Any) -> int:
        if fails:
            raise ValueError("again")
        return 0

    harness = connected(policy)
    (first, other), shared = group_of(harness, b"a", b"b", timeout=400 * MS)
    later = harness.insert(b"c", timeout=1 * S)
    sent(harness)
    harness.pass_time(399 * MS)
    harness.give(refused(shared, 0, "full"), refused(shared, 1, "full"))
    fails = True
    harness.pass_time(2 * MS)
    assert isinstance(harness.answers[first], UnavailableError)
    assert isinstance(harness.answers[other], ValueError)
    harness.pass_time(1 * S)
    assert isinstance(harness.answers[later], OutcomeUnknownError), "the timers still run"


def refused_group(harness: ClientHarness, *records: bytes) -> tuple[list[int], wire.Insert]:
    """Return calls that share a unit which no server accepts now."""
    calls, shared = group_of(harness, *records)
    harness.give(refused(shared, 0, "full"), refused(shared, 1, "full"))
    return calls, shared


def test_calls_of_a_group_that_moves_share_a_unit_again() -> None:
    harness = connected()
    calls, shared = group_of(harness, b"a", b"b", b"c", b"d")
    learn(harness, state="leaving")
    harness.give(redirect(shared, 0), redirect(shared, 1))
    moved = [m for name, m in harness.take(wire.Insert) if name == "s1r0:1"]
    assert [payloads(insert) for insert in moved] == [[b"a"], [b"b", b"c", b"d"]]
    place(harness, moved[0], 11)
    place(harness, moved[1], 13, 15, 17)
    found = [harness.answers[call] for call in calls]
    assert found == [[RecordId(gsn, 1)] for gsn in (11, 13, 15, 17)]


def test_calls_that_outlive_one_of_their_group_share_a_unit_again() -> None:
    harness = connected(pinned)
    calls, _ = refused_group(harness, b"a", b"b", b"c", b"d")
    harness.cancel(calls.pop(0))
    harness.step(BatchEnd())
    again = sent(harness)
    assert [payloads(insert) for insert in again] == [[b"b"], [b"c", b"d"]]
    place(harness, again[0], 4)
    place(harness, again[1], 6, 8)
    assert [harness.answers[call] for call in calls] == [[RecordId(n, 0)] for n in (4, 6, 8)]


def test_inserts_after_a_refused_group_share_units_again() -> None:
    """Those that were in the group are alone: the error may be about one of them."""
    harness = connected()
    calls, shared = group_of(harness, b"a", b"b", b"c", b"d")
    harness.give(refused(shared, 0, "no-such-position"))
    alone = sent(harness)
    assert [payloads(insert) for insert in alone] == [[b"a"], [b"b"], [b"c"], [b"d"]]
    for insert in alone:
        place(harness, insert, 2 * insert.seq)
    assert [harness.answers[call] for call in calls] == [[RecordId(n, 0)] for n in (6, 8, 10, 12)]
    group_of(harness, b"e", b"f")


@examples(60)
@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.05, 0.3]),
    repetition=st.sampled_from([0.0, 0.3]),
    pin=st.booleans(),
    changes=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 1), st.booleans()), max_size=6),
    cancels=st.sets(st.integers(0, 149), max_size=20),
)
def test_every_record_is_in_the_log_once(
    seed: int,
    loss: float,
    repetition: float,
    pin: bool,
    changes: list[tuple[int, int, bool]],
    cancels: set[int],
) -> None:
    cluster = in_a_storm(ReshapedCluster, seed, loss, repetition, pin=pin)
    harness = cluster.harness
    for ms, shard, for_good in changes:
        cluster.later(ms, partial(cluster.begin, shard, for_good=for_good))
    calls: dict[int, bytes] = {}
    for number in range(150):
        record = b"%d" % number * (1 + number % 3)
        calls[harness.insert(record, timeout=20 * S if number % 5 else 30 * MS)] = record
        if number % 4 == 0:
            end = harness.now + cluster.random.randrange(3 * MS)
            cluster.later(3, lambda: None)
            cluster.run(lambda: harness.now >= end)  # noqa: B023 - run at once
    for call in [call for number, call in enumerate(calls) if number in cancels]:
        if call not in harness.answers:
            harness.cancel(call)
            del calls[call]
    expected: dict[int, bytes] = {}
    absent = set()
    for call, record in calls.items():
        result: Any = cluster.result(call)
        if isinstance(result, OutcomeUnknownError):
            result = cluster.result(resolve(harness, result, 600 * S))
        if isinstance(result, UnavailableError) or result == [None]:
            absent.add(record)
        else:
            (rid,) = result
            assert rid > RID_GENESIS
            expected[rid.gsn] = record
    cluster.run(lambda: not shards_in_flight(harness))
    log = dict(cluster.log)
    assert len(log) == len(cluster.log)
    assert {gsn: log.get(gsn) for gsn in expected} == expected
    assert len(set(log.values())) == len(log), "a record is there twice"
    assert not absent & set(log.values())
    assert not harness.core.counters.protocol_errors
