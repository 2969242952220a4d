"""The position of a scan, for bulk reads.

Rule: each step returns the end of its complete part; the last one returns `stop`. Each step has its
own deadline. Each fetch names the position, so a lost result (a cancelled task, a signal) is
returned again.

Invariant: `position` is after all returned units. See docs/protocol.md, section 14.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.errors import DeadlineError

if TYPE_CHECKING:
    from ziplog.client.common.requests import Scanned
    from ziplog.core.entries import Unit

#: The result of a step: units, and the gsn (exclusive) up to which they are complete.
Step = tuple[list["Unit"], int]


class ScanCursor:
    """The position of a scan, common to the blocking and the asyncio iterator."""

    def __init__(self, start: int, stop: int, timeout: float) -> None:
        self._stop: Final = stop
        self._timeout: Final = timeout
        #: The end of the units that were returned.
        self.position = start
        self._is_closed = False

    @property
    def has_ended(self) -> bool:
        """Whether no unit follows."""
        return self._is_closed or self.position >= self._stop

    def accept(self, scanned: Scanned) -> Step:
        """Return the result of a fetch, and advance the position.

        Raises:
            DeadlineError: the fetch made no progress.

        """
        if scanned.reached <= self.position:
            what = f"a scan up to gsn {self._stop} did not get beyond gsn {self.position}"
            raise DeadlineError(f"{what} within {self._timeout:g} s")
        step = scanned.units, scanned.reached
        # The last statement, so that no signal handler can interrupt after it.
        self.position = scanned.reached
        return step
