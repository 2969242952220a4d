"""Break each rule of a recovery once: the rule's test must fail.

Model checking showed for the first ones that their omission loses records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from shard import replica as module
from shard.ordering.admission import Admission
from shard.recovery import checkpoint, participant, state_transfer
from shard.recovery.failure_detector import FailureDetector
from shard.recovery.participant import RecoveryParticipant
from shard.recovery.state_transfer import StateTransfer
from shard.replica import Replica
from shard.serving.readers import Readers
from shard.state.replica_state import ReplicaState
from shard.state.sessions import Sessions
from tests.unit.shard import test_failure_detector as suspicion
from tests.unit.shard import test_recovery as held
from tests.unit.shard import test_recovery_meanwhile as meanwhile

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]


def without_the_promise(patch: Patch) -> None:
    """D20: the survivor's state is taken, and the survivor continues as before."""
    freeze = RecoveryParticipant.freeze

    def mutant(self: RecoveryParticipant, *args: Any) -> bool:
        done = freeze(self, *args)
        if done:
            self._state.server_state = "up"
        return done

    patch.setattr(RecoveryParticipant, "freeze", mutant)


def only_what_the_primary_confirmed(patch: Patch) -> None:
    """D22: promises are not rolled forward."""
    roll = RecoveryParticipant._roll_forward
    patch.setattr(
        RecoveryParticipant, "_roll_forward", lambda s, m, _promised, now: roll(s, m, [], now)
    )


def restart_in_the_same_view(patch: Patch) -> None:
    """D2: a frozen server resumes from its checkpoint."""
    save = checkpoint.save

    def mutant(state: Any) -> bytes:
        was, state.server_state = state.server_state, "up"
        saved = save(state)
        state.server_state = was
        return saved

    patch.setattr(module, "save", mutant)


def views_do_not_matter(patch: Patch) -> None:
    """D1: an insert of an older view is accepted."""
    admit = Admission.admit

    def mutant(self: Admission, route: bytes, message: Any, *rest: Any) -> Any:
        return admit(self, route, replace(message, view=self._state.view), *rest)

    patch.setattr(Admission, "admit", mutant)
    patch.setattr(FailureDetector, "on_beat", lambda *_: None)
    patch.setattr(Replica, "_beat", lambda *_: None)


def an_older_recovery_counts(patch: Patch) -> None:
    """D21: of two recoveries of one view, both may be decided."""

    def mutant(self: RecoveryParticipant, decision: Any) -> bool:
        self._state.view, self._state.server_state = decision.view, "joined"
        return True

    patch.setattr(RecoveryParticipant, "_enter", mutant)


def sessions_are_forgotten(patch: Patch) -> None:
    """D9: a copy that arrives after the recovery is placed again."""
    patch.setattr(Sessions, "add_tables", lambda _self, *_: None)


def an_undecided_log_is_kept(patch: Patch) -> None:
    """D25: a server keeps entries that the survivor does not have."""
    patch.setattr(state_transfer, "_common", lambda _, request: request.after)


def stable_entries_are_dropped(patch: Patch) -> None:
    """D43: stable entries are cut off with the rest."""

    def mutant(self: StateTransfer, keep: int, _trim: int) -> None:
        self._state.store.mark = None
        self._state.store.truncate(keep)
        self._after, self._after_view = keep, self._state.store.view_at(keep)

    patch.setattr(StateTransfer, "_cut", mutant)


def trims_delete_what_may_not_be_stable(patch: Patch) -> None:
    patch.setattr(ReplicaState, "delete_trimmed", lambda self: self.store.trim(self.trim))


def any_log_will_do(patch: Patch) -> None:
    patch.setattr(state_transfer, "may_be_same", lambda *_: True)


def sent_before_it_is_on_disk(patch: Patch) -> None:
    on_persisted = RecoveryParticipant.on_persisted

    def mutant(self: RecoveryParticipant) -> None:
        self._state.persisted = self._state.stream.last
        patch.setattr(participant, "digest_of", lambda _store: bytes(16))
        on_persisted(self)

    patch.setattr(RecoveryParticipant, "on_persisted", mutant)


def survivor_does_not_wait(patch: Patch) -> None:
    decided = Replica._view_decided
    patch.setattr(
        Replica,
        "_view_decided",
        lambda self, route, m: decided(self, route, replace(m, is_confirmed=True)),
    )


def a_witness_forgets_at_once(patch: Patch) -> None:
    patch.setattr(RecoveryParticipant, "freeze_for", RecoveryParticipant.leave)


def absent_within_the_view(patch: Patch) -> None:
    """D13: a refusal within a view proves nothing."""
    locate = Readers.locate
    patch.setattr(
        Readers, "locate", lambda self, route, m, now: locate(self, route, replace(m, view=0), now)
    )


def own_pause_counts_as_silence(patch: Patch) -> None:
    patch.setattr(FailureDetector, "on_pause", lambda *_: None)
    tick = FailureDetector.tick

    def mutant(self: FailureDetector, now: int, number: int) -> None:
        self._ticked_at = now
        tick(self, now, number)

    patch.setattr(FailureDetector, "tick", mutant)


MUTANTS: list[tuple[Mutant, Callable[[], None]]] = [
    (without_the_promise, held.test_frozen_server_takes_nothing_and_reports_nothing),
    (
        only_what_the_primary_confirmed,
        held.test_survivor_rolls_forward_what_it_acked_and_nothing_more,
    ),
    (restart_in_the_same_view, held.test_clean_stop_of_a_frozen_server_ends_in_limbo),
    (views_do_not_matter, meanwhile.test_other_views_are_refused_after_a_recovery),
    (
        views_do_not_matter,
        meanwhile.test_zombie_primary_neither_completes_an_insert_nor_moves_what_is_stable,
    ),
    (an_older_recovery_counts, held.test_promise_is_kept_for_the_newest_recovery_only),
    (sessions_are_forgotten, held.test_lost_data_directory_is_filled_again),
    (
        sessions_are_forgotten,
        held.test_retry_in_the_new_view_returns_the_position_that_the_record_has,
    ),
    (an_undecided_log_is_kept, held.test_log_that_was_not_chosen_is_cut_off),
    (
        an_undecided_log_is_kept,
        held.test_attempt_that_was_not_decided_is_cut_off_by_the_one_that_was,
    ),
    (stable_entries_are_dropped, held.test_server_that_would_have_to_drop_stable_entries_stops),
    (
        trims_delete_what_may_not_be_stable,
        held.test_a_server_in_limbo_deletes_no_entry_that_may_not_be_stable,
    ),
    (any_log_will_do, held.test_other_log_than_the_decided_one_stops_the_server),
    (sent_before_it_is_on_disk, held.test_promise_is_sent_only_once_it_is_on_disk),
    (
        survivor_does_not_wait,
        meanwhile.test_survivor_serves_nothing_new_before_its_view_is_confirmed,
    ),
    (
        a_witness_forgets_at_once,
        meanwhile.test_witness_remembers_its_view_until_it_has_all_of_the_next_one,
    ),
    (absent_within_the_view, meanwhile.test_clients_learn_the_outcome_of_their_inserts),
    (own_pause_counts_as_silence, suspicion.test_paused_server_suspects_no_peer),
]


@pytest.mark.parametrize(
    ("mutant", "test"), MUTANTS, ids=[f"{m.__name__}-{t.__name__[5:45]}" for m, t in MUTANTS]
)
def test_breaking_the_rule_is_noticed(
    mutant: Mutant, test: Callable[[], None], monkeypatch: Patch
) -> None:
    test()
    mutant(monkeypatch)
    with pytest.raises((AssertionError, ValueError, KeyError)):
        test()
