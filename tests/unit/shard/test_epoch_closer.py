"""When a primary closes epochs: a little late while inserts arrive, rarely while idle."""

from __future__ import annotations

import pytest

from shard.ordering.epoch_closer import EPOCH_END_DELAY_NS, STREAM_ACTIVE_NS, EpochCloser
from shard.state.replica_state import ReplicaConfig, ReplicaState
from tests.memory_store import MemoryStore
from tests.world import MS, S, address, first_lease
from ziplog.core import distance
from ziplog.core.view import run_of
from ziplog.wire import Limits

LEASE = first_lease(2)
#: First gsn of the lease, and of its second and third epoch.
BASES = [LEASE.epoch_base(epoch) for epoch in range(3)]
#: Begin time of the lease, and of its second and third epoch.
BEGAN = S
SECOND = BEGAN + LEASE.epoch_ms * MS
THIRD = SECOND + LEASE.epoch_ms * MS


def closer(
    *, last_activity_at: int = -S, has_readers: bool = True, lag_fix: bool = True, rtt_ms: int = 0
) -> tuple[EpochCloser, ReplicaState]:
    """Return the epoch closer of a primary with its last activity at this time."""
    node = address("shard-0-0")
    config = ReplicaConfig(
        node.name, node.endpoint, 0, 0, (node,), (), "memory", 1, Limits(rtt_ms=rtt_ms),
        lag_fix=lag_fix,
    )  # fmt: skip
    state = ReplicaState(config, MemoryStore(), 1)
    state.has_subscribers = has_readers
    state.clock.announce([run_of(LEASE)], BEGAN, BEGAN)
    made = EpochCloser(state)
    made.last_activity_at = last_activity_at
    return made, state


def test_epoch_ends_a_little_late_after_an_insert() -> None:
    made, _ = closer(last_activity_at=SECOND - MS)
    assert made.min_gsn(SECOND) == BASES[0]
    assert made.min_gsn(SECOND + EPOCH_END_DELAY_NS - MS - 1) == BASES[0]
    assert made.min_gsn(SECOND + EPOCH_END_DELAY_NS - MS) == BASES[1], "no insert arrived"


def test_epoch_ends_late_at_any_insert_rate() -> None:
    made, _ = closer()
    made.last_activity_at = SECOND + EPOCH_END_DELAY_NS - 1
    assert made.min_gsn(SECOND + EPOCH_END_DELAY_NS - 1) == BASES[0]
    assert made.min_gsn(SECOND + EPOCH_END_DELAY_NS) == BASES[1]


def test_epoch_ends_at_once_after_a_batch() -> None:
    made, _ = closer(last_activity_at=SECOND)
    assert made.first_open_gsn(SECOND, SECOND) == BASES[1]


def test_after_a_pause_the_clock_counts_without_readers() -> None:
    made, _ = closer(last_activity_at=THIRD - STREAM_ACTIVE_NS, has_readers=False)
    assert made.min_gsn(THIRD) == BASES[2]


def test_without_readers_only_leases_end() -> None:
    made, state = closer(last_activity_at=THIRD, has_readers=False)
    assert (
        made.min_gsn(THIRD)
        == made.first_open_gsn(THIRD, THIRD)
        == made.close_due(THIRD)
        == BASES[0]
    )
    assert made.next_close_at(THIRD, is_awaited=False) is None
    following, begins = LEASE.following(), THIRD + 5 * MS
    state.clock.announce([run_of(following)], begins, THIRD)
    assert made.next_close_at(THIRD, is_awaited=False) == begins
    assert made.close_due(begins) == following.base


def test_an_idle_shard_without_readers_closes_nothing() -> None:
    made, state = closer(last_activity_at=-S, has_readers=False)
    state.clock.announce([run_of(LEASE.following())], THIRD, SECOND)
    assert made.close_due(SECOND) == 0
    assert made.next_close_at(SECOND, is_awaited=False) is None


@pytest.mark.parametrize("lag_fix", [True, False])
def test_idle_epochs_close_rarely_with_lag_fix(*, lag_fix: bool) -> None:
    made, _ = closer(lag_fix=lag_fix)
    assert made.close_due(SECOND) == BASES[1]
    assert made.close_due(THIRD) == (0 if lag_fix else BASES[2])
    due = SECOND + distance.idle_epoch_interval_ns(0) if lag_fix else THIRD
    assert made.next_close_at(SECOND, is_awaited=False) == due
    assert made.close_due(due) > 0


def test_every_idle_epoch_closes_for_readers_far_away() -> None:
    made, _ = closer(rtt_ms=20)
    assert made.close_due(SECOND) == BASES[1]
    assert made.close_due(THIRD) == BASES[2]


@pytest.mark.parametrize("has_readers", [True, False])
def test_waiting_units_make_the_next_epoch_close_in_time(*, has_readers: bool) -> None:
    made, _ = closer(has_readers=has_readers)
    assert made.close_due(SECOND) == (BASES[1] if has_readers else 0)
    assert made.next_close_at(SECOND, is_awaited=True) == THIRD


def test_the_end_of_an_epoch_waits_for_a_pause() -> None:
    made, _ = closer(last_activity_at=SECOND + MS)
    assert made.next_close_at(SECOND + MS, is_awaited=False) == SECOND + MS + EPOCH_END_DELAY_NS
    made.last_activity_at = BEGAN + 5 * MS
    assert made.next_close_at(BEGAN + 5 * MS, is_awaited=False) == SECOND


@pytest.mark.parametrize("has_readers", [True, False])
def test_epoch_that_has_ended_is_closed_after_an_event_between_its_end_and_the_wake_up(
    *, has_readers: bool
) -> None:
    made, state = closer(last_activity_at=SECOND - MS, has_readers=has_readers)
    state.clock.announce([run_of(LEASE.following())], THIRD, BEGAN)
    late = THIRD + 5 * MS
    assert made.next_close_at(late, is_awaited=False) == late
    state.stream.end = made.close_due(late)
    following = state.clock.next_epoch_at(late) if has_readers else None
    assert made.next_close_at(late, is_awaited=False) == following


def test_epoch_that_cannot_be_closed_needs_no_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made, state = closer()
    assert made.next_close_at(SECOND, is_awaited=False) == SECOND
    monkeypatch.setattr("shard.ordering.epoch_closer.MAX_UNSTABLE_DECISIONS", 0)
    assert made.next_close_at(SECOND, is_awaited=False) == THIRD
    state.shard_state = "finalized"
    monkeypatch.undo()
    assert made.next_close_at(SECOND, is_awaited=False) == THIRD
