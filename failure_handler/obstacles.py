"""What keeps a shard from its recovery, and what an operator can do.

Pure functions of the reports and of the committed state; they decide nothing. The failure handler's
leader reports the texts to the membership service, whose status document has them. See
docs/protocol.md, section 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core.nearness import named
from ziplog.core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from failure_handler.members import Member
    from failure_handler.state import Recovered
    from ziplog.core.view import Placement

#: Silence after which a server is missing: a supervisor has restarted it by then.
MISSING_NS: Final = 3 * NS_PER_S


def obstacle(
    members: Sequence[Member],
    placement: Placement,
    known: Recovered | None,
    listening_since: int,
    now: int,
) -> str:
    """Return what the recovery of a shard waits for, and what to do; "": for nothing.

    Args:
        members: its servers, the primary first.
        placement: its placement.
        known: the committed state of its recovery; None: there never was one.
        listening_since: silence counts from here on, in ns.
        now: monotonic nanoseconds.

    """
    silent = [one for one in members if now - max(one.heard_at, listening_since) >= MISSING_NS]
    names = " and ".join(member.name for member in silent)
    reports = [(one, report) for one in members if (report := one.recent_report(now)) is not None]
    is_in_trouble = any(report.state in {"limbo", "frozen"} for _, report in reports)
    if placement.state != "recovering" and not is_in_trouble:
        return ""  # Servers without trouble do not report.
    if len(silent) == len(members):
        return f"no server of the shard is up; start {names}"
    if silent and known is not None and not known.is_under_way and not known.is_finished:
        return (
            f"{names} must copy the log of the new view first; start {names}, with an empty"
            f" directory if its own is lost{_loss(silent, placement, known)}"
        )
    if silent:
        return (
            f"no server that reports certainly has all records, so the shard waits for {names};"
            f" start {names} with the former data directory"
        )
    damaged = " and ".join(one.name for one, report in reports if report.is_damaged)
    if damaged:
        return (
            f"{damaged} cannot read a part of the log that no other server has; restore its segment"
            " files from a copy, or another server's former data directory, and start it again"
        )
    return ""


def _loss(silent: Sequence[Member], placement: Placement, known: Recovered) -> str:
    """Return what to do if the silent servers are lost and readers wait for one of them, else "".

    It is for whole regions: each missing server has a label, and no other server has it.
    """
    missing = {member.index for member in silent}
    gone = sorted({placement.replicas[index].region for index in missing})
    left = [one.region for index, one in enumerate(placement.replicas) if index not in missing]
    are_too_few = known.confirmed < known.view and len(left) < len(placement.replicas) - 1
    if not are_too_few or "" in gone or not set(gone).isdisjoint(left):
        return ""
    commands = " and ".join(f"`ziplog region lost {region}`" for region in gone)
    are, let = ("is", "lets") if len(gone) == 1 else ("are", "let")
    return (
        f"; readers wait, too: if {named(gone)} {are} lost for good, {commands} {let} them continue"
    )
