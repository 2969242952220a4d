"""Validation and encoding of user arguments, for both APIs.

Invalid arguments are rejected here, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from logdb.client.commits import UnknownCommit
from logdb.records import OVERHEAD_BYTES
from logdb.values import decode_key, decode_value, encode_key, encode_value
from logdb.wire import MAX_KEYS
from ziplog.errors import ClosedError, ConfigError, RecordTooLargeError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logdb.values import UserKey
    from ziplog.errors import OutcomeUnknownError

#: Rows of one page of a scan.
PAGE_ROWS: Final = 1000


class Bounds(msgspec.Struct, frozen=True, gc=False):
    """The bounds of a scan: keys from `start` on, before `stop` (None: all)."""

    start: bytes
    stop: bytes | None
    #: Rows; None: all.
    limit: int | None
    #: Whether keys are returned as bytes.
    is_bytes: bool

    @property
    def is_empty(self) -> bool:
        """Whether no key can be in the range, or the limit is 0."""
        return self.limit == 0 or (self.stop is not None and self.stop <= self.start)

    def key(self, key: bytes) -> str | bytes:
        """Return a key in the user's type."""
        return key if self.is_bytes else decode_key(key)

    def row(self, row: tuple[bytes, bytes]) -> tuple[Any, Any]:
        """Return a key and its value in the user's types."""
        return self.key(row[0]), decode_value(row[1])


def bounds(
    start: UserKey | None, stop: UserKey | None, prefix: UserKey | None, limit: int | None
) -> Bounds:
    """Return the bounds of a scan.

    Raises:
        ConfigError: both a prefix and a bound were given, or the limit is not a number from 0 on.
        TypeError: a bound is neither str nor bytes.

    """
    if limit is not None:
        if not isinstance(limit, int) or limit < 0:
            raise ConfigError("limit", limit, "a whole number from 0 on, or None for all")
        limit = int(limit)  # A bool would be encoded as a bool, which is not a valid limit.
    if prefix is not None and not (start is None and stop is None):
        raise ConfigError("prefix", prefix, "given without start and stop")
    given = [bound for bound in (start, stop, prefix) if bound is not None]
    is_bytes = any(not isinstance(bound, str) for bound in given)
    if prefix is not None:
        first = encode_key(prefix)
        return Bounds(first, _after_prefix(first), limit, is_bytes)
    return Bounds(
        b"" if start is None else encode_key(start),
        None if stop is None else encode_key(stop),
        limit,
        is_bytes,
    )


def _after_prefix(prefix: bytes) -> bytes | None:
    """Return the first key after all keys with a prefix; None: there is none."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


def keys(given: Iterable[UserKey]) -> list[bytes]:
    """Return the bytes of keys.

    Raises:
        TypeError: a single key was passed, or a key is neither str nor bytes.
        ConfigError: there are more than 10,000 keys.

    """
    if isinstance(given, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"several keys must be given as a list, not as a {type(given).__name__}")
    found = [encode_key(key) for key in given]
    if len(found) > MAX_KEYS:
        raise ConfigError("keys", len(found), f"at most {MAX_KEYS} at once")
    return found


def write(key: object, value: object, largest: int) -> tuple[bytes, bytes]:
    """Return the bytes of a key and a value.

    Raises:
        TypeError: the key is neither str nor bytes.
        UnsupportedValueError: MessagePack cannot carry the value.
        RecordTooLargeError: they do not fit into a record of `largest` bytes.

    """
    encoded_key, encoded = encode_key(key), encode_value(value)
    room = largest - len(encoded_key) - OVERHEAD_BYTES
    if len(encoded) > room:
        raise RecordTooLargeError(len(encoded), room, "value")
    return encoded_key, encoded


def writes(given: Mapping[Any, object], largest: int) -> dict[bytes, bytes | None]:
    """Return the writes of a dictionary; raises the errors of `write` and of `Sizes`."""
    _check_is_mapping(given)
    sizes = Sizes(largest)
    found: dict[bytes, bytes | None] = {}
    for key, value in given.items():
        encoded_key, encoded = write(key, value, largest)
        if encoded_key not in found:
            sizes.add(len(encoded_key) + WRITE_BYTES)
        found[encoded_key] = encoded
    return found


def expected(given: Mapping[Any, object]) -> dict[bytes, Any]:
    """Return expected values in the form in which they are read (None: or absent)."""
    _check_is_mapping(given)
    found = {encode_key(key): decode_value(encode_value(value)) for key, value in given.items()}
    if len(found) > MAX_KEYS:
        raise ConfigError("expected", len(found), f"at most {MAX_KEYS} keys")
    return found


def _check_is_mapping(given: object) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(f"keys with values must be a dictionary, not a {type(given).__name__}")


#: Maximum bytes of a commit record without its parts, and of each part without its key.
RECORD_BYTES: Final = 64
READ_BYTES: Final = 16
RANGE_BYTES: Final = 32
WRITE_BYTES: Final = 32


class Sizes:
    """The maximum size of a commit record, so that an oversized write is rejected early."""

    __slots__ = ("_largest", "_size")

    def __init__(self, largest: int) -> None:
        self._largest: Final = largest
        self._size = RECORD_BYTES

    def add(self, size: int) -> None:
        """Add bytes.

        Raises:
            RecordTooLargeError: the record would exceed the cluster's limit; nothing was added.

        """
        if self._size + size > self._largest:
            raise RecordTooLargeError(self._size + size, self._largest, "commit record")
        self._size += size


def unknown_commit(error: OutcomeUnknownError) -> UnknownCommit:
    """Return the commit with an unknown outcome from its error.

    Raises:
        ClosedError: the error is not of a database.

    """
    if not isinstance(error.doubt, UnknownCommit):
        raise ClosedError("the client of this error", "only errors of a database can be resolved")
    return error.doubt
