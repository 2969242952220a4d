"""Lease announcements to storage servers: new leases, placements and the trim point.

Rule: only committed state is announced, and each server gets the leases that follow the one in its
heartbeat. A server with a lease that was never committed gets the committed one, and halts on it
(D30). A follower relays leases to a server that lacks them: its link to the leader may be cut.

If leases have many members, each new lease is also published, once for all servers that receive
publications. The other servers get messages of their own, and so do servers that lost one.

Invariants: a server that reports a gap gets an announcement within half a second. It fits a frame:
the server gets the runs that it needs, or, if it does not report them, the history part by part.

See docs/protocol.md, sections 3 and 13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from mms.servers import SUSPECT_NS
from ziplog.core.node import Broadcast, Publish, Send
from ziplog.core.view import MANY_MEMBERS, MAX_STEP, LeaseStep, difference, run_of
from ziplog.wire import LeaseAnnounced

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mms.leases import LeasePlan
    from mms.servers import Server, Servers
    from mms.state import ClusterState
    from ziplog.core.node import Effect
    from ziplog.core.view import Lease, LeaseRun, Member, Placement
    from ziplog.wire import Heartbeat

#: Minimum interval between two announcements of the same state to one server.
_ANNOUNCE_INTERVAL_NS: Final = 500_000_000
#: Age of a committed lease from which on a follower relays it to servers that lack it.
_RELAY_NS: Final = 1_000_000_000
#: The interval is at least this time for each member, for a server that holds no lease.
_WHOLE_NS_PER_MEMBER: Final = 1_000_000
#: Maximum number of cached membership changes: some seconds' worth at twenty leases a second.
_KEPT_CHANGES: Final = 256
#: Maximum size of the steps in one announcement; above it, whole leases are sent.
_MAX_STEPS_BYTES: Final = 1024 * 1024
#: What a group of servers gets, beside the placement of one shard: no placement, or the members'.
_NOTHING: Final = -1
_MEMBERS: Final = -2


class _Start(NamedTuple):
    """The point at which the leases of an announcement start."""

    #: The lease before the first one that is sent, and its digest.
    number: int
    digest: bytes
    #: The receiver does not hold that lease, and does not need it.
    is_cut: bool = False


class Announcements:
    """Builds the announcements to the storage servers of one cluster."""

    def __init__(
        self, state: ClusterState, servers: Servers, plan: LeasePlan, publisher: str
    ) -> None:
        self._state, self._servers, self._plan = state, servers, plan
        #: The endpoint at which this node publishes leases; "": it does not.
        self._publisher: Final = publisher
        #: When it last published one.
        self._published_at = 0
        #: The lease with which placements last changed.
        self.placements_changed_at = 0
        #: A lease that was committed at least `_RELAY_NS` ago, and the last one at a later time.
        self._relayed = self._noted = 0
        self._noted_at = 0
        #: Membership changes, by the number of the first lease of the run that has them.
        self._changes: dict[int, tuple[tuple[Member, ...], tuple[int, ...]]] = {}

    def is_due(self, server: Server, now: int) -> bool:
        """Whether a server gets an announcement now.

        It does if it lacks committed state that was not announced to it just now. A stopping server
        waits for an answer, so it gets one in any case.
        """
        state, message, last = self._state, server.heartbeat, self._state.last
        if message is None or last is None:
            return False
        if server.is_stopping:
            return True
        # A server without a lease gets whole leases, which take time to encode and to send.
        whole_ns = 0 if message.lease else len(last.members) * _WHOLE_NS_PER_MEMBER
        interval_ns = max(_ANNOUNCE_INTERVAL_NS, whole_ns)
        if message.has_gap:
            return now - server.announced_alone_at >= interval_ns
        lacks_state = message.lease != last.number or message.trim < state.trim
        if self._servers.receives_publications(message):
            # The last publication may still be on its way.
            lacks_state = lacks_state and now - self._published_at >= interval_ns
            knows_placement = self._was_announced(server, now)
        elif server.announced == last.number and now - server.announced_at < interval_ns:
            return False
        else:
            knows_placement = False
        return (
            server.announced == 0
            or lacks_state
            or (not knows_placement and self._is_unplaced(server, message))
            or state.contradicts(message.lease, message.digest)
        )

    def _is_unplaced(self, server: Server, message: Heartbeat) -> bool:
        """Whether a server may not know the placement of its shard or of other shards."""
        placement = self._state.placements.get(server.shard)
        return (
            message.shard_state != (placement.state if placement is not None else "")
            or message.state == "starting"
            or message.lease < self.placements_changed_at
            or server.is_behind
            or server.shard in self._state.recovering
        )

    def announce(self, server: Server, now: int) -> Effect:
        """Return the announcement of all new state to one server that sent a heartbeat."""
        message, last, state = server.heartbeat, self._state.last, self._state
        assert message is not None
        assert last is not None
        includes_placements = server.announced == 0 or self._is_unplaced(server, message)
        server.announced, server.announced_at, server.announced_alone_at = last.number, now, now
        if includes_placements:
            self._record_placement(server, now)
        if state.contradicts(message.lease, message.digest):
            runs = [run_of(state.numbered(message.lease))]
            return Send(server.route, self._announcement(now, self._placements(server), runs))
        placements = self._placements(server) if includes_placements else []
        start = self._start(message, message.lease, message.digest)
        following = self._following(start, placements, now)
        return Send(server.route, self._with_limit(following, server))

    def relay(self, server: Server, now: int) -> list[Effect]:
        """Return what a follower announces to a server that sent a heartbeat: what it lacks."""
        message, last = server.heartbeat, self._state.last
        if message is None or last is None:
            return []
        if now - self._noted_at >= _RELAY_NS:
            self._relayed, self._noted, self._noted_at = self._noted, last.number, now
        is_behind = message.lease < self._relayed
        if not is_behind or now - server.announced_alone_at < _ANNOUNCE_INTERVAL_NS:
            return []
        return [self.announce(server, now)]

    def _start(self, message: Heartbeat, number: int, digest: bytes) -> _Start:
        """Return the first lease that a server needs, if it holds those up to `number`."""
        if not message.needs_from:
            return _Start(number, digest)
        first = self._state.first_needed(number, message.needs_from)
        if first is None:
            return _Start(number, digest)
        return _Start(first.first.number - 1, first.first.predecessor, is_cut=True)

    def announce_all(self, now: int) -> list[Effect]:
        """Return announcements of all new state; servers that lack the same leases share one."""
        if self._state.last is None:
            return []
        return self._announce_to_many(now) if self._has_many_members else self._announce_to_few(now)

    def _announce_to_few(self, now: int) -> list[Effect]:
        """Return announcements of the leases, with the placements of all members if needed."""
        last = self._state.last
        assert last is not None
        effects: list[Effect] = []
        #: Servers by the start of their leases, and by what is placed for them.
        groups: dict[tuple[_Start, int], list[Server]] = {}
        for server, message in self._heard(self._servers, now):
            if self._state.contradicts(message.lease, message.digest):
                effects.append(self.announce(server, now))
                continue
            placed = _NOTHING
            if self._is_unplaced(server, message):
                # A shard that leaves has an announcement of its own, which may have its limit.
                is_alone = last.view_of(server.shard) is None or server.shard in self._state.retired
                placed = server.shard if is_alone else _MEMBERS
                self._record_placement(server, now)
            server.announced, server.announced_at = last.number, now
            start = self._start(message, message.lease, message.digest)
            groups.setdefault((start, placed), []).append(server)
        for (start, placed), group in groups.items():
            placements = self._placements(group[0]) if placed != _NOTHING else []
            announcement = self._following(start, placements, now)
            announcement = self._with_limit(announcement, group[0])
            effects.append(Broadcast(tuple(server.route for server in group), announcement))
        return effects

    def _announce_to_many(self, now: int) -> list[Effect]:
        """Publish the leases; return messages for the servers that the publication does not serve.

        Placements follow in a message for each server, so that leases are encoded only once.
        """
        state, last = self._state, self._state.last
        assert last is not None
        effects: list[Effect] = [self._publication(last, now)] if self._publisher else []
        groups: dict[_Start, list[Server]] = {}
        placed: list[Effect] = []
        is_placing = self.placements_changed_at == last.number
        for server, message in self._heard(
            self._servers if is_placing else self._servers.unserved, now
        ):
            if state.contradicts(message.lease, message.digest):
                effects.append(self.announce(server, now))
                continue
            number, digest = message.lease, message.digest
            if server.announced > number:
                # Assume that the server got the last announcement, so that one message serves all.
                number, digest = server.announced, state.digest_of(server.announced)
            if self._is_unplaced(server, message) and not self._was_announced(server, now):
                self._record_placement(server, now)
                placement = self._announcement(now, self._placements(server), [])
                placed.append(Send(server.route, self._with_limit(placement, server)))
            if not self._servers.receives_publications(message):
                server.announced, server.announced_at = last.number, now
                groups.setdefault(self._start(message, number, digest), []).append(server)
        for start, group in groups.items():
            routes = tuple(server.route for server in group)
            effects.append(Broadcast(routes, self._following(start, [], now)))
        return effects + placed

    @staticmethod
    def _heard(servers: Iterable[Server], now: int) -> Iterator[tuple[Server, Heartbeat]]:
        """Yield the servers that send heartbeats, and the last one of each."""
        for server in servers:
            if server.heartbeat is not None and now - server.last_heard_at < SUSPECT_NS:
                yield server, server.heartbeat

    @property
    def _has_many_members(self) -> bool:
        last = self._state.last
        return last is not None and len(last.members) >= MANY_MEMBERS

    def _publication(self, last: Lease, now: int) -> Effect:
        """Return the publication of the last lease."""
        self._published_at = now
        start = _Start(last.number - 1, last.predecessor)
        return Publish(
            msgspec.structs.replace(self._following(start, [], now), is_publication=True)
        )

    def _with_limit(self, announcement: LeaseAnnounced, server: Server) -> LeaseAnnounced:
        """Add the limit of a server's shard to an announcement that places the shard, if it left.

        The lease that shows the limit may be older than all the leases that the server needs.
        """
        retired = self._state.retired.get(server.shard)
        if not announcement.placements or retired is None or not retired.limit:
            return announcement
        return msgspec.structs.replace(announcement, limit=retired.limit)

    def _was_announced(self, server: Server, now: int) -> bool:
        """Whether the placement of a server's shard was announced to it just now."""
        placement = self._state.placements.get(server.shard)
        is_new = server.announced == 0 or server.announced_placement != placement
        return not is_new and now - server.placement_announced_at < _ANNOUNCE_INTERVAL_NS

    def _record_placement(self, server: Server, now: int) -> None:
        server.announced_placement = self._state.placements.get(server.shard)
        server.placement_announced_at = now

    def _placements(self, server: Server) -> list[Placement]:
        """Return the placements that a server needs: its own, and those of a few members."""
        placements, last = self._state.placements, self._state.last
        shards = {server.shard}
        if last is not None and len(last.members) < MANY_MEMBERS:
            shards.update(member.shard for member in last.members)
        return [placements[shard] for shard in sorted(shards) if shard in placements]

    def _following(self, start: _Start, placements: list[Placement], now: int) -> LeaseAnnounced:
        """Return the announcement of the leases from `start` on, as many as fit."""
        last = self._state.last
        changes = self._has_many_members and not start.is_cut
        steps = self._steps_after(start.number) if changes else None
        if last is None or steps is None:
            runs = self._state.runs_after(start.number, start.digest)
            found = self._announcement(now, placements, runs)
            return msgspec.structs.replace(found, is_cut=True) if start.is_cut else found
        return msgspec.structs.replace(
            self._announcement(now, placements, []),
            after=start.number, steps=steps, digest=last.digest,
        )  # fmt: skip

    def _steps_after(self, number: int) -> list[LeaseStep] | None:
        """Return the changes since lease `number`; None if they are unknown, or too many."""
        steps: list[LeaseStep] = []
        size = 0
        for index in range(len(self._state.runs) - 1, -1, -1):
            run = self._state.runs[index]
            last = run.last
            count = last.number - max(number, run.first.number - 1)
            if count <= 0:
                break
            if count > MAX_STEP or len(steps) == MAX_STEP:
                return None
            if run.first.number > number:
                change = self._change(index)
                if change is None:
                    return None
            else:
                change = ((), ())
            step = LeaseStep(count, last.epochs, last.epoch_size, last.epoch_ms, *change)
            size += step.max_bytes
            if size > _MAX_STEPS_BYTES:
                return None
            steps.append(step)
        return steps[::-1]

    def _change(self, index: int) -> tuple[tuple[Member, ...], tuple[int, ...]] | None:
        """Return how the members of a run differ from those of the run before it; None if unknown.

        Computed once for each run; a repeated announcement uses the cached change.
        """
        if index == 0:
            return None
        before, run = self._state.runs[index - 1], self._state.runs[index]
        change = self._changes.get(run.first.number)
        if change is None:
            change = difference(before.last.members, run.first.members)
            if len(self._changes) >= _KEPT_CHANGES:
                del self._changes[next(iter(self._changes))]
            self._changes[run.first.number] = change
        return change

    def _announcement(
        self, now: int, placements: list[Placement], runs: list[LeaseRun]
    ) -> LeaseAnnounced:
        state = self._state
        is_all = not runs or runs[-1].last == state.last
        starts_in_us = max(self._plan.starts - now, 0) // 1000 if is_all else 0
        publisher = self._publisher if self._has_many_members else ""
        return LeaseAnnounced(
            state.cluster, runs, starts_in_us, placements, state.trim, publisher=publisher
        )
