"""Seals: an append, a `seal` or a sealed tail returns once its position is sealed.

    call --(insert, or tail query)--> waits for its position --every shard passed it--> completed
                                             '--deadline--> ended, not sealed

A position is sealed once each shard that owns a position at or below it has reported a stable
frontier above (docs/protocol.md, section 17). A record whose insert begins later then gets a higher
position, at any shard and from any client.

Invariant: a call is completed as sealed only if its position is in the settled prefix.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ziplog.client.reads.stream_set import StreamNumbers
from ziplog.client.seals.settled_prefix import SettledPrefix
from ziplog.errors import DeadlineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.client.common.requests import SealRequest, TailRequest
    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.reads.tail import LogTail, TailQueries
    from ziplog.types import RecordId


#: Number of ended calls whose positions are kept.
_MOST_ENDED: Final = 64


class _Waiting(NamedTuple):
    """A call that waits for its position to be sealed."""

    gsn: int
    deadline: int
    result: Any
    #: Returns the error at the deadline, given what is awaited.
    error: Callable[[str], Exception]


class Seals(StreamNumbers):
    """The calls of a client that wait for a seal."""

    def __init__(self, context: StepContext, routing: Routing, tail_queries: TailQueries) -> None:
        super().__init__()
        self._context: Final = context
        self._routing: Final = routing
        self._tail_queries: Final = tail_queries
        self._prefix: Final = SettledPrefix(context, routing, self.numbers, tail_queries)
        self._waiting: Final[dict[int, _Waiting]] = {}
        #: (gsn, call) of each waiting call, and of some that have ended.
        self._by_gsn: Final[list[tuple[int, int]]] = []

    @property
    def waiting(self) -> bool:
        """Whether a call is pending."""
        return bool(self._waiting)

    # --- calls ---

    def prepare(self) -> None:
        """Begin to follow the shards, because a call will wait once its record is placed."""
        self._prefix.prepare()

    def start(self, call: int, request: SealRequest) -> None:
        """Start a call of `seal`."""
        rid = request.rid
        self.wait(call, rid.gsn, request.deadline, rid, lambda awaited: self._error(rid, awaited))

    def start_tail(self, call: int, request: TailRequest) -> None:
        """Start a tail call, which a sealed one ends when its position is sealed."""
        if not request.sealed:
            self._tail_queries.start(call, request)
            return

        def on_tail(tail: LogTail | DeadlineError) -> None:
            if isinstance(tail, DeadlineError):
                self._context.complete(call, tail)
            else:
                self.wait(call, tail.last.gsn, request.deadline, tail.last)

        self.prepare()
        self._tail_queries.query(call, request.deadline, on_tail, with_recent=False)

    def wait(
        self,
        call: int,
        gsn: int,
        deadline: int,
        result: Any,
        error: Callable[[str], Exception] | None = None,
        owner: int | None = None,
    ) -> None:
        """Complete a call with its result once `gsn` is sealed.

        Args:
            call: the call.
            gsn: the position.
            deadline: when it fails.
            result: of the call.
            error: returns the error at the deadline, given what is awaited; None: a
                `DeadlineError`.
            owner: the shard that has an append at the position.

        """
        if gsn < self._prefix.position or not gsn:
            self._context.complete(call, result)
            return
        self._waiting[call] = _Waiting(gsn, deadline, result, error or self._seal_error)
        heappush(self._by_gsn, (gsn, call))
        if deadline < self._context.next_timer:
            self._context.set_timer(deadline)
        self._prefix.want(gsn, owner)

    def _error(self, rid: RecordId, awaited: str) -> DeadlineError:
        """Return the error of `seal`, whose caller may have given any position."""
        end = self._prefix.leases_end
        if not 0 < end <= rid.gsn:
            return self._seal_error(awaited)
        return DeadlineError(
            f"no shard of {self._routing} was given the position {rid} yet: as far as this client"
            f" knows, the leases end before gsn {end}; seal a position that an insert or check_tail"
            " returned"
        )

    def _seal_error(self, awaited: str) -> DeadlineError:
        return DeadlineError(f"timed out waiting for {awaited}; nothing is lost: try again")

    def cancel(self, call: int) -> None:
        """Cancel a call, if it waits here."""
        ended = self._waiting.pop(call, None)
        if ended is None:
            return
        self._note_ended()
        if ended.gsn == self._prefix.wanted:
            self._prefix.lower(max((w.gsn for w in self._waiting.values()), default=0))

    def _note_ended(self) -> None:
        """Forget what belongs to calls that have ended."""
        if not self._waiting:
            self._prefix.rest()
        if len(self._by_gsn) > 2 * len(self._waiting) + _MOST_ENDED:
            self._by_gsn[:] = sorted((w.gsn, call) for call, w in self._waiting.items())

    def _awaited(self, gsn: int) -> str:
        """Return what the seal of a position waits for."""
        shards = self._routing.describe_silent(self._prefix.unsettled(gsn))
        return " and ".join(shards) or f"the membership service of {self._routing}"

    # --- time ---

    def on_batch_end(self) -> None:
        """Advance after a batch of messages, and complete the calls that are sealed."""
        prefix = self._prefix
        if not prefix.is_dirty:
            return
        prefix.end_batch()
        by_gsn, position, pop = self._by_gsn, prefix.position, self._waiting.pop
        if not by_gsn or by_gsn[0][0] >= position:
            return
        while by_gsn and by_gsn[0][0] < position:
            _, call = heappop(by_gsn)
            waiting = pop(call, None)
            if waiting is not None:
                self._context.complete(call, waiting.result)
        self._note_ended()

    def tick(self) -> None:
        """Do the work that is due; end the calls at their deadlines."""
        context = self._context
        for call, waiting in list(self._waiting.items()):
            if context.now >= waiting.deadline:
                self.cancel(call)
                context.counters.unsealed += 1
                context.complete(call, waiting.error(self._awaited(waiting.gsn)))
            else:
                context.set_timer(waiting.deadline)
        self._prefix.tick()

    def close(self) -> None:
        """Close the streams: the client is closing."""
        self._prefix.close()

    def check(self) -> None:
        """Assert the invariants."""
        self._prefix.check()
        by_gsn = set(self._by_gsn)
        for call, waiting in self._waiting.items():
            assert (waiting.gsn, call) in by_gsn, "a call would never be completed"
            assert self._context.next_timer <= waiting.deadline, "a deadline would be missed"
