"""Messages about cursors, between clients and the membership service.

See docs/protocol.md, section 19.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ziplog.core.cursors import (
    MAX_MOVES,
    Cursor,
    CursorError,
    CursorMove,
    CursorName,
    Edit,
    HoldS,
    LeaseMs,
    Nonce,
)
from ziplog.core.fields import Unsigned
from ziplog.core.message import Message
from ziplog.types import Gsn, ShardId
from ziplog.wire.base import VERSION, Name, Request

#: Maximum number of cursors in a `CursorList`.
MAX_LISTED: Final = 128


class CursorClaim(Message, tag=VERSION * 256 + 71, frozen=True, gc=False):
    """Requests ownership of a cursor, which is created if there is none of this name."""

    request: Request
    name: CursorName
    owner: Nonce
    owner_text: Name
    #: Of this claim: copies of the request are one claim.
    nonce: Nonce
    #: The position of a new cursor.
    start: Gsn
    lease_ms: LeaseMs
    hold_s: HoldS


class CursorMoves(Message, tag=VERSION * 256 + 72, frozen=True):
    """Requests moves of cursors, each by its owner. Each is done or refused by itself."""

    request: Request
    moves: Annotated[list[CursorMove], Meta(min_length=1, max_length=MAX_MOVES)]


class CursorRelease(Message, tag=VERSION * 256 + 73, frozen=True, gc=False):
    """Ends the ownership of a cursor."""

    request: Request
    name: CursorName
    term: Unsigned


class CursorEdit(Message, tag=VERSION * 256 + 74, frozen=True, gc=False):
    """An operator creates, changes or deletes a cursor."""

    request: Request
    name: CursorName
    edit: Edit
    nonce: Nonce
    #: Of create and seek: the position. Of pause: where, 0: at once.
    position: Gsn = 0
    #: Of create.
    hold_s: HoldS = 0


class CursorReply(Message, tag=VERSION * 256 + 75, frozen=True, gc=False):
    """The reply to a request about one cursor: the cursor after it, if there is one."""

    request: Request
    error: CursorError = ""
    cursor: Cursor | None = None
    #: The shard that owns the cursor's position, as far as it is known.
    shard: ShardId = 0
    #: The first position that is not trimmed.
    trim: Gsn = 0


class RefusedMove(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A move that was refused, and the cursor after it, if there is one."""

    name: CursorName
    error: CursorError
    cursor: Cursor | None = None


class CursorsMoved(Message, tag=VERSION * 256 + 81, frozen=True):
    """The reply to `CursorMoves`, once all are decided."""

    request: Request
    refused: list[RefusedMove] = []  # noqa: RUF012 - msgspec copies it


class OwnedTerm(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A cursor, and the term in which a client claimed it."""

    name: CursorName
    term: Unsigned


class CursorRenewal(Message, tag=VERSION * 256 + 76, frozen=True):
    """An owner reports that it is alive; it does so three times in each lease."""

    request: Request
    owner: Nonce
    owned: Annotated[list[OwnedTerm], Meta(max_length=1024)]


class CursorsRenewed(Message, tag=VERSION * 256 + 77, frozen=True):
    """The reply to a renewal: what the owner may not know of its cursors."""

    request: Request
    #: The cursors that it owns no longer, except deleted ones.
    lost: list[Cursor] = []  # noqa: RUF012 - msgspec copies it
    deleted: list[CursorName] = []  # noqa: RUF012 - msgspec copies it
    #: The paused ones that it owns.
    paused: list[Cursor] = []  # noqa: RUF012 - msgspec copies it


class CursorQuery(Message, tag=VERSION * 256 + 78, frozen=True, gc=False):
    """Requests the cursors with names after `after`. Answered after a read barrier."""

    request: Request
    after: Name = ""


class CursorList(Message, tag=VERSION * 256 + 79, frozen=True):
    """Cursors by name, at most `MAX_LISTED`."""

    request: Request
    cursors: list[Cursor]
    #: For each of them: the shard that owns its position, as far as it is known.
    shards: list[ShardId]
    #: There are more cursors, with later names.
    has_more: bool = False
    #: For each of them: its owner was silent for its lease.
    silent: list[bool] = []  # noqa: RUF012 - msgspec copies it
