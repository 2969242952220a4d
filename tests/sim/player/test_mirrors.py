"""Mirrors of a simulated cluster: seeds without a violation, and mutants that are found."""

from __future__ import annotations

from typing import Final

import pytest

from tests.sim.player.mirrors import draw_mirror, run_mirror
from tests.sim.player.mutants_of_mirrors import MUTANTS, MirrorMutant, search

#: Maximum number of tried seeds of a mutant.
BUDGET_SEEDS: Final = 20


@pytest.mark.parametrize("seed", [3, 8])
def test_a_run_violates_nothing(seed: int) -> None:
    assert run_mirror(draw_mirror(seed)).records


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
