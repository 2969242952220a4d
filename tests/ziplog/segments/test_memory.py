"""Memory to read into is used again, and never while somebody looks into it."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from ziplog.segments.memory import ReadMemory

KIB = 1024


def test_what_was_let_go_is_used_again() -> None:
    memory = ReadMemory()
    view = memory.view(5000 * KIB)
    piece = view.obj
    part = view[7:90]
    view.release()
    # A part of it is held still.
    other = memory.view(4000 * KIB)
    assert other.obj is not piece
    part.release()
    assert memory.view(5001 * KIB).obj is piece


def test_a_view_has_the_size_that_was_asked_for() -> None:
    memory = ReadMemory()
    for size in (0, 1, 64 * KIB - 1, 64 * KIB, 1024 * KIB, 1024 * KIB + 1, 3):
        assert memory.view(size).nbytes == size


def test_what_is_too_small_is_not_kept() -> None:
    memory = ReadMemory()
    for size in range(1, 7):
        memory.view(size * 1024 * KIB).release()
    assert sum(map(len, memory._pieces)) == 6 * 1024 * KIB


def test_what_is_little_holds_no_piece() -> None:
    memory = ReadMemory()
    large = memory.view(100 * KIB)
    piece = large.obj
    large.release()
    little = memory.view(10 * KIB)
    assert little.obj is not piece


steps = st.lists(
    st.tuples(st.integers(1, 3000 * KIB), st.booleans(), st.integers(0, 20)), max_size=40
)


@given(steps)
def test_what_is_held_stays_as_it_is(steps: list[tuple[int, bool, int]]) -> None:
    memory, numbers = ReadMemory(), count(1)
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
