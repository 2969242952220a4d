"""Commands of the membership service, as consensus carries them.

Each command states its effect on `ClusterState`; a refusal is one word of a closed set. New
commands get new tags; old ones stay readable, as logs do. All commands here belong to wire version
1. A command of a later version is proposed only while the cluster uses that version (section 15).
See docs/protocol.md, sections 3, 8, 11 and 13.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from ziplog.core.cursors import (
    MAX_MOVES,
    CursorMove,
    CursorName,
    Edit,
    HoldS,
    LeaseMs,
    Nonce,
)
from ziplog.core.fields import Region, Unsigned
from ziplog.core.view import Lease, Placement
from ziplog.types import Durability, Epoch, Gsn, ShardId, View
from ziplog.wire import Name, Text
from ziplog.wire.base import Wire

_ClusterId = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class Command(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of the membership service's commands."""

    def encode(self) -> bytes:
        """Return the encoded command."""
        return msgspec.msgpack.encode(self)


class CreateCluster(Command, tag=1, frozen=True, gc=False):
    """The first command: the cluster's identity (a random number) and its shards."""

    cluster: _ClusterId
    name: Name
    placements: list[Placement]
    #: The durability level that the cluster file requested.
    durability: Durability = "memory"


class GrantLease(Command, tag=2, frozen=True, gc=False):
    """Commit the next lease, and the placements that change with it."""

    lease: Lease
    placements: list[Placement]


class SetTrim(Command, tag=3, frozen=True, gc=False):
    """Delete all positions before `gsn`, unless a cursor holds one of them."""

    gsn: Gsn
    #: Whatever cursors hold; those before `gsn` hold nothing any more.
    force: bool = False


class SetFinalized(Command, tag=4, frozen=True, gc=False):
    """Mark this epoch, and every one before it, as finalized."""

    epoch: Epoch


class Barrier(Command, tag=5, frozen=True, gc=False):
    """Read barrier: a node that applied it has applied all earlier ones. `token` is unique."""

    token: bytes


class RemoveShard(Command, tag=6, frozen=True, gc=False):
    """Remove the shard from the leases for recovery `recovery`, which began in `view` or later."""

    shard: ShardId
    view: View
    recovery: View


class RecordLoss(Command, tag=7, frozen=True, gc=False):
    """Records of the shard in [start, stop) may be lost in the recovery to `view`."""

    shard: ShardId
    view: View
    start: Gsn
    stop: Gsn


class PlaceShard(Command, tag=8, frozen=True, gc=False):
    """Place a new shard: its number and its servers. It is in no lease yet."""

    placement: Placement


class RetireShard(Command, tag=9, frozen=True, gc=False):
    """Remove the shard for good: its positions end with the last lease that has it.

    A refusal may have been reported to an operator. So it also holds for the commands that were
    proposed before it, by a former leader for example: they are out of turn, and change nothing.
    """

    shard: ShardId
    #: Number of such commands that were decided when it was proposed; None: an older version's.
    turn: Annotated[int, msgspec.Meta(ge=0)] | None = None


class FinalizeShard(Command, tag=10, frozen=True, gc=False):
    """Finalize the shard: all its positions are on stable storage at all of its servers."""

    shard: ShardId


class RaiseWire(Command, tag=11, frozen=True, gc=False):
    """Use this wire version from now on, unless a later one is in use.

    All registered nodes have reported that they know it.
    """

    wire: Wire


class SetDurability(Command, tag=13, frozen=True, gc=False):
    """All servers keep to `disk` from this epoch on, or one of them does not any more."""

    level: Durability
    epoch: Epoch


class ClusterEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What happened in the cluster, for operators."""

    #: Unix time by the leader's clock, in microseconds.
    at_us: Unsigned
    #: cluster, leader, loss, node, recovery, region, restart, shard, trim, view; later releases may
    #: have more.
    kind: Name
    text: Text
    #: -1: none.
    shard: Annotated[int, msgspec.Meta(ge=-1)] = -1
    #: "": none.
    node: Name = ""


class RecordEvents(Command, tag=12, frozen=True):
    """Append events to the record."""

    #: The number of the first one: a command that was applied is out of turn.
    first: Annotated[int, msgspec.Meta(ge=1)]
    events: Annotated[list[ClusterEvent], msgspec.Meta(min_length=1, max_length=64)]


class ClaimCursor(Command, tag=14, frozen=True, gc=False):
    """Make a client the owner of a cursor; create it if there is none of this name."""

    name: CursorName
    owner: Nonce
    owner_text: Name
    nonce: Nonce
    start: Gsn
    lease_ms: LeaseMs
    hold_s: HoldS
    #: The term in which the leader found the cursor free, or its owner silent; 0: no cursor.
    expects: Unsigned
    #: Unix time in microseconds by the proposer's clock.
    at_us: Unsigned


class MoveCursors(Command, tag=15, frozen=True):
    """Move cursors forward. Each move is applied or refused by itself."""

    moves: Annotated[list[CursorMove], msgspec.Meta(min_length=1, max_length=MAX_MOVES)]
    at_us: Unsigned


class ReleaseCursor(Command, tag=16, frozen=True, gc=False):
    """End the ownership of a cursor by its owner."""

    name: CursorName
    term: Unsigned


class EditCursor(Command, tag=17, frozen=True, gc=False):
    """Create, change or delete a cursor, for an operator; or let its hold lapse."""

    name: CursorName
    edit: Edit
    nonce: Nonce
    position: Gsn
    hold_s: HoldS
    at_us: Unsigned
    #: Of lapse: the term in which the cursor was not used.
    expects: Unsigned = 0


class SetRegionLost(Command, tag=18, frozen=True, gc=False):
    """Give a region up: views are confirmed without its servers; or let them count again.

    A command that was proposed before the last one is out of turn, and changes nothing.
    """

    region: Region
    is_lost: bool
    #: Number of such commands that were applied when it was proposed; None: an older version's.
    turn: Unsigned | None = None


AnyCursorCommand = ClaimCursor | MoveCursors | ReleaseCursor | EditCursor
AnyCommand = (
    CreateCluster | GrantLease | SetTrim | SetFinalized | Barrier | RemoveShard | RecordLoss
    | PlaceShard | RetireShard | FinalizeShard | RaiseWire | RecordEvents | SetDurability
    | SetRegionLost | AnyCursorCommand
)  # fmt: skip

#: Why a command was refused; "" if it was applied.
Refusal = Literal[
    "", "malformed", "no-cluster", "other-cluster", "not-successor", "bad-members",
    "bad-placements", "no-such-position", "no-such-shard", "other-view", "exists", "wrong-size",
    "retired", "last-shard", "has-leases", "too-many", "out-of-turn", "held", "no-such-cursor",
    "owned", "stale-term", "goes-back", "trimmed", "full", "no-such-region",
]  # fmt: skip

_decoder: Final[msgspec.msgpack.Decoder[AnyCommand]] = msgspec.msgpack.Decoder(AnyCommand)
_result_decoder: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(
    Refusal | list[Refusal]
)


def decode_refusal(result: bytes) -> Refusal:
    """Return the refusal that `mms.state.ClusterState.apply` encoded; "" for `MoveCursors`."""
    outcome = _result_decoder.decode(result)
    return "" if isinstance(outcome, list) else outcome


def decode_refusals(result: bytes) -> list[Refusal]:
    """Return the refusal of each move of a `MoveCursors` that was applied."""
    refusals = _result_decoder.decode(result)
    return refusals if isinstance(refusals, list) else []


def decode_command(command: bytes) -> AnyCommand:
    """Decode a command.

    Raises:
        msgspec.MsgspecError: the bytes are not a command.
        RecursionError: likewise.

    """
    return _decoder.decode(command)
