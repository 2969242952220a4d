"""Extents: the owners of a range, and its epochs (docs/protocol.md, sections 3 and 14)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.ziplog.client.fakes import (
    CLUSTER,
    MS,
    ClientHarness,
    S,
    connected,
    lease,
    placement,
)
from ziplog import Extent, Extents, RecordId, wire
from ziplog.client.bulk.extents import extents_of
from ziplog.client.common.requests import ExtentsRequest
from ziplog.core.view import Lease, LeaseRun, run_of
from ziplog.errors import ConfigError, DeadlineError, NoSuchRecordError, TrimmedError


def history(*members: tuple[int, ...], epochs: int = 3, size: int = 10) -> list[LeaseRun]:
    """Return one run per change of members; equal ones in a row are one."""
    runs: list[LeaseRun] = []
    for shards in members:
        made = lease(shards)
        if not runs:
            first = Lease(1, made.predecessor, 1, 0, epochs, size, 10, made.members)
            runs.append(run_of(first))
        elif runs[-1].last.members == made.members:
            last = runs[-1].last.following()
            runs[-1] = LeaseRun(runs[-1].first, runs[-1].count + 1, last)
        else:
            runs.append(run_of(runs[-1].last.following(made.members)))
    return runs


def start_query(harness: ClientHarness, start: int, stop: int | None) -> int:
    return harness.call(ExtentsRequest(harness.until(), start, stop))


def reply_leases(harness: ClientHarness, runs: list[LeaseRun], trim: int = 0) -> int:
    """Reply to the open lease request; return the gsn that it asked for."""
    question = harness.take(wire.LeaseQuery)[-1][1]
    known = [placement(0), placement(1)]
    harness.give(wire.LeaseHistory(CLUSTER, question.request, runs, known, trim))
    gsn: int = question.gsn
    return gsn


def test_extent_spans_the_membership_of_its_shard() -> None:
    runs = history((0, 1), (0,), (0, 1), (0, 1), (1,))
    found = extents_of(runs, 1, None, 0)
    assert found.end == 151
    assert found.shards == [
        Extent(0, 1, 121), Extent(1, 1, 31), Extent(1, 61, 151),
    ]  # fmt: skip


def test_extents_are_cut_to_the_range_and_to_what_is_not_trimmed() -> None:
    runs = history((0, 1), (0,), (1,))
    assert extents_of(runs, 10, 40, 0).shards == [Extent(0, 10, 40), Extent(1, 10, 31)]
    assert extents_of(runs, 10, 40, 35).shards == [Extent(0, 35, 40)]
    assert extents_of(runs, 40, 40, 0).shards == []
    assert extents_of([], 1, None, 0) == Extents(0, 1, [], [])


@given(
    st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=8),
    st.integers(1, 240), st.integers(1, 240), st.integers(0, 240),
)  # fmt: skip
def test_extents_list_the_members_of_each_position(
    members: list[set[int]], start: int, stop: int, trim: int
) -> None:
    runs = history(*(tuple(sorted(shards)) for shards in members))
    found = extents_of(runs, start, stop, trim)
    for gsn in range(1, found.end + 5):
        run = next((run for run in runs if run.first.base <= gsn < run.last.stop), None)
        is_inside = max(start, trim) <= gsn < stop
        expected = {m.shard for m in run.first.members} if run and is_inside else set()
        told = [e.shard for e in found.shards if e.start <= gsn < e.stop]
        assert sorted(told) == sorted(expected)
    for shard in range(4):
        own = [(e.start, e.stop) for e in found.shards if e.shard == shard]
        assert all(one[1] < two[0] for one, two in pairwise(own)), "adjacent extents must be merged"


def test_the_epochs_of_leases() -> None:
    runs = history((0,), (0,), (0, 1))
    found = extents_of(runs, 1, None, 0)
    assert [found.epoch_at(gsn) for gsn in (1, 10, 11, 60, 61, 90)] == [0, 0, 1, 5, 6, 8]
    assert [found.epoch_start(epoch) for epoch in (0, 4, 6)] == [1, 41, 61]
    assert [found.epoch_stop(epoch) for epoch in (0, 5, 8)] == [11, 61, 91]
    for epoch in (-1, 9):
        with pytest.raises(ConfigError):
            found.epoch_start(epoch)
    with pytest.raises(NoSuchRecordError):
        found.epoch_at(91)
    with pytest.raises(NoSuchRecordError):
        found.owner_at(91)
    with pytest.raises(ConfigError):
        extents_of([], 1, None, 0).epoch_start(0)


def test_the_owners_of_positions() -> None:
    runs = history((0,), (), (0, 1))
    found = extents_of(runs, 1, None, 0)
    assert found.owner_at(30) == 0
    with pytest.raises(NoSuchRecordError, match="no shard was live"):
        found.owner_at(31)
    assert {found.owner_at(gsn) for gsn in range(61, 91)} == {0, 1}
    for shard in (0, 1):
        lease = runs[2].first
        assert found.owner_at(lease.next_owned(shard, lease.base)) == shard


def test_trimmed_leases_are_distinguished_from_unknown_positions() -> None:
    found = extents_of(history((0,), (1,))[1:], 31, None, 35)
    with pytest.raises(TrimmedError) as trimmed:
        found.epoch_start(1)
    assert trimmed.value.first.gsn == 35
    with pytest.raises(TrimmedError):
        found.epoch_at(30)
    later = extents_of(history((0,), (1,))[1:], 31, None, 5)
    with pytest.raises(ConfigError):
        later.epoch_start(1)
    with pytest.raises(NoSuchRecordError):
        later.epoch_at(30)


def test_leases_are_asked_for_until_they_reach_the_end_of_the_range() -> None:
    harness, runs = connected(), history((0,), (0, 1), (1,))
    call = start_query(harness, 5, 61)
    assert reply_leases(harness, runs[:1]) == 4, (
        "the position before: it was given out if the log ends here"
    )
    assert not harness.answers
    assert reply_leases(harness, runs[1:2]) == 31
    assert harness.answers[call].shards == [Extent(0, 5, 61), Extent(1, 31, 61)]
    assert harness.answers[call].end == 61


def test_without_an_end_they_are_asked_for_until_there_are_no_more() -> None:
    harness, runs = connected(), history((0,), (0, 1))
    call = start_query(harness, 1, None)
    assert reply_leases(harness, runs[:1], trim=3) == 1
    reply_leases(harness, runs[1:], trim=3)
    assert not harness.answers
    assert reply_leases(harness, [], trim=4) == 61
    found = harness.answers[call]
    assert (found.trim, found.end) == (4, 61)
    assert found.shards == [Extent(0, 4, 61), Extent(1, 31, 61)]


def test_a_trim_between_two_replies_leaves_the_leases_after_it() -> None:
    """The history takes several messages; what the first one had was trimmed, and a part more."""
    harness, runs = connected(), history((0,), (0, 1), (1,), (0, 1))
    call = start_query(harness, 1, None)
    reply_leases(harness, runs[:1])
    assert reply_leases(harness, runs[2:3], trim=65) == 31
    assert reply_leases(harness, runs[3:], trim=65) == 91
    reply_leases(harness, [], trim=65)
    found = harness.answers[call]
    assert (found.trim, found.end) == (65, 121)
    assert found.shards == [Extent(1, 65, 121), Extent(0, 91, 121)]


@pytest.mark.parametrize(("start", "stop"), [(1, 32), (31, 32), (32, None)])
def test_range_without_owners_is_refused(start: int, stop: int | None) -> None:
    harness = connected()
    call = start_query(harness, start, stop)
    reply_leases(harness, history((0,)))
    reply_leases(harness, [])
    error = harness.answers[call]
    assert isinstance(error, NoSuchRecordError)
    assert "a position from 31 on" in str(error)


def test_start_after_all_leases_is_refused() -> None:
    harness = connected()
    call = start_query(harness, 40, None)
    assert reply_leases(harness, []) == 39
    assert reply_leases(harness, history((0,))) == 1, "the end of the log, for the error"
    reply_leases(harness, [])
    error = harness.answers[call]
    assert isinstance(error, NoSuchRecordError)
    assert "a position from 31 on" in str(error)


def test_log_without_leases_refuses_every_start_but_the_first() -> None:
    harness = connected()
    call = start_query(harness, 40, None)
    reply_leases(harness, [])
    reply_leases(harness, [])
    assert "a position from 1 on" in str(harness.answers[call])


def test_the_end_of_the_log_is_a_range_without_positions() -> None:
    harness = connected()
    call = start_query(harness, 31, None)
    assert reply_leases(harness, history((0,))) == 30
    reply_leases(harness, [])
    assert harness.answers[call].shards == []
    call = start_query(harness, 1, None)
    reply_leases(harness, [])
    reply_leases(harness, [])
    assert harness.answers[call].shards == []


def test_a_service_that_is_silent_is_asked_again_until_the_deadline() -> None:
    harness = connected()
    call = start_query(harness, 1, 5)
    harness.pass_time(1 * S)
    assert len({m.request for _, m in harness.take(wire.LeaseQuery)}) == 1, "the same request"
    harness.pass_time(9 * S)
    assert isinstance(harness.answers[call], DeadlineError)
    harness.sent.clear()
    harness.pass_time(5 * S)
    assert not harness.take(wire.LeaseQuery)


def test_cancelled_extents_call_sends_no_request() -> None:
    harness = connected()
    call = start_query(harness, 1, 5)
    harness.cancel(call)
    harness.sent.clear()
    harness.pass_time(500 * MS)
    assert not harness.take(wire.LeaseQuery)
    assert call not in harness.answers


def test_placements_of_the_answer_are_learned() -> None:
    harness = ClientHarness()
    harness.connect(placement(0))
    start_query(harness, 1, 5)
    reply_leases(harness, history((0,)))
    routing: Any = harness.core._routing
    assert routing.shards == [0, 1]


def test_position_errors_name_the_known_range() -> None:
    found = extents_of(history((0,)), 1, None, 0)
    with pytest.raises(NoSuchRecordError, match="positions 1 to 30") as error:
        found.epoch_at(99)
    assert error.value.rid == RecordId(99, 0)
