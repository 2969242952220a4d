"""The turns of tasks that are behind the ring: in its turn, a task has a subscription of its own.

    waiting --free--> held --closed, or over while others wait--> (none)

A turn is over after `TURN_NS`, or once its task has not needed records for `IDLE_NS`: its target
hangs, or is slow. The task then waits behind the others, and continues from its own position.
A change wakes the readers whose turn may begin or be over.
"""

from __future__ import annotations

from itertools import islice
from typing import Final, Protocol

from ziplog.core.units import NEVER, NS_PER_S

#: Maximum number of subscriptions besides the feed.
MAX_TURNS: Final = 8
#: An attempt to subscribe may take the first 5 seconds.
TURN_NS: Final = 10 * NS_PER_S
IDLE_NS: Final = NS_PER_S


class Reader(Protocol):
    """What takes turns."""

    def wake(self) -> None:
        """Look soon whether the turn begins, or is over."""
        ...


class Turns:
    """The turns of one process."""

    def __init__(self) -> None:
        """Start with all turns free."""
        #: When each one began; and since when its reader has needed no records, or `NEVER`.
        self._held: Final[dict[Reader, int]] = {}
        self._idle: Final[dict[Reader, int]] = {}
        #: In the order of their arrival.
        self._waiting: Final[dict[Reader, None]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def take(self, reader: Reader, now: int) -> bool:
        """Take a free turn, or wait for one; return whether the reader has a turn."""
        if reader not in self._waiting:
            self._waiting[reader] = None
            self._wake()
        if self.is_next(reader):
            del self._waiting[reader]
            self._held[reader], self._idle[reader] = now, NEVER
            self._wake()
        return reader in self._held

    def _wake(self) -> None:
        """Wake the readers that a change concerns: those that have a turn, and the next one."""
        for reader in (*self._held, *islice(self._waiting, 1)):
            reader.wake()

    def is_next(self, reader: Reader) -> bool:
        """Whether the reader waits, and a turn is free for it."""
        return len(self._held) < MAX_TURNS and next(iter(self._waiting), None) is reader

    def note(self, reader: Reader, now: int, *, wants_records: bool) -> None:
        """Note whether the holder of a turn needs records."""
        self._idle[reader] = NEVER if wants_records else min(self._idle[reader], now)

    def over_at(self, reader: Reader) -> int:
        """Return when a held turn is over; `NEVER`: no other reader waits for it."""
        if not self._waiting:
            return NEVER
        return min(self._held[reader] + TURN_NS, self._idle[reader] + IDLE_NS)

    def leave(self, reader: Reader) -> None:
        """Give up a turn, or the wait for one. Idempotent."""
        if reader in self._held:
            del self._held[reader], self._idle[reader]
            self._wake()
        self.stop_waiting(reader)

    def stop_waiting(self, reader: Reader) -> None:
        """End the wait: the reader needs no records now. Idempotent."""
        if reader in self._waiting:
            del self._waiting[reader]
            self._wake()

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self._held) <= MAX_TURNS
        assert self._held.keys() == self._idle.keys()
        assert not self._held.keys() & self._waiting.keys()
