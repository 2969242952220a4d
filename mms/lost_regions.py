"""Lost regions: an operator gives them up, so views of their shards are confirmed without them.

    ChangeRegion(lost) -- a server there was heard within 10 s, or it is lost already: a read
                       barrier, then still so --> RegionChanged
    ChangeRegion -- `SetRegionLost` committed --> RegionChanged
    all servers there are up, none of their shards is recovering --> `SetRegionLost` (not lost)

Rule: the leader gives a region up only on an operator's request, and only while all of its servers
are silent. A request to end that is always committed, and no earlier proposal counts after it.

See docs/protocol.md, section 20.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mms import membership_rules
from mms.commands import SetRegionLost
from mms.proposals import NO_SHARD, Proposals
from mms.servers import UP_NS
from mms.waiting_requests import WaitingRequests
from ziplog.core.nearness import named
from ziplog.core.node import Send
from ziplog.core.units import NS_PER_S
from ziplog.wire import ChangeRegion, RegionChanged

if TYPE_CHECKING:
    from mms.servers import Server, Servers
    from mms.state import ClusterState
    from ziplog.core.node import Effect

#: Silence of each server of a region before the region can be given up.
SILENCE_S: Final = 10
#: Maximum number of servers or regions that a refusal names.
_MAX_NAMED: Final = 20


class LostRegions:
    """Handles changes of regions at one node of the membership service."""

    def __init__(self, state: ClusterState, servers: Servers) -> None:
        self._state: Final = state
        self._servers: Final = servers
        self._proposals: Final = Proposals()
        self._waiting: Final[WaitingRequests[ChangeRegion]] = WaitingRequests()

    # --- requests ---

    def would_answer(self, message: ChangeRegion, now: int) -> bool:
        """Whether this state decides a request: there is an obstacle, or the region is lost.

        An earlier proposal may still change that, and a newer leader may have.
        """
        is_lost = message.region in self._state.lost_regions
        return message.is_lost and (is_lost or bool(self._obstacle(message.region, now)))

    def submit(self, src: bytes, message: ChangeRegion, now: int) -> list[Effect]:
        """Handle an operator's request; the client repeats it until it is answered.

        One that `would_answer` comes after a read barrier, so that the answer is final.
        """
        answer = self._waiting.answer(src, message)
        if answer is not None:
            return [self._reply(src, message, answer)]
        if message.is_lost:
            if message.region in self._state.lost_regions:
                return [self._reply(src, message)]
            obstacle = self._obstacle(message.region, now)
            if obstacle and self._waiting.has(src, message):
                return []  # Its command may be applied all the same.
            if obstacle:
                return [self._reply(src, message, obstacle)]
        self._waiting.add(src, message)
        return self._propose(message.region, now, is_lost=message.is_lost)

    def on_refused(self, now: int) -> list[Effect]:
        """Handle the waiting requests again: consensus refused a proposal."""
        self._proposals.on_decided(NO_SHARD, SetRegionLost)
        waiting = self._waiting.pop(lambda _: True)
        return [effect for src, message in waiting for effect in self.submit(src, message, now)]

    def on_applied(self, command: SetRegionLost) -> list[Effect]:
        """Answer the requests that a commit fulfils; earlier proposals are out of turn now."""
        self._proposals.on_decided(NO_SHARD, SetRegionLost)
        decided = command.region, command.region in self._state.lost_regions
        done = self._waiting.pop(lambda message: (message.region, message.is_lost) == decided)
        return [self._reply(src, message) for src, message in done]

    def abandon(self) -> list[tuple[bytes, int]]:
        """Forget all requests; return their routes and numbers."""
        self._proposals.clear()
        return self._waiting.abandon()

    def _propose(self, region: str, now: int, *, is_lost: bool) -> list[Effect]:
        command = SetRegionLost(region, is_lost, self._state.region_changes)
        return self._proposals.propose(NO_SHARD, command, now)

    def _reply(self, src: bytes, message: ChangeRegion, obstacle: str = "") -> Effect:
        self._waiting.on_answered(src, message, obstacle)
        reply = RegionChanged(self._state.cluster, message.request, message.region, obstacle)
        return Send(src, reply)

    def _obstacle(self, region: str, now: int) -> str:
        """Return why a region cannot be given up, and what to do; "": it can."""
        if region not in self._state.regions:
            known = sorted(self._state.regions)[:_MAX_NAMED]
            return f"no storage server is there; name a region with servers: {named(known)}"
        silence_ns = SILENCE_S * NS_PER_S
        heard = [
            server.name
            for server in self._servers_in(region)
            if self._servers.silence(server, now) < silence_ns
        ]
        if not heard:
            return ""
        more = f", and {len(heard) - _MAX_NAMED} more" if len(heard) > _MAX_NAMED else ""
        return (
            f"{', '.join(heard[:_MAX_NAMED])}{more} may run: the membership leader counts less than"
            f" {SILENCE_S} s of silence. Stop the servers there, or wait, and try again"
        )

    # --- the end ---

    def end(self, now: int) -> list[Effect]:
        """Let the lost regions count again whose servers are all back. For the leader."""
        return [
            effect
            for region in self._state.lost_regions
            if self._is_back(region, now)
            for effect in self._propose(region, now, is_lost=False)
        ]

    def _is_back(self, region: str, now: int) -> bool:
        """Whether all servers of a region are up, and no shard with a server there is recovering.

        Servers of a shard that is over do not count.
        """
        state = self._state
        servers = [
            server
            for server in self._servers_in(region)
            if not membership_rules.is_over(state, server.shard)
        ]
        return all(
            server.heartbeat is not None
            and now - server.last_heard_at < UP_NS
            and not server.is_in_limbo
            and server.shard not in state.recovering
            for server in servers
        )

    def _servers_in(self, region: str) -> list[Server]:
        """Return the servers that the placements have in a region."""
        return [
            server
            for placement in self._state.placements.values()
            for server, replica in zip(
                self._servers.replicas(placement.shard), placement.replicas, strict=True
            )
            if replica.region == region
        ]

    def check(self) -> None:
        """Assert the invariant."""
        self._waiting.check()
