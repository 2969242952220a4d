"""Players in a simulated cluster: seeds without a violation, and mutants that are found."""

from __future__ import annotations

from typing import Final

import pytest

from tests.sim.player.mutants import MUTANTS, PlayerMutant, search
from tests.sim.player.plan import draw_player, draw_pushed
from tests.sim.player.run import run_player

#: Maximum number of tried seeds of a mutant.
BUDGET_SEEDS: Final = 30


@pytest.mark.parametrize("seed", [4, 9, 14])
def test_a_run_violates_nothing(seed: int) -> None:
    assert run_player(draw_player(seed)).records


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(10, 210, 20))
def test_many_runs_violate_nothing(first: int) -> None:
    for seed in range(first, first + 20):
        run_player(draw_player(seed))


@pytest.mark.parametrize("seed", [2, 4])
def test_a_run_with_receivers_violates_nothing(seed: int) -> None:
    assert run_player(draw_pushed(seed)).records


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(10, 210, 20))
def test_many_runs_with_receivers_violate_nothing(first: int) -> None:
    for seed in range(first, first + 20):
        run_player(draw_pushed(seed))


def test_equal_seeds_give_equal_runs() -> None:
    assert run_player(draw_player(6)) == run_player(draw_player(6))


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=str)
def test_a_broken_rule_is_found(mutant: PlayerMutant) -> None:
    found = search(mutant, BUDGET_SEEDS)
    assert found is not None, mutant.rule
    assert run_player(mutant.draw(found[0])).records
