"""Makes a failing plan smaller: fewer faults, fewer clients, fewer calls, and it fails still.

A smaller plan is another run, in which everything may come otherwise; it counts if it fails at all,
since every failure is one too many. Rule: a step is kept only if the run was made and failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.sim.plan import Plan

#: Runs that shrinking makes at most.
BUDGET_RUNS: Final = 60


def shrink(plan: Plan, fails: Callable[[Plan], bool], budget: int = BUDGET_RUNS) -> Plan:
    """Return a plan that fails as well and has nothing that one step could take away.

    Args:
        plan: fails.
        fails: makes a run, and says whether it failed.
        budget: how many runs to make at most.

    """
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(plan):
            if budget == 0:
                return plan
            budget -= 1
            if fails(candidate):
                plan, is_smaller = candidate, True
                break
    return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Yield plans with less, those with much less first."""
    faults = plan.faults
    half = len(faults) // 2
    if half:
        yield plan._replace(faults=faults[:half])
        yield plan._replace(faults=faults[half:])
    for index in range(len(faults)):
        yield plan._replace(faults=faults[:index] + faults[index + 1 :])
    if plan.writers > 1:
        yield plan._replace(writers=1)
    if plan.readers > 1:
        yield plan._replace(readers=1)
    if plan.calls > 1:
        yield plan._replace(calls=plan.calls // 2)
