"""Mirrors of a simulated cluster: seeds without a violation, and mutants that are found."""

from __future__ import annotations

from typing import Any, Final
from unittest.mock import patch

import pytest

from logplayer.targets.log_target import LogTarget
from tests.sim.player.mirrors import MirrorPlan, draw_mirror, run_mirror
from tests.sim.player.mutants_of_mirrors import MUTANTS, MirrorMutant, repetitions, search
from ziplog.errors import ConfigError

#: Maximum number of tried seeds of a mutant.
BUDGET_SEEDS: Final = 20


@pytest.mark.parametrize("seed", [3, 8])
def test_a_run_violates_nothing(seed: int) -> None:
    assert run_mirror(draw_mirror(seed)).records


def refusals_of(plan: MirrorPlan) -> int:
    """Execute a plan; return how often a claim found another record in the mirror."""
    compare, found = LogTarget._check_last, 0

    def compared(self: LogTarget, *arguments: Any) -> None:
        nonlocal found
        try:
            compare(self, *arguments)
        except ConfigError:
            found += 1
            raise

    with patch.object(LogTarget, "_check_last", compared):
        run_mirror(plan)
    return found


def test_a_source_that_repeats_trimmed_rows_violates_nothing() -> None:
    assert any(refusals_of(repetitions(seed)) for seed in range(2, 2 + BUDGET_SEEDS))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_many_runs_with_repeated_rows_violate_nothing() -> None:
    """Many have a claim that must not continue; half of them have other faults, too."""
    refused = 0
    for seed in range(1, 41):
        plan = repetitions(seed)
        if seed % 2:
            drawn = draw_mirror(seed)
            faults = tuple(sorted([*plan.faults, *drawn.faults]))
            plan = plan._replace(players=drawn.players, faults=faults)
        refused += bool(refusals_of(plan))
    assert refused >= 10


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(10, 110, 20))
def test_many_runs_violate_nothing(first: int) -> None:
    for seed in range(first, first + 20):
        run_mirror(draw_mirror(seed))


def test_equal_seeds_give_equal_runs() -> None:
    assert run_mirror(draw_mirror(2)) == run_mirror(draw_mirror(2))


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=str)
def test_a_broken_rule_is_found(mutant: MirrorMutant) -> None:
    found = search(mutant, BUDGET_SEEDS)
    assert found is not None, mutant.rule
    assert run_mirror(mutant.draw(found[0])).records, "the rule, kept"
