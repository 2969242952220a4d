"""Limits and field types shared by messages and stored entries."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from ziplog.types import Gsn

#: Maximum size of a frame, and of a block, in bytes.
MAX_FRAME: Final = 16 * 1024 * 1024
#: Maximum number of records in a unit.
MAX_UNIT_RECORDS: Final = 4096
#: Maximum number of shards of a cluster, retired ones included.
MAX_SHARDS: Final = 16_384

Cluster = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=1, le=MAX_UNIT_RECORDS)]
Unsigned = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Checksum = Annotated[int, Meta(ge=0, lt=2**32)]
#: The label of a server's region; "": none.
Region = Annotated[str, Meta(max_length=64)]
#: Consecutive owned gsns of one insert, increasing.
Gsns = Annotated[list[Gsn], Meta(min_length=1, max_length=MAX_UNIT_RECORDS)]
