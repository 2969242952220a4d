"""Who votes: a node that lost its directory forgot what it promised, and must not count.

A directory has an *identity*, random and made with it; a new one is no voter. Rule: it becomes one
by being a founder (all nodes of the group were seen new at once, and one node, always the same,
wrote their identities down), or by holding an entry that the leader committed without it after it
had heard of it (docs/protocol.md, section 12).

Invariant: a vote or an acknowledgement that counted is known to the node that gave it, or to all
that could do harm with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class VoterStatus(msgspec.Struct, frozen=True):
    """What a node says of itself, to every other one, again and again."""

    identity: str
    is_voter: bool
    #: Nothing was ever written to its log, nor did it ever hear a leader.
    is_new: bool
    #: The identities with which the group began, by endpoint; none if it does not know them.
    founders: dict[str, str]


class PendingVoter(NamedTuple):
    """What a leader knows of a node that does not vote yet."""

    identity: str
    #: An entry of this leader's that was appended after it had heard of that identity.
    barrier: int


def founders(own: str, me: VoterStatus, others: Mapping[str, VoterStatus | None]) -> dict[str, str]:
    """Return the identities of the founders, if this node is one of them; else nothing.

    `own` is this node's endpoint, `others` what the others said to this process, None if nothing.
    """
    if not others:
        return {own: me.identity}
    heard = [status for status in others.values() if status is not None]
    for status in heard:
        if status.founders.get(own) == me.identity:
            return status.founders
    # One node writes the founders down: two could do it with different ones.
    all_new = me.is_new and len(heard) == len(others) and all(s.is_new for s in heard)
    if all_new and own < min(others):
        return {own: me.identity} | {
            name: status.identity for name, status in others.items() if status is not None
        }
    return {}


def is_admitted(
    pending_voter: PendingVoter, committed: int, held: Mapping[str, int], pending: Collection[str]
) -> bool:
    """Whether a pending_voter may count once it holds its barrier.

    `held` says up to which entry every other node is known to hold this leader's log. All that
    vote must hold the barrier: then none of them leads, or is a candidate, in a term that the
    lost directory may have voted in and its successor does not know.
    """
    voters = [index for node, index in held.items() if node not in pending]
    return committed >= pending_voter.barrier and all(
        index >= pending_voter.barrier for index in voters
    )
