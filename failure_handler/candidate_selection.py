"""Whose state a shard goes on from: the choice of a recovery's candidate.

A server that is up, frozen or joined in the current view holds all that was acked in it, at just
the acked positions; so does a witness of the view before, while the current one is not confirmed.
If all replicas are in limbo, none may have everything, and the one with the longest log has most,
as far as it can be read; what was confirmed must not be lost for a damaged end of it.
Rule: a server that lost its data directory holds nothing, whatever it says, until it has joined the
current view. Functions only. See docs/protocol.md, section 11 (D24, D17).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from failure_handler.members import Member
    from ziplog.core.view import Placement
    from ziplog.wire import Suspect


class Candidate(NamedTuple):
    """A server that was heard, and may be the survivor."""

    member: Member
    report: Suspect

    @property
    def holds(self) -> tuple[int, int, bool, int]:
        """How much it holds; ties go to one that can read all of it, then to the lowest index."""
        report = self.report
        return report.last_view, report.last, not report.is_damaged, -self.member.index


def in_view(
    members: Sequence[Member], placement: Placement, first: int, last: int, now: int
) -> list[Candidate]:
    """Return the servers that were heard and are in a view from `first` to `last`, inclusive."""
    return [
        Candidate(member, report)
        for member in members
        if (report := member.recent_report(now)) is not None
        and report.state in {"up", "frozen", "joined"}
        and first <= report.view <= last
        # The placement tells the directories of its own view; who is in a later one has joined it.
        and (report.view > placement.view or not member.has_forgotten(report))
    ]


def in_limbo(members: Sequence[Member], first: int, now: int) -> list[Candidate]:
    """Return all servers of a shard, if all were heard and are in limbo; otherwise none.

    What a server remembers of a view before `first` counts no more than what is on its disk.
    """
    found = [
        Candidate(member, report)
        for member in members
        if (report := member.recent_report(now)) is not None
        and (report.state == "limbo" or report.view < first or member.has_forgotten(report))
    ]
    return found if len(found) == len(members) else []


def is_any_in_limbo(members: Sequence[Member], now: int) -> bool:
    """Whether a server of a shard says that it is in limbo."""
    heard = (member.recent_report(now) for member in members)
    return any(report is not None and report.state == "limbo" for report in heard)


def best(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the primary, if it is in the latest view of all, or the one there that holds most."""
    latest = max((one.report.view for one in candidates), default=0)
    in_latest = [one for one in candidates if one.report.view == latest]
    primary = next((one for one in in_latest if one.member.index == 0), None)
    return primary or max(in_latest, key=lambda one: one.holds, default=None)


def longest(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the one with the longest log of those that have their data directory."""
    known = [one for one in candidates if not one.member.has_forgotten(one.report)]
    return max(known, key=lambda one: one.holds, default=None)


def hides_damage(chosen: Candidate, candidates: Sequence[Candidate], first: int) -> bool:
    """Whether the beginning of view `first`, which was confirmed, may be in a damaged log only.

    Its survivor wrote that before it was decided; but for a view that began with no entry of its
    own, whoever has nothing of it is behind it.
    """
    return chosen.report.last_view < first and any(one.report.is_damaged for one in candidates)
