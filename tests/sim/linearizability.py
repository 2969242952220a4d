"""Is there an order of a history's operations in which the log could have done what clients saw?

The log that clients see (docs/protocol.md, sections 1 and 4-8), as a sequential object:

* *held*: from a gsn to the record there. *closed*: nothing will ever appear below it. *never*:
  single positions of which a read said that they stay empty. *trim*: the trim point. *position*: of
  each subscription, where it goes on.
* `insert` places each of its records, one by one, at a free position that is not closed, above
  `after`, at one shard and in the order of the call. The order of gsns says nothing of real time.
  Who got `OutcomeUnknownError` or nothing at all may be placed at any time after the call, or
  never; whoever got an error that says that nothing was done, and whose `resolve` said None, never.
  What `resolve` or an error's `results` name was placed by then.
* `read` that found a record: it is held. `NoSuchRecordError`: nothing of that shard is held there;
  if the reason is that it is a no-op, or not a position of that shard, it never will be.
* A fetch hands out all that is held from the subscription's position to the last record that it
  hands out, nothing else, and closes everything up to there, also what is below the subscription's
  start: every frontier is beyond it (section 5). If it says that it ended, it passed every insert
  that was complete when the subscription began (none, if it starts beyond them). `RID_RECENT`
  starts where its first record is.
* `trim` takes effect once, before it returns (or, if it timed out, at some time or never), and
  closes everything below: it is committed when all frontiers are there. From then on readers may be
  told `TrimmedError`, but each replica learns of it by itself: only a read or subscription that
  began after `trim` had returned is promised not to be given a record below it.
* The *tail* is no more than section 7 says: at or above every insert that was complete before it
  was asked for. It is not linearizable: shards are asked one after the other, so it may be the last
  of two records of which the higher one is missing; and it may name one that a recovery then drops.
* `sync` is about disks: it is not looked at. No more is any call that says that nothing was done.

The search is Wing and Gong's, with Lowe's memory of what was tried: an operation may come next if
no other one that is not placed yet had returned before it was called. What has been placed fixes
the state, whatever its order was, so the set alone is remembered. What cannot harm any other
operation is placed at once. Positions that no fetch and no trim reaches are objects of their own,
and searched one by one: linearizability is local (Herlihy and Wing).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tests.sim.history import PENDING, Operation
from tests.sim.steps import (
    END,
    Found,
    Missing,
    Passed,
    Put,
    Refused,
    State,
    Step,
    Trimming,
    steps_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: How many states are looked at before a history is given up as not decided.
BUDGET_STATES: Final = 20_000


@dataclass(frozen=True)
class Explanation:
    """Why a history is not linearizable, or that this is not known."""

    #: False: the budget was used up before any order was found.
    is_decided: bool
    #: The operation whose result cannot be explained any more; all before it can.
    culprit: Operation
    #: A longest order of what could be placed.
    placed: list[Operation]
    #: What could come next, and why it cannot.
    stuck: list[tuple[Operation, str]]
    states: int

    def __str__(self) -> str:
        if not self.is_decided:
            return f"not decided after {self.states} states"
        return "\n".join(
            (
                f"not linearizable ({self.states} states) once this returned:",
                f"    {self.culprit}",
                "the longest order that explains what came before:",
                *(f"    {operation}" for operation in self.placed),
                "and none of these can come next:",
                *(f"    {operation}: {why}" for operation, why in self.stuck),
            )
        )


class _Outcome(NamedTuple):
    is_decided: bool
    is_linearizable: bool
    states: int
    placed: list[Step]
    stuck: list[tuple[Step, str]]


def explain(
    operations: Sequence[Operation],
    *,
    budget_states: int = BUDGET_STATES,
    lost: Iterable[tuple[int, int, int]] = (),
) -> Explanation | None:
    """Look for an order of the operations in which the log could have done what clients saw.

    Args:
        operations: of a history (`History.operations`), up to about 40 of them.
        budget_states: when to give up.
        lost: (shard, start, stop): what happened at these positions is not looked at.

    Returns:
        None: there is one. Else: why there is none (of the shortest beginning of the history that
        has none), or that the budget was used up.

    """
    rows = list(lost)

    def outcome(upto: int) -> _Outcome:
        return _search_all(steps_of(_until(operations, upto), rows), budget_states)

    ends = sorted(o.returned for o in operations if o.returned is not None)
    if not ends:
        return None
    whole = outcome(END)
    if whole.is_linearizable:
        return None
    low, high, found = 0, len(ends) - 1, whole
    while whole.is_decided and low < high:
        middle = (low + high) // 2
        tried = outcome(ends[middle])
        if tried.is_decided and not tried.is_linearizable:
            high, found = middle, tried
        else:
            low = middle + 1
    culprit = next(o for o in operations if o.returned == ends[high])
    return Explanation(
        whole.is_decided,
        culprit,
        [step.operation for step in found.placed],
        [(step.operation, why) for step, why in found.stuck],
        whole.states,
    )


def _until(operations: Sequence[Operation], at: int) -> list[Operation]:
    """Return what was known at a time."""
    return [
        o if o.returned is None or o.returned <= at else replace(o, returned=None, result=PENDING)
        for o in operations
        if o.called <= at
    ]


def _search_all(steps: Sequence[Step], budget_states: int) -> _Outcome:
    """Search each part that is an object of its own."""
    states = 0
    for part in _parts(steps):
        outcome = _search(part, budget_states - states)
        states += outcome.states
        if not outcome.is_linearizable:
            return outcome._replace(states=states)
    return _Outcome(True, True, states, [], [])


def _parts(steps: Sequence[Step]) -> list[list[Step]]:
    """Return the parts that have nothing to do with each other."""
    reached = max(map(_reach, steps), default=0)
    parts: dict[object, list[Step]] = {}
    for step in steps:
        key: object = 0
        if type(step) is Step:
            key = step
        elif isinstance(step, Put | Found | Missing) and step.gsn >= reached:
            key = step.gsn
        parts.setdefault(key, []).append(step)
    return list(parts.values())


def _reach(step: Step) -> int:
    """Return below which position a step looks at all of them."""
    match step:
        case Passed(stop=stop) | Trimming(stop=stop):
            return stop
        case Refused(first=first):
            return first
    return 0


def _search(steps: Sequence[Step], budget_states: int) -> _Outcome:
    """Search for an order, depth first; what is to return first is tried first."""
    steps = sorted(steps, key=lambda step: (step.returned, step.called))
    _mark_harmful(steps)
    needed = sum(1 << i for i, step in enumerate(steps) if step.returned != END)
    seen: set[int] = set()
    best: tuple[int, int, State, Any] = (-1, 0, State({}), None)
    stack: list[tuple[int, int, State, Any]] = [(0, 0, State({}), None)]
    while stack:
        depth, mask, state, path = node = stack.pop()
        if mask & needed == needed:
            return _Outcome(True, True, len(seen), [], [])
        if mask in seen:
            continue
        if len(seen) >= budget_states:
            return _Outcome(False, False, len(seen), [], [])
        seen.add(mask)
        best = max(best, node, key=lambda row: row[0])
        branches = []
        for index in _enabled(steps, mask):
            step = steps[index]
            if step.refusal(state):
                continue
            branch = (depth + 1, mask | 1 << index, step.applied(state), (step, path))
            if _harms_nobody(step, steps, mask, state):
                branches = [branch]
                break
            branches.append(branch)
        stack.extend(reversed(branches))
    _, mask, state, path = best
    stuck = [(steps[i], steps[i].refusal(state)) for i in _enabled(steps, mask)]
    return _Outcome(True, False, len(seen), _unrolled(path), stuck)


def _enabled(steps: Sequence[Step], mask: int) -> list[int]:
    """Return what may come next: nothing that is not placed had returned before it was called."""
    left = [i for i in range(len(steps)) if not mask >> i & 1]
    limit = steps[left[0]].returned if left else END
    return [i for i in left if steps[i].called <= limit]


def _mark_harmful(steps: Sequence[Step]) -> None:
    """Note the records of which it matters when they appear: those that a read missed.

    What a fetch passed without handing it out is none of them: it can appear neither before the
    fetch nor after it. Nor is one of two at a position: no order has both.
    """
    missed = {step.gsn for step in steps if isinstance(step, Missing)}
    for step in steps:
        if isinstance(step, Put):
            step.is_harmless = step.gsn not in missed


def _harms_nobody(step: Step, steps: Sequence[Step], mask: int, state: State) -> bool:
    """Whether nothing that is not placed could be in the way of this step, or it in theirs."""
    if step.is_harmless or not isinstance(step, Passed | Trimming):
        return step.is_harmless
    others = [other for i, other in enumerate(steps) if not mask >> i & 1 and other is not step]
    if any(isinstance(o, Put) and state.closed <= o.gsn < step.stop for o in others):
        return False
    return isinstance(step, Trimming) or not any(
        isinstance(o, Passed | Refused) and o.subscription == step.subscription for o in others
    )


def _unrolled(path: Any) -> list[Step]:
    steps: list[Step] = []
    while path is not None:
        step, path = path
        steps.append(step)
    return steps[::-1]
