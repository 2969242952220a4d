"""Weights follow rates, but not their noise (docs/protocol.md, section 13)."""

import random
from collections import deque

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mms.weights import Weights
from ziplog.core.gsn import MAX_ROUND
from ziplog.core.view import Member

K = 1000


def holding(rates: dict[int, int], *held: int) -> Weights:
    """Return weights with these rates that hold these weights, or computed ones."""
    weights = Weights()
    for shard, rate in rates.items():
        weights.set_rate(shard, rate)
    hold(weights, list(held) or weights.for_shards(list(rates)))
    return weights


def hold(weights: Weights, held: list[int]) -> None:
    members = tuple(Member(shard, 1, weight) for shard, weight in enumerate(held))
    weights.on_granted(members)
    weights.check(members)


def poisson(noise: random.Random, expected: float) -> int:
    """Return a count of a Poisson process: nearly normal, as it is large."""
    return max(round(noise.gauss(expected, expected**0.5)), 0)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        # Thesis 4.4.4: one of six shards at 10K records/s goes to 15K, or to 5K.
        ([15 * K, 10 * K, 10 * K, 10 * K, 10 * K, 10 * K], [3, 2, 2, 2, 2, 2]),
        ([5 * K, 10 * K, 10 * K, 10 * K, 10 * K, 10 * K], [1, 2, 2, 2, 2, 2]),
        ([15 * K, 10 * K], [3, 2]),
        ([5 * K, 10 * K], [1, 2]),
        # Thesis, Fig. 4.2.
        ([3 * K, 2 * K], [3, 2]),
        # Five times the rate of another (thesis 4.2.3).
        ([5 * K, 1 * K], [5, 1]),
        ([990, 1020, 1030], [1, 1, 1]),
        ([0, 40, 64], [1, 1, 1]),
        ([0, 128, 64], [1, 2, 1]),
        ([0, 0, 1_000_000], [1, 1, 256]),
        ([100, 210, 1500], [1, 2, 16]),
        ([1000, 1130, 1750, 9100], [4, 5, 7, 40]),
    ],
)
def test_rates_become_weights(rates: list[int], expected: list[int]) -> None:
    assert holding(dict(enumerate(rates))).for_shards(range(len(rates))) == expected


@pytest.mark.parametrize(("rate", "expected"), [(15 * K, [3, 2, 2]), (5 * K, [1, 2, 2])])
def test_a_step_is_seen_at_once(rate: int, expected: list[int]) -> None:
    weights = holding(dict.fromkeys(range(3), 10 * K))
    assert not weights.are_outdated()
    weights.set_rate(0, rate)
    assert weights.are_outdated()
    assert weights.for_shards(range(3)) == expected
    hold(weights, expected)
    assert not weights.are_outdated()


def test_a_step_that_only_heartbeats_show_is_seen_as_well() -> None:
    weights = holding(dict.fromkeys(range(3), 10 * K))
    weights.observe(0, 15 * K)
    assert weights.are_outdated()


def test_a_shard_of_which_nothing_is_known_keeps_its_weight() -> None:
    weights = holding({}, 8, 4, 1)
    assert not weights.are_outdated()
    assert weights.for_shards(range(3)) == [8, 4, 1]
    assert weights.for_shards(range(4)) == [8, 4, 1, 1]
    weights.set_rate(1, 1000)
    assert weights.for_shards(range(3)) == [8, 4, 1]
    weights.set_rate(2, 1000)
    assert weights.are_outdated()
    # 5 stands for 2000 records a second: the first is thought to have 3200.
    assert weights.for_shards(range(3)) == [3, 1, 1]


def test_members_that_go_take_the_common_factor_along() -> None:
    weights = holding({0: 1000, 1: 2000, 2: 4000})
    assert weights.for_shards([1, 2]) == [1, 2]
    assert weights.for_shards([0, 2]) == [1, 4]


def test_a_new_leader_goes_by_the_weights_of_the_last_lease() -> None:
    weights = holding({0: 1000, 1: 5000})
    weights.forget_rates()
    assert not weights.are_outdated()
    assert weights.for_shards([0, 1]) == [1, 5]


def test_fitting_weights_are_kept_though_others_would_be_computed() -> None:
    weights = holding({0: 1000, 1: 1000})
    weights.set_rate(1, 1150)
    assert holding({0: 1000, 1: 1150}).for_shards([0, 1]) == [4, 5]
    assert not weights.are_outdated()
    assert weights.for_shards([0, 1]) == [1, 1]


def test_bad_weights_are_kept_while_no_others_fit_much_better() -> None:
    # The second and the third are rounded apart, and then differ by more than they do.
    rates = {0: 1_000_000, 1: 1_124_000, 2: 1_126_000}
    assert holding(rates).for_shards(range(3)) == [4, 4, 5]
    for held in ([4, 4, 5], [4, 5, 4]):
        weights = holding(rates, *held)
        assert weights.for_shards(range(3)) == held
        assert not weights.are_outdated()


def test_weights_do_not_oscillate() -> None:
    weights = holding({0: 1_000_000, 1: 1_000_000})
    held = []
    for rate in (1_100_000, 1_250_000, 1_100_000, 1_250_000, 1_000_000):
        weights.set_rate(1, rate)
        hold(weights, weights.for_shards(range(2)))
        held.append(weights.for_shards(range(2)))
    assert held == [[1, 1], [4, 5], [4, 5], [4, 5], [1, 1]]


SHARES = {0: 1, 1: 1, 2: 2, 3: 1, 4: 3}


@pytest.mark.parametrize("rate", [70, 150, 1000, 10 * K])
def test_noise_changes_nothing(rate: int) -> None:
    """An hour of heartbeats, four a second, of what came in the last second (Poisson)."""
    noise = random.Random(rate)
    came = {s: deque(4 * [rate * weight // 4], maxlen=4) for s, weight in SHARES.items()}
    weights = holding({shard: rate * weight for shard, weight in SHARES.items()})
    assert weights.for_shards(range(5)) == [1, 1, 2, 1, 3]
    changes = 0
    for _ in range(4 * 3600):
        for shard, weight in SHARES.items():
            came[shard].append(poisson(noise, rate * weight / 4))
            weights.observe(shard, sum(came[shard]))
            if weights.are_outdated():
                changes += 1
                hold(weights, weights.for_shards(range(5)))
    assert changes <= 2


def test_one_bad_first_rate_is_corrected_by_later_ones() -> None:
    weights = holding(dict.fromkeys(range(6), 10 * K))
    weights.set_rate(0, 12_500)  # by the first milliseconds of it
    assert weights.are_outdated()
    hold(weights, weights.for_shards(range(6)))
    for _ in range(8):
        weights.observe(0, 10 * K)
    assert weights.are_outdated()
    assert weights.for_shards(range(6)) == [1] * 6


rates_of_many = st.lists(st.integers(0, 2**40), min_size=1, max_size=300)


@given(rates_of_many)
def test_a_round_is_never_too_long(rates: list[int]) -> None:
    weights = holding(dict(enumerate(rates))).for_shards(range(len(rates)))
    assert min(weights) >= 1
    assert max(weights) <= 256 * min(weights)
    assert sum(weights) <= MAX_ROUND


@given(rates_of_many)
def test_the_faster_one_never_weighs_less(rates: list[int]) -> None:
    weights = holding(dict(enumerate(rates))).for_shards(range(len(rates)))
    pairs = sorted(zip(rates, weights, strict=True))
    assert [weight for _, weight in pairs] == sorted(weights)


@given(st.lists(st.integers(64, 2**20), min_size=1, max_size=50), st.integers(1, 2**16))
def test_only_ratios_count(rates: list[int], scale: int) -> None:
    shards = range(len(rates))
    scaled = {shard: rate * scale for shard, rate in enumerate(rates)}
    weights = holding(dict(enumerate(rates)))
    before = weights.for_shards(shards)
    assert holding(scaled).for_shards(shards) == before
    # A common change of all rates does not matter, for any held weights.
    hold(weights, before)
    for shard, rate in scaled.items():
        weights.set_rate(shard, rate)
    assert weights.for_shards(shards) == before


@given(st.lists(st.integers(10_000_000, 2**32), min_size=2, max_size=20))
def test_weights_fit_the_rates(rates: list[int]) -> None:
    """Without much noise, rounding is the only error."""
    least = min(rates)
    rates = [min(rate, 256 * least) for rate in rates]
    weights = holding(dict(enumerate(rates))).for_shards(range(len(rates)))
    units = [rate / weight for rate, weight in zip(rates, weights, strict=True)]
    assert max(units) / min(units) <= 1.2501


# A rate above the largest ratio of two rates.
@example([(0, 622), (1, 59030), (2, 226), (0, 844)])
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 100_000)), max_size=100))
def test_outdated_weights_are_replaced_by_better_ones(rates: list[tuple[int, int]]) -> None:
    """Each change improves the weights, and none follows before a rate changes."""
    weights = holding(dict.fromkeys(range(6), 1000))
    held = [1] * 6
    for shard, rate in rates:
        weights.set_rate(shard, rate)
        if weights.are_outdated():
            better = weights.for_shards(range(6))
            assert better != held
            held = better
            hold(weights, held)
            assert not weights.are_outdated()


def test_4000_shards_fit_a_round() -> None:
    rates = {shard: 64 if shard == 0 else 10**6 for shard in range(4000)}
    weights = holding(rates).for_shards(range(4000))
    assert min(weights) == 1
    assert 4000 < sum(weights) <= MAX_ROUND


def test_a_step_shows_in_the_heartbeats_of_a_second() -> None:
    """300 a second become 450; each heartbeat, four a second, has the rate of the last second."""
    weights = holding({0: 300, 1: 300})
    for rate in (337, 375, 412, 450):
        weights.observe(0, rate)
        weights.observe(1, 300)
    assert weights.are_outdated()
    assert weights.for_shards([0, 1]) == [3, 2]
