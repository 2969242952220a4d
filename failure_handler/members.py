"""What the failure handler hears: where shards are, and what their servers say of themselves.

Servers tell every node ten times a second while something is wrong (`Suspect`), and nothing while
all is well. Rule: time is only ever used to guess who is there, never to decide what a position
holds. Invariant: a placement never goes back to an older view.

See docs/protocol.md, sections 9 and 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from ziplog.core.view import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ziplog.core.view import Placement
    from ziplog.wire import Suspect

_MS: Final = 1_000_000
#: A server that was heard within this time is there; one that was not has probably failed.
HEARD_NS: Final = 1000 * _MS


class Member:
    """One replica of one shard, as it was heard last."""

    __slots__ = ("fingerprint", "heard_at", "index", "name", "route", "suspect")

    def __init__(self, name: str, index: int) -> None:
        self.name: Final = name
        #: Its place among the shard's replicas; 0 is the primary.
        self.index: Final = index
        #: Of the data directory that it must have; "": any.
        self.fingerprint = ""
        #: The way to it: where it was heard from.
        self.route = b""
        self.suspect: Suspect | None = None
        #: When it was heard last, in ns; it never was if `suspect` is None.
        self.heard_at = 0

    def recent_report(self, now: int) -> Suspect | None:
        """Return what it said within `HEARD_NS`."""
        return self.suspect if now - self.heard_at < HEARD_NS else None

    def has_forgotten(self, suspect: Suspect) -> bool:
        """Whether it does not have the data directory that it is known with."""
        return self.fingerprint not in {"", fingerprint(suspect.identity)}


class Members:
    """All shards, and all of their servers."""

    def __init__(self) -> None:
        #: The cluster's number; 0 while it is not known.
        self.cluster = 0
        self.placements: dict[int, Placement] = {}
        #: When the membership service's leader was heard last, in ns; None: never.
        self.informed_at: int | None = None
        self._members: dict[int, list[Member]] = {}

    def on_cluster_info(self, placements: Iterable[Placement], now: int) -> None:
        """Take what the membership service says."""
        self.informed_at = now
        for placement in placements:
            self.place(placement)

    def place(self, placement: Placement) -> None:
        """Know where a shard is, unless something newer is known."""
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
        """Note that the membership service took a shard out of the leases."""
        self.place(msgspec.structs.replace(self.placements[shard], state="recovering"))

    def on_reinserted(self, shard: int, view: int, fingerprints: Sequence[str]) -> None:
        """Note that it took the shard back.

        As a member, or as one that has left: the service says so later, and here only matters that
        it is not being recovered.
        """
        placement = self.placements[shard]
        replicas = tuple(
            msgspec.structs.replace(replica, fingerprint=found)
            for replica, found in zip(placement.replicas, fingerprints, strict=True)
        )
        self.place(msgspec.structs.replace(placement, view=view, state="live", replicas=replicas))

    def of(self, shard: int) -> list[Member]:
        """Return a shard's members, the primary first; none if it is not known."""
        return self._members.get(shard, [])

    def on_suspect(self, route: bytes, suspect: Suspect, now: int) -> Member | None:
        """Note what a server says; None if it is of nobody that is placed there.

        One with another data directory than the known one counts for nobody while that one is heard
        and works. What a process says in an older view than it was in before is late, and no news:
        it would pass for one that forgot the later view.
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
        """Assert that shards and members fit each other."""
        assert self.placements.keys() == self._members.keys()
        for shard, members in self._members.items():
            replicas = self.placements[shard].replicas
            assert [member.name for member in members] == [r.name for r in replicas]
