"""Members: placements of shards, and the recent reports of their servers.

A server that suspects a failure sends `Suspect` to every node ten times a second. Rule: time only
serves to guess which servers are up, never to decide the content of a position. Invariant: a
placement never returns to an older view.

See docs/protocol.md, sections 9 and 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from ziplog.core.units import NS_PER_MS
from ziplog.core.view import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ziplog.core.view import Placement
    from ziplog.wire import Suspect

#: Age up to which a report counts; a server without one has probably failed.
HEARD_NS: Final = 1000 * NS_PER_MS
#: Age up to which the lost regions count: a node queries them every second.
LOST_REGIONS_NS: Final = 3000 * NS_PER_MS


class Member:
    """One replica of one shard, with its last report."""

    __slots__ = ("fingerprint", "heard_at", "index", "name", "route", "suspect")

    def __init__(self, name: str, index: int) -> None:
        self.name: Final = name
        #: Its index among the shard's replicas; 0 is the primary.
        self.index: Final = index
        #: Of the data directory that it must have; "": any.
        self.fingerprint = ""
        #: The route to it: the source of its last report.
        self.route = b""
        self.suspect: Suspect | None = None
        #: When its last report came, in ns; meaningless while `suspect` is None.
        self.heard_at = 0

    def recent_report(self, now: int) -> Suspect | None:
        """Return its last report, if that came within `HEARD_NS`."""
        return self.suspect if now - self.heard_at < HEARD_NS else None

    def has_forgotten(self, suspect: Suspect) -> bool:
        """Whether its data directory is not the one that it is known with."""
        return self.fingerprint not in {"", fingerprint(suspect.identity)}


class Members:
    """All shards, and all of their servers."""

    def __init__(self) -> None:
        #: The cluster's number; 0 while it is unknown.
        self.cluster = 0
        self.placements: dict[int, Placement] = {}
        #: The regions that an operator gave up, as the membership service's leader knew them.
        self.lost_regions: frozenset[str] = frozenset()
        #: When this node sent the query that they answer, in ns.
        self._queried_lost_at = -(2**62)
        self._members: dict[int, list[Member]] = {}

    def on_cluster_info(
        self, placements: Iterable[Placement], lost_regions: Iterable[str], queried_at: int
    ) -> None:
        """Store the membership service's placements, and the regions that an operator gave up.

        `queried_at`: when this node sent the query that is answered, in ns.
        """
        for placement in placements:
            self.place(placement)
        if queried_at >= self._queried_lost_at:
            self.lost_regions, self._queried_lost_at = frozenset(lost_regions), queried_at

    def place(self, placement: Placement) -> None:
        """Store a shard's placement, unless a newer one is known."""
        shard = placement.shard
        known = self.placements.get(shard)
        if known is not None and placement.view < known.view:
            return
        self.placements[shard] = placement
        members = self._members.get(shard, [])
        if [member.name for member in members] != [r.name for r in placement.replicas]:
            members = [Member(r.name, index) for index, r in enumerate(placement.replicas)]
            self._members[shard] = members
        for member, replica in zip(members, placement.replicas, strict=True):
            member.fingerprint = replica.fingerprint

    def on_removed(self, shard: int) -> None:
        """Store that the membership service removed a shard from the leases."""
        self.place(msgspec.structs.replace(self.placements[shard], state="recovering"))

    def on_reinserted(
        self, shard: int, view: int, fingerprints: Sequence[str], regions: Sequence[str]
    ) -> None:
        """Store that the membership service reinserted the shard.

        Whether it is live or has left is not known here; it only matters that its recovery ended.
        """
        placement = self.placements[shard]
        replicas = tuple(
            msgspec.structs.replace(replica, fingerprint=found, region=region)
            for replica, found, region in zip(
                placement.replicas, fingerprints, regions, strict=True
            )
        )
        self.place(msgspec.structs.replace(placement, view=view, state="live", replicas=replicas))

    def of(self, shard: int) -> list[Member]:
        """Return a shard's members, the primary first; none if the shard is unknown."""
        return self._members.get(shard, [])

    def copies_needed(self, shard: int, survivor: int, now: int) -> int:
        """Return the number of replicas that must hold a view before it is confirmed.

        The view then survives f failures, one of them known; those of lost regions are known, too.
        A server there that reports, and hears the survivor, runs: it can join the view. Regions
        that were lost long ago may be back.
        """
        replicas, members = self.placements[shard].replicas, self.of(shard)
        is_recent = now - self._queried_lost_at < LOST_REGIONS_NS
        lost_regions = self.lost_regions if is_recent else frozenset()
        left = sum(
            replica.region not in lost_regions
            or (
                (report := member.recent_report(now)) is not None
                and survivor not in report.suspects
            )
            for replica, member in zip(replicas, members, strict=True)
        )
        return max(1, min(len(replicas) - 1, left))

    def on_suspect(self, route: bytes, suspect: Suspect, now: int) -> Member | None:
        """Store a server's report; return the server, or None if that shard has no such server.

        A server with another data directory than the known one is ignored while the known one
        reports and works. A report from an older view than the same process had before is late: it
        would look like a server that lost the later view.
        """
        members = self.of(suspect.shard)
        if suspect.server >= len(members) or members[suspect.server].name != suspect.node:
            return None
        member = members[suspect.server]
        last = member.suspect
        if last and last.incarnation == suspect.incarnation and suspect.view < last.view:
            return member
        before = member.recent_report(now)
        if (
            before is not None
            and before.state != "limbo"
            and not member.has_forgotten(before)
            and member.has_forgotten(suspect)
        ):
            return None
        member.route, member.suspect, member.heard_at = route, suspect, now
        return member

    def check(self) -> None:
        """Assert that shards and members match."""
        assert self.placements.keys() == self._members.keys()
        for shard, members in self._members.items():
            replicas = self.placements[shard].replicas
            assert [member.name for member in members] == [r.name for r in replicas]
