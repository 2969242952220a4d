"""The partition of a record: those with equal keys have the same one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from crc32c import crc32c

if TYPE_CHECKING:
    from ziplog.types import Record

_GSN_BYTES: Final = 8


def hash_of(record: Record) -> int:
    """Return the number that places a record: equal keys have equal numbers."""
    key = record.key
    return crc32c(record.rid.gsn.to_bytes(_GSN_BYTES, "big") if key is None else key)


def partition_of(record: Record, partitions: int) -> int:
    """Return the partition of a record, from 0 to `partitions` - 1."""
    return hash_of(record) % partitions


def size_of(record: Record) -> int:
    """Return the size of a record's payload and key, in bytes."""
    return len(record.payload) + len(record.key or b"")
