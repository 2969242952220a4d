"""One claimed cursor of a client, and its moves.

Rule: a move below one that was sent is refused, because a copy of that one may arrive later: the
cursor would be at a position that its owner gave up. See docs/protocol.md, section 19.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ziplog.client.common.requests import ClaimState
from ziplog.core.cursors import Cursor
from ziplog.errors import ConfigError, NoSuchRecordError
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.wire.cursors import RefusedMove


class Claim(msgspec.Struct):
    """A cursor that this client owns, or owned."""

    cursor: Cursor
    #: The shard of the committed position.
    shard: int
    lease_ns: int
    #: Whether a subscription belongs to it.
    reads: bool
    #: Number of moves so far.
    moves: int = 0
    #: The highest position of a move that was sent; copies of it may arrive late.
    sent: int = 0
    #: A move that is not sent yet.
    soon: tuple[RecordId, bytes] | None = None
    #: The last move that was sent, until its reply comes.
    awaited: Move | None = None
    is_paused: bool = False
    #: Where it pauses; 0: at once.
    pause_at: int = 0
    #: What ended it; "": nothing did.
    lost: str = ""

    @property
    def unconfirmed(self) -> tuple[RecordId, bytes] | None:
        """The position and the mark of the last move, if its outcome is not known."""
        if self.soon is None and self.awaited is not None:
            return self.awaited.position, self.awaited.mark
        return self.soon

    @property
    def state(self) -> ClaimState:
        """What the caller sees of it."""
        cursor = self.cursor
        position = RecordId(cursor.position, self.shard)
        return ClaimState(
            cursor.name, cursor.term, position, cursor.mark, self.is_paused, self.lost,
            cursor.birth, cursor.seek, cursor.has_moved, self.pause_at,
        )  # fmt: skip


class Move(NamedTuple):
    """A move that is about to be sent."""

    #: The number of its claim.
    number: int
    claim: Claim
    position: RecordId
    mark: bytes
    #: Gets the position, or an error.
    on_end: Callable[[Any], None]

    def end(self, refused: RefusedMove | None, error: Exception | None) -> None:
        """Note the outcome; `error`: of a lost claim."""
        claim, position = self.claim, self.position
        if error is not None:
            self.on_end(error)
        elif refused is not None and refused.error == "no-such-position":
            if claim.sent == position.gsn:
                claim.sent = claim.cursor.position
            self.on_end(NoSuchRecordError(position, "no shard owns the position yet"))
        elif refused is not None and refused.cursor is not None:  # It would go back.
            allowed = f"gsn {refused.cursor.position} or later, because that is committed"
            self.on_end(ConfigError("position", str(position), allowed))
        else:
            if position.gsn >= claim.cursor.position:
                claim.shard = position.shard
                claim.cursor = msgspec.structs.replace(
                    claim.cursor, position=position.gsn, mark=self.mark, has_moved=True
                )
            self.on_end(position)
