"""Buckets of histograms."""

from __future__ import annotations

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from ziplog.core.histogram import BOUNDS_US, Histogram


@examples(300)
@given(st.lists(st.integers(-5, 2**36) | st.sampled_from([b * 1000 for b in BOUNDS_US])))
def test_a_duration_is_in_the_first_bucket_that_it_does_not_exceed(durations: list[int]) -> None:
    histogram = Histogram()
    expected = [0] * (len(BOUNDS_US) + 1)
    for ns in durations:
        histogram.add(ns)
        expected[bisect_left([bound * 1000 for bound in BOUNDS_US], ns)] += 1
    assert histogram.counts == expected
    assert histogram.sum_ns == sum(max(ns, 0) for ns in durations)


def test_the_bounds() -> None:
    assert len(BOUNDS_US) == 19
    assert (BOUNDS_US[0], BOUNDS_US[-1]) == (64, 16_777_216)
