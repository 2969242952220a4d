"""A backup's guesses: the slots that it promised to units before the primary's decision.

Only the primary's decision about the slot or the unit breaks a promise (D3). A unit that loses its
slots, or never got any, waits without slots (D4). The next guess comes after the highest decided
and the highest promised slot (D5, docs/protocol.md, section 4, rules 1 to 4).

Invariant: promises are in increasing gsn order, disjoint, and above all decided slots.
"""

from __future__ import annotations

from collections import OrderedDict
from operator import itemgetter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shard.state.epoch_clock import EpochClock
    from shard.state.sessions import HeldUnit

#: Number of consecutive decisions with one offset after which the backup realigns.
_REALIGN_AFTER: Final = 4
#: Largest offset that the backup follows, in slots; the next epoch corrects a greater one.
_MAX_OFFSET: Final = 65_536


class Guesses:
    """The promised slots of one backup."""

    def __init__(self, clock: EpochClock) -> None:
        self._clock: Final = clock
        #: Promised units by their first gsn, in increasing order.
        self.promised: OrderedDict[int, HeldUnit] = OrderedDict()
        #: The gsn after the last promise.
        self._promised_end = 0
        #: Slots to leave free before the next guess: this backup is behind the primary.
        self._slots_behind = 0
        #: Units that lost their promises to no-ops, with their record counts. The primary has
        #: probably placed them after the no-ops; its decision has not arrived.
        self._displaced_by_skips: dict[tuple[bytes, int], int] = {}
        #: Records that get no guess, because this backup is ahead of the primary.
        self._slots_ahead = 0
        #: Guesses below this gsn precede the last realignment; their offsets do not count.
        self._realigned_at = 0
        self._offset = 0
        self._same_offsets = 0

    def restore(self, units: Iterable[HeldUnit]) -> None:
        """Restore the promises that were made before a restart."""
        kept = [(unit.gsns[0], unit) for unit in units if unit.gsns is not None]
        self.promised = OrderedDict(sorted(kept, key=itemgetter(0)))
        self._update_promised_end()

    @property
    def is_aligned(self) -> bool:
        """Whether the backup is neither behind nor ahead of the primary, as far as it knows."""
        return not self._slots_behind and not self._slots_ahead

    def promise(self, unit: HeldUnit, floor: int) -> bool:
        """Promise the unit the slots that the primary will probably give it, from `floor` on.

        Returns False if it gets none: the backup is ahead, or its leases have no room.
        """
        if self._slots_ahead:
            self._slots_ahead = max(self._slots_ahead - unit.count, 0)
            return False
        gsns = self._clock.first_slots(max(floor, self._promised_end, unit.after + 1), unit.count)
        if gsns and self._slots_behind:
            gsns = self._leave_free(gsns, unit.count)
        if not gsns:
            return False
        unit.gsns = gsns
        unit.guess = gsns[0]
        self.promised[gsns[0]] = unit
        self._promised_end = gsns[-1] + 1
        return True

    def _leave_free(self, gsns: list[int], count: int) -> list[int]:
        """Return the gsns that are `_slots_behind` slots after these, if they are in one epoch."""
        free = self._clock.first_slots(gsns[0], self._slots_behind)
        self._slots_behind = 0
        self._displaced_by_skips.clear()
        if not free or free[0] != gsns[0]:
            return gsns
        return self._clock.first_slots(free[-1] + 1, count)

    def record_epochs(self) -> None:
        """Record the epochs of all promises: new leases may displace those of the promises."""
        for gsn, unit in self.promised.items():
            if unit.epoch < 0:
                unit.epoch = self._clock.epoch_at(gsn)

    def apply_place(self, unit: HeldUnit, gsns: list[int]) -> list[HeldUnit]:
        """Apply the placement of a unit: all slots up to its last one are decided.

        Breaks each promise that contradicts it. Returns the other units that lost their slots.
        """
        if unit.guess:
            if unit.gsns is not None:
                del self.promised[unit.gsns[0]]
            if self._displaced_by_skips:
                self.forget(unit)
            self._compare(unit.guess, gsns[0])
        displaced = self._break_below(gsns[-1] + 1)
        self._update_promised_end()
        return displaced

    def apply_skip(self, end: int) -> list[HeldUnit]:
        """Apply no-ops up to `end`; break their promises, and return the units that lost them."""
        displaced = self._break_below(end)
        if displaced:
            self._displaced_by_skips = {
                (loser.client, loser.seq): loser.count for loser in displaced
            }
            self._slots_behind = sum(self._displaced_by_skips.values())
        self._update_promised_end()
        return displaced

    def _break_below(self, end: int) -> list[HeldUnit]:
        """Break the promises below `end`; return their units."""
        promised = self.promised
        displaced: list[HeldUnit] = []
        while promised and (first := next(iter(promised))) < end:
            loser = promised.pop(first)
            loser.gsns = None
            displaced.append(loser)
        return displaced

    def forget(self, unit: HeldUnit) -> None:
        """Leave no slots free for a unit that lost its slots: the primary will not place it."""
        self._slots_behind -= self._displaced_by_skips.pop((unit.client, unit.seq), 0)

    def _update_promised_end(self) -> None:
        """Continue guessing after the highest promise that is left."""
        if not self.promised:
            self._promised_end = 0
            self._slots_ahead = 0  # without promises, the backup is not ahead of the stream
        else:
            highest = self.promised[next(reversed(self.promised))].gsns
            assert highest is not None
            self._promised_end = highest[-1] + 1

    def _compare(self, guessed: int, decided: int) -> None:
        """Detect a constant offset between guesses and decisions, and realign (D5)."""
        if guessed < self._realigned_at:
            return
        if guessed == decided:
            self._offset = self._same_offsets = 0
            return
        offset = self._clock.slots_between(guessed, decided)
        if not offset or abs(offset) > _MAX_OFFSET or offset != self._offset:
            self._offset = offset or 0
            self._same_offsets = 1 if offset else 0
            return
        self._same_offsets += 1
        if self._same_offsets == _REALIGN_AFTER:
            self._same_offsets = 0
            self._offset = 0
            self._realigned_at = self._promised_end
            self._displaced_by_skips.clear()
            if offset > 0:
                self._slots_behind = offset
            else:
                self._slots_ahead = -offset

    def check(self, decided_end: int) -> None:
        """Assert the invariant."""
        end = decided_end
        for first, unit in self.promised.items():
            assert unit.gsns is not None
            assert first == unit.gsns[0]
            assert first >= end, "promises overlap, or lie below a decision"
            assert not unit.confirmed
            end = unit.gsns[-1] + 1
