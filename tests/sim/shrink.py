"""Shrinks a failing plan: fewer faults, fewer clients, fewer calls, and it still fails.

A smaller plan is another run with other events; any failure of it counts. Rule: a step is kept only
if its run failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.sim.plan import Plan

#: Maximum number of runs.
BUDGET_RUNS: Final = 60


def shrink(plan: Plan, fails: Callable[[Plan], bool], budget: int = BUDGET_RUNS) -> Plan:
    """Return a failing plan that no single step can shrink further.

    Args:
        plan: a failing plan.
        fails: runs a plan, and returns whether it failed.
        budget: maximum number of runs.

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
    """Yield smaller plans, much smaller ones first."""
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
