"""Commit validation: decides whether a transaction commits (thesis 4.3).

The decision depends only on the log before the commit record. Invariant: when a transaction
commits, everything it read is unchanged, so the order of commit records is a serial order. See
docs/logdb.md, section 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logdb.decisions import Decisions
    from logdb.records import Commit, KeyRead, RangeRead
    from logdb.versions import Versions

Outcome = Literal["committed", "conflict", "expired"]


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """The decision about a commit record."""

    outcome: Outcome | Literal["repeated"]
    #: Keys (or first keys of ranges) that other transactions changed, in the order of the record.
    conflicts: list[bytes] = []


_COMMITTED: Final = Verdict("committed")
_EXPIRED: Final = Verdict("expired")
_REPEATED: Final = Verdict("repeated")


def conflicts(
    versions: Versions, reads: Iterable[KeyRead], ranges: Iterable[RangeRead]
) -> list[bytes]:
    """Return the keys (or first keys of ranges) that changed since they were read.

    A key has changed if its version is not the one that was read (thesis 4.3).
    """
    version = versions.version
    changed = [read.key for read in reads if version(read.key) != read.version]
    changed += [
        each.start for each in ranges if versions.digest(each.start, each.stop) != each.digest
    ]
    return changed


def decide(
    versions: Versions, decisions: Decisions, commit: Commit, gsn: int, horizon: int = 0
) -> Verdict:
    """Decide about the commit record at a gsn.

    Args:
        versions: the state before the record.
        decisions: the decisions before the record.
        commit: the record.
        gsn: its position.
        horizon: values before it may be trimmed; 0: none.

    """
    if decisions.outcome(commit.id) is not None:
        return _REPEATED
    if commit.began < decisions.floor:
        return _EXPIRED
    if any(write.rid is not None and write.rid.gsn < horizon for write in commit.writes):
        return _EXPIRED
    changed = conflicts(versions, commit.reads, commit.ranges)
    for write in commit.writes:
        if write.rid is None:
            continue
        # A value inserted before the present one would undo it (thesis 4.3), and a value must
        # precede the record that refers to it. Gsn 0, the version of an absent key, holds no
        # record.
        if not max(versions.version(write.key), 1) <= write.rid.gsn < gsn:
            changed.append(write.key)
    return Verdict("conflict", changed) if changed else _COMMITTED
