"""The hints of other shards at a backup: which no-ops its primary probably decides.

The primary gives up its positions below a hint, unless the hint was lost or it has no readers. So a
backup follows hints until its primary has placed several units below one. Then it ignores hints
until the primary follows one (docs/protocol.md, section 13.4).
"""

from __future__ import annotations

from typing import Final

#: Number of units in a row that the primary places below a hint before the backup ignores hints.
#: One or two may have arrived before the hint there, and after it here.
MAX_UNITS_BELOW: Final = 4


class Hints:
    """The hints that a backup has received in its view."""

    def __init__(self) -> None:
        #: The next guess is not below this position.
        self.floor = 0
        self._highest = 0
        self._is_followed = True
        self._units_below = 0

    def on_hint(self, gsn: int) -> None:
        """Record a hint."""
        self._highest = max(self._highest, gsn)
        if self._is_followed:
            self.floor = self._highest

    def on_skip(self, stop: int) -> None:
        """Record that the primary gave up the positions below `stop`."""
        if stop == self._highest:
            self._is_followed, self._units_below = True, 0

    def on_place(self, guess: int, gsn: int) -> None:
        """Record the position of a unit, and the guess of it; 0: there was none."""
        if not guess:
            return
        self._units_below = self._units_below + 1 if guess >= self.floor > gsn else 0
        if self._units_below == MAX_UNITS_BELOW:
            self.floor, self._is_followed = 0, False
