"""Conversion of keys and values between the user's types and the log (docs/logdb.md, section 2).

Unsupported keys and values are rejected here, before anything is sent.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgpack

from logdb.errors import UnsupportedValueError
from logdb.records import MAX_KEY_BYTES
from ziplog.errors import ConfigError, ProtocolError, RecordTooLargeError

UserKey = str | bytes


def encode_key(key: object) -> bytes:
    """Return a key's bytes.

    Raises:
        TypeError: the key is neither str nor bytes-like.
        ConfigError: the str has no UTF-8 form.
        RecordTooLargeError: the key has more than 1,024 bytes.

    """
    if isinstance(key, str):
        try:
            key = key.encode(errors="surrogateescape")
        except UnicodeEncodeError as error:
            raise ConfigError("key", key, f"a str that UTF-8 can carry ({error.reason})") from error
    elif isinstance(key, (bytes, bytearray, memoryview)):
        key = bytes(key)
    else:
        raise TypeError(f"a key must be str or bytes, not {type(key).__name__}")
    if len(key) > MAX_KEY_BYTES:
        raise RecordTooLargeError(len(key), MAX_KEY_BYTES, "key")
    return key


def decode_key(key: bytes) -> str:
    """Return a key as text; the inverse of `encode_key`, for any bytes."""
    return key.decode(errors="surrogateescape")


def encode_value(value: object) -> bytes:
    """Return a value's MessagePack form.

    Raises:
        UnsupportedValueError: MessagePack cannot carry the value.

    """
    try:
        encoded: bytes = msgpack.packb(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UnsupportedValueError(value, str(error)) from error
    return encoded


def decode_value(encoded: bytes) -> Any:
    """Return a value.

    Raises:
        ProtocolError: the bytes are not a value written by this library.

    """
    unpack = partial(msgpack.unpackb, encoded, strict_map_key=False)
    try:
        try:
            return unpack()
        except TypeError:  # a dictionary key was a tuple, which decodes as an unhashable list
            return unpack(object_pairs_hook=_dictionary)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError(f"a value in the log is not valid MessagePack: {error}") from error


def _dictionary(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    return {to_hashable(key): value for key, value in pairs}


def to_hashable(key: Any) -> Any:
    """Return a decoded dictionary key in its original, hashable form."""
    return tuple(map(to_hashable, key)) if isinstance(key, list) else key
