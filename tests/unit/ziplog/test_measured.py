"""The sum and the histogram of a benchmark, beside sorted lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziplog.bench.measured import Histogram, Measured, total

durations = st.lists(st.integers(0, 10**12), min_size=1, max_size=50)


def histogram_of(values: list[int]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    return histogram


@given(durations, st.floats(0.01, 1.0))
def test_a_quantile_is_at_most_a_bucket_above_the_exact_one(
    values: list[int], share: float
) -> None:
    found = histogram_of(values).quantile(share)
    rank = next(n for n in range(1, len(values) + 1) if share * len(values) - n <= 0)
    exact = sorted(values)[rank - 1]
    assert exact < found <= max(exact * 33 / 32 + 1, exact + 1)


@given(durations)
def test_buckets_are_in_order_and_count_each_duration_once(values: list[int]) -> None:
    buckets = list(histogram_of(values).buckets())
    ends = [end for end, _ in buckets]
    assert ends == sorted(set(ends))
    assert sum(count for _, count in buckets) == len(values)
    assert max(values) < ends[-1]


def test_an_empty_histogram_has_no_latency() -> None:
    assert Histogram().quantile(0.5) == 0


def test_the_sum_adds_counts_and_rates() -> None:
    one = Measured("put", 10, 2.0, 0.0, {5: 7, 6: 3}, 9, 1)
    other = Measured("put", 30, 3.0, 0.0, {6: 30}, 30, 0)
    get = Measured("get", 4, 2.0, 0.0, {1: 4})
    put, alone = total([[one, get], [other]])
    assert (put.operation, put.count, put.seconds) == ("put", 40, 3.0)
    assert put.rate == pytest.approx(10 / 2 + 30 / 3)
    assert put.counts == {5: 7, 6: 33}
    assert (put.fast_path, put.slow_path) == (39, 1)
    assert (alone.operation, alone.count, alone.rate) == ("get", 4, 2.0)
