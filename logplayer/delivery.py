"""What a task delivers next: its position, the records taken at it, and the rejected ones.

    looked --> cut --> given --succeeded--> position = given.stop
                         '--rejected--> a smaller part, or the same range without the record

Rejected records that a part keeps take space in it, so they count when it is halved.

Invariant: batches follow each other without a gap; each begins at `position`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logplayer.contract import RejectedRecord
from logplayer.retries import reason_of
from logplayer.selection import Cut

if TYPE_CHECKING:
    from logplayer.contract import OnRejected, Rejected
    from logplayer.ring import Ring
    from logplayer.selection import Selection


class Delivery:
    """The progress of one task within the log."""

    def __init__(self, selection: Selection, policy: OnRejected) -> None:
        """Deliver nothing yet.

        Args:
            selection: the task's.
            policy: what happens to a rejected record.

        """
        self._selection: Final = selection
        self._policy: Final = policy
        #: The target has everything below it.
        self.position = 0
        #: [position, looked) has no record of the task besides those of the cut.
        self.looked = 0
        #: The records that the target does not have yet, and their part that is under way.
        self.cut: Cut | None = None
        self.given: Cut | None = None
        #: Rejected records of the cut's range, by their positions.
        self._aside: list[tuple[int, RejectedRecord]] = []
        #: The cut has a record below it that will be rejected; 0: not known.
        self._suspect = 0
        #: The position of a rejected record that stops the task, and the reason.
        self._stop_before: tuple[int, str] | None = None

    def restart(self, position: int) -> None:
        """Continue at a position of another claim."""
        self.position = self.looked = position
        self._drop_cut()

    def _drop_cut(self) -> None:
        self.cut = self.given = None
        self._aside = []
        self._suspect, self._stop_before = 0, None

    def continue_at(self, position: int) -> None:
        """Continue where the target stands, after a step of unknown outcome."""
        cut, self.given = self.cut, None
        if cut is not None and cut.start == position == self.position:
            return  # Nothing of it was done.
        if cut is not None and cut.start < position < cut.stop:
            self.position = position
            self._pass(position)
            return
        is_ahead = self.position <= position <= self.looked
        self._drop_cut()
        self.position = position
        if not is_ahead:
            self.looked = position

    # --- looking ---

    def look(self, ring: Ring, limit: int) -> None:
        """Look for records from `looked` on, which the ring covers; `limit`: stop there."""
        cut = self.cut
        assert cut is None or not cut.is_full
        if not ring.has_record(self.looked):
            self.looked = max(self.looked, min(ring.stop, limit))
            return
        found = self._selection.cut(ring, self.position, self.looked, limit, cut)
        self.looked = max(self.looked, found.stop)
        if cut is None:
            self.cut = found if found.records else None
        elif found.records:
            cut.extend(found)
        else:
            cut.is_full |= found.is_full

    # --- batches ---

    def take(self, limit: int) -> Cut:
        """Return the next part of the cut to deliver, below a position."""
        cut = self.cut
        assert cut is not None
        cut.is_full = True  # A step is repeated with the same records.
        if self._stop_before is not None:
            limit = min(limit, self._stop_before[0])
        if self._suspect:
            limit = min(limit, self._middle(cut))
        self.given = cut.head(limit)
        return self.given

    def _middle(self, cut: Cut) -> int:
        """Return the end of the first half of what may be rejected."""
        positions = self._positions(cut.head(self._suspect))
        return positions[len(positions) // 2] if len(positions) > 1 else self._suspect

    def _positions(self, cut: Cut) -> list[int]:
        """Return the gsns of the records of a part, and of the rejected ones that it keeps."""
        aside = {origin for origin, _ in self._aside if origin < cut.stop}
        return sorted(aside.union(cut.origins))

    def take_empty(self, stop: int) -> Cut:
        """Return a step without records up to a position that was passed."""
        assert self.cut is None
        assert self.position < stop <= self.looked
        self.given = Cut(self.position, stop, 0)
        return self.given

    def take_nothing(self) -> Cut:
        """Return a step that passes no position."""
        self.given = Cut(self.position, self.position, 0)
        return self.given

    def rejected_of(self, cut: Cut) -> tuple[RejectedRecord, ...]:
        """Return the rejected records that a part of the cut has to keep."""
        return tuple(kept for origin, kept in self._aside if origin < cut.stop)

    def succeed(self) -> Cut:
        """Note that the part under way is done; return it."""
        given, self.given = self.given, None
        assert given is not None
        self.position = given.stop
        self._pass(given.stop)
        return given

    def _pass(self, position: int) -> None:
        """Drop what is below a position."""
        cut = self.cut
        self.looked = max(self.looked, position)
        if cut is not None:
            self.cut = cut.tail(position) if position < cut.stop else None
        self._aside = [one for one in self._aside if one[0] >= position]
        if self._suspect <= position:
            self._suspect = 0

    def skip(self, stop: int) -> None:
        """Pass positions without a step: the target stores no position."""
        self.given = None
        self.position = stop
        self._pass(stop)

    # --- rejected records ---

    @property
    def can_reject(self) -> bool:
        """Whether the part under way has a record to leave out, or can be halved."""
        given = self.given
        return given is not None and (bool(given.records) or len(self._positions(given)) > 1)

    def reject(self, error: Rejected) -> list[RejectedRecord]:
        """Handle the rejection of the part under way; return the records that are left out."""
        given, self.given = self.given, None
        assert given is not None
        if error.index is not None and 0 <= error.index < len(given):
            found = [error.index]
        elif len(self._positions(given)) > 1:
            self._suspect = given.stop
            return []
        else:
            found = list(range(len(given)))
        origin, why = given.origins[found[0]], reason_of(error)
        self._suspect = 0
        if self._policy == "stop":
            self._stop_before = (origin, why)
            return []
        out = [RejectedRecord(given.records[index], why) for index in found]
        self._leave_out(found, given)
        if self._policy == "dead-letter":
            self._aside += [(origin, one) for one in out]
        return out

    def _leave_out(self, indices: list[int], given: Cut) -> None:
        """Remove records from the cut; the part under way is its beginning."""
        old = self.cut
        assert old is not None
        new = Cut(old.start, old.stop, old.arrived)
        new.is_full = True
        assert old.records[: len(given)] == given.records
        for index, (record, origin) in enumerate(zip(old.records, old.origins, strict=True)):
            if index not in indices:
                new.add([record], origin)
        self.cut = new

    @property
    def stopped_by(self) -> str:
        """Why the record at the position stops the task; "": nothing stops it."""
        if self._stop_before is None or self.cut is None:
            return ""
        origin, why = self._stop_before
        return "" if self.cut.head(origin).records else f"the target rejects gsn {origin}: {why}"

    def try_again(self) -> None:
        """Deliver a record again that stopped the task."""
        self._stop_before = None

    def check(self) -> None:
        """Assert the invariants."""
        assert self.position <= self.looked
        for part in (self.cut, self.given):
            assert part is None or part.start == self.position, "a gap between two batches"
            assert part is None or part.stop <= self.looked
