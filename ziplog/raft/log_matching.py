"""What a Raft follower takes of entries: what it does not hold, and no more than that.

Rule (Raft, section 5.3): entries are deleted only if one that came contradicts them
(docs/protocol.md, section 12).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.raft.journal import Entry


class LogMatch(NamedTuple):
    """How entries that came fit to those that are held."""

    #: So many of them, from the first on, are held already.
    known: int
    #: The next one is held with another term: it and all behind it must go.
    contradicts: bool


def compare(
    own: Sequence[Entry], previous_term: int | None, came: Sequence[Entry]
) -> LogMatch | None:
    """Compare what came, behind an entry of `previous_term`, with what is held.

    `own` are the entries held, from that previous one on. None: it is not the one that is held, so
    nothing of what came may be taken.
    """
    if not own or own[0].term != previous_term:
        return None
    known = 0
    for ours, theirs in zip(own[1:], came, strict=False):
        if ours.term != theirs.term:
            return LogMatch(known, contradicts=True)
        known += 1
    return LogMatch(known, contradicts=False)
