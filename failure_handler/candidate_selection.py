"""Candidate selection: the server that provides a shard's log for the next view.

A server that is up, frozen or joined in the current view holds everything that was acked in it, at
the acked positions. So does a witness of the former view, while the current one is not confirmed.
If all replicas are in limbo, none may hold everything. Then the longest readable log holds most,
unless a damaged one may hide confirmed entries.

Rule: a server that lost its data directory holds nothing, whatever it reports, until it has joined
the current view. Pure functions. See docs/protocol.md, section 11 (D24, D17).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from failure_handler.members import Member
    from ziplog.core.view import Placement
    from ziplog.wire import Suspect


class Candidate(NamedTuple):
    """A server with a recent report, which may become the survivor."""

    member: Member
    report: Suspect

    @property
    def holds(self) -> tuple[int, int, bool, int]:
        """Sort key of its log; ties go to an undamaged log, then to the lowest index."""
        report = self.report
        return report.last_view, report.last, not report.is_damaged, -self.member.index


def in_view(
    members: Sequence[Member], placement: Placement, first: int, last: int, now: int
) -> list[Candidate]:
    """Return the servers with recent reports from views `first` to `last`, inclusive."""
    return [
        Candidate(member, report)
        for member in members
        if (report := member.recent_report(now)) is not None
        and report.state in {"up", "frozen", "joined"}
        and first <= report.view <= last
        # The placement has the directories of its own view; a server in a later view joined it.
        and (report.view > placement.view or not member.has_forgotten(report))
    ]


def in_limbo(members: Sequence[Member], first: int, now: int) -> list[Candidate]:
    """Return all servers of a shard, if all of them recently reported limbo; otherwise none.

    A server's memory of a view before `first` counts no more than its disk.
    """
    found = [
        Candidate(member, report)
        for member in members
        if (report := member.recent_report(now)) is not None
        and (report.state == "limbo" or report.view < first or member.has_forgotten(report))
    ]
    return found if len(found) == len(members) else []


def unheard_by_enough(members: Sequence[Member], copies: int, now: int) -> list[int]:
    """Return the servers whose view too few others would join, so it would not be confirmed.

    `copies`: number of replicas, the server among them, that have to hold the view. A server that
    recently reported, and does not suspect another one, can join it.
    """
    reports = [(m.index, report) for m in members if (report := m.recent_report(now)) is not None]

    def joiners(server: int) -> int:
        return sum(one != server and server not in report.suspects for one, report in reports)

    return [member.index for member in members if 1 + joiners(member.index) < copies]


def is_any_in_limbo(members: Sequence[Member], now: int) -> bool:
    """Whether a server of a shard recently reported limbo."""
    reports = (member.recent_report(now) for member in members)
    return any(report is not None and report.state == "limbo" for report in reports)


def best(candidates: Sequence[Candidate]) -> Candidate:
    """Return the primary, if it is in the latest view, or else the longest log of that view.

    `candidates`: at least one.
    """
    latest = max(one.report.view for one in candidates)
    in_latest = [one for one in candidates if one.report.view == latest]
    primary = next((one for one in in_latest if one.member.index == 0), None)
    return primary or max(in_latest, key=lambda one: one.holds)


def longest(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the longest log among the servers that have their data directory."""
    known = [one for one in candidates if not one.member.has_forgotten(one.report)]
    return max(known, key=lambda one: one.holds, default=None)


def hides_damage(chosen: Candidate, candidates: Sequence[Candidate], first: int) -> bool:
    """Whether only a damaged log may hold the beginning of the confirmed view `first`.

    The survivor of that view wrote it before the decision. If the view began without an entry of
    its own, a server without an entry of it is older all the same.
    """
    reports = [one.report for one in candidates]
    is_any_damaged = any(report.is_damaged and report.state == "limbo" for report in reports)
    return chosen.report.last_view < first and is_any_damaged
