"""Voting rights of Raft nodes: a node that lost its directory must not vote until it is admitted.

A new directory gets a random *identity* and no vote, because an earlier directory of the node may
have promised votes. A node becomes a voter in one of two ways. A founder: all nodes of the group
were seen new at once, and one fixed node recorded their identities. Or a pending voter: it holds an
entry that the leader appended after it learned of the identity, and that was committed without it
(docs/protocol.md, section 12).

Invariant: a vote or an acknowledgement that counted is known to the node that gave it, or to every
node that could contradict it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class VoterStatus(msgspec.Struct, frozen=True):
    """The voting status of a node, which it sends to all other nodes periodically."""

    identity: str
    is_voter: bool
    #: Its log was never written to, and it never had a leader.
    is_new: bool
    #: The identities of the founders, by endpoint; empty if it does not know them.
    founders: dict[str, str]


class PendingVoter(NamedTuple):
    """A node without voting rights that the leader is going to admit."""

    identity: str
    #: Index of an entry that this leader appended after it learned of the identity.
    barrier: int


def founders(own: str, me: VoterStatus, others: Mapping[str, VoterStatus | None]) -> dict[str, str]:
    """Return the identities of the founders, if this node is one of them; otherwise empty.

    `own` is this node's endpoint, `others` the statuses that this process received, None for a node
    that sent none.
    """
    if not others:
        return {own: me.identity}
    known = [status for status in others.values() if status is not None]
    for status in known:
        if status.founders.get(own) == me.identity:
            return status.founders
    # Only one node records the founders: two nodes could record different ones.
    all_new = me.is_new and len(known) == len(others) and all(s.is_new for s in known)
    if all_new and own < min(others):
        return {own: me.identity} | {
            name: status.identity for name, status in others.items() if status is not None
        }
    return {}


def is_admitted(
    pending_voter: PendingVoter, committed: int, held: Mapping[str, int], pending: Collection[str]
) -> bool:
    """Whether a pending voter may vote once it holds its barrier.

    `held` is the last entry of this leader's log that each other node is known to hold; `pending`
    are the nodes without voting rights. All voters must hold the barrier: then none of them is a
    leader or candidate in a term that the lost directory may have voted in.
    """
    voters = [index for node, index in held.items() if node not in pending]
    return committed >= pending_voter.barrier and all(
        index >= pending_voter.barrier for index in voters
    )
