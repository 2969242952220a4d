"""The buffer pool reuses buffers, and never while a view of one is alive."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziplog.segments.buffer_pool import BufferPool

if TYPE_CHECKING:
    from collections.abc import Iterator

KIB = 1024


def test_released_buffer_is_reused() -> None:
    memory = BufferPool()
    view = memory.view(5000 * KIB)
    piece = view.obj
    part = view[7:90]
    view.release()
    # A view of a part is still alive.
    other = memory.view(4000 * KIB)
    assert other.obj is not piece
    part.release()
    assert memory.view(5001 * KIB).obj is piece


def test_view_has_the_requested_size() -> None:
    memory = BufferPool()
    for size in (0, 1, 64 * KIB - 1, 64 * KIB, 1024 * KIB, 1024 * KIB + 1, 3):
        assert memory.view(size).nbytes == size


def test_free_buffers_that_are_too_small_are_dropped() -> None:
    memory = BufferPool()
    for size in range(1, 7):
        memory.view(size * 1024 * KIB).release()
    assert sum(map(len, memory._pieces)) == 6 * 1024 * KIB


def test_small_view_uses_no_pooled_buffer() -> None:
    memory = BufferPool()
    large = memory.view(100 * KIB)
    piece = large.obj
    large.release()
    little = memory.view(10 * KIB)
    assert little.obj is not piece


def test_huge_buffer_is_not_pooled() -> None:
    memory = BufferPool()
    memory.view(16 * 1024 * KIB).release()
    memory.view(16 * 1024 * KIB + 1).release()
    assert [len(piece) for piece in memory._pieces] == [16 * 1024 * KIB]


@pytest.fixture
def restless() -> Iterator[None]:
    """Let threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_threads_never_share_a_buffer() -> None:
    memory = BufferPool()

    def work(mark: int) -> None:
        for _ in range(20_000):
            view = memory.view(64 * KIB)
            view[0] = view[-1] = mark
            assert view[0] == view[-1] == mark
            view.release()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(1, 5)))


steps = st.lists(
    st.tuples(st.integers(1, 3000 * KIB), st.booleans(), st.integers(0, 20)), max_size=40
)


@given(steps)
def test_contents_of_a_live_view_never_change(steps: list[tuple[int, bool, int]]) -> None:
    memory, numbers = BufferPool(), count(1)
    held: list[tuple[memoryview, int]] = []
    for size, is_held, let_go in steps:
        view, mark = memory.view(size), next(numbers)
        view[0] = view[-1] = mark
        if is_held:
            held.append((view, mark))
        if let_go < len(held):
            held.pop(let_go)[0].release()
        assert all(each[0] == each[-1] == mark for each, mark in held)
        assert len(memory._pieces) <= 6
