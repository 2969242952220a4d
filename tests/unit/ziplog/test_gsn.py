"""Schedule arithmetic, compared with a merge by exact fractions (thesis 4.2.3, Fig. 4.2)."""

from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziplog.core.gsn import MAX_ROUND, Schedule

#: Weights and the owners of one round: the published vectors of docs/protocol.md, section 2.
VECTORS = [
    ([(0, 1)], [0]),
    ([(0, 1), (1, 1)], [0, 1]),
    ([(7, 1), (3, 1)], [3, 7]),
    ([(0, 3), (1, 2)], [0, 1, 0, 0, 1]),  # Fig. 4.2: rates 3 and 2
    ([(0, 2), (1, 3)], [1, 0, 1, 0, 1]),
    ([(0, 2), (1, 2)], [0, 1, 0, 1]),
    ([(0, 1), (1, 2), (2, 4)], [2, 1, 2, 2, 0, 1, 2]),
    ([(4, 3), (1, 1), (2, 5)], [2, 4, 2, 2, 4, 2, 1, 2, 4]),
]

weights_of_shards = st.dictionaries(
    st.integers(0, 2**31 - 1), st.integers(1, 40), min_size=1, max_size=12
).map(lambda weights: list(weights.items()))


def merged(weights: list[tuple[int, int]]) -> list[int]:
    """Return the owners of a round: expected arrivals in exact order, ties by shard id."""
    arrivals = [
        (Fraction(j, weight), shard) for shard, weight in weights for j in range(1, weight + 1)
    ]
    return [shard for _, shard in sorted(arrivals)]


@pytest.mark.parametrize(("weights", "owners"), VECTORS)
def test_published_vectors(weights: list[tuple[int, int]], owners: list[int]) -> None:
    schedule = Schedule(weights)
    assert [schedule.owner(offset) for offset in range(len(owners))] == owners
    assert merged(weights) == owners


@given(weights_of_shards, st.randoms(use_true_random=False))
def test_the_owners_are_the_expected_arrival_merge(
    weights: list[tuple[int, int]], random: Random
) -> None:
    expected = merged(weights) * 2
    random.shuffle(weights)
    schedule = Schedule(weights)
    assert [schedule.owner(offset) for offset in range(len(expected))] == expected


@given(weights_of_shards, st.integers(0, 3))
def test_every_offset_is_one_slot_of_one_shard(weights: list[tuple[int, int]], rounds: int) -> None:
    schedule = Schedule(weights)
    start, stop = rounds * schedule.round_length, (rounds + 2) * schedule.round_length
    seen: dict[int, int] = {}
    for shard, weight in weights:
        for slot in range(rounds * weight, (rounds + 2) * weight):
            offset = schedule.offset(shard, slot)
            assert offset not in seen
            seen[offset] = shard
            assert schedule.slot_from(shard, offset) == slot
    assert sorted(seen) == list(range(start, stop))
    assert all(schedule.owner(offset) == shard for offset, shard in seen.items())


@given(weights_of_shards, st.integers(0, 2000))
def test_slot_from_and_next_offset_find_the_first_at_or_after(
    weights: list[tuple[int, int]], offset: int
) -> None:
    schedule = Schedule(weights)
    for shard, weight in weights:
        slot = schedule.slot_from(shard, offset)
        assert schedule.offset(shard, slot) >= offset
        assert slot == 0 or schedule.offset(shard, slot - 1) < offset
        assert schedule.next_offset(shard, offset) == schedule.offset(shard, slot)
        assert schedule.slot_from(shard, schedule.round_length) == weight


@given(weights_of_shards, st.integers(0, 500), st.integers(0, 200), st.integers(0, 10**6))
def test_many_slots_at_once_are_the_slots_one_by_one(
    weights: list[tuple[int, int]], slot: int, count: int, base: int
) -> None:
    schedule = Schedule(weights)
    for shard, _ in weights:
        single = [base + schedule.offset(shard, slot + index) for index in range(count)]
        assert schedule.offsets(shard, slot, count, base) == single


def test_fractions_that_floats_confuse_are_ordered_exactly() -> None:
    # 32768/65535 and 16384/32767 differ by 2**-31; the wrong order would swap two owners.
    weights = [(0, 32_767), (1, 32_768)]
    schedule = Schedule(weights)
    assert schedule.round_length == 65_535
    assert [schedule.owner(offset) for offset in range(65_535)] == merged(weights)


def test_4000_shards_share_the_longest_round() -> None:
    schedule = Schedule([(shard, 16) for shard in range(4000)])
    assert schedule.offsets(3999, 0, 3) == [3999, 7999, 11_999]


@pytest.mark.parametrize("weights", [[(0, 0)], [(0, 1), (0, 2)], [(0, MAX_ROUND), (1, 1)]], ids=str)
def test_impossible_weights_fail_an_assertion(weights: list[tuple[int, int]]) -> None:
    with pytest.raises(AssertionError):
        Schedule(weights)
