"""Messages between the ordering layer and its clients."""

from __future__ import annotations

from typing import Final

import msgspec

from ziplog.core.message import Message
from ziplog.types import Gsn, ShardId
from ziplog.wire import VERSION, AnyMessage, decoder_of


class Follow(Message, tag=VERSION * 256 + 192, frozen=True, gc=False):
    """Requests the cuts for the next `FOLLOW_NS`; the leader answers with the last one."""


class Cut(Message, tag=VERSION * 256 + 193, frozen=True, gc=False):
    """A committed cut: all positions of a shard below its frontier are ordered."""

    frontiers: dict[ShardId, Gsn]


#: Returns the message of a frame, of the ordering layer or of the log.
decode: Final = decoder_of(msgspec.msgpack.Decoder(AnyMessage | Follow | Cut))
