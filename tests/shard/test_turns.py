"""When a primary ends epochs: a little late while inserts flow, seldom while nothing comes."""

from __future__ import annotations

import pytest

from shard.ordering.epoch_closer import QUIET_TURN_NS, TURN_LATE_NS, Turns
from shard.state.decision_log import STREAM_FLOWS_NS
from shard.state.replica_state import ReplicaConfig, ReplicaState
from tests.memory_store import MemoryStore
from tests.world import MS, S, address, first_lease
from ziplog.core.view import run_of
from ziplog.wire import Limits

LEASE = first_lease(2)
#: Where the lease begins, and where its second and third epoch do.
BASES = [LEASE.epoch_base(epoch) for epoch in range(3)]
#: When the lease began, and when its second and third epoch do.
BEGAN = S
SECOND = BEGAN + LEASE.epoch_ms * MS
THIRD = SECOND + LEASE.epoch_ms * MS


def turns(
    *, flowed_at: int = -S, is_watched: bool = True, lag_fix: bool = True
) -> tuple[Turns, ReplicaState]:
    """Return the turns of a primary whose stream went on at `flowed_at`."""
    node = address("shard-0-0")
    config = ReplicaConfig(
        node.name, node.endpoint, 0, 0, (node,), (), "memory", 1, Limits(), lag_fix=lag_fix
    )
    state = ReplicaState(config, MemoryStore(), 1)
    state.has_subscribers = is_watched
    state.clock.announce([run_of(LEASE)], BEGAN, BEGAN)
    made = Turns(state)
    made.flowed_at = flowed_at
    return made, state


def test_behind_an_insert_an_epoch_goes_on_for_a_little_while() -> None:
    made, _ = turns(flowed_at=SECOND - MS)
    assert made.floor(SECOND) == BASES[0]
    assert made.floor(SECOND + TURN_LATE_NS - MS - 1) == BASES[0]
    assert made.floor(SECOND + TURN_LATE_NS - MS) == BASES[1], "nothing came for as long"


def test_an_epoch_ends_late_however_fast_inserts_come() -> None:
    made, _ = turns()
    made.flowed_at = SECOND + TURN_LATE_NS - 1
    assert made.floor(SECOND + TURN_LATE_NS - 1) == BASES[0]
    assert made.floor(SECOND + TURN_LATE_NS) == BASES[1]


def test_behind_a_batch_an_epoch_ends_at_once() -> None:
    made, _ = turns(flowed_at=SECOND)
    assert made.over(SECOND, SECOND) == BASES[1]


def test_after_a_pause_the_clock_counts_though_nobody_reads() -> None:
    made, _ = turns(flowed_at=THIRD - STREAM_FLOWS_NS, is_watched=False)
    assert made.floor(THIRD) == BASES[2]


def test_while_nobody_reads_only_leases_end() -> None:
    made, state = turns(flowed_at=THIRD, is_watched=False)
    assert made.floor(THIRD) == made.over(THIRD, THIRD) == made.end(THIRD) == BASES[0]
    assert made.next_end(THIRD, is_awaited=False) is None
    following, begins = LEASE.following(), THIRD + 5 * MS
    state.clock.announce([run_of(following)], begins, THIRD)
    assert made.next_end(THIRD, is_awaited=False) == begins
    assert made.end(begins) == following.base


def test_an_idle_shard_that_nobody_reads_ends_nothing() -> None:
    made, state = turns(flowed_at=-S, is_watched=False)
    state.clock.announce([run_of(LEASE.following())], THIRD, SECOND)
    assert made.end(SECOND) == 0
    assert made.next_end(SECOND, is_awaited=False) is None


@pytest.mark.parametrize("lag_fix", [True, False])
def test_while_nothing_comes_epochs_end_seldom_if_who_waits_says_so(*, lag_fix: bool) -> None:
    made, _ = turns(lag_fix=lag_fix)
    assert made.end(SECOND) == BASES[1]
    assert made.end(THIRD) == (0 if lag_fix else BASES[2])
    due = SECOND + QUIET_TURN_NS if lag_fix else THIRD
    assert made.next_end(SECOND, is_awaited=False) == due
    assert made.end(due) > 0


@pytest.mark.parametrize("is_watched", [True, False])
def test_who_waits_for_positions_has_the_next_epoch_end_in_time(*, is_watched: bool) -> None:
    made, _ = turns(is_watched=is_watched)
    assert made.end(SECOND) == (BASES[1] if is_watched else 0)
    assert made.next_end(SECOND, is_awaited=True) == THIRD


def test_the_end_of_an_epoch_waits_until_nothing_follows_what_came_last() -> None:
    made, _ = turns(flowed_at=SECOND + MS)
    assert made.next_end(SECOND + MS, is_awaited=False) == SECOND + MS + TURN_LATE_NS
    made.flowed_at = BEGAN + 5 * MS
    assert made.next_end(BEGAN + 5 * MS, is_awaited=False) == SECOND
