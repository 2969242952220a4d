"""Results of seeds as data, and the command line that reproduces a run."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.sim.database.draws import draw as draw_database
from tests.sim.plan import draw
from tests.sim.run import run

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.sim.plan import Plan
    from tests.sim.stages import Outcome


class Result(NamedTuple):
    """The result of a seed."""

    seed: int
    outcome: Outcome | None
    #: The failure in one line; "" if it succeeded.
    failure: str


def command(plan: Plan) -> str:
    """Return the command line that reproduces a run."""
    words = [f"python -m tests.sim --seed {plan.seed}"]
    drawn = draw(plan.seed)
    if plan.database is not None:
        words.append("--logdb")
        drawn = draw_database(plan.seed)
    if plan.is_raft_real != drawn.is_raft_real:
        words.append("--raft" if plan.is_raft_real else "--no-raft")
    if plan.regions != drawn.regions:
        words.append("--regions" if plan.regions is not None else "--no-regions")
    for option, name in (("steps", "calls"), ("writers", "writers"), ("readers", "readers")):
        if getattr(plan, name) != getattr(drawn, name):
            words.append(f"--{option} {getattr(plan, name)}")
    if plan.faults != drawn.faults:
        words.append(f'--faults "{"; ".join(map(str, plan.faults))}"')
    return " ".join(words)


def fails(plan: Plan) -> bool:
    """Run a plan; return whether it failed."""
    return bool(attempt(plan).failure)


def attempt(plan: Plan) -> Result:
    """Run a plan; any exception is its failure."""
    try:
        return Result(plan.seed, run(plan), "")
    except Exception as error:  # noqa: BLE001 - as above
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:300]
        return Result(
            plan.seed,
            None,
            f"{type(error).__name__} {Path(where.filename).name}:{where.lineno} {text}",
        )


def attempt_all(plans: Iterable[Plan]) -> list[Result]:
    """Run some plans."""
    return [attempt(plan) for plan in plans]
