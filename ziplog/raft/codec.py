"""Codec of Raft messages: plain values as MessagePack, instead of the library's pickles.

Unpickling bytes from a connection would let any peer run code here. Rule: bytes from outside are
decoded only to None, booleans, numbers, text, bytes, and lists and dictionaries of them, of at most
`MAX_FRAME` bytes. Lists are decoded as tuples, as the library expects
(docs/protocol.md, section 12).
"""

from __future__ import annotations

import zlib
from typing import Any, Final

import msgspec

#: Maximum size of a frame between nodes, in bytes; a command has up to 16 MiB.
MAX_FRAME: Final = 24 * 1024 * 1024

dumps = msgspec.msgpack.Encoder().encode
compress = zlib.compress


def loads(data: bytes) -> Any:
    """Decode a value that `dumps` encoded, with its lists as tuples.

    Raises:
        ValueError: the bytes are not such a value.

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
    """Decompress data of `zlib.compress`.

    Raises:
        ValueError: the data is damaged, or the result is longer than `MAX_FRAME`.

    """
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(data, MAX_FRAME)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not stream.eof:
        raise ValueError(f"the data is truncated, or longer than {MAX_FRAME} bytes")
    return found
