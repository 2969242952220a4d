"""What consensus sends and keeps, in bytes: plain values as MessagePack, instead of pickles.

To unpickle what came over a connection is to let whoever sent it run code here. Rule: nothing but
None, booleans, numbers, text, bytes, and lists and dictionaries of them is ever made of bytes from
outside, and never more than `MAX_FRAME` bytes of it. Lists arrive as tuples: that is what the
library works with (docs/protocol.md, section 12).
"""

from __future__ import annotations

import zlib
from typing import Any, Final

import msgspec

#: Of a frame between nodes; a command has up to 16 MiB.
MAX_FRAME: Final = 24 * 1024 * 1024

dumps = msgspec.msgpack.Encoder().encode
compress = zlib.compress


def loads(data: bytes) -> Any:
    """Return the value that `dumps` was given, its lists as tuples.

    Raises:
        ValueError: the bytes are no such value.

    """
    try:
        return _frozen(msgspec.msgpack.decode(data))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return value


def decompress(data: bytes) -> bytes:
    """Return what `zlib.compress` was given.

    Raises:
        ValueError: it is damaged, or longer than `MAX_FRAME`.

    """
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(data, MAX_FRAME)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not stream.eof:
        raise ValueError(f"it is cut off, or longer than {MAX_FRAME} bytes")
    return found
