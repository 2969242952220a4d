"""A backup's reports: which entries it holds, and whether the primary must forward at once.

The primary counts an entry as replicated once a report covers it. It forwards each batch at once
while that was last requested; otherwise it gathers several batches in one forward. A report is sent
when a forward requests it, when it changes something at the primary, or after a short time
(docs/protocol.md, sections 4 and 5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shard.state.replica_state import MAX_BACKLOG_BYTES
from ziplog.core.units import NEVER, NS_PER_MS
from ziplog.wire import Report

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState

#: Longest time that a report waits if nothing at the primary waits for it.
REPORT_LINGER_NS: Final = 10 * NS_PER_MS
#: Time after which the primary learns that decisions may wait again: another append may follow.
LINGER_AGAIN_NS: Final = NS_PER_MS
#: The primary may batch forwards while at most this many of the latest guesses were wrong.
COUNTED_GUESSES: Final = 256
MAX_WRONG_GUESSES: Final = 5
#: Longest interval between reports of a backup that has subscribers.
SUBSCRIBERS_REPORT_NS: Final = 500 * NS_PER_MS
#: Time after which the primary assumes that a silent backup has no subscribers any more.
SUBSCRIBERS_EXPIRY_NS: Final = 3 * SUBSCRIBERS_REPORT_NS
_ALL_WRONG: Final = (1 << COUNTED_GUESSES) - 1


class Reports:
    """What a backup reports in its view, and when."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        self._primary: Final = state.config.replicas[0].name.encode()
        #: Latest time of the next report, in ns; NEVER: none is due.
        self._due = NEVER
        #: The primary was asked to forward at once until this time, in ns. 0: it may batch. NEVER:
        #: the end is not known.
        self._at_once_until = NEVER
        #: The contents of the last report, and its time.
        self._last_entry = 0
        self._has_subscribers = self._has_followers = False
        self._sent_at = -(2**62)
        #: The latest guesses, a bit for each; 1: it was wrong.
        self._wrong_guesses = _ALL_WRONG

    @property
    def due(self) -> int:
        """Time until which no report is due if nothing changes, in ns."""
        return min(self._due, self._at_once_until or NEVER)

    def on_guess(self, *, is_right: bool) -> None:
        """Record whether the primary placed a unit where this backup guessed."""
        self._wrong_guesses = (self._wrong_guesses << 1 | (not is_right)) & _ALL_WRONG

    def on_forward(self, now: int, *, is_requested: bool) -> None:
        """Schedule a report of the entries in a forward."""
        if is_requested:
            self._due = now
        elif self._state.stream.last > self._last_entry:
            self._due = min(self._due, now + REPORT_LINGER_NS)

    def on_durable(self) -> None:
        """Schedule a report: more entries are on stable storage."""
        self._due = 0

    def on_batch_end(self, durable: int, now: int) -> None:
        """Report what is new or was requested. `durable`: the last entry on stable storage."""
        state, must_forward_at_once = self._state, self._must_forward_at_once
        may_batch = not self._at_once_until
        if not may_batch:
            if must_forward_at_once:
                self._at_once_until = NEVER
            elif self._at_once_until == NEVER:
                self._at_once_until = now + LINGER_AGAIN_NS
        if (
            now >= self.due
            or state.has_subscribers is not self._has_subscribers
            or state.has_followers is not self._has_followers
            or (must_forward_at_once and may_batch)
        ):
            self._report(durable, now, must_forward_at_once=must_forward_at_once)

    def _report(self, durable: int, now: int, *, must_forward_at_once: bool) -> None:
        state = self._state
        if state.store.backlog_bytes > MAX_BACKLOG_BYTES:
            self._due = now + REPORT_LINGER_NS
            if 0 < self._at_once_until < NEVER:
                self._at_once_until = self._due
            return
        if must_forward_at_once:
            self._at_once_until = NEVER
        elif now >= self._at_once_until:
            self._at_once_until = 0
        last = state.stream.last
        self._due, self._last_entry, self._sent_at = NEVER, last, now
        self._has_subscribers, self._has_followers = state.has_subscribers, state.has_followers
        state.send(
            self._primary,
            Report(
                state.cluster, state.shard, state.view, state.server, state.incarnation,
                last, min(durable, last), self._at_once_until > 0, self._has_subscribers,
                self._has_followers,
            ),
        )  # fmt: skip

    @property
    def _must_forward_at_once(self) -> bool:
        """Whether decisions must not wait at the primary: readers do, or guesses were wrong."""
        state = self._state
        return (
            state.has_followers
            or self._wrong_guesses.bit_count() > MAX_WRONG_GUESSES
            or (
                bool(state.awaiting)
                and state.is_awaited_from(state.clock.next_owned(state.stream.end))
            )
        )

    def tick(self, now: int) -> None:
        """Repeat the report that this backup has subscribers."""
        if self._has_subscribers and now >= self._sent_at + SUBSCRIBERS_REPORT_NS:
            self._due, self._sent_at = now, now

    def next_wakeup(self) -> int:
        """Return the time of the next report, in ns."""
        if self._has_subscribers:
            return min(self.due, self._sent_at + SUBSCRIBERS_REPORT_NS)
        return self.due
