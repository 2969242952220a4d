"""What all messages share: the version, the limits, the types of fields, the contents of a unit."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ziplog.types import ClientId, Gsn

#: Stands in every frame: a tag is `VERSION * 256 + code`.
VERSION: Final = 1
#: No frame is longer, in bytes.
MAX_FRAME: Final = 16 * 1024 * 1024
#: No insert holds more records.
MAX_UNIT_RECORDS: Final = 4096
#: No outline has more stretches.
MAX_STEPS: Final = 4096

Cluster = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Request = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=1, le=MAX_UNIT_RECORDS)]
Unsigned = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Checksum = Annotated[int, Meta(ge=0, lt=2**32)]
#: Consecutive owned gsns of one insert, increasing.
Gsns = Annotated[list[Gsn], Meta(min_length=1, max_length=MAX_UNIT_RECORDS)]


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all messages."""

    cluster: Cluster


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


class KeylessBody(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How a body without keys of its records is encoded: as it was before there were any."""

    timestamp_us: int
    key: bytes | None
    payloads: list[bytes]
    origin: Origin | None
