"""What storage servers are told: leases that they do not have, placements, the trim point.

Rule: only what is committed is told, and each server is told what follows the lease that it says it
has. A server that holds a lease that never was is told the true one, on which it halts (D30).
Invariant: a server that says that it lacks something is told within half a second of saying so.

See docs/protocol.md, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.node import Broadcast, Send
from ziplog.view import run_of
from ziplog.wire import LeaseAnnounced

if TYPE_CHECKING:
    from mms.leases import LeasePlan
    from mms.servers import Server, Servers
    from mms.state import ClusterState
    from ziplog.node import Effect
    from ziplog.view import LeaseRun
    from ziplog.wire import Heartbeat

#: A server that was told something is not told it again for this long.
_TOLD_NS: Final = 500_000_000


class Announcements:
    """Tells the storage servers of one cluster what is new."""

    def __init__(self, state: ClusterState, servers: Servers, plan: LeasePlan) -> None:
        self._state, self._servers, self._plan = state, servers, plan
        #: The lease with which placements last changed.
        self.placed_with = 0
        #: How often a server held a lease that was never committed: it was told to halt.
        self.contradictions = 0

    def lacks(self, server: Server, now: int) -> bool:
        """Whether a server does not know what is committed, and was not told just now."""
        state, message, last = self._state, server.heartbeat, self._state.last
        if message is None or last is None:
            return False
        if server.told == last.number and now - server.told_at < _TOLD_NS:
            return False
        return (
            server.told == 0
            or message.lease != last.number
            or self._is_unplaced(server, message)
            or message.trim < state.trim
            or state.contradicts(message.lease, message.digest)
        )

    def _is_unplaced(self, server: Server, message: Heartbeat) -> bool:
        """Whether a server may not know how its shard is placed."""
        return (
            message.state == "starting"
            or message.lease < self.placed_with
            or server.is_behind
            or server.shard in self._state.recovering
        )

    def tell(self, server: Server, now: int) -> Effect:
        """Tell one server, which was heard, all that is new."""
        message, last, state = server.heartbeat, self._state.last, self._state
        assert message is not None
        assert last is not None
        server.told, server.told_at = last.number, now
        if state.contradicts(message.lease, message.digest):
            self.contradictions += 1
            runs = [run_of(state.numbered(message.lease))]
        else:
            runs = state.runs_after(message.lease, message.digest)
        return Send(server.route, self._announcement(runs, now, with_placements=True))

    def tell_all(self, now: int) -> list[Effect]:
        """Tell every server that is heard what is new, once for all that lack the same."""
        state, last = self._state, self._state.last
        if last is None:
            return []
        effects: list[Effect] = []
        groups: dict[tuple[int, bytes, bool], list[bytes]] = {}
        for server in self._servers:
            message = server.heartbeat
            if message is None or server.state(now) == "down":
                continue
            if state.contradicts(message.lease, message.digest):
                effects.append(self.tell(server, now))
                continue
            server.told, server.told_at = last.number, now
            lack = (message.lease, message.digest, self._is_unplaced(server, message))
            groups.setdefault(lack, []).append(server.route)
        for (number, digest, unplaced), routes in groups.items():
            runs = state.runs_after(number, digest)
            announcement = self._announcement(runs, now, with_placements=unplaced)
            effects.append(Broadcast(tuple(routes), announcement))
        return effects

    def _announcement(
        self, runs: list[LeaseRun], now: int, *, with_placements: bool
    ) -> LeaseAnnounced:
        state = self._state
        starts_in_us = max(self._plan.starts - now, 0) // 1000
        placements = list(state.placements.values()) if with_placements else []
        return LeaseAnnounced(state.cluster, runs, starts_in_us, placements, state.trim)
