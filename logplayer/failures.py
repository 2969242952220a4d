"""The failed tasks of a process, as its member cursor's mark has them: for processes that ask.

The mark is MessagePack of the terms of the failed tasks' claims. Terms are of the whole service, so
one says which task it is, and an older mark says nothing of later claims.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from ziplog.core.cursors import MAX_MARK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

#: The second part of the names of cursors that stand for processes; no target has this name.
MEMBERS: Final = "members"
_Terms: Final = msgspec.msgpack.Decoder(list[int])


def mark_of(terms: Iterable[int]) -> bytes:
    """Return the mark of the failed claims; the lowest terms, if it cannot hold all of them."""
    chosen = sorted(terms)
    mark = msgspec.msgpack.encode(chosen)
    while len(mark) > MAX_MARK_BYTES:
        chosen.pop()
        mark = msgspec.msgpack.encode(chosen)
    return mark if chosen else b""


def terms_of(mark: bytes) -> frozenset[int]:
    """Return the terms of the failed claims; none if it is no such mark."""
    try:
        return frozenset(_Terms.decode(mark)) if mark else frozenset()
    except msgspec.DecodeError:
        return frozenset()
