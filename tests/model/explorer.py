"""Breadth-first search of all states of a model, with a shortest trace to a violation.

A model defines states (hashable values), their successors, and violated invariants. `canonical`
merges states that differ only in names; that is sound if the initial state, the steps and the
invariants treat all names alike. Invariant: states are visited in the order of their depth, so the
first violation has a shortest trace.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    #: Depth, states found, steps taken, seconds of CPU.
    Progress = Callable[[int, int, int, float], None]


class Model(Protocol):
    """A state space."""

    def initial(self) -> Hashable:
        """Return the initial state."""

    def successors(self, state: Any) -> Iterable[tuple[Any, Any]]:
        """Return (step, next state) pairs."""

    def canonical(self, state: Any) -> Hashable:
        """Return the representative of all states that differ from `state` only in names."""

    def violated(self, state: Any) -> str | None:
        """Return the name of an invariant that does not hold in `state`."""


class Violation(NamedTuple):
    """A violated invariant, and a shortest trace: (step, state) pairs from the initial state.

    The step of the first pair is None.
    """

    invariant: str
    trace: list[tuple[Any, Any]]


class Result(NamedTuple):
    """The result of a search."""

    states: int
    steps: int
    #: The number of states of the longest shortest trace, including the initial state.
    depth: int
    cpu_s: float
    #: Every reachable state was visited.
    is_complete: bool
    violation: Violation | None


def explore(
    model: Model, max_states: int | None = None, progress: Progress | None = None
) -> Result:
    """Visit all states, level by level, until one violates an invariant.

    Args:
        model: the model.
        max_states: stop, incomplete, after the level that reaches this number of states.
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
    """Replay the trace from the initial state, with its names."""
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
