"""The replicated cursors: named positions with an owner.

    (none) --create, or a claim--> free or owned;  free --claim--> owned
    owned --release, seek--> free;  owned --claim, after silence--> owned, in another term
    any --delete--> (none)

Rules: a term is the next value of one counter, so the terms of a name only grow, also after it was
deleted. A move counts only in the present term, and never goes back; only a seek does, and it
begins a term. The first of two pending claims wins. A copy of a claim, a move or an edit counts
once; that of an edit gets the outcome of the first one.
Nothing here depends on time: the leader decides which owner is silent (`mms.cursors`).

Invariants: `check`. See docs/protocol.md, section 19.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from ziplog.core.cursors import MAX_CURSORS, MIN_LEASE_MS, Cursor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mms.commands import ClaimCursor, EditCursor, Refusal, ReleaseCursor
    from ziplog.core.cursors import CursorMove


#: Kind, cursor and nonce of an edit: what its copies have in common.
EditKey = tuple[str, str, bytes]
#: Number of latest edits whose copies change nothing. A client repeats an edit for a while only.
MAX_EDITS: Final = 256


class CursorTable:
    """All cursors of a cluster."""

    def __init__(
        self,
        cursors: Iterable[Cursor] = (),
        terms: int = 0,
        edits: Iterable[tuple[EditKey, Refusal]] = (),
    ) -> None:
        """Continue with these cursors.

        Args:
            cursors: all of them.
            terms: the last term that was given out.
            edits: the latest edits and their outcomes, oldest first.

        """
        self.edits: Final = dict(edits)
        self._by_name: Final = {cursor.name: cursor for cursor in cursors}
        self.terms = terms

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: str) -> Cursor | None:
        """Return a cursor; None if there is none of this name."""
        return self._by_name.get(name)

    def in_order(self) -> list[Cursor]:
        """Return all cursors, by name."""
        return sorted(self._by_name.values(), key=lambda cursor: cursor.name)

    def holder(self, gsn: int) -> Cursor | None:
        """Return the cursor that keeps the first record before `gsn` from being trimmed."""
        holding = [one for one in self._by_name.values() if one.is_holding and one.position < gsn]
        return min(holding, key=lambda one: (one.position, one.name), default=None)

    # --- commands ---

    def claim(self, command: ClaimCursor, trim: int, stop: int) -> Refusal:
        """Make a client the owner of a cursor.

        Args:
            command: the claim.
            trim: the first position that is not trimmed.
            stop: the end of all leases.

        """
        before = self._by_name.get(command.name)
        if before is None:
            if command.expects:
                return "no-such-cursor"
            refusal = self._create(command.name, command.start, command.hold_s, trim, stop)
            if refusal:
                return refusal
            cursor = self._by_name[command.name]
        elif before.claim == command.nonce:
            return ""  # A copy, also if the claim has ended meanwhile.
        elif before.term != command.expects:
            return "owned"
        elif before.position < trim:
            return "trimmed"
        else:
            cursor = replace(before, term=self._next_term())
        self._put(
            replace(
                cursor, move=0, owner=command.owner, owner_text=command.owner_text,
                claim=command.nonce, lease_ms=command.lease_ms, hold_s=command.hold_s,
                is_holding=command.hold_s > 0,
                moved_us=max(cursor.moved_us, command.at_us),
            )
        )  # fmt: skip
        return ""

    def _create(self, name: str, start: int, hold_s: int, trim: int, stop: int) -> Refusal:
        if len(self._by_name) >= MAX_CURSORS:
            return "full"
        if start > stop:
            return "no-such-position"
        term, position = self._next_term(), max(start, trim)
        cursor = Cursor(name, term, term, position, hold_s=hold_s, is_holding=hold_s > 0)
        self._put(cursor)
        return ""

    def move(self, move: CursorMove, stop: int, at_us: int) -> Refusal:
        """Move a cursor forward; a copy of an earlier move changes nothing."""
        cursor = self._by_name.get(move.name)
        if cursor is None:
            return "no-such-cursor"
        if cursor.term != move.term or not cursor.owner:
            return "stale-term"
        if move.move <= cursor.move and move.position <= cursor.position:
            return ""
        if move.position < cursor.position:
            return "goes-back"
        if move.position > stop:
            return "no-such-position"
        self._put(
            replace(
                cursor, position=move.position, mark=move.mark, move=max(cursor.move, move.move),
                has_moved=True, moved_us=max(cursor.moved_us, at_us),
            )
        )  # fmt: skip
        return ""

    def release(self, command: ReleaseCursor) -> Refusal:
        """End the ownership by the owner of a term."""
        cursor = self._by_name.get(command.name)
        if cursor is None:
            return "no-such-cursor"
        if cursor.term != command.term:
            return "stale-term"
        self._put(replace(cursor, owner=b"", owner_text=""))
        return ""

    def edit(self, command: EditCursor, trim: int, stop: int) -> Refusal:
        """Create, change or delete a cursor, unless it is a copy; arguments as of `claim`."""
        key = command.edit, command.name, command.nonce
        if key in self.edits:
            return self.edits[key]
        refusal = self._edit(command, trim, stop)
        if command.nonce:
            self.edits[key] = refusal
            if len(self.edits) > MAX_EDITS:
                del self.edits[next(iter(self.edits))]
        return refusal

    def _edit(self, command: EditCursor, trim: int, stop: int) -> Refusal:
        before = self._by_name.get(command.name)
        if before is not None and command.nonce and before.edit == command.nonce:
            return ""  # a copy, after a snapshot of a former release
        if command.edit == "create":
            if before is not None:
                return "exists"
            refusal = self._create(command.name, command.position, command.hold_s, trim, stop)
            if refusal:
                return refusal
            changed = self._by_name[command.name]
        elif before is None:
            return "no-such-cursor"
        elif command.edit == "delete":
            del self._by_name[command.name]
            return ""
        elif command.edit == "lapse":
            if before.term == command.expects:
                self._put(replace(before, is_holding=False))
            return ""
        elif command.edit == "seek" and command.position > stop:
            return "no-such-position"
        else:
            changed = self._edited(before, command, trim)
        self._put(replace(changed, edit=command.nonce, moved_us=command.at_us))
        return ""

    def _edited(self, cursor: Cursor, command: EditCursor, trim: int) -> Cursor:
        match command.edit:
            case "seek":
                return replace(
                    cursor, term=self._next_term(), position=max(command.position, trim), mark=b"",
                    move=0, seek=cursor.seek + 1, has_moved=False, owner=b"", owner_text="",
                    is_holding=cursor.hold_s > 0,
                )  # fmt: skip
            case "release":
                return replace(cursor, term=self._next_term(), move=0, owner=b"", owner_text="")
            case "pause":
                return replace(cursor, is_paused=True, pause_at=command.position)
            case _:
                return replace(cursor, is_paused=False, pause_at=0)

    def stop_holding(self, gsn: int) -> None:
        """End the holds of all cursors before `gsn`: the log is trimmed there by force."""
        for cursor in self.in_order():
            if cursor.is_holding and cursor.position < gsn:
                self._put(replace(cursor, is_holding=False))

    def _next_term(self) -> int:
        self.terms += 1
        return self.terms

    def _put(self, cursor: Cursor) -> None:
        self._by_name[cursor.name] = cursor

    def check(self, trim: int) -> None:
        """Assert the invariants; `trim`: the first position that is not trimmed."""
        assert len(self._by_name) <= MAX_CURSORS
        assert len(self.edits) <= MAX_EDITS
        terms = [cursor.term for cursor in self._by_name.values()]
        assert len(set(terms)) == len(terms), "two cursors of one term"
        for cursor in self._by_name.values():
            assert cursor.birth <= cursor.term <= self.terms
            assert cursor.lease_ms >= MIN_LEASE_MS
            assert not cursor.is_holding or cursor.hold_s > 0
            assert not cursor.is_holding or cursor.position >= trim, "a held position was trimmed"
            assert cursor.owner or not cursor.owner_text
