"""Players in a simulated cluster: seeds without a violation, and mutants that are found."""

from __future__ import annotations

from typing import Final

import pytest

from tests.properties import seeds
from tests.sim.player import mutants_of_push as _mutants_of_push  # noqa: F401 - registers them
from tests.sim.player import mutants_of_receivers as _mutants_of_receivers  # noqa: F401 - likewise
from tests.sim.player.mutants import MUTANTS, PlayerMutant, losses_of_files, search
from tests.sim.player.plan import draw_player, draw_pushed
from tests.sim.player.run import run_player

#: Number of runs of a test: 2,000 at night, 2 by day.
RUNS: Final = 2
#: Maximum number of tried seeds of a mutant.
BUDGET_SEEDS: Final = 80
#: The last successful seed of mutants that not every seed finds; it is tried first.
LAST_FOUND_BY: Final = {
    "all_staged_files_are_removed": 64,
    "contents_are_not_synced": 2,
    "emptied_directory_is_complete": 2,
    "drains_do_not_wait": 4,
    "emptied_directory_is_fresh": 3,
    "empty_target_is_fresh": 2,
    "no_directory_sync": 2,
    "renamed_not_linked": 26,
    "replies_are_not_remembered": 5,
    "steps_leave_gaps": 2,
}
#: Mutants whose runs take long.
LONG: Final = frozenset({
    "all_staged_files_are_removed", "claims_are_counted_by_time", "contents_are_not_synced",
    "drains_do_not_wait", "no_fence", "older_targets_are_passed", "renamed_not_linked",
    "ring_skips", "seek_without_number", "silence_of_a_receiver_is_success", "term_begins_anew",
    "term_is_not_compared", "trim_passes_a_hold",
})  # fmt: skip


@pytest.mark.parametrize("block", seeds(1, 1_000))
def test_runs_violate_nothing(block: int) -> None:
    for seed in range(RUNS * block + 1, RUNS * (block + 1) + 1):
        assert run_player(draw_player(seed)).records


@pytest.mark.parametrize("seed", [2, 3])
def test_a_run_whose_files_are_removed_violates_nothing(seed: int) -> None:
    assert run_player(losses_of_files(seed)).records


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(10, 110, 20))
def test_many_runs_whose_files_are_removed_violate_nothing(first: int) -> None:
    for seed in range(first, first + 20):
        run_player(losses_of_files(seed))


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
    assert run_player(draw_player(4)) == run_player(draw_player(4))


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, marks=pytest.mark.nightly if name in LONG else ())
        for name, mutant in MUTANTS.items()
    ],
    ids=str,
)
def test_a_broken_rule_is_found(mutant: PlayerMutant) -> None:
    found = search(mutant, 1, LAST_FOUND_BY.get(mutant.name, 1)) or search(mutant, BUDGET_SEEDS)
    assert found is not None, mutant.rule
    assert run_player(mutant.draw(found[0])).records
