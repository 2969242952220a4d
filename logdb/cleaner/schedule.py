"""When a coordinator has a round to make, or to finish one that was begun by a dead one.

Rule: others' rounds that are open are waited for, up to a minute; what failed is tried again later.
Invariant: without news, whoever is idle stays so. See docs/logdb.md, section 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.client.common.requests import NEVER

if TYPE_CHECKING:
    from logdb.cleaner.settings import Counts, RoundSettings
    from logdb.state import State
    from ziplog.types import RecordId

#: How often it is asked whether a round is due.
_LOOK_NS: Final = 100_000_000
#: A key's share of a checkpoint, about, in bytes.
_KEY_BYTES: Final = 64


class Due:
    """Tells one coordinator when to begin. Times are monotonic nanoseconds."""

    def __init__(
        self, state: State, coordinator: bytes, settings: RoundSettings, counts: Counts
    ) -> None:
        """Begin; nothing is due before the first look.

        Args:
            state: what checkpoints are made of.
            coordinator: whose rounds are not another's.
            settings: how much is worth a round, and how long others are waited for.
            counts: what was done.

        """
        self._state: Final = state
        self.coordinator: Final = coordinator
        self._settings: Final = settings
        self._counts: Final = counts
        self._look_at = self._retry_at = 0
        #: The state's position at the last look, and whether something was due that had to wait.
        self._looked: RecordId | None = None
        self._is_waiting = False
        #: When each round that is open was seen first, by its mark's gsn.
        self._seen: dict[int, int] = {}
        #: The last round that was done, by anybody, and how much the last cut has left dead.
        self._done: RecordId | None = None
        self._dead = 0
        #: Where the checkpoint that we started from would have the log trimmed; None: not known.
        self._started: int | None = None

    @property
    def owed(self) -> int:
        """Where the log is still to be trimmed, as who should have may be dead; 0: nowhere."""
        started = self._started or 0
        return started if started > self._counts.trimmed else 0

    def watch(self, now: int) -> None:
        """See whose rounds are open, and whether one was done; after each batch of events."""
        state = self._state
        if state.last_done != self._done:
            self._done = state.last_done
            if state.last_begun is not None and state.last_begun.cut:
                self._dead = state.segments.dead_bytes
        if state.begun or self._seen:
            gsns = [mark.position.gsn for mark in state.begun.values()]
            self._seen = {gsn: self._seen.get(gsn, now) for gsn in gsns}

    def look(self, now: int) -> bool:
        """Whether something is to be begun now: to trim what is `owed`, or else a round."""
        if now < self._look_at:
            return False
        self._look_at = now + _LOOK_NS
        self._looked = self._state.position
        if self._started is None:
            self._started = self._state.trimmed
            self._retry_at = now + self._settings.retry_ns if self._started else 0
        owed = self.owed
        self._is_waiting = bool(owed) or self._is_worth_it()
        if not self._is_waiting:
            return False
        may_at = max(self._retry_at, 0 if owed else self._free_at(NEVER))
        self._look_at = max(may_at, self._look_at)
        return now >= may_at

    def next_look(self) -> int:
        """Return when to look; `NEVER`: after the next event."""
        has_news = self._is_waiting or self._state.position != self._looked
        return self._look_at if has_news else NEVER

    def ended(self, now: int, *, failed: bool) -> None:
        """What was begun is over."""
        self._look_at = now + _LOOK_NS
        if failed:
            self._retry_at = now + self._settings.retry_ns

    def stop(self) -> None:
        """Nothing is due any more, ever."""
        self._look_at = NEVER

    def cut(self) -> int:
        """Return where a round should cut the log; 0: it is not worth it."""
        cut = self._state.choose_cut()
        return cut if cut > self._state.trimmed else 0

    def is_first(self, begun: RecordId, now: int) -> bool:
        """Whether no other's round began before ours, whose mark was applied, and is open."""
        self.watch(now)
        return self._free_at(begun.gsn) <= now

    def _is_worth_it(self) -> bool:
        state, settings = self._state, self._settings
        keys = len(state.versions)
        if state.since_checkpoint >= max(keys, settings.every_records, 1):
            return True
        dead = state.segments.dead_bytes - self._dead
        return dead > max(settings.min_dead_bytes, _KEY_BYTES * keys) and self.cut() > 0

    def _free_at(self, before: int) -> int:
        """Return from when on no other's round that began before a gsn is waited for."""
        begun = self._state.begun.items()
        gsns = [mark.position.gsn for owner, mark in begun if owner != self.coordinator]
        seen = [self._seen[gsn] for gsn in gsns if gsn < before]
        return max(seen) + self._settings.leave_ns if seen else 0
