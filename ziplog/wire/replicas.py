"""Messages between the replicas of a shard (docs/protocol.md, sections 4, 5 and 11)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ziplog.core.entries import Decision, SessionTable
from ziplog.core.fields import Unsigned
from ziplog.core.message import Message
from ziplog.core.view import ServerState
from ziplog.types import Fseq, Gsn, Seq, ShardId, View
from ziplog.wire.base import VERSION, Text


class Forward(Message, tag=VERSION * 256 + 30, frozen=True, gc=False):
    """The primary's decisions in stream order, from number `first` on (D7)."""

    shard: ShardId
    view: View
    incarnation: Unsigned
    first: Fseq
    decisions: list[Decision]
    #: Every replica holds the stream up to `stable` (inclusive), and up to `durable` on disk.
    stable: Fseq
    durable: Fseq
    #: Report at once: clients, readers or units wait for the report at the primary.
    report_immediately: bool = True
    #: The last entry on the primary's own disk; None: the primary acks from its memory.
    flushed: Fseq | None = None


class Report(Message, tag=VERSION * 256 + 31, frozen=True, gc=False):
    """A backup holds the stream up to `replicated_up_to`, inclusive; up to `durable`, on disk."""

    shard: ShardId
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    incarnation: Unsigned
    replicated_up_to: Fseq
    durable: Fseq
    #: Forward decisions immediately: recent guesses were wrong, or readers wait at this backup.
    forward_immediately: bool = True
    #: This backup has subscribers.
    has_subscribers: bool = False
    #: Some of them receive records. Earlier releases do not send it: they may have some.
    has_followers: bool = True


class Resend(Message, tag=VERSION * 256 + 32, frozen=True, gc=False):
    """A backup requests the stream from `first` on, or bodies that it lacks (D7: NACK)."""

    shard: ShardId
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    first: Fseq
    #: Number of decisions that need their bodies; the rest need none.
    bodies: Annotated[int, Meta(ge=0, le=65536)]


class Beat(Message, tag=VERSION * 256 + 33, frozen=True, gc=False):
    """Heartbeat of a replica to the other replicas (docs/protocol.md, section 11)."""

    shard: ShardId
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    incarnation: Unsigned
    state: ServerState
    #: The sender's suspicion time; 0: unknown, from an earlier release.
    suspicion_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0
    #: Why the sender refuses new inserts, in words; "": it accepts them.
    full: Text = ""
    #: The sender's last entry, and the last one that it knows all replicas hold; 0: unknown.
    last: Fseq = 0
    stable: Fseq = 0


class Ahead(Message, tag=VERSION * 256 + 36, frozen=True, gc=False):
    """Lag-fix hint of a primary: `shard` has a record at `gsn` that readers wait to reach.

    A primary gives up its positions below `gsn`, and its backups guess so (docs/protocol.md,
    section 13.4).
    """

    shard: ShardId
    gsn: Gsn


class Logged(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A log entry in a state transfer between replicas; a `Place` includes its body."""

    fseq: Fseq
    view: View
    decision: Decision


class Fetch(Message, tag=VERSION * 256 + 34, frozen=True, gc=False):
    """Requests the log after the sender's last entry, then the sessions from `session` on.

    `view` is the view of the recovery. If a server repairs its files, it is the view of both
    servers, or 0 if both are in limbo.
    """

    shard: ShardId
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    #: The sender's last entry, and the view of that entry; 0 and 0: it has none.
    after: Fseq
    after_view: View
    #: Number of session tables that the sender has.
    session: Unsigned
    #: The client of the sender's last table, which holds units up to `seq`; b"": it has no table.
    #: None: it accepts whole sessions without `steps` only, as servers of earlier releases did.
    client: Annotated[bytes, Meta(max_length=16)] | None = None
    seq: Seq = 0


class Fetched(Message, tag=VERSION * 256 + 35, frozen=True, gc=False):
    """A part of the log, or of the sessions, in answer to `Fetch`.

    If `keep < after`, the requester must drop its entries after `keep`, and request again.
    Otherwise `entries` follow `after` without a gap, unless the first one shows that everything
    before it was trimmed. Once `after` is `last`, sessions follow, in the order of clients and
    seqs; `sessions_left` is 0 with the last of them.
    """

    shard: ShardId
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    #: Repeats the request.
    after: Fseq
    session: Unsigned
    keep: Fseq
    last: Fseq
    entries: list[Logged]
    sessions: list[SessionTable]
    sessions_left: Unsigned
    #: The sender's trim point, and the last entry that it knows to be stable.
    trim: Gsn
    stable: Fseq
    #: Repeats the request: a late answer to an earlier request may have the same `after`.
    after_view: View = 0
    #: No record of a session that the sender removed is above this position.
    horizon: Unsigned = 0
