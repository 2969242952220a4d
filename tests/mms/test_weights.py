"""Weights follow rates, but not their noise (docs/protocol.md, section 2)."""

import random

from hypothesis import given
from hypothesis import strategies as st

from mms.weights import Weights
from ziplog.gsn import MAX_ROUND


def settled(rates: dict[int, int]) -> Weights:
    weights = Weights()
    for _ in range(2):
        weights.observe(rates)
    return weights


def test_equal_rates_give_weights_of_one() -> None:
    assert settled({0: 1020, 1: 1030, 2: 990}).of([0, 1, 2]) == [1, 1, 1]


def test_slow_shards_are_equally_slow() -> None:
    assert settled({0: 0, 1: 40, 2: 64}).of([0, 1, 2]) == [1, 1, 1]


def test_weights_are_powers_of_two_of_the_slowest() -> None:
    assert settled({0: 100, 1: 210, 2: 1500}).of([0, 1, 2]) == [1, 2, 16]
    assert settled({0: 100, 1: 210, 2: 1500}).of([1, 2]) == [1, 8]


def test_a_shard_that_was_never_seen_counts_as_slow() -> None:
    assert settled({0: 1000}).of([0, 7]) == [1, 1]


def test_noise_changes_nothing() -> None:
    noise = random.Random(1)
    weights = settled({0: 1000, 1: 2000, 2: 1000})
    for _ in range(500):
        weights.observe({0: noise.randint(850, 1150), 1: noise.randint(1700, 2300), 2: 1000})
        assert weights.of([0, 1, 2]) == [1, 2, 1]


def test_a_rate_leaves_its_band_before_its_weight_changes() -> None:
    weights = settled({0: 1000, 1: 2000})
    for _ in range(10):
        weights.observe({0: 1000, 1: 3000})  # nearer to 4 than to 2, but inside the band
    assert weights.of([0, 1]) == [1, 2]
    for _ in range(2):
        weights.observe({0: 1000, 1: 3600})
    assert weights.of([0, 1]) == [1, 4]


def test_one_odd_look_changes_nothing_and_two_equal_ones_do() -> None:
    weights = settled({0: 1000, 1: 1000})
    weights.observe({0: 9000, 1: 1000})
    assert weights.of([0, 1]) == [1, 1]
    weights.observe({0: 1000, 1: 1000})
    assert weights.of([0, 1]) == [1, 1]
    for _ in range(2):
        weights.observe({0: 9000, 1: 1000})
    assert weights.of([0, 1]) == [8, 1]


@given(st.dictionaries(st.integers(0, 5000), st.integers(0, 2**40), min_size=1, max_size=300))
def test_a_round_is_never_too_long(rates: dict[int, int]) -> None:
    weights = settled(rates).of(sorted(rates))
    assert min(weights) == 1
    assert sum(weights) <= MAX_ROUND


def test_4000_shards_fit_a_round() -> None:
    rates = {shard: 64 if shard == 0 else 10**6 for shard in range(4000)}
    weights = settled(rates).of(range(4000))
    assert min(weights) == 1
    assert 4000 < sum(weights) <= MAX_ROUND
