"""What storage servers are told: leases that they do not have, placements, the trim point.

Rule: only what is committed is told, and each server is told what follows the lease that it says it
has. A server that holds a lease that never was is told the true one, on which it halts (D30).
Invariants: a server that says that it lacks something is told within half a second of saying so;
an announcement fits a frame, however long the history of leases is: a server is sent the runs that
it needs, or if it does not say what it needs, one part of the history after the other.

See docs/protocol.md, sections 3 and 13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from ziplog.core.node import Broadcast, Send
from ziplog.core.view import MANY_MEMBERS, MAX_STEP, LeaseStep, difference, run_of
from ziplog.wire import LeaseAnnounced

if TYPE_CHECKING:
    from mms.leases import LeasePlan
    from mms.servers import Server, Servers
    from mms.state import ClusterState
    from ziplog.core.node import Effect
    from ziplog.core.view import LeaseRun, Member, Placement
    from ziplog.wire import Heartbeat

#: A server that was told something is not told it again for this long.
_TOLD_NS: Final = 500_000_000
#: Changes of members that are kept: at twenty leases a second, those of some seconds.
_KEPT_CHANGES: Final = 256
#: Steps in one announcement, in bytes; whole leases are sent instead of more.
_MAX_STEPS_BYTES: Final = 1024 * 1024


class _Start(NamedTuple):
    """Where the leases of an announcement start."""

    #: The lease before the first one that is sent, and its digest.
    number: int
    digest: bytes
    #: The receiver does not hold that one, and does not need it.
    is_cut: bool = False


class Announcements:
    """Tells the storage servers of one cluster what is new."""

    def __init__(self, state: ClusterState, servers: Servers, plan: LeasePlan) -> None:
        self._state, self._servers, self._plan = state, servers, plan
        #: The lease with which placements last changed.
        self.placed_with = 0
        #: How often a server held a lease that was never committed: it was told to halt.
        self.contradictions = 0
        #: By the number of a run's first lease: what changed with it.
        self._changes: dict[int, tuple[tuple[Member, ...], tuple[int, ...]]] = {}

    def lacks(self, server: Server, now: int) -> bool:
        """Whether a server does not know what is committed, and was not told just now."""
        state, message, last = self._state, server.heartbeat, self._state.last
        if message is None or last is None:
            return False
        if message.has_gap:
            return now - server.told_alone_at >= _TOLD_NS
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
        """Whether a server may not know how its shard is placed, or where others are."""
        placement = self._state.placements.get(server.shard)
        return (
            message.shard_state != (placement.state if placement is not None else "")
            or message.state == "starting"
            or message.lease < self.placed_with
            or server.is_behind
            or server.shard in self._state.recovering
        )

    def tell(self, server: Server, now: int) -> Effect:
        """Tell one server, which was heard, all that is new."""
        message, last, state = server.heartbeat, self._state.last, self._state
        assert message is not None
        assert last is not None
        tells = server.told == 0 or self._is_unplaced(server, message)
        server.told, server.told_at, server.told_alone_at = last.number, now, now
        if tells:
            self._tells_of(server, now)
        if state.contradicts(message.lease, message.digest):
            self.contradictions += 1
            runs = [run_of(state.numbered(message.lease))]
            return Send(server.route, self._announcement(now, self._placements(server), runs))
        placements = self._placements(server) if tells else []
        start = self._start(message, message.lease, message.digest)
        following = self._following(start, placements, now)
        return Send(server.route, self._with_limit(following, server))

    def _start(self, message: Heartbeat, number: int, digest: bytes) -> _Start:
        """Return where the leases start that a server needs, which holds those up to `number`."""
        if not message.needs_from:
            return _Start(number, digest)
        first = self._state.first_needed(number, message.needs_from)
        if first is None:
            return _Start(number, digest)
        return _Start(first.first.number - 1, first.first.predecessor, is_cut=True)

    def tell_all(self, now: int) -> list[Effect]:
        """Tell every server that is heard what is new, once for all that lack the same."""
        state, last = self._state, self._state.last
        if last is None:
            return []
        effects: list[Effect] = []
        is_many = len(last.members) >= MANY_MEMBERS
        #: By where their leases start, and of which shard they are to hear (-1: of none).
        groups: dict[tuple[_Start, int], list[Server]] = {}
        for server in self._servers:
            message = server.heartbeat
            if message is None or server.state(now) == "down":
                continue
            if state.contradicts(message.lease, message.digest):
                effects.append(self.tell(server, now))
                continue
            number, digest = message.lease, message.digest
            if is_many and server.told > number:
                # What it was told it has, until it says that it has not: so all are told the same.
                number, digest = server.told, state.digest_of(server.told)
            about = -1
            is_told = is_many and self._was_told(server, now)
            if not is_told and self._is_unplaced(server, message):
                is_alone = is_many or last.view_of(server.shard) is None
                about = server.shard if is_alone else last.members[0].shard
                self._tells_of(server, now)
            server.told, server.told_at = last.number, now
            groups.setdefault((self._start(message, number, digest), about), []).append(server)
        for (start, about), group in groups.items():
            placements = self._placements(group[0]) if about >= 0 else []
            following = self._following(start, placements, now)
            if about >= 0:
                following = self._with_limit(following, group[0])
            effects.append(Broadcast(tuple(server.route for server in group), following))
        return effects

    def _with_limit(self, announcement: LeaseAnnounced, server: Server) -> LeaseAnnounced:
        """Return an announcement that places a server's shard, with where that ends if it left.

        The lease that says so may be older than all that the server needs.
        """
        retired = self._state.retired.get(server.shard)
        if not announcement.placements or retired is None or not retired.limit:
            return announcement
        return msgspec.structs.replace(announcement, limit=retired.limit)

    def _was_told(self, server: Server, now: int) -> bool:
        """Whether a server was told just now how its shard is placed."""
        placement = self._state.placements.get(server.shard)
        is_new = server.told == 0 or server.told_of != placement
        return not is_new and now - server.told_of_at < _TOLD_NS

    def _tells_of(self, server: Server, now: int) -> None:
        server.told_of = self._state.placements.get(server.shard)
        server.told_of_at = now

    def _placements(self, server: Server) -> list[Placement]:
        """Return the placements that a server has to know: its own, and those of a few members."""
        placements, last = self._state.placements, self._state.last
        shards = {server.shard}
        if last is not None and len(last.members) < MANY_MEMBERS:
            shards.update(member.shard for member in last.members)
        return [placements[shard] for shard in sorted(shards) if shard in placements]

    def _following(self, start: _Start, placements: list[Placement], now: int) -> LeaseAnnounced:
        """Return the announcement of the leases from `start` on, as many as fit."""
        last = self._state.last
        is_many = last is not None and len(last.members) >= MANY_MEMBERS
        steps = self._steps_after(start.number) if is_many and not start.is_cut else None
        if last is None or steps is None:
            runs = self._state.runs_after(start.number, start.digest)
            found = self._announcement(now, placements, runs)
            return msgspec.structs.replace(found, is_cut=True) if start.is_cut else found
        return msgspec.structs.replace(
            self._announcement(now, placements, []),
            after=start.number, steps=steps, digest=last.digest,
        )  # fmt: skip

    def _steps_after(self, number: int) -> list[LeaseStep] | None:
        """Return what changed since lease `number`; None if that is not known, or long ago."""
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
        """Return how the members of a run differ from those of the run before it, if that is kept.

        It is found once for each run, and asked for again while servers say that they lack it.
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
        return LeaseAnnounced(state.cluster, runs, starts_in_us, placements, state.trim)
