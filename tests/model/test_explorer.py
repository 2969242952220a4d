"""The search itself, on tiny models."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from tests.model.explorer import explore


class Grid(NamedTuple):
    """Two counters from 0 to `size` - 1, either of which may grow; `bad` must not be reached."""

    size: int
    bad: tuple[int, int] | None = None
    symmetry: bool = False

    def initial(self) -> tuple[int, int]:
        return 0, 0

    def successors(self, state: tuple[int, int]) -> list[tuple[str, tuple[int, int]]]:
        x, y = state
        steps = [("x", (x + 1, y)), ("y", (x, y + 1))]
        return [(name, new) for name, new in steps if max(new) < self.size]

    def canonical(self, state: tuple[int, int]) -> tuple[int, int]:
        return min(state, state[::-1]) if self.symmetry else state

    def violated(self, state: tuple[int, int]) -> str | None:
        return "NotThere" if state == self.bad else None


def test_every_state_is_visited_once() -> None:
    result = explore(Grid(4))
    assert (result.states, result.steps, result.depth) == (16, 24, 7)
    assert result.is_complete
    assert result.violation is None


def test_names_do_not_count() -> None:
    assert explore(Grid(4, symmetry=True)).states == 10


def test_the_trace_is_a_shortest_one() -> None:
    result = explore(Grid(9, bad=(2, 1)))
    assert result.violation is not None
    assert not result.is_complete
    assert len(result.violation.trace) == result.depth == 4
    assert result.violation.trace[0] == (None, (0, 0))
    assert result.violation.trace[-1][1] == (2, 1)


def test_a_trace_through_renamed_states_is_a_way_that_exists() -> None:
    model = Grid(9, bad=(1, 3), symmetry=True)
    result = explore(model)
    assert result.violation is not None
    trace = result.violation.trace
    assert len(trace) == 5
    for (_, state), (step, following) in pairwise(trace):
        assert (step, following) in model.successors(state)


def test_a_bad_beginning_is_found() -> None:
    result = explore(Grid(3, bad=(0, 0)))
    assert result.violation is not None
    assert result.violation.trace == [(None, (0, 0))]


def test_a_search_gives_up_at_the_end_of_a_level() -> None:
    levels: list[int] = []
    result = explore(Grid(9), 5, lambda _depth, states, _steps, _cpu_s: levels.append(states))
    assert (result.states, result.depth, result.is_complete) == (6, 3, False)
    assert levels == [3, 6]
