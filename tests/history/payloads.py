"""Numbered payloads: a unique number under a checksum.

Invariant: `number_of(payload(n, size)) == n`, and anything else, if only in one bit, is `FOREIGN`.
"""

from __future__ import annotations

import struct
from typing import Final

from crc32c import crc32c

#: Number of a payload that is damaged or not from a workload.
FOREIGN: Final = -1
#: A client's payloads are numbered `client * PER_CLIENT + n`, n from 1: readable in decimals.
PER_CLIENT: Final = 1_000_000_000

_HEAD: Final = struct.Struct("<IQ")
#: The shortest payload, in bytes.
MIN_BYTES: Final = _HEAD.size
_FILL: Final = bytes(range(256))


def payload(number: int, size: int) -> bytes:
    """Return the payload `number`, `size` bytes long (at least `MIN_BYTES`)."""
    assert size >= MIN_BYTES, "a payload has room for its number"
    rest = size - MIN_BYTES
    body = number.to_bytes(8, "little") + (_FILL * (rest // len(_FILL) + 1))[:rest]
    return crc32c(body).to_bytes(4, "little") + body


def number_of(contents: bytes) -> int:
    """Return the number of a payload, or `FOREIGN`."""
    if len(contents) < MIN_BYTES:
        return FOREIGN
    checksum, number = _HEAD.unpack_from(contents)
    return number if crc32c(memoryview(contents)[4:]) == checksum else FOREIGN
