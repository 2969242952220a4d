"""The independent computation of owners agrees with the thesis and with production code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.ownership import Lease, Ownership, round_of
from ziplog.core import view

#: Two shards; the second owns every third position: 0 0 1 | 0 0 1 | ...
WEIGHTS = ((0, 2), (1, 1))
LEASE = Lease(1, 1 + 4 * 12, 0, 12, WEIGHTS)


def owned(*leases: Lease) -> Ownership:
    result = Ownership()
    result.learn(leases or [LEASE])
    return result


def test_the_example_of_the_thesis() -> None:
    # Fig. 4.2: three records a ms at shard 1, two at shard 2.
    assert round_of(((1, 3), (2, 2))) == (1, 2, 1, 1, 2)


weights_of = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(
    lambda row: tuple((2 * index, weight) for index, weight in enumerate(row))
)


@given(weights_of, st.integers(1, 9), st.integers(1, 40), st.integers(1, 5), st.data())
def test_the_schedule_is_that_of_the_thesis(
    weights: tuple[tuple[int, int], ...], base: int, size: int, epochs: int, data: Any
) -> None:
    members = tuple(view.Member(shard, 1, weight) for shard, weight in weights)
    lease = view.Lease(1, view.NO_DIGEST, base, 3, epochs, size, 10, members)
    oracle = owned(Lease(base, lease.stop, 3, size, weights))
    for gsn in range(base, lease.stop):
        assert oracle.owner(gsn) == lease.owner(gsn)
        assert oracle.epoch(gsn) == lease.epoch_at(gsn)
    shard = data.draw(st.sampled_from([shard for shard, _ in weights]))
    gsn = data.draw(st.integers(base, lease.stop - 1))
    mine = [g for g in range(gsn, lease.stop) if oracle.owner(g) == shard]
    assert oracle.next_owned(shard, gsn) == min(mine, default=lease.stop)
    assert lease.next_owned(shard, gsn) == min(mine, default=lease.stop)


def test_leases_are_contiguous_and_may_be_learned_in_pieces() -> None:
    second = Lease(LEASE.stop, LEASE.stop + 20, 4, 10, ((1, 1),))
    whole = owned(LEASE, second)
    pieces = Ownership()
    pieces.learn([replace(LEASE, stop=25), replace(LEASE, base=25, first_epoch=2)])
    pieces.learn([LEASE, second])
    for gsn in range(1, second.stop):
        assert whole.owner(gsn) == pieces.owner(gsn)
        assert whole.epoch(gsn) == pieces.epoch(gsn)
    assert whole.stop == pieces.stop == second.stop
    assert whole.next_owned(0, LEASE.stop - 4) == LEASE.stop - 3
    assert whole.next_owned(0, LEASE.stop - 1) == second.stop, "it has no position there"
    assert whole.next_owned(1, LEASE.stop - 1) == LEASE.stop - 1
    assert whole.next_owned(1, LEASE.stop) == LEASE.stop


def test_positions_that_a_rebuild_took_away_are_passed() -> None:
    unrecorded = replace(LEASE, base=LEASE.stop, stop=LEASE.stop + 48, first_epoch=4)
    filler = Lease(LEASE.stop, 1000, 4, 12, ())
    fresh = Lease(1000, 1048, 9, 12, WEIGHTS)
    oracle = owned(LEASE, unrecorded)
    assert oracle.next_owned(0, LEASE.stop) == LEASE.stop
    oracle.learn([LEASE, filler, fresh])
    assert oracle.next_owned(0, LEASE.stop - 4) == LEASE.stop - 3
    assert oracle.next_owned(0, LEASE.stop) == fresh.base


def test_the_limit_of_a_shard_is_the_end_of_its_last_lease() -> None:
    alone, both = ((1, 1),), WEIGHTS
    ends = [LEASE.stop + 12 * i for i in range(4)]
    leases = [
        Lease(base, stop, 4 + i, 12, weights)
        for i, (base, stop, weights) in enumerate(
            zip(ends, ends[1:], (alone, both, alone), strict=False)
        )
    ]
    known = owned(LEASE, *leases)
    assert [known.limit(shard) for shard in (0, 1, 2)] == [ends[2], ends[3], 0]


@pytest.mark.parametrize(
    ("lease", "text"),
    [
        (replace(LEASE, base=LEASE.stop + 1, stop=LEASE.stop + 13), "no lease has"),
        (replace(LEASE, weights=((0, 1), (1, 2))), "given out twice"),
        (replace(LEASE, epoch_size=24), "given out twice"),
        (replace(LEASE, first_epoch=1), "given out twice"),
        (replace(LEASE, base=14, first_epoch=1), "given out twice"),
        (replace(LEASE, stop=1), "an empty lease"),
    ],
)
def test_a_lease_is_never_taken_back(lease: Lease, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        owned().learn([lease])


def test_a_position_without_a_lease_has_no_owner() -> None:
    for gsn in (0, LEASE.stop):
        with pytest.raises(AssertionError, match="no lease has position"):
            owned().owner(gsn)
