"""Single inserts that share a unit: each keeps its own position, deadline, result and error."""

from __future__ import annotations

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
from ziplog.client.inserts.insert_calls import UNIT_BYTES, UNIT_RECORDS
from ziplog.core.entries import Body, decode_body
from ziplog.core.node import BatchEnd
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


def place(glass: ClientHarness, insert: wire.Insert, *gsns: int) -> None:
    glass.give(ack(insert, 0, gsns), ack(insert, 1, gsns))


def group_of(
    glass: ClientHarness, *records: bytes, **options: Any
) -> tuple[list[int], wire.Insert]:
    """Insert records that share a unit in flight; the window has no other unit."""
    first = glass.insert(b"first")
    (alone,) = sent(glass)
    calls = [glass.insert(record, **options) for record in records]
    glass.step(BatchEnd())
    (shared,) = sent(glass)
    assert payloads(shared) == [*records]
    place(glass, alone, 2)
    assert glass.answers.pop(first) == [RecordId(2, 0)]
    return calls, shared


def test_inserts_wait_while_two_units_are_in_flight_and_then_share_one() -> None:
    glass = connected()
    first = glass.insert(b"first")
    (alone,) = sent(glass)
    assert payloads(alone) == [b"first"], "a lone insert is sent at once"
    second = [glass.insert(b"%d" % number) for number in range(3)]
    assert not sent(glass), "more may come in this batch"
    glass.step(BatchEnd())
    (shared,) = sent(glass)
    assert payloads(shared) == [b"0", b"1", b"2"]
    third = [glass.insert(b"%d" % number) for number in (3, 4)]
    glass.step(BatchEnd())
    assert not sent(glass), "two units are in flight"
    place(glass, shared, 4, 6, 8)
    (last,) = sent(glass)
    assert payloads(last) == [b"3", b"4"]
    place(glass, alone, 2)
    place(glass, last, 10, 12)
    assert [glass.answers[call] for call in (first, *second, *third)] == [
        [RecordId(gsn, 0)] for gsn in (2, 4, 6, 8, 10, 12)
    ]
    assert glass.core.counters.inserts == glass.core.counters.fast_path == 6


def test_group_is_limited_in_records_and_bytes() -> None:
    glass = connected()
    sizes = [1] * 300 + [100_000] * 3 + [UNIT_BYTES + 1] * 2
    for size in (1, *sizes):
        glass.insert(bytes(size))
    units = sent(glass)
    found = []
    while units:
        found += units
        for unit in units:
            base = unit.seq * 1000
            place(glass, unit, *range(base, base + unit.count))
        units = sent(glass)
    assert [insert.count for insert in found] == [1, UNIT_RECORDS, 300 - 256 + 2, 1, 1, 1]
    assert len(glass.answers) == len(sizes) + 1


def test_each_record_keeps_its_key_and_the_unit_the_latest_time_and_position() -> None:
    glass = connected()
    place(glass, (glass.insert(b"known"), sent(glass)[0])[1], 40)
    glass.insert(b"first")
    sent(glass)
    for gsn, key, time in ((0, b"k", 7), (40, None, 9), (2, b"l", 8)):
        request = InsertRequest(glass.until(), [b"x"], RecordId(gsn, 0), key, time)
        glass.call(request)
    glass.step(BatchEnd())
    (shared,) = sent(glass)
    assert (shared.after, body(shared).keys, body(shared).timestamp_us) == (
        40, [b"k", None, b"l"], 9,
    )  # fmt: skip


def test_insert_after_an_unknown_position_is_sent_alone() -> None:
    glass = connected()
    glass.insert(b"first")
    sent(glass)
    glass.insert(b"a")
    glass.insert(b"b", after=RecordId(100, 0))
    glass.step(BatchEnd())
    assert [(payloads(insert), insert.after) for insert in sent(glass)] == [
        ([b"a"], 0),
        ([b"b"], 100),
    ]


def test_call_at_its_deadline_has_an_unknown_outcome_and_the_others_a_result() -> None:
    glass = connected()
    first = glass.insert(b"first")
    sent(glass)
    late = glass.insert(b"a", timeout=1 * S)
    calls = [glass.insert(b"b"), glass.insert(b"c")]
    glass.step(BatchEnd())
    glass.pass_time(1100 * MS)
    error = glass.answers.pop(late)
    assert isinstance(error, OutcomeUnknownError)
    pending = resolve(glass, error)
    shared = next(insert for insert in reversed(sent(glass)) if insert.count == 3)
    place(glass, shared, 4, 6, 8)
    assert glass.answers[pending] == [RecordId(4, 0)]
    assert [glass.answers[call] for call in calls] == [[RecordId(6, 0)], [RecordId(8, 0)]]
    assert first not in glass.answers


def test_outcomes_of_all_calls_of_a_group_can_be_resolved() -> None:
    glass = connected()
    calls, _ = group_of(glass, b"a", b"b", timeout=1 * S)
    glass.pass_time(1100 * MS)
    pending = [resolve(glass, glass.answers[call]) for call in calls]
    again = sent(glass)[-1]
    place(glass, again, 4, 6)
    assert [glass.answers[call] for call in pending] == [[RecordId(4, 0)], [RecordId(6, 0)]]


def test_cancelled_calls_of_a_group_affect_no_other() -> None:
    glass = connected()
    calls, shared = group_of(glass, b"a", b"b", b"c")
    glass.cancel(calls[1])
    place(glass, shared, 4, 6, 8)
    assert [glass.answers.get(call) for call in calls] == [
        [RecordId(4, 0)], None, [RecordId(8, 0)],
    ]  # fmt: skip
    calls, shared = group_of(glass, b"a", b"b")
    for call in calls:
        glass.cancel(call)
    place(glass, shared, 10, 12)
    assert not shards_in_flight(glass)


def test_cancelled_call_that_waits_is_not_sent() -> None:
    glass = connected()
    glass.insert(b"first")
    sent(glass)
    glass.cancel(glass.insert(b"a"))
    glass.insert(b"b")
    glass.step(BatchEnd())
    assert [payloads(insert) for insert in sent(glass)] == [[b"b"]]


def test_group_that_is_refused_is_sent_again_as_single_inserts() -> None:
    glass = connected()
    calls, shared = group_of(glass, b"a", b"b")
    glass.give(refused(shared, 0, "no-such-position"))
    alone = sent(glass)
    assert [payloads(insert) for insert in alone] == [[b"a"], [b"b"]]
    glass.give(refused(alone[0], 0, "no-such-position"))
    place(glass, alone[1], 6)
    assert isinstance(glass.answers[calls[0]], NoSuchRecordError)
    assert glass.answers[calls[1]] == [RecordId(6, 0)]


def test_group_of_a_protocol_violation_fails_all_its_calls() -> None:
    glass = connected()
    calls, shared = group_of(glass, b"a", b"b")
    place(glass, shared, 6, 4)
    assert all(isinstance(glass.answers[call], ProtocolError) for call in calls)


def test_group_is_sent_elsewhere_if_its_shard_has_no_positions() -> None:
    glass = connected()
    calls, shared = group_of(glass, b"a", b"b")
    learn(glass, state="leaving")
    glass.give(redirect(shared, 0), redirect(shared, 1))
    glass.step(BatchEnd())
    moved = [m for name, m in glass.take(wire.Insert) if name == "s1r0:1"]
    assert [record for insert in moved for record in payloads(insert)] == [b"a", b"b"]
    for insert in moved:
        place(glass, insert, *range(11, 11 + 2 * insert.count, 2))
    assert all(glass.answers[call][0].shard == 1 for call in calls)
    assert glass.core.counters.moved == 2


def test_group_that_no_server_accepts_now_is_sent_again_as_it_was() -> None:
    glass = connected(pinned)
    calls, shared = group_of(glass, b"a", b"b")
    glass.give(refused(shared, 0, "full"), refused(shared, 1, "full"))
    glass.pass_time(100 * MS)
    (again,) = sent(glass)
    assert (again.seq, again.body) == (shared.seq, shared.body)
    place(glass, again, 4, 6)
    assert [glass.answers[call] for call in calls] == [[RecordId(4, 0)], [RecordId(6, 0)]]


def test_call_that_ends_while_no_server_accepts_its_group_is_not_inserted_later() -> None:
    glass = connected(pinned)
    first = glass.insert(b"first")
    (alone,) = sent(glass)
    late = glass.insert(b"a", timeout=1 * S)
    other = glass.insert(b"b")
    glass.step(BatchEnd())
    (shared,) = sent(glass)
    place(glass, alone, 2)
    while late not in glass.answers:
        glass.give(refused(shared, 0, "full"), refused(shared, 1, "full"))
        glass.pass_time(10 * MS)
        (*_, shared) = [shared, *sent(glass)]
    error = glass.answers[late]
    assert isinstance(error, UnavailableError)
    assert not isinstance(error, OutcomeUnknownError)
    glass.step(BatchEnd())
    (*_, again) = [shared, *sent(glass)]
    assert payloads(again) == [b"b"], "its record may be inserted again by the caller"
    place(glass, again, 6)
    assert glass.answers[other] == [RecordId(6, 0)]
    assert glass.answers[first] == [RecordId(2, 0)]


def test_outcome_is_known_when_the_last_call_of_its_group_ends_and_no_server_holds_it() -> None:
    glass = connected(pinned)
    first = glass.insert(b"first")
    (alone,) = sent(glass)
    early, late = glass.insert(b"a", timeout=1 * S), glass.insert(b"b", timeout=2 * S)
    glass.step(BatchEnd())
    (shared,) = sent(glass)
    place(glass, alone, 2)
    glass.pass_time(1100 * MS)
    error = glass.answers.pop(early)
    assert isinstance(error, OutcomeUnknownError)
    pending = resolve(glass, error)
    while late not in glass.answers:
        (*_, shared) = [shared, *sent(glass)]
        glass.give(refused(shared, 0, "full"), refused(shared, 1, "full"))
        glass.pass_time(10 * MS)
    assert isinstance(glass.answers[late], UnavailableError)
    assert glass.answers[pending] == [None]
    assert first in glass.answers


def test_policy_that_fails_fails_its_own_call_only() -> None:
    calls: list[bytes] = []

    def policy(payload: bytes, _key: bytes | None, live: Any) -> int:
        calls.append(payload)
        if payload == b"a" and calls.count(b"a") > 1:
            raise ValueError("a again")
        return int(live[0])

    glass = connected(policy)
    (bad, good), shared = group_of(glass, b"a", b"b")
    learn(glass, state="leaving")
    glass.give(redirect(shared, 0), redirect(shared, 1))
    assert isinstance(glass.answers[bad], ValueError)
    moved = [m for name, m in glass.take(wire.Insert) if name == "s1r0:1"]
    assert [payloads(insert) for insert in moved] == [[b"b"]]
    place(glass, moved[0], 11)
    assert glass.answers[good] == [RecordId(11, 1)]


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
    glass = cluster.glass
    for ms, shard, for_good in changes:
        cluster.later(ms, partial(cluster.begin, shard, for_good=for_good))
    calls: dict[int, bytes] = {}
    for number in range(150):
        record = b"%d" % number * (1 + number % 3)
        calls[glass.insert(record, timeout=20 * S if number % 5 else 30 * MS)] = record
        if number % 4 == 0:
            end = glass.now + cluster.random.randrange(3 * MS)
            cluster.later(3, lambda: None)
            cluster.run(lambda: glass.now >= end)  # noqa: B023 - run at once
    for call in [call for number, call in enumerate(calls) if number in cancels]:
        if call not in glass.answers:
            glass.cancel(call)
            del calls[call]
    expected: dict[int, bytes] = {}
    absent = set()
    for call, record in calls.items():
        result: Any = cluster.result(call)
        if isinstance(result, OutcomeUnknownError):
            result = cluster.result(resolve(glass, result, 600 * S))
        if isinstance(result, UnavailableError) or result == [None]:
            absent.add(record)
        else:
            (rid,) = result
            assert rid > RID_GENESIS
            expected[rid.gsn] = record
    cluster.run(lambda: not shards_in_flight(glass))
    log = dict(cluster.log)
    assert len(log) == len(cluster.log)
    assert {gsn: log.get(gsn) for gsn in expected} == expected
    assert len(set(log.values())) == len(log), "a record is there twice"
    assert not absent & set(log.values())
    assert not glass.core.counters.protocol_errors
