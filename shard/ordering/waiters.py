"""Clients that wait at a primary until a position is stable, or durable, on all replicas.

The primary replies once, as soon as the condition holds. A client that may have lost the reply
repeats its request under the same number (docs/protocol.md, sections 5 and 7). A client may wait
only for a position that is decided, or lies in a lease held. When the table is full, a connection
with fewer requests takes the place of the oldest request of the connection with the most.
Invariant: at most `MAX_WAITERS` requests of each kind wait, each for one position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core.entries import Skip
from ziplog.segments.entry import BusyError, UnreadableError
from ziplog.wire import Frontier, Synced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shard.state.replica_state import ReplicaState
    from ziplog.wire import Sync, Want

#: Most waiting requests of each kind.
MAX_WAITERS: Final = 1024


class _Requests:
    """Requests of one kind, each waiting until a watermark has passed its gsn."""

    def __init__(self) -> None:
        #: The gsn by route and request number; each route has a request.
        self._gsns: Final[dict[bytes, dict[int, int]]] = {}
        #: The number of requests.
        self.count = 0

    def add(self, route: bytes, request: int, gsn: int) -> bool:
        """Add a request, or a repetition of one; return False if there is no room for it."""
        mine = self._gsns.get(route, {})
        if request not in mine:
            if self.count >= MAX_WAITERS and not self._evict_oldest(len(mine)):
                return False
            self.count += 1
        self._gsns.setdefault(route, mine)[request] = gsn
        return True

    def _evict_oldest(self, held: int) -> bool:
        """Drop the oldest request of the route with the most, if it has more than `held` + 1.

        The client that sent the dropped request repeats it.
        """
        requests = max(self._gsns.values(), key=len)
        if len(requests) <= held + 1:
            return False
        del requests[next(iter(requests))]
        self.count -= 1
        return True

    def pop_below(self, mark: int) -> Iterator[tuple[bytes, int, int]]:
        """Remove and yield the requests with a gsn below the mark: route, request, gsn."""
        for route, requests in list(self._gsns.items()):
            for request, gsn in list(requests.items()):
                if gsn < mark:
                    del requests[request]
                    self.count -= 1
                    yield route, request, gsn
            if not requests:
                del self._gsns[route]


class Waiters:
    """The clients that wait at one primary, by route and request number."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        self._for_frontier: Final = _Requests()
        self._for_durable: Final = _Requests()

    def __len__(self) -> int:
        return self._for_frontier.count + self._for_durable.count

    def on_want(self, route: bytes, want: Want) -> None:
        """Reply when the frontier has passed a gsn, if the want has a request number."""
        if want.request and self._for_frontier.add(route, want.request, want.gsn):
            self.on_frontier()

    def on_frontier(self) -> None:
        """Reply to the requests that the frontier has passed."""
        if not self._for_frontier.count:
            return
        state, frontier = self._state, self._state.frontier
        for route, request, _ in self._for_frontier.pop_below(frontier):
            state.send(route, Frontier(state.cluster, state.shard, state.view, request, frontier))

    def on_sync(self, route: bytes, sync: Sync) -> None:
        """Reply when all records up to a gsn are on stable storage at all replicas.

        A client names a record that the primary acknowledged. A position that is not decided here
        may never be decided, so the request is refused.
        """
        if sync.gsn >= self._state.stream.end:
            self._state.refuse(route, sync.request, "not-stable", f"{sync.gsn} is not decided")
        elif self._for_durable.add(route, sync.request, sync.gsn):
            self.on_durable()

    def on_durable(self) -> None:
        """Reply to the requests for positions on stable storage at all replicas."""
        if not self._for_durable.count:
            return
        state, durable = self._state, self._state.stream.durable_end
        for route, request, gsn in self._for_durable.pop_below(durable):
            try:
                is_lost = self._is_lost(gsn)
            except BusyError as error:
                state.refuse(route, request, "not-ready", str(error))
                continue
            if is_lost:
                detail = f"{gsn} was lost with the memory of all servers"
                state.refuse(route, request, "no-such-position", detail)
                continue
            state.send(route, Synced(state.cluster, state.shard, state.view, request, durable))

    def _is_lost(self, gsn: int) -> bool:
        """Whether an acked record is missing, because a recovery replaced it by a no-op."""
        state = self._state
        if gsn < state.trim:
            return False
        try:
            entry = state.store.find(gsn)
        except BusyError:
            raise
        except UnreadableError:
            return False
        return entry is not None and type(entry.decision) is Skip
