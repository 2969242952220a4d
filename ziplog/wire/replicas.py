"""Between the replicas of a shard (docs/protocol.md, sections 4, 5 and 11)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ziplog.core.entries import Decision, SessionTable
from ziplog.core.fields import Unsigned
from ziplog.core.message import Message
from ziplog.core.view import ServerState
from ziplog.types import Fseq, Gsn, Seq, ShardId, View
from ziplog.wire.base import VERSION


class Forward(Message, tag=VERSION * 256 + 30, frozen=True, gc=False):
    """The primary's decisions, in its order: number `first` and those after it (D7)."""

    shard: ShardId
    view: View
    incarnation: Unsigned
    first: Fseq
    decisions: list[Decision]
    #: Up to here (inclusive), every replica holds the stream; up to `durable`, on stable storage.
    stable: Fseq
    durable: Fseq


class Report(Message, tag=VERSION * 256 + 31, frozen=True, gc=False):
    """A backup holds the stream up to `replicated_up_to`, inclusive; up to `durable`, on disk."""

    shard: ShardId
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    incarnation: Unsigned
    replicated_up_to: Fseq
    durable: Fseq
    #: Guesses failed lately, or readers wait here: tell me your decisions at once.
    forward_immediately: bool = True
    #: Somebody subscribes to this backup.
    has_subscribers: bool = False


class Resend(Message, tag=VERSION * 256 + 32, frozen=True, gc=False):
    """A backup misses the stream from `first` on, or the bodies of some of it (D7: NACK)."""

    shard: ShardId
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    first: Fseq
    #: Send bodies along with this many decisions; the rest need none.
    bodies: Annotated[int, Meta(ge=0, le=65536)]


class Beat(Message, tag=VERSION * 256 + 33, frozen=True, gc=False):
    """A replica is there, and what it is (docs/protocol.md, section 11)."""

    shard: ShardId
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    incarnation: Unsigned
    state: ServerState


class Ahead(Message, tag=VERSION * 256 + 36, frozen=True, gc=False):
    """From primary to primary: `shard` has a record at `gsn`, and readers wait for what is before.

    A hint: who gets it gives up its own positions below (docs/protocol.md, section 13).
    """

    shard: ShardId
    gsn: Gsn


class Logged(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An entry of a replica's log, as one replica sends it to another; a `Place` has its body."""

    fseq: Fseq
    view: View
    decision: Decision


class Fetch(Message, tag=VERSION * 256 + 34, frozen=True, gc=False):
    """Send me your log behind my last entry; then the sessions from number `session` on.

    `view` is that of the recovery, or of both servers, if one repairs its files; 0: both are in
    limbo, and only that.
    """

    shard: ShardId
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    #: The last entry of the one that asks, and the view of that entry; 0 and 0: it has none.
    after: Fseq
    after_view: View
    #: How many tables of sessions it has already.
    session: Unsigned
    #: The last table that it has is of this client, and holds its units up to `seq`; b"": it has
    #: none. None: it takes whole sessions only, without `steps`, as servers did once.
    client: Annotated[bytes, Meta(max_length=16)] | None = None
    seq: Seq = 0


class Fetched(Message, tag=VERSION * 256 + 35, frozen=True, gc=False):
    """A part of the log, or of the sessions.

    If `keep < after`: the one that asks must drop its entries behind `keep`, and ask again.
    Otherwise `entries` follow `after` without a gap, unless the first one shows that everything
    before was trimmed. Once `after` is `last`, sessions follow, in the order of clients and seqs;
    `sessions_left` is 0 with the last of them.
    """

    shard: ShardId
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    #: Repeats the question.
    after: Fseq
    session: Unsigned
    keep: Fseq
    last: Fseq
    entries: list[Logged]
    sessions: list[SessionTable]
    sessions_left: Unsigned
    #: The trim point of the one that sends, and up to where it knows the log to be stable.
    trim: Gsn
    stable: Fseq
    #: Repeats the question: a late answer to an earlier one may be about the same number.
    after_view: View = 0
    #: No record of a session that the sender forgot is above this position.
    horizon: Unsigned = 0
