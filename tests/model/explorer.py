"""A breadth-first search of all states of a model, and the shortest way to a bad one.

A model gives states (hashable values), their successors, and what is wrong with a state. With
`canonical`, states that differ in names only are one; that is sound if the initial state, the steps
and the invariants treat all names alike. Invariant: states are visited in the order of their depth,
so the first violation found has a shortest trace.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    #: Depth, states found, steps taken, seconds of CPU.
    Progress = Callable[[int, int, int, float], None]


class Model(Protocol):
    """What can be explored."""

    def initial(self) -> Hashable:
        """Return the state to begin with."""

    def successors(self, state: Any) -> Iterable[tuple[Any, Any]]:
        """Return (step, next state) pairs."""

    def canonical(self, state: Any) -> Hashable:
        """Return the one state that stands for all that differ from `state` in names only."""

    def violated(self, state: Any) -> str | None:
        """Return the name of an invariant that does not hold in `state`."""


class Violation(NamedTuple):
    """A broken invariant, and the shortest way there: (step, state) pairs from the initial state.

    The step of the first pair is None.
    """

    invariant: str
    trace: list[tuple[Any, Any]]


class Result(NamedTuple):
    """What a search found."""

    states: int
    steps: int
    #: The number of states on the longest of the shortest ways; the initial state counts.
    depth: int
    cpu_s: float
    #: Every reachable state was seen.
    is_complete: bool
    violation: Violation | None


def explore(
    model: Model, max_states: int | None = None, progress: Progress | None = None
) -> Result:
    """Visit all states, level by level, until one violates an invariant.

    Args:
        model: what to explore.
        max_states: give up, incomplete, at the end of the level in which so many are found.
        progress: called after each level.

    """
    began = time.process_time()
    initial = model.canonical(model.initial())
    came_from: dict[Any, Any] = {initial: None}
    level, depth, steps = [initial], 1, 0

    def result(*, is_complete: bool, bad: Any = None, invariant: str = "") -> Result:
        violation = Violation(invariant, _trace(model, came_from, bad)) if invariant else None
        cpu_s = time.process_time() - began
        return Result(len(came_from), steps, depth, cpu_s, is_complete, violation)

    if invariant := model.violated(initial):
        return result(is_complete=False, bad=initial, invariant=invariant)
    successors, canonical, violated = model.successors, model.canonical, model.violated
    while True:
        found = []
        for state in level:
            for _step, following in successors(state):
                steps += 1
                name = canonical(following)
                if name in came_from:
                    continue
                came_from[name] = state
                found.append(name)
                if invariant := violated(name):
                    depth += 1
                    return result(is_complete=False, bad=name, invariant=invariant)
        if not found:
            return result(is_complete=True)
        level, depth = found, depth + 1
        if progress is not None:
            progress(depth, len(came_from), steps, time.process_time() - began)
        if max_states is not None and len(came_from) >= max_states:
            return result(is_complete=False)


def _trace(model: Model, came_from: dict[Any, Any], bad: Any) -> list[tuple[Any, Any]]:
    """Walk again from the initial state, with the names that it began with."""
    names = [bad]
    while (previous := came_from[names[-1]]) is not None:
        names.append(previous)
    names.reverse()
    state = model.initial()
    trace: list[tuple[Any, Any]] = [(None, state)]
    for name in names[1:]:
        step, state = next(
            pair for pair in model.successors(state) if model.canonical(pair[1]) == name
        )
        trace.append((step, state))
    return trace
