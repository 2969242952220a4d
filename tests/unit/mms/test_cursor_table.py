"""The replicated table of cursors."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mms.commands import (
    ClaimCursor,
    EditCursor,
    MoveCursors,
    ReleaseCursor,
    SetTrim,
    decode_refusal,
    decode_refusals,
)
from mms.cursor_table import MAX_EDITS
from mms.state import ClusterState
from tests.unit.mms.test_state import apply, with_leases
from ziplog.core.cursors import MAX_CURSORS, Cursor, CursorMove

ALICE, BOB = b"a" * 16, b"b" * 16


def claim(name: str = "x", owner: bytes = ALICE, nonce: bytes = b"1", **more: Any) -> ClaimCursor:
    options: dict[str, Any] = {"start": 0, "lease_ms": 1000, "hold_s": 60, "expects": 0}
    options |= more
    return ClaimCursor(name, owner, owner.decode(), nonce, at_us=7, **options)


def move(state: ClusterState, term: int, number: int, position: int, mark: bytes = b"") -> str:
    moves = [CursorMove("x", term, number, position, mark)]
    (refusal,) = decode_refusals(state.apply(MoveCursors(moves, 8).encode()))
    state.check()
    return refusal


def edit(what: Any, nonce: bytes = b"e", position: int = 0, name: str = "x") -> EditCursor:
    return EditCursor(name, what, nonce, position, 60, 9)


def found(state: ClusterState, name: str = "x") -> Cursor:
    cursor = state.cursors.get(name)
    assert cursor is not None
    return cursor


def test_claim_creates_a_cursor() -> None:
    state = with_leases(2)
    assert apply(state, claim(start=5)) == ""
    cursor = found(state)
    assert (cursor.birth, cursor.term, cursor.position, cursor.owner) == (1, 1, 5, ALICE)
    assert (cursor.is_holding, cursor.has_moved, cursor.moved_us) == (True, False, 7)


def test_copy_of_a_claim_counts_once() -> None:
    state = with_leases(1)
    assert [apply(state, claim()), apply(state, claim())] == ["", ""]
    assert found(state).term == 1


def test_copy_of_the_last_claim_is_no_other_claim_after_its_end() -> None:
    state = with_leases(1)
    assert apply(state, claim()) == ""
    assert apply(state, ReleaseCursor("x", 1)) == ""
    before = found(state)
    assert apply(state, claim()) == ""
    assert found(state) == before


def test_first_of_two_pending_claims_wins() -> None:
    state = with_leases(1)
    assert apply(state, claim()) == ""
    assert apply(state, claim(owner=BOB, nonce=b"2", expects=1)) == ""
    # Proposed at the same time as Bob's:
    assert apply(state, claim(owner=ALICE, nonce=b"3", expects=1)) == "owned"
    assert (found(state).owner, found(state).term) == (BOB, 2)


def test_terms_of_a_name_grow_over_a_deletion() -> None:
    state = with_leases(1)
    assert apply(state, claim()) == ""
    assert move(state, 1, 1, 9) == ""
    assert apply(state, edit("delete")) == ""
    assert move(state, 1, 2, 10) == "no-such-cursor"
    assert apply(state, claim(nonce=b"2", expects=1)) == "no-such-cursor"
    assert apply(state, claim(nonce=b"3")) == ""
    assert (found(state).birth, found(state).term, found(state).position) == (2, 2, 0)
    assert move(state, 1, 2, 10) == "stale-term"


def test_move_counts_in_the_present_term_only_and_never_goes_back() -> None:
    state = with_leases(1)
    apply(state, claim())
    assert move(state, 1, 1, 9, b"m") == ""
    assert move(state, 1, 1, 9, b"m") == ""
    assert move(state, 1, 2, 8) == "goes-back"
    assert move(state, 2, 2, 10) == "stale-term"
    assert move(state, 1, 2, state.stop + 1) == "no-such-position"
    assert move(state, 1, 2, state.stop) == ""
    assert (found(state).position, found(state).has_moved) == (state.stop, True)


def test_late_copy_of_a_move_does_not_bring_its_mark_back() -> None:
    state = with_leases(1)
    apply(state, claim())
    assert move(state, 1, 1, 9, b"former") == ""
    assert move(state, 1, 2, 9, b"newer") == ""
    assert move(state, 1, 1, 9, b"former") == ""
    assert found(state).mark == b"newer"


def test_move_that_a_later_one_overtook_is_not_answered_as_done_without_its_position() -> None:
    state = with_leases(1)
    apply(state, claim())
    assert move(state, 1, 2, 9, b"second") == ""
    assert move(state, 1, 1, 12, b"first") == ""
    assert (found(state).position, found(state).mark, found(state).move) == (12, b"first", 2)
    assert move(state, 1, 2, 9, b"second") == ""
    assert found(state).mark == b"first"


def test_moves_of_each_term_are_numbered_from_the_beginning() -> None:
    state = with_leases(1)
    apply(state, claim())
    assert move(state, 1, 1, 9, b"former") == ""
    assert move(state, 1, 2, 10, b"former") == ""
    assert apply(state, claim(owner=BOB, nonce=b"2", expects=1)) == ""
    assert move(state, 2, 1, 10, b"newer") == ""
    assert found(state).mark == b"newer"


def test_released_cursor_takes_no_moves_and_keeps_its_position() -> None:
    state = with_leases(1)
    apply(state, claim())
    move(state, 1, 1, 9, b"m")
    assert apply(state, ReleaseCursor("x", 2)) == "stale-term"
    assert apply(state, ReleaseCursor("x", 1)) == ""
    assert apply(state, ReleaseCursor("x", 1)) == ""
    assert apply(state, ReleaseCursor("y", 1)) == "no-such-cursor"
    assert move(state, 1, 2, 10) == "stale-term"
    assert apply(state, claim(owner=BOB, nonce=b"2", expects=1)) == ""
    assert (found(state).position, found(state).mark, found(state).term) == (9, b"m", 2)


def test_seek_begins_a_term_and_may_go_back() -> None:
    state = with_leases(1)
    apply(state, claim())
    move(state, 1, 1, 9, b"m")
    assert apply(state, edit("seek", b"s", 4)) == ""
    assert apply(state, edit("seek", b"s", 4)) == ""
    cursor = found(state)
    assert (cursor.position, cursor.term, cursor.seek, cursor.mark) == (4, 2, 1, b"")
    assert (cursor.owner, cursor.has_moved) == (b"", False)
    assert move(state, 1, 2, 10) == "stale-term"
    assert apply(state, edit("seek", b"t", state.stop + 1)) == "no-such-position"


def test_pause_leaves_the_owner_and_its_term() -> None:
    state = with_leases(1)
    apply(state, claim())
    assert apply(state, edit("pause", b"p", 6)) == ""
    assert (found(state).state, found(state).pause_at, found(state).owner) == ("paused", 6, ALICE)
    assert move(state, 1, 1, 5) == ""
    assert apply(state, edit("resume", b"r")) == ""
    assert (found(state).state, found(state).term) == ("owned", 1)
    assert apply(state, edit("release", b"q")) == ""
    assert (found(state).state, found(state).term) == ("free", 2)


@pytest.mark.parametrize("what", ["seek", "pause", "resume", "release", "delete", "lapse"])
def test_change_of_a_missing_cursor_is_refused(what: str) -> None:
    assert apply(with_leases(1), edit(what)) == "no-such-cursor"


def test_creation_of_an_existing_cursor_is_refused() -> None:
    state = with_leases(1)
    assert apply(state, edit("create", b"1", 3)) == ""
    assert apply(state, edit("create", b"1", 3)) == ""
    assert apply(state, edit("create", b"2", 3)) == "exists"
    assert (found(state).position, found(state).state) == (3, "free")


def test_position_that_no_shard_owns_is_refused() -> None:
    state = with_leases(1)
    assert apply(state, claim(start=state.stop + 1)) == "no-such-position"
    assert apply(state, edit("create", b"1", state.stop + 1)) == "no-such-position"
    assert state.cursors.get("x") is None


def test_number_of_cursors_is_limited() -> None:
    state = with_leases(1)
    for number in range(MAX_CURSORS):
        command = claim(name=f"c{number}")
        assert decode_refusal(state.apply(command.encode())) == ""
    assert apply(state, claim(name="one-more")) == "full"


def test_held_position_is_not_trimmed() -> None:
    state = with_leases(1)
    apply(state, claim(start=5))
    assert apply(state, SetTrim(6)) == "held"
    assert apply(state, SetTrim(5)) == ""
    assert move(state, 1, 1, 9) == ""
    assert apply(state, SetTrim(9)) == ""
    assert state.trim == 9


def test_forced_trim_ends_the_holds_before_it() -> None:
    state = with_leases(1)
    apply(state, claim(start=5))
    apply(state, claim(name="y", owner=BOB, nonce=b"y", start=8))
    assert apply(state, SetTrim(8, force=True)) == ""
    assert [found(state, name).is_holding for name in "xy"] == [False, True]
    assert apply(state, claim(nonce=b"2", expects=1)) == "trimmed"
    assert apply(state, edit("seek")) == ""
    assert (found(state).position, found(state).is_holding) == (8, True)


def test_cursor_without_a_hold_does_not_stop_a_trim() -> None:
    state = with_leases(1)
    apply(state, claim(start=5, hold_s=0))
    assert apply(state, SetTrim(6)) == ""


def test_hold_lapses_only_in_the_term_that_was_unused() -> None:
    state = with_leases(1)
    apply(state, claim(start=5))
    lapse = EditCursor("x", "lapse", b"", 0, 0, 9, expects=1)
    apply(state, claim(owner=BOB, nonce=b"2", expects=1))
    assert apply(state, lapse) == ""
    assert found(state).is_holding
    assert apply(state, msgspec.structs.replace(lapse, expects=2)) == ""
    assert not found(state).is_holding


@pytest.mark.parametrize("later", ["pause", "seek"])
def test_copy_of_an_edit_counts_once_also_after_later_edits(later: str) -> None:
    state = with_leases(1)
    apply(state, claim())
    assert apply(state, edit("seek", b"1", 20)) == ""
    assert apply(state, edit(later, b"2", 5)) == ""
    before = found(state)
    assert apply(state, edit("seek", b"1", 20)) == ""
    assert found(state) == before


def test_copy_of_a_deletion_does_not_delete_a_later_cursor() -> None:
    state = with_leases(1)
    apply(state, claim())
    assert apply(state, edit("delete", b"1")) == ""
    assert apply(state, claim(owner=BOB, nonce=b"2")) == ""
    assert apply(state, edit("delete", b"1")) == ""
    assert found(state).owner == BOB


def test_copy_of_a_creation_does_not_bring_a_deleted_cursor_back() -> None:
    state = with_leases(1)
    for command in (edit("create", b"1"), edit("delete", b"2"), edit("create", b"1")):
        assert apply(state, command) == ""
    assert state.cursors.get("x") is None


def test_copy_of_a_refused_edit_is_refused_too() -> None:
    state = with_leases(1)
    assert apply(state, edit("pause", b"1")) == "no-such-cursor"
    apply(state, claim())
    assert apply(state, edit("pause", b"1")) == "no-such-cursor"
    assert not found(state).is_paused
    assert apply(state, edit("pause", b"2")) == ""


def test_copy_of_the_last_edit_counts_once_after_a_snapshot_without_edits() -> None:
    state, other = with_leases(1), ClusterState()
    apply(state, claim())
    assert apply(state, edit("seek", b"1", 20)) == ""
    former = msgspec.msgpack.decode(state.snapshot())[:-1]  # of an earlier release
    other.restore(msgspec.msgpack.encode(former))
    assert apply(other, claim(nonce=b"2", expects=2)) == ""
    before = found(other)
    assert apply(other, edit("seek", b"1", 20)) == ""
    assert found(other) == before


def test_snapshot_has_the_edits_whose_copies_may_come() -> None:
    state, other = with_leases(1), ClusterState()
    for number in range(MAX_EDITS + 1):
        what = "delete" if number % 2 else "create"
        assert apply(state, edit(what, b"%d" % number)) == ""
    other.restore(state.snapshot())
    assert len(other.cursors.edits) == MAX_EDITS
    assert other.snapshot() == state.snapshot()
    assert apply(other, edit("delete", b"1")) == ""
    assert other.cursors.get("x") is not None
    former = msgspec.msgpack.decode(state.snapshot())[:-1]  # of an earlier release
    other.restore(msgspec.msgpack.encode(former))
    assert apply(other, edit("delete", b"1")) == ""
    assert other.cursors.get("x") is None


def test_snapshot_has_the_cursors_and_the_terms() -> None:
    state = with_leases(1)
    apply(state, claim(start=5))
    apply(state, claim(name="y"))
    apply(state, edit("delete", name="y"))
    other = ClusterState()
    other.restore(state.snapshot())
    assert (other.cursors.in_order(), other.cursors.terms) == ([found(state)], 2)
    assert other.snapshot() == state.snapshot()
