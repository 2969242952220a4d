"""What a process says of itself: the mark of its member cursor, which the list of cursors has.

The mark is MessagePack of two values: a hash of the process's tasks, and the terms of the claims
of failed tasks. The service gives each term to one claim only. So a term identifies a task, and
an old mark matches no later claim.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from ziplog.core.cursors import MAX_MARK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

#: The second part of the names of cursors that stand for processes; no target has this name.
MEMBERS: Final = "members"
_HASH_BYTES: Final = 8


class MemberMark(NamedTuple):
    """The mark of a member cursor."""

    #: The hash of the names of the process's tasks; b"": unknown.
    tasks: bytes
    #: The terms of the claims of failed tasks.
    failed: frozenset[int]


_Decoder: Final = msgspec.msgpack.Decoder(tuple[bytes, list[int]])
_UNKNOWN: Final = MemberMark(b"", frozenset())


def hash_of_tasks(names: Iterable[str]) -> bytes:
    """Return the hash of a process's tasks, given by the names of their cursors."""
    return blake2b("\n".join(sorted(names)).encode(), digest_size=_HASH_BYTES).digest()


def encode_mark(tasks: bytes, failed: Iterable[int]) -> bytes:
    """Return a mark; with the lowest terms, if it cannot hold all of them."""
    terms = sorted(failed)
    mark = msgspec.msgpack.encode((tasks, terms))
    while len(mark) > MAX_MARK_BYTES:
        terms.pop()
        mark = msgspec.msgpack.encode((tasks, terms))
    return mark


def decode_mark(mark: bytes) -> MemberMark:
    """Return what a mark has; nothing, if it is none of a member."""
    try:
        tasks, failed = _Decoder.decode(mark)
    except msgspec.DecodeError:
        return _UNKNOWN
    return MemberMark(tasks, frozenset(failed))
