"""Who waits for what a primary decided to be stable everywhere, or durable everywhere.

Rule: an answer is given once, as soon as it is true; who may have lost it asks again, under the
same number (docs/protocol.md, sections 5 and 7).
Invariant: at most `MAX_WAITERS` of each kind wait, each for one position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.segments.entry import UnreadableError
from ziplog.wire import Frontier, Skip, Synced

if TYPE_CHECKING:
    from shard.state import ReplicaState
    from ziplog.wire import Sync, Want

#: Of each kind.
MAX_WAITERS: Final = 1024


class Waiters:
    """Those who wait at one primary, by route and request, for a gsn."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        self._for_frontier: Final[dict[tuple[bytes, int], int]] = {}
        self._for_disk: Final[dict[tuple[bytes, int], int]] = {}

    @property
    def wait_for_frontier(self) -> bool:
        """Whether somebody waits for the frontier to pass a gsn."""
        return bool(self._for_frontier)

    def want(self, route: bytes, want: Want) -> None:
        """Answer, if that is asked for, when the frontier has passed a gsn."""
        waiters, key = self._for_frontier, (route, want.request)
        if want.request and (key in waiters or len(waiters) < MAX_WAITERS):
            waiters[key] = want.gsn
            self.frontier_moved()

    def frontier_moved(self) -> None:
        """Answer those whose gsn the frontier has passed."""
        if not self._for_frontier:
            return
        state, frontier = self._state, self._state.frontier
        for key, gsn in list(self._for_frontier.items()):
            if gsn < frontier:
                del self._for_frontier[key]
                route, request = key
                state.send(
                    route, Frontier(state.cluster, state.shard, state.view, request, frontier)
                )

    def sync(self, route: bytes, sync: Sync) -> None:
        """Answer when all up to a gsn is on stable storage at all replicas."""
        waiters, key = self._for_disk, (route, sync.request)
        if key in waiters or len(waiters) < MAX_WAITERS:
            waiters[key] = sync.gsn
            self.disks_moved()

    def disks_moved(self) -> None:
        """Answer those whose gsn is on stable storage at all replicas."""
        if not self._for_disk:
            return
        state, durable = self._state, self._state.stream.durable_end
        for key, gsn in list(self._for_disk.items()):
            if gsn < durable:
                del self._for_disk[key]
                route, request = key
                if self._is_lost(gsn):
                    detail = f"{gsn} was lost with the memory of all servers"
                    state.refuse(route, request, "no-such-position", detail)
                    continue
                state.send(route, Synced(state.cluster, state.shard, state.view, request, durable))

    def _is_lost(self, gsn: int) -> bool:
        """Whether a record that was acked here is not there: a recovery made a no-op of it."""
        state = self._state
        if gsn < state.trim:
            return False
        try:
            entry = state.store.find(gsn)
        except UnreadableError:
            return False
        return entry is not None and type(entry.decision) is Skip
