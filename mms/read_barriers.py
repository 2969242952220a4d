"""Questions that are answered behind a read barrier.

    new -- a barrier is proposed for all new ones --> asked -- it is committed --> answered

A leader that was deposed without knowing it would answer from an old state; one that has seen its
own barrier applied has seen all that was committed before it. Who asks now and then is not kept
waiting; when many ask, they share barriers. Rule: a question is answered by a barrier proposed
after it came. Invariants: no more than `MAX_PENDING` wait, and barriers keep their distance but for
a few. See docs/protocol.md, section 3.
"""

from __future__ import annotations

from typing import Final

from mms.commands import Barrier
from ziplog.wire import LeaseQuery, Trim

_MS: Final = 1_000_000
#: Questions that wait; more are refused.
MAX_PENDING: Final = 256
#: Barriers keep this distance in the long run.
INTERVAL_NS: Final = 50 * _MS
#: So many may follow each other at once after a while without any.
BURST: Final = 8
#: A barrier that is not committed after this time never will be, as far as a client cares.
_LOST_NS: Final = 2000 * _MS

#: The way back, and what was asked.
PendingRead = tuple[bytes, LeaseQuery | Trim]


class ReadBarriers:
    """All questions that wait for consensus."""

    def __init__(self, incarnation: int) -> None:
        """`incarnation`: random, new in every process; makes the barriers' tokens unique."""
        self._incarnation: Final = incarnation
        self._new: list[PendingRead] = []
        #: By a barrier's token: when it was proposed, and who waits for it.
        self._waiting: dict[bytes, tuple[int, list[PendingRead]]] = {}
        self._barriers = 0
        #: When the next one would be due if all had kept their distance.
        self._next_allowed_at = 0

    def __len__(self) -> int:
        return len(self._new) + sum(len(questions) for _, questions in self._waiting.values())

    def add(self, src: bytes, question: LeaseQuery | Trim) -> None:
        """Let a question wait for the next barrier."""
        assert len(self) < MAX_PENDING
        self._new.append((src, question))

    def next_wakeup(self) -> int | None:
        """Return when the next barrier is due."""
        return self._due_at if self._new else None

    @property
    def _due_at(self) -> int:
        return self._next_allowed_at - (BURST - 1) * INTERVAL_NS

    def propose_barrier(self, now: int) -> Barrier | None:
        """Return the barrier to propose for the new questions, if one is due."""
        if not self._new or now < self._due_at:
            return None
        self._barriers += 1
        self._next_allowed_at = max(self._next_allowed_at, now) + INTERVAL_NS
        token = self._incarnation.to_bytes(8, "big") + self._barriers.to_bytes(8, "big")
        self._waiting[token] = (now, self._new)
        self._new = []
        return Barrier(token)

    def on_committed(self, barrier: Barrier) -> list[PendingRead]:
        """Return the questions that a committed barrier lets through."""
        return self._waiting.pop(barrier.token, (0, []))[1]

    def pop_lost(self, now: int) -> list[PendingRead]:
        """Forget, and return, the questions whose barrier did not come."""
        tokens = [token for token, (at, _) in self._waiting.items() if now >= at + _LOST_NS]
        return [question for token in tokens for question in self._waiting.pop(token)[1]]

    def abandon(self) -> list[PendingRead]:
        """Forget, and return, all questions."""
        every = [question for _, asked in self._waiting.values() for question in asked]
        every += self._new
        self._waiting.clear()
        self._new = []
        return every
