"""Live bytes per segment, and the cleaner's cut (docs/logdb.md, section 8)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logdb.log_usage import LogUsage
from tests.properties import examples

#: A record: its size, and how much of it is live (percent).
records = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 100)), min_size=1, max_size=60)


def filled(log: list[tuple[int, int]], *, least: int = 50) -> LogUsage:
    segments = LogUsage(100, least)
    for index, (size, percent) in enumerate(log):
        segments.add_record(index * 2 + 1, size)
        segments.add_live(index * 2 + 1, size * percent // 100)
    return segments


@given(records)
def test_a_record_is_counted_in_its_segment(log: list[tuple[int, int]]) -> None:
    segments = filled(log)
    expected: list[list[int]] = []
    for index, (size, percent) in enumerate(log):
        if not expected or expected[-1][1] >= 100:
            expected.append([index * 2 + 1, 0, 0])
        expected[-1][1] += size
        expected[-1][2] += size * percent // 100
    assert segments.export() == [tuple(each) for each in expected]
    assert segments.log_bytes == sum(size for size, _ in log)
    assert segments.moving_bytes == sum(size * percent // 100 for size, percent in log)
    for index, (size, percent) in enumerate(log):
        segments.add_live(index * 2 + 1, -(size * percent // 100))
    assert [live for _, _, live in segments.export()] == [0] * len(segments)
    again = LogUsage(100, 50)
    again.load(segments.export())
    assert (again.log_bytes, again.moving_bytes) == (segments.log_bytes, segments.moving_bytes)


@examples(300)
@given(records, st.integers(0, 130))
def test_the_cut_frees_half_of_the_dead_bytes_at_the_lowest_cost(
    log: list[tuple[int, int]], position: int
) -> None:
    segments = filled(log)
    cut = segments.choose_cut(position)
    dead = segments.log_bytes - segments.moving_bytes
    firsts = [first for first, _, _ in segments.export()]

    def cost(at: int) -> tuple[int, int]:
        before = [each for each in segments.export() if each[0] < at]
        return (
            sum(size - live for _, size, live in before),
            sum(live for _, _, live in before),
        )

    allowed = [at for at in firsts[1:] if at <= position and cost(at)[0] * 2 >= dead]
    if dead <= 50 or dead * 2 <= segments.log_bytes or not allowed:
        assert cut == 0
    else:
        assert cut in allowed
        freed, moved = cost(cut)
        assert all(moved * cost(at)[0] <= cost(at)[1] * freed for at in allowed)


def test_no_cut_with_few_dead_bytes() -> None:
    log = [(100, 0)] * 10
    assert filled(log, least=1000).choose_cut(99) == 0
    assert filled(log, least=999).choose_cut(99) == 19
    half = [(100, 50)] * 10
    assert filled(half, least=0).choose_cut(99) == 0
    assert filled([*half, (100, 49)], least=0).choose_cut(99) > 0


def test_live_segments_are_not_moved_for_less_than_they_free() -> None:
    # 10 dead, 10 full, 1 dead: the last one does not pay.
    log = [(100, 0)] * 10 + [(100, 100)] * 5 + [(100, 0)] * 2
    assert filled(log, least=0).choose_cut(99) == 21


def test_a_trim_drops_only_segments_without_live_bytes() -> None:
    segments = filled([(100, 0), (100, 0), (100, 10), (100, 0), (100, 0)])
    segments.trim(3)
    assert [first for first, _, _ in segments.export()] == [3, 5, 7, 9]
    assert segments.log_bytes == 400
    segments.trim(7)  # something lives at 5
    assert [first for first, _, _ in segments.export()] == [3, 5, 7, 9]
    segments.add_live(5, -10)
    segments.trim(8)  # the segment from 7 on is not wholly before
    assert [first for first, _, _ in segments.export()] == [7, 9]
    segments.trim(10**9)  # the last one has no end yet
    assert [first for first, _, _ in segments.export()] == [9]
    assert segments.log_bytes == 100


def test_only_an_empty_log_is_loaded() -> None:
    segments = filled([(100, 0)])
    with pytest.raises(AssertionError):
        segments.load([])
