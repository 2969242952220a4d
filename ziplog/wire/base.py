"""What all messages share: the version, the limits, the types of fields, the contents of a unit."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ziplog.types import Gsn

#: Stands in every frame: a tag is `VERSION * 256 + code`.
VERSION: Final = 1
#: No frame is longer, in bytes.
MAX_FRAME: Final = 16 * 1024 * 1024
#: No insert holds more records.
MAX_UNIT_RECORDS: Final = 4096

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


class Body(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the records of one insert hold. Servers store and send it as it came, undecoded."""

    timestamp_us: Annotated[int, Meta(ge=-(2**62), lt=2**62)]
    key: bytes | None
    payloads: Annotated[list[bytes], Meta(min_length=1, max_length=MAX_UNIT_RECORDS)]
