"""Linearizability check: searches an order of a history's operations that explains all results.

The log as a sequential object for its clients (docs/protocol.md, sections 1 and 4-8):

* *held*: the record at each gsn. *closed*: no record will ever appear below it. *never*: single
  positions that a read reported as empty for ever. *trim*: the trim point. *position*: of each
  subscription.
* `insert` places each record at a free position that is not closed, above `after`, at one shard and
  in the order of the call. The order of gsns implies nothing about real time. After
  `OutcomeUnknownError`, or without a result, a record may be placed at any time after the call, or
  never. After an error that excludes an effect, or if `resolve` returned None: never. A rid from
  `resolve` or from an error's `results` was placed by then.
* An append, also one that `resolve` ends, and `seal` close everything up to their last position
  before they return (section 17): the records of the append are held by then.
* `read` with a record: it is held. `NoSuchRecordError`: no record of that shard is held there; if
  the reason is a no-op or another shard's position, none ever will be.
* A fetch returns all held records from the subscription's position to its last returned record, and
  no others. It closes everything up to there, also below the subscription's start: every frontier
  is beyond it (section 5). At its end, a subscription has passed every insert that was complete at
  its start (none, if it starts beyond them). `RID_RECENT` starts at its first record.
* `trim` takes effect once, before it returns (after a timeout: at some time or never), and closes
  everything below: it is committed when all frontiers are there. Afterwards readers may receive
  `TrimmedError`, but each replica learns the trim point separately. Only reads and subscriptions
  that began after `trim` returned must not receive a record below it.
* The *tail* has the guarantee of section 7 only: it is at or above every insert that was complete
  before the query. It is not linearizable: the client queries the shards one after the other, so
  the tail may be the second of two records while the first is missing; and a recovery may drop it.
  A sealed tail closes everything up to its result, too.
* `sync` concerns disks and is ignored. So are calls without an effect.

The search is Wing and Gong's, with Lowe's memory of visited sets. An operation may come next if no
unplaced operation had returned before its call. The set of placed operations determines the state,
so only the set is remembered. A step that conflicts with no other one is placed at once. Positions
that no fetch and no trim reaches are independent objects, searched one by one: linearizability is
local (Herlihy and Wing).
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
    Sealing,
    State,
    Step,
    Trimming,
    steps_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Number of searched states after which a history counts as not decided.
BUDGET_STATES: Final = 20_000


@dataclass(frozen=True)
class Explanation:
    """The reason why a history is not linearizable, or that the search did not decide."""

    #: False: the budget ended before an order was found.
    is_decided: bool
    #: The first operation with an unexplainable result.
    culprit: Operation
    #: A longest possible order.
    placed: list[Operation]
    #: The candidates for the next step, and the reasons against them.
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
    """Search an order of the operations that explains all results.

    Args:
        operations: of a history (`History.operations`), up to about 40.
        budget_states: maximum number of searched states.
        lost: (shard, start, stop): operations at these positions are ignored.

    Returns:
        None: there is one. Else the reason why there is none (for the shortest prefix of the
        history without one), or that the budget was used up.

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
    """Return the results known at a time."""
    return [
        o if o.returned is None or o.returned <= at else replace(o, returned=None, result=PENDING)
        for o in operations
        if o.called <= at
    ]


def _search_all(steps: Sequence[Step], budget_states: int) -> _Outcome:
    """Search each independent part."""
    states = 0
    for part in _parts(steps):
        outcome = _search(part, budget_states - states)
        states += outcome.states
        if not outcome.is_linearizable:
            return outcome._replace(states=states)
    return _Outcome(True, True, states, [], [])


def _parts(steps: Sequence[Step]) -> list[list[Step]]:
    """Return the independent parts."""
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
    """Return the position below which a step depends on all positions."""
    match step:
        case Passed(stop=stop) | Trimming(stop=stop) | Sealing(stop=stop):
            return stop
        case Refused(first=first):
            return first
    return 0


def _search(steps: Sequence[Step], budget_states: int) -> _Outcome:
    """Search for an order, depth first, in the order of return times."""
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
            if _is_harmless(step, steps, mask, state):
                branches = [branch]
                break
            branches.append(branch)
        stack.extend(reversed(branches))
    _, mask, state, path = best
    stuck = [(steps[i], steps[i].refusal(state)) for i in _enabled(steps, mask)]
    return _Outcome(True, False, len(seen), _unrolled(path), stuck)


def _enabled(steps: Sequence[Step], mask: int) -> list[int]:
    """Return the possible next steps: no unplaced step had returned before their calls."""
    left = [i for i in range(len(steps)) if not mask >> i & 1]
    limit = steps[left[0]].returned if left else END
    return [i for i in left if steps[i].called <= limit]


def _mark_harmful(steps: Sequence[Step]) -> None:
    """Mark the records with an important time of appearance: those that a read missed.

    A record that a fetch passed without returning it is not marked: it can appear neither before
    nor after the fetch. Neither is one of two records at a position: no order has both.
    """
    missed = {step.gsn for step in steps if isinstance(step, Missing)}
    for step in steps:
        if isinstance(step, Put):
            step.is_harmless = step.gsn not in missed


def _is_harmless(step: Step, steps: Sequence[Step], mask: int, state: State) -> bool:
    """Whether this step conflicts with no unplaced step."""
    if step.is_harmless or not isinstance(step, Passed | Trimming | Sealing):
        return step.is_harmless
    others = [other for i, other in enumerate(steps) if not mask >> i & 1 and other is not step]
    if any(isinstance(o, Put) and state.closed <= o.gsn < step.stop for o in others):
        return False
    return not isinstance(step, Passed) or not any(
        isinstance(o, Passed | Refused) and o.subscription == step.subscription for o in others
    )


def _unrolled(path: Any) -> list[Step]:
    steps: list[Step] = []
    while path is not None:
        step, path = path
        steps.append(step)
    return steps[::-1]
