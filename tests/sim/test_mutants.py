"""Every mutant is found by a few seeds, and the run that found it is clean without the mutant."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

import pytest

from tests.sim.mutants import MUTANTS
from tests.sim.mutation import Found, is_clean, search

if TYPE_CHECKING:
    from tests.sim.mutation import Mutant
    from tests.sim.plan import Plan

#: Maximum number of tried seeds. Any change of the draws changes the successful ones.
BUDGET_SEEDS = 160
#: The last successful seed of mutants that not every seed finds; it is tried first. An outdated one
#: only costs time: the search starts at 1 then.
LAST_FOUND_BY: Final[dict[str, int]] = {
    "acks_before_the_disk": 2,
    "after_is_ignored": 2,
    "another_number_for_a_copy": 3,
    "any_copy_expires_for_all": 2,
    "claims_are_no_sign_of_life": 56,
    "client_completes_on_a_majority": 21,
    "copies_are_decided": 3,
    "copies_of_a_claim_are_claims": 3,
    "decided_counts_as_confirmed": 2,
    "displaced_unit_is_guessed_again": 4,
    "early_stream_outlives_its_view": 4,
    "finalized_before_all_are_sealed": 4,
    "first_record_of_a_call_is_sealed": 3,
    "known_states_beside_other_reads": 8,
    "lack_of_room_without_a_tombstone": 2,
    "level_is_recorded_before_all_is_on_the_disk": 36,
    "lowered_level_is_not_recorded_first": 3,
    "missing_record_is_not_noticed": 6,
    "near_replica_says_not_yet": 2,
    "no_positions_are_skipped": 4,
    "nothing_expires": 2,
    "one_redirect_is_enough": 13,
    "one_replica_answers_a_read": 2,
    "only_confirmed_is_rolled_forward": 89,
    "promise_moves_to_the_next_epoch": 2,
    "raised_level_is_not_flushed": 8,
    "reads_are_not_fresh": 13,
    "rebuilt_leases_are_given_again": 8,
    "rebuilt_view_is_too_low": 3,
    "redirect_without_a_tombstone": 18,
    "refusal_beside_a_promise": 13,
    "refusals_are_counted": 3,
    "refused_moves_are_answered_as_done": 2,
    "requested_level_counts_as_recorded": 3,
    "rest_of_a_session_is_not_asked_for": 2,
    "restart_in_the_same_view": 2,
    "second_claim_wins": 2,
    "survivor_acks_after_its_promise": 6,
    "terms_begin_anew_with_a_name": 2,
    "trims_pass_what_cursors_hold": 3,
    "undecided_log_is_kept": 26,
    "unit_gets_behind_its_followers": 93,
    "unstable_records_are_delivered": 10,
    "views_do_not_matter": 4,
}

#: Mutants whose search from seed 1 takes 4 s or more of CPU.
LONG: Final = frozenset({
    "another_number_for_a_copy", "any_copy_expires_for_all", "any_shard_will_do",
    "append_returns_when_it_is_placed", "backup_of_three_knows_what_is_stable",
    "claims_are_no_sign_of_life", "client_completes_on_a_majority",
    "clock_stands_still_while_suspended", "confirmed_by_survivor_alone", "copies_are_decided",
    "copies_of_a_claim_are_claims", "finalized_before_all_are_sealed",
    "first_record_of_a_call_is_sealed", "known_states_are_kept", "known_states_beside_other_reads",
    "labels_never_change", "lack_of_room_without_a_tombstone", "lease_without_a_limit",
    "level_is_recorded_before_all_is_on_the_disk", "lost_region_still_votes",
    "moved_without_regions", "moves_of_former_terms_count", "near_backup_knows_what_is_stable",
    "no_positions_are_skipped", "nothing_expires", "one_redirect_is_enough",
    "only_confirmed_is_rolled_forward", "positions_go_back", "raised_level_is_not_flushed",
    "reads_are_not_compared", "reads_are_not_fresh", "rebuilt_leases_are_given_again",
    "rebuilt_view_is_too_low", "redirect_without_a_tombstone", "refusal_beside_a_promise",
    "refusals_are_counted", "refused_file_ends_the_server", "rest_of_a_session_is_not_asked_for",
    "retired_shard_comes_back_live", "second_claim_wins", "silence_is_not_awaited",
    "stable_counts_promises", "stretch_is_skipped", "survivor_acks_after_its_promise",
    "tables_are_not_asked", "terms_begin_anew_with_a_name", "trimmed_before_the_checkpoint",
    "trims_pass_what_cursors_hold", "two_states_begin_one_view", "undecided_log_is_kept",
    "unstable_records_are_delivered", "values_before_the_horizon", "whole_history_is_sent",
})  # fmt: skip


def found(mutant: Mutant) -> Found:
    known = LAST_FOUND_BY.get(mutant.name)
    result = None if known is None else search(mutant, 1, known)
    result = result or search(mutant, BUDGET_SEEDS)
    assert result is not None, f"{mutant.name}: not found by {BUDGET_SEEDS} seeds ({mutant.focus})"
    return result


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, marks=pytest.mark.nightly if name in LONG else ())
        for name, mutant in MUTANTS.items()
    ],
    ids=str,
)
def test_a_broken_rule_is_found(mutant: Mutant) -> None:
    assert is_clean(mutant, found(mutant).seed)


def test_every_seed_that_is_remembered_is_of_a_mutant() -> None:
    assert not (LAST_FOUND_BY.keys() | LONG) - MUTANTS.keys()
    assert all(1 < seed <= BUDGET_SEEDS for seed in LAST_FOUND_BY.values())


def test_a_rule_that_is_broken_is_whole_again_afterwards() -> None:
    mutant = MUTANTS["frontier_passes_a_hole"]
    first = found(mutant)
    assert is_clean(mutant, first.seed)
    assert search(mutant, 1, first.seed) == first


def test_another_exception_is_a_bug_of_the_mutant() -> None:
    mutant = MUTANTS["frontier_passes_a_hole"]

    def undrawable(seed: int) -> Plan:
        raise KeyError(seed)

    with pytest.raises(KeyError):
        search(mutant._replace(draw=undrawable), 1)


def test_nothing_is_found_where_nothing_is_broken() -> None:
    whole = MUTANTS["frontier_passes_a_hole"]._replace(broken=nullcontext)
    assert search(whole, 3) is None
