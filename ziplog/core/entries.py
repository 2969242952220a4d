"""Log entries, shared by messages and segment files: units, decisions, session tables.

These structures are a format: the wire and the segment files hold them as MessagePack arrays.
New fields are only added at the end.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ziplog.core.fields import MAX_UNIT_RECORDS, Checksum, Gsns, Unsigned
from ziplog.errors import ProtocolError
from ziplog.types import ClientId, Epoch, Gsn, Seq


class Origin(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Writer, batch and row number of a unit's records, for duplicate recognition by readers.

    Within a shard, a writer's row counts if its (batch, row) is higher than that of all the
    writer's rows before it in the log. Readers drop all other rows as duplicates.
    """

    #: Identifies the writer; no other writer uses it.
    writer: ClientId
    batch: Unsigned
    #: The row number of the unit's first record; the numbers of the others follow it.
    row: Unsigned


class Body(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The contents of one unit's records. Servers store and forward the encoded form as it is."""

    timestamp_us: Annotated[int, Meta(ge=-(2**62), lt=2**62)]
    key: bytes | None
    payloads: Annotated[list[bytes], Meta(min_length=1, max_length=MAX_UNIT_RECORDS)]
    origin: Origin | None = None
    #: The key of each record; None: all records have `key`.
    keys: Annotated[list[bytes | None], Meta(max_length=MAX_UNIT_RECORDS)] | None = None

    def key_of(self, index: int) -> bytes | None:
        """Return the key of a record."""
        return self.key if self.keys is None else self.keys[index]


class _KeylessBody(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The encoding of a body without `keys`: the format from before that field existed."""

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
    """Decision: a unit is at these gsns. The body is sent only if a backup requested it."""

    client: ClientId
    seq: Seq
    first_incomplete: Seq
    epoch: Epoch
    gsns: Gsns
    checksum: Checksum
    body: bytes | None = None

    def without_body(self) -> Place:
        """Return the decision without its body."""
        return Place(
            self.client, self.seq, self.first_incomplete, self.epoch, self.gsns, self.checksum
        )


class Skip(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2):
    """Decision: every position that the shard owns in [start, stop) is a no-op."""

    start: Gsn
    stop: Gsn


class Expire(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3):
    """Decision: the session of a client that reached the session timeout is removed (D9)."""

    client: ClientId
    #: The primary's horizon after the removal: the horizon of every server is at least this.
    horizon: int = 0


Decision = Place | Skip | Expire


class Steps(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The gsns of a unit, relative to the first one: the distances between neighbours.

    `distances` holds one period of the distances, or all of them.
    """

    #: The number of records, including the first one.
    count: Annotated[int, Meta(ge=2, le=MAX_UNIT_RECORDS)]
    distances: Annotated[
        list[Annotated[int, Meta(ge=1, le=2**62)]],
        Meta(min_length=1, max_length=MAX_UNIT_RECORDS - 1),
    ]


class SettledUnit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A placed unit in a session table: its seq and its positions."""

    seq: Seq
    #: All gsns; with `steps`, the first one only.
    gsns: Gsns
    checksum: Checksum
    steps: Steps | None = None


class SessionTable(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The state of one client session: its placed units from `first_incomplete` on.

    A session may be split into several tables. This one holds the units after seq `after`: if it
    `is_cut`, those up to the last one listed, otherwise all of them.
    """

    client: ClientId
    first_incomplete: Seq
    units: list[SettledUnit]
    after: Seq = 0
    is_cut: bool = False
    #: The horizon when the session started; see `Fetched`.
    horizon: Unsigned = 0


class _Provenance(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A body of which only the origin is decoded."""

    timestamp_us: msgspec.Raw
    key: msgspec.Raw
    payloads: msgspec.Raw
    origin: Origin | None = None


_encoder = msgspec.msgpack.Encoder()
_body_decoder: msgspec.msgpack.Decoder[Body] = msgspec.msgpack.Decoder(Body)
_origin_decoder: msgspec.msgpack.Decoder[_Provenance] = msgspec.msgpack.Decoder(_Provenance)


def encode_body(body: Body) -> bytes:
    """Return the encoded body of a unit; a body without `keys` has no field for them."""
    if body.keys is not None:
        return _encoder.encode(body)
    return encode_keyless_body(body.timestamp_us, body.key, body.payloads, body.origin)


def encode_keyless_body(
    timestamp_us: int, key: bytes | None, payloads: list[bytes], origin: Origin | None
) -> bytes:
    """Return the encoded body of a unit whose records have one key, or none; see `Body`."""
    return _encoder.encode(_KeylessBody(timestamp_us, key, payloads, origin))


def decode_body(body: bytes, count: int) -> Body:
    """Return the contents of a unit of `count` records.

    Raises:
        ProtocolError: it is not a body, has a wrong number of payloads or keys, or has both a
            common key and a key for each record.

    """
    try:
        decoded = _body_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"body of {len(body)} bytes is malformed: {error}") from error
    if len(decoded.payloads) != count:
        raise ProtocolError(f"body holds {len(decoded.payloads)} records instead of {count}")
    keys = decoded.keys
    if keys is not None and (len(keys) != count or decoded.key is not None):
        raise ProtocolError(
            f"body of {count} records has {len(keys)} keys and the common key {decoded.key!r}"
        )
    return decoded


def decode_origin(body: bytes) -> Origin | None:
    """Return the origin of a unit's records; the rest of the body is not decoded.

    Raises:
        ProtocolError: it is not a body.

    """
    try:
        return _origin_decoder.decode(body).origin
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"body of {len(body)} bytes is malformed: {error}") from error
