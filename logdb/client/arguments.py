"""What users pass, checked and turned into what is sent: the same for both APIs.

Rule: what cannot work is refused here, when it is given, before anything is sent.
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

#: Rows that a scan asks for at once.
PAGE_ROWS: Final = 1000


class Bounds(msgspec.Struct, frozen=True, gc=False):
    """What is to be scanned: keys from `start` on, before `stop` (None: all)."""

    start: bytes
    stop: bytes | None
    #: Rows; None: all.
    limit: int | None
    #: The user speaks bytes.
    is_bytes: bool

    @property
    def is_empty(self) -> bool:
        """Whether no key can lie in it, or none is wanted."""
        return self.limit == 0 or (self.stop is not None and self.stop <= self.start)

    def key(self, key: bytes) -> str | bytes:
        """Return a key as the user wants it."""
        return key if self.is_bytes else decode_key(key)

    def row(self, row: tuple[bytes, bytes]) -> tuple[Any, Any]:
        """Return a key and its value as the user wants them."""
        return self.key(row[0]), decode_value(row[1])


def bounds(
    start: UserKey | None, stop: UserKey | None, prefix: UserKey | None, limit: int | None
) -> Bounds:
    """Return the bounds of a scan.

    Raises:
        ConfigError: both a prefix and a bound, or a limit that is no number from 0 on.
        TypeError: a bound is neither str nor bytes.

    """
    if limit is not None:
        if not isinstance(limit, int) or limit < 0:
            raise ConfigError("limit", limit, "a whole number from 0 on, or None for all")
        limit = int(limit)  # A bool is sent as one, and nobody would understand it.
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
    """Return the first key behind all those with a prefix; None: there is none."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


def keys(given: Iterable[UserKey]) -> list[bytes]:
    """Return keys' bytes.

    Raises:
        TypeError: it is one key, or one of them is neither str nor bytes.
        ConfigError: there are more than 10,000.

    """
    if isinstance(given, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"several keys must be given as a list, not as a {type(given).__name__}")
    found = [encode_key(key) for key in given]
    if len(found) > MAX_KEYS:
        raise ConfigError("keys", len(found), f"at most {MAX_KEYS} at once")
    return found


def write(key: object, value: object, largest: int) -> tuple[bytes, bytes]:
    """Return a key's and a value's bytes.

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
    """Return what a dictionary writes; errors are those of `write`, and of `Sizes`."""
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
    """Return what keys are compared with: values as they would come back (None: or absent)."""
    _check_is_mapping(given)
    found = {encode_key(key): decode_value(encode_value(value)) for key, value in given.items()}
    if len(found) > MAX_KEYS:
        raise ConfigError("expected", len(found), f"at most {MAX_KEYS} keys")
    return found


def _check_is_mapping(given: object) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(f"keys with values must be a dictionary, not a {type(given).__name__}")


#: What a commit record needs at most for itself, and beside the keys of each of its parts.
RECORD_BYTES: Final = 64
READ_BYTES: Final = 16
RANGE_BYTES: Final = 32
WRITE_BYTES: Final = 32


class Sizes:
    """The size of a commit record, so that what would not fit is refused when it is given."""

    __slots__ = ("_largest", "_size")

    def __init__(self, largest: int) -> None:
        self._largest: Final = largest
        self._size = RECORD_BYTES

    def add(self, size: int) -> None:
        """Take so many bytes more.

        Raises:
            RecordTooLargeError: the record would be larger than the cluster allows; nothing was
                taken.

        """
        if self._size + size > self._largest:
            raise RecordTooLargeError(self._size + size, self._largest, "commit record")
        self._size += size


def unknown_commit(error: OutcomeUnknownError) -> UnknownCommit:
    """Return what a commit's error is about.

    Raises:
        ClosedError: no database raised it.

    """
    if not isinstance(error.doubt, UnknownCommit):
        raise ClosedError("the client of this error", "only a database's errors can be asked")
    return error.doubt
