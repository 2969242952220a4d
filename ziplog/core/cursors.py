"""A cursor: a named position of the log, which the membership service keeps by consensus.

At most one client owns a cursor. Each claim gets a *term*, a number that only grows; a move of the
position counts only in the present term (docs/protocol.md, section 19).
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from ziplog.core.fields import Unsigned
from ziplog.types import Gsn

#: Maximum number of cursors of a cluster, and of bytes of a mark.
MAX_CURSORS: Final = 1024
MAX_MARK_BYTES: Final = 512
#: Maximum number of moves that are requested, or proposed, together.
MAX_MOVES: Final = 256
#: Limits of a lease in milliseconds, and of a hold in seconds.
MIN_LEASE_MS: Final = 200
MAX_LEASE_MS: Final = 300_000
MAX_HOLD_S: Final = 2**31 - 1
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", re.ASCII)
NAME_RULE: Final = (
    "1 to 128 of the characters A-Z a-z 0-9 . _ / -, the first one a letter or a digit"
)

CursorName = Annotated[str, Meta(pattern=rf"^{_NAME.pattern}\Z", max_length=128)]
Mark = Annotated[bytes, Meta(max_length=MAX_MARK_BYTES)]
#: Random bytes: an owner has them for good, a claim or an edit anew.
Nonce = Annotated[bytes, Meta(max_length=16)]
LeaseMs = Annotated[int, Meta(ge=MIN_LEASE_MS, le=MAX_LEASE_MS)]
HoldS = Annotated[int, Meta(ge=0, le=MAX_HOLD_S)]

#: How an operator changes a cursor. lapse: it holds no trims any more, because it was not used.
Edit = Literal["create", "seek", "pause", "resume", "release", "delete", "lapse"]

#: Why a request about a cursor is refused; "": it is not. `no-such-position`: no shard owns it yet.
CursorError = Literal[
    "", "no-such-cursor", "exists", "owned", "stale-term", "goes-back", "no-such-position",
    "trimmed", "full",
]  # fmt: skip


def is_name(text: str) -> bool:
    """Whether a text may name a cursor."""
    return _NAME.fullmatch(text) is not None


class Cursor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The committed state of one cursor."""

    name: CursorName
    #: The term of its first claim or of its creation: another cursor of this name had another one.
    birth: Unsigned
    term: Unsigned
    #: Everything below it was processed.
    position: Gsn
    #: What the owner stored with the position.
    mark: Mark = b""
    #: The number of its last move in this term; 0: none.
    move: Unsigned = 0
    #: Number of seeks so far.
    seek: Unsigned = 0
    #: It was moved since it was made or sought.
    has_moved: bool = False
    #: The client that owns it; b"": none. `owner_text` describes it for people.
    owner: Nonce = b""
    owner_text: Annotated[str, Meta(max_length=256)] = ""
    #: The nonce of the last claim, and of the last edit.
    claim: Nonce = b""
    edit: Nonce = b""
    lease_ms: LeaseMs = 10_000
    is_paused: bool = False
    #: The owner goes on up to here; 0: it pauses at once.
    pause_at: Gsn = 0
    #: Time without use after which it holds no trims, in seconds; 0: it never holds any.
    hold_s: HoldS = 0
    is_holding: bool = False
    #: Unix time of the last move or edit in microseconds, by the leader's clock, for people.
    moved_us: Unsigned = 0

    @property
    def state(self) -> Literal["owned", "free", "paused"]:
        """What people see; a paused cursor may have an owner."""
        return "paused" if self.is_paused else "owned" if self.owner else "free"


class CursorMove(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An owner moves its cursor forward."""

    name: CursorName
    term: Unsigned
    #: The number of this move in its term, from 1.
    move: Unsigned
    position: Gsn
    mark: Mark
