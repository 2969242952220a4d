"""Mutants of cursors. See tests/sim/mutation.

Three clients claim two cursors; `tests/sim/owners.py` compares what they learn.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from mms.cursor_moves import PendingMoves
from mms.cursor_table import CursorTable
from mms.cursors import Cursors
from tests.sim.mutation import LAN, LOSSY, busy, mutant, replaced
from tests.sim.plan import Fault

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mms.commands import ClaimCursor, Refusal
    from tests.sim.plan import Plan
    from tests.simulator.network import Conditions
    from ziplog.core.cursors import Cursor, CursorMove


def owners(seed: int, *faults: Fault, conditions: Conditions = LAN, **changes: Any) -> Plan:
    """Return a run with three clients that claim cursors."""
    return busy(
        seed, *faults, owners=3, conditions=conditions, calls=150, think_us=30_000, span_ms=4_000,
        **changes,
    )  # fmt: skip


def zombies(seed: int) -> Plan:
    """Return a run in which owners stand still for longer than their leases."""
    random = Random(f"zombies {seed}")
    pauses = [
        Fault(random.randrange(3_500), "pause", (f"owner-{random.randrange(3)}",), 600)
        for _ in range(10)
    ]
    return owners(seed, *pauses)


def lossy_owners(seed: int) -> Plan:
    """Return a run over a network that loses and repeats frames."""
    return owners(seed, conditions=LOSSY)


_ZOMBIES: Final = "owners stand still for longer than their leases"
_LOSSY: Final = "owners; lost and repeated frames"
_CALM: Final = "owners, and no faults"


@mutant(zombies, _ZOMBIES)
def moves_of_former_terms_count() -> Iterator[None]:
    """A move counts in the present term only (C2)."""
    move = CursorTable.move

    def moved(self: CursorTable, step: CursorMove, stop: int, at_us: int) -> Refusal:
        cursor = self.get(step.name)
        if cursor is not None and cursor.owner:
            number = step.move if step.term == cursor.term else cursor.move + 1
            position = max(step.position, cursor.position)
            step = replace(step, term=cursor.term, move=number, position=position)
        return move(self, step, stop, at_us)

    with replaced(CursorTable, "move", moved):
        yield


@mutant(owners, _CALM)
def silence_is_not_awaited() -> Iterator[None]:
    """A claim of an owned cursor waits until its owner was silent for its lease (C5)."""
    with replaced(Cursors, "_is_silent", lambda *_: True):
        yield


@mutant(owners, _CALM)
def claims_are_no_sign_of_life() -> Iterator[None]:
    """An owner that has just claimed a cursor is not silent (C5)."""
    decided = Cursors.on_decided

    def forgetful(self: Cursors, *arguments: Any) -> Any:
        before = dict(self._heard_at)
        effects = decided(self, *arguments)
        self._heard_at = before
        return effects

    with replaced(Cursors, "on_decided", forgetful):
        yield


@mutant(owners, _CALM)
def second_claim_wins() -> Iterator[None]:
    """Of two pending claims, the first one wins (C5)."""
    claim = CursorTable.claim

    def claimed(self: CursorTable, command: ClaimCursor, trim: int, stop: int) -> Refusal:
        before = self.get(command.name)
        if before is not None and before.claim != command.nonce:
            command = replace(command, expects=before.term)
        return claim(self, command, trim, stop)

    with replaced(CursorTable, "claim", claimed):
        yield


@mutant(lossy_owners, _LOSSY)
def copies_of_a_claim_are_claims() -> Iterator[None]:
    """A copy of a claim that was granted is answered with the same term (C4)."""
    claim, received = CursorTable.claim, Cursors.claim

    def claimed(self: CursorTable, command: ClaimCursor, trim: int, stop: int) -> Refusal:
        before = self.get(command.name)
        if before is not None and before.claim == command.nonce:
            self._put(replace(before, claim=b""))
            command = replace(command, expects=before.term)
        return claim(self, command, trim, stop)

    def repeated(self: Cursors, src: bytes, message: Any, now: int) -> Any:
        cursor = self._state.cursors.get(message.name)
        if cursor is None or cursor.claim != message.nonce:
            return received(self, src, message, now)
        copied = replace(cursor, claim=b"")
        with (
            replaced(self._state.cursors, "get", lambda _: copied),
            replaced(Cursors, "_is_silent", lambda *_: True),
        ):
            return received(self, src, message, now)

    with replaced(CursorTable, "claim", claimed), replaced(Cursors, "claim", repeated):
        yield


@mutant(owners, _CALM)
def terms_begin_anew_with_a_name() -> Iterator[None]:
    """The terms of a name grow also over its deletion (C1)."""
    create = CursorTable._create

    def created(self: CursorTable, *arguments: Any) -> Refusal:
        terms, self.terms = self.terms, 1_000_000 * len(self)
        refusal = create(self, *arguments)
        self.terms = max(terms, self.terms)
        return refusal

    with (
        replaced(CursorTable, "_create", created),
        replaced(CursorTable, "check", lambda *_: None),
    ):
        yield


@mutant(zombies, _ZOMBIES)
def refused_moves_are_answered_as_done() -> Iterator[None]:
    """A request is answered with the moves that were refused (C2)."""
    on_decided = PendingMoves.on_decided

    def decided(
        self: PendingMoves, encoded: bytes, moves: list[CursorMove], refusals: list[Refusal]
    ) -> Any:
        return on_decided(self, encoded, moves, ["" for _ in refusals])

    with replaced(PendingMoves, "on_decided", decided):
        yield


@mutant(owners, _CALM)
def positions_go_back() -> Iterator[None]:
    """A position goes back by a seek only (C2, C3)."""
    claim = CursorTable.claim

    def claimed(self: CursorTable, command: ClaimCursor, trim: int, stop: int) -> Refusal:
        before: Cursor | None = self.get(command.name)
        refusal = claim(self, command, trim, stop)
        after = self.get(command.name)
        if before is not None and after is not None and after.term != before.term:
            self._put(replace(after, position=max(before.position - 1, trim)))
        return refusal

    with replaced(CursorTable, "claim", claimed):
        yield


@mutant(owners, _CALM)
def trims_pass_what_cursors_hold() -> Iterator[None]:
    """A trim deletes nothing that a cursor holds (C7)."""
    with (
        replaced(CursorTable, "holder", lambda *_: None),
        replaced(CursorTable, "check", lambda *_: None),
    ):
        yield
