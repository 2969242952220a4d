"""Every mutant is found by a few seeds, and the run that found it is clean without the mutant."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest

from tests.sim.mutants import MUTANTS
from tests.sim.mutation import Found, is_clean, search
from tests.sim.plan import Plan, draw

if TYPE_CHECKING:
    from tests.sim.mutation import Mutant

#: Seeds that are tried until one finds it. Any change of what is drawn moves them.
BUDGET_SEEDS = 40


def found(mutant: Mutant) -> Found:
    result = search(mutant, BUDGET_SEEDS)
    assert result is not None, f"{mutant.name}: {BUDGET_SEEDS} seeds found nothing ({mutant.focus})"
    return result


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=str)
def test_a_broken_rule_is_found(mutant: Mutant) -> None:
    assert is_clean(mutant, found(mutant).seed)


def test_a_rule_that_is_broken_is_whole_again_afterwards() -> None:
    mutant = MUTANTS["frontier_passes_a_hole"]
    first = found(mutant)
    assert is_clean(mutant, first.seed)
    assert search(mutant, 1, first.seed) == first


def test_what_is_no_assertion_is_a_mistake_of_the_mutant() -> None:
    mutant = MUTANTS["frontier_passes_a_hole"]

    def undrawable(seed: int) -> Plan:
        raise KeyError(seed)

    with pytest.raises(KeyError):
        search(mutant._replace(draw=undrawable), 1)


def test_nothing_is_found_where_nothing_is_broken() -> None:
    whole = MUTANTS["frontier_passes_a_hole"]._replace(broken=nullcontext, draw=draw)
    assert search(whole, 3) is None
