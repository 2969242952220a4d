"""What a log is made of, in messages and on disk: units of records, decisions, session tables.

These structures are a format: both the wire and the segment files hold them, as MessagePack arrays.
Fields are only ever added at the end.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ziplog.core.fields import MAX_UNIT_RECORDS, Checksum, Gsns, Unsigned
from ziplog.errors import ProtocolError
from ziplog.types import ClientId, Epoch, Gsn, Seq


class Origin(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Which rows of which batch of which writer a unit holds: what is written again is told by it.

    Of what one writer wrote to one shard, a row counts if it is later, by batch and row, than all
    before it in the log; others are repetitions, and readers drop them.
    """

    #: Names the writer; nobody else ever writes under it.
    writer: ClientId
    batch: Unsigned
    #: The number of the unit's first record; each other has one more.
    row: Unsigned


class Body(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the records of one insert hold. Servers store and send it as it came, undecoded."""

    timestamp_us: Annotated[int, Meta(ge=-(2**62), lt=2**62)]
    key: bytes | None
    payloads: Annotated[list[bytes], Meta(min_length=1, max_length=MAX_UNIT_RECORDS)]
    origin: Origin | None = None
    #: Each record's key; None: `key` is that of all.
    keys: Annotated[list[bytes | None], Meta(max_length=MAX_UNIT_RECORDS)] | None = None

    def key_of(self, index: int) -> bytes | None:
        """Return the key of a record."""
        return self.key if self.keys is None else self.keys[index]


class _KeylessBody(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How a body without keys of its records is encoded: as it was before there were any."""

    timestamp_us: int
    key: bytes | None
    payloads: list[bytes]
    origin: Origin | None


class Unit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The records of one insert at their positions, for readers."""

    epoch: Epoch
    gsns: Gsns
    #: An encoded `Body` with one payload for each gsn.
    body: bytes


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=1):
    """The primary put a unit at these gsns. The body travels only when a backup asked for it."""

    client: ClientId
    seq: Seq
    first_incomplete: Seq
    epoch: Epoch
    gsns: Gsns
    checksum: Checksum
    body: bytes | None = None


class Skip(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2):
    """Every position that the shard owns in [start, stop) is a no-op."""

    start: Gsn
    stop: Gsn


class Expire(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3):
    """The client was silent for so long that its session is forgotten (D9)."""

    client: ClientId
    #: The primary's horizon with that: every server's is at least this.
    horizon: int = 0


Decision = Place | Skip | Expire


class Steps(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where the records of a unit are after the first one: so many distances between neighbours.

    `distances` is one period of them, or all of them.
    """

    #: Of all records, the first one too.
    count: Annotated[int, Meta(ge=2, le=MAX_UNIT_RECORDS)]
    distances: Annotated[
        list[Annotated[int, Meta(ge=1, le=2**62)]],
        Meta(min_length=1, max_length=MAX_UNIT_RECORDS - 1),
    ]


class SettledUnit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A unit that a session remembers: where it is."""

    seq: Seq
    #: All of them, or with `steps` the first one only.
    gsns: Gsns
    checksum: Checksum
    steps: Steps | None = None


class SessionTable(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a session remembers: the units from `first_incomplete` on that have their slots.

    A session may be cut into several tables: this one holds the units after seq `after`, up to the
    last one here if it `is_cut`, otherwise all of them.
    """

    client: ClientId
    first_incomplete: Seq
    units: list[SettledUnit]
    after: Seq = 0
    is_cut: bool = False
    #: The horizon when the session began: see `Fetched`.
    horizon: Unsigned = 0


_encoder = msgspec.msgpack.Encoder()
_body_decoder: msgspec.msgpack.Decoder[Body] = msgspec.msgpack.Decoder(Body)


def encode_body(body: Body) -> bytes:
    """Return what a unit holds, encoded; a body without `keys` has no field for them."""
    if body.keys is not None:
        return _encoder.encode(body)
    return _encoder.encode(_KeylessBody(body.timestamp_us, body.key, body.payloads, body.origin))


def decode_body(body: bytes, count: int) -> Body:
    """Return the contents of a unit of `count` records.

    Raises:
        ProtocolError: it is no body, or holds another number of payloads or keys, or both a key of
            all and keys of each.

    """
    try:
        decoded = _body_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"body of {len(body)} bytes is malformed: {error}") from error
    if len(decoded.payloads) != count:
        raise ProtocolError(f"body holds {len(decoded.payloads)} records instead of {count}")
    keys = decoded.keys
    if keys is not None and (len(keys) != count or decoded.key is not None):
        raise ProtocolError(f"body of {count} records has {len(keys)} keys, and {decoded.key!r}")
    return decoded
