"""Read barriers: linearizable reads at the leader, confirmed by commands in the Raft log.

    new -- a barrier is proposed for all new requests --> waiting -- it is committed --> answered

A deposed leader could answer from an old state. A leader that applied its own barrier has applied
all that was committed before it. A token bucket limits barriers: rare requests do not wait,
frequent ones share barriers. Rule: a request is answered by a barrier that was proposed after the
request came. Invariants: at most `MAX_PENDING` requests wait, and barriers keep their interval but
for a burst. See docs/protocol.md, section 3.
"""

from __future__ import annotations

from typing import Final

from mms.commands import Barrier
from ziplog.core.units import NS_PER_MS, NS_PER_S
from ziplog.wire import ChangeRegion, CursorClaim, CursorQuery, FinishUpgrade, LeaseQuery, Trim

#: Maximum number of waiting requests; more are refused.
MAX_PENDING: Final = 256
#: Interval between barriers in the long run.
INTERVAL_NS: Final = 50 * NS_PER_MS
#: Maximum number of barriers in a row without that interval.
BURST: Final = 8
#: Time after which an uncommitted barrier counts as lost. A commit on slow disks takes seconds: a
#: shorter time would drop every request just before its barrier is committed.
_LOST_NS: Final = 10 * NS_PER_S

#: Requests that this state answers as it is: an earlier proposal, or that of a newer leader, may
#: have another outcome.
DecidedRequest = ChangeRegion | FinishUpgrade | CursorClaim
QueuedRead = LeaseQuery | Trim | CursorQuery | DecidedRequest
#: The route back to the client, and its request.
PendingRead = tuple[bytes, QueuedRead]


class ReadBarriers:
    """All requests that wait for consensus."""

    def __init__(self, incarnation: int) -> None:
        """`incarnation`: random, new in every process; makes the barriers' tokens unique."""
        self._incarnation: Final = incarnation
        self._new: list[PendingRead] = []
        #: By a barrier's token: when it was proposed, and the requests that wait for it.
        self._waiting: dict[bytes, tuple[int, list[PendingRead]]] = {}
        self._barriers = 0
        #: Token bucket: when the next barrier would be due if all had kept the interval.
        self._next_allowed_at = 0

    def __len__(self) -> int:
        return len(self._new) + sum(len(requests) for _, requests in self._waiting.values())

    def has(self, src: bytes, request: QueuedRead) -> bool:
        """Whether a copy of a request waits."""
        queues = [requests for _, requests in self._waiting.values()]
        return any((src, request) in queue for queue in (self._new, *queues))

    def add(self, src: bytes, request: QueuedRead) -> None:
        """Queue a request for the next barrier."""
        assert len(self) < MAX_PENDING
        assert not self.has(src, request)
        self._new.append((src, request))

    def next_wakeup(self) -> int | None:
        """Return when the next barrier is due."""
        return self._due_at if self._new else None

    @property
    def _due_at(self) -> int:
        return self._next_allowed_at - (BURST - 1) * INTERVAL_NS

    def propose_barrier(self, now: int) -> Barrier | None:
        """Return the barrier to propose for the queued requests, if one is due."""
        if not self._new or now < self._due_at:
            return None
        self._barriers += 1
        self._next_allowed_at = max(self._next_allowed_at, now) + INTERVAL_NS
        token = self._incarnation.to_bytes(8, "big") + self._barriers.to_bytes(8, "big")
        self._waiting[token] = (now, self._new)
        self._new = []
        return Barrier(token)

    def on_committed(self, barrier: Barrier) -> list[PendingRead]:
        """Remove and return the requests of a committed barrier."""
        return self._waiting.pop(barrier.token, (0, []))[1]

    def pop_lost(self, now: int) -> list[PendingRead]:
        """Remove and return the requests of barriers that were not committed in time."""
        tokens = [token for token, (at, _) in self._waiting.items() if now >= at + _LOST_NS]
        return [request for token in tokens for request in self._waiting.pop(token)[1]]

    def abandon(self) -> list[PendingRead]:
        """Remove and return all requests."""
        every = [request for _, requests in self._waiting.values() for request in requests]
        every += self._new
        self._waiting.clear()
        self._new = []
        return every
