"""The commands that consensus carries for the membership service.

Rule: they are values, which say what is to become of the state (`ClusterState`), whatever it is; a
refusal is one word of a closed set. New commands get new tags; old ones are read for ever, as logs
are. See docs/protocol.md, sections 3, 8, 11 and 13.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from ziplog.core.view import Lease, Placement
from ziplog.types import Durability, Epoch, Gsn, ShardId, View
from ziplog.wire import Name

_ClusterId = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class Command(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of what consensus carries for the membership service."""

    def encode(self) -> bytes:
        """Return its bytes."""
        return msgspec.msgpack.encode(self)


class CreateCluster(Command, tag=1, frozen=True, gc=False):
    """The first command: the cluster's identity (a random number) and its shards."""

    cluster: _ClusterId
    name: Name
    placements: list[Placement]
    #: The level of the log, for as long as it lives.
    durability: Durability = "memory"


class GrantLease(Command, tag=2, frozen=True, gc=False):
    """Commit the next lease, and the placements that change with it."""

    lease: Lease
    placements: list[Placement]


class SetTrim(Command, tag=3, frozen=True, gc=False):
    """Everything before `gsn` is deleted."""

    gsn: Gsn


class SetFinalized(Command, tag=4, frozen=True, gc=False):
    """This epoch, and every one before it, is finalized."""

    epoch: Epoch


class Barrier(Command, tag=5, frozen=True, gc=False):
    """Nothing: who sees it applied has seen all that was committed before. `token` is unique."""

    token: bytes


class RemoveShard(Command, tag=6, frozen=True, gc=False):
    """Give the shard no more leases: `recovery`, from `view` or a later one, is under way."""

    shard: ShardId
    view: View
    recovery: View


class RecordLoss(Command, tag=7, frozen=True, gc=False):
    """Records of the shard in [start, stop) may be lost, says the recovery to `view`."""

    shard: ShardId
    view: View
    start: Gsn
    stop: Gsn


class PlaceShard(Command, tag=8, frozen=True, gc=False):
    """A new shard: its number, and where its servers are. It is in no lease yet."""

    placement: Placement


class RetireShard(Command, tag=9, frozen=True, gc=False):
    """The shard leaves, for good: a lease that does not have it is the end of what it owns."""

    shard: ShardId


class FinalizeShard(Command, tag=10, frozen=True, gc=False):
    """All that the shard owns is on stable storage at all of its servers."""

    shard: ShardId


AnyCommand = (
    CreateCluster | GrantLease | SetTrim | SetFinalized | Barrier | RemoveShard | RecordLoss
    | PlaceShard | RetireShard | FinalizeShard
)  # fmt: skip

#: Why a command was refused; "" if it was not.
Refusal = Literal[
    "", "malformed", "no-cluster", "other-cluster", "not-successor", "bad-members",
    "bad-placements", "no-such-position", "no-such-shard", "other-view", "exists", "wrong-size",
    "retired", "last-shard", "has-leases", "too-many",
]  # fmt: skip

_decoder: Final[msgspec.msgpack.Decoder[AnyCommand]] = msgspec.msgpack.Decoder(AnyCommand)


def decode_refusal(result: bytes) -> Refusal:
    """Return what `mms.state.ClusterState.apply` answered."""
    refusal: Any = msgspec.msgpack.decode(result, type=Refusal)
    return refusal  # type: ignore[no-any-return]


def decode_command(command: bytes) -> AnyCommand:
    """Return the command of these bytes.

    Raises:
        msgspec.MsgspecError: they are none.
        RecursionError: likewise.

    """
    return _decoder.decode(command)
