"""Raft's log matching: compares entries of the leader with those that a follower holds.

Rule (Raft, section 5.3): entries are deleted only if a received entry conflicts with them
(docs/protocol.md, section 12).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.raft.journal import Entry


class LogMatch(NamedTuple):
    """The result of comparing received entries with held ones."""

    #: Number of received entries, from the first on, that are held already.
    known: int
    #: The next entry is held with another term: it and all after it must be deleted.
    contradicts: bool


def compare(
    own: Sequence[Entry], previous_term: int | None, came: Sequence[Entry]
) -> LogMatch | None:
    """Compare received entries, which follow an entry of `previous_term`, with held ones.

    `own` are the held entries from that previous one on. None: the previous entry does not match,
    so none of the received entries may be appended.
    """
    if not own or own[0].term != previous_term:
        return None
    known = 0
    for ours, theirs in zip(own[1:], came, strict=False):
        if ours.term != theirs.term:
            return LogMatch(known, contradicts=True)
        known += 1
    return LogMatch(known, contradicts=False)
