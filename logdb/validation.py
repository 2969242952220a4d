"""The decision: whether a transaction commits (thesis 4.3). The heart of LogDB.

Rule: it depends on nothing but the log before the commit record. Invariant: what a transaction that
commits has read is what is there just before it takes effect, so the log's order is a serial one.
See docs/logdb.md, section 4.
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
    """What becomes of a commit record."""

    outcome: Outcome | Literal["repeated"]
    #: Keys (or first keys of ranges) that others changed, in the order of the record.
    conflicts: list[bytes] = []


_COMMITTED: Final = Verdict("committed")
_EXPIRED: Final = Verdict("expired")
_REPEATED: Final = Verdict("repeated")


def conflicts(
    versions: Versions, reads: Iterable[KeyRead], ranges: Iterable[RangeRead]
) -> list[bytes]:
    """Return the keys (or first keys of ranges) that are no longer what they were when read.

    So is a key whose version is not the one that was read (thesis 4.3).
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
        versions: the state just before it.
        decisions: those before it.
        commit: what it says.
        gsn: where it is.
        horizon: values before it may be cleared away; 0: none.

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
        # What was inserted before the present value would undo it (thesis 4.3), and no value stands
        # behind the record that names it. No record is at 0, the version of an absent key.
        if not max(versions.version(write.key), 1) <= write.rid.gsn < gsn:
            changed.append(write.key)
    return Verdict("conflict", changed) if changed else _COMMITTED
