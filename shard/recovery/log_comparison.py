"""Comparison of two replicas' logs: digests, watermarks of entries, iteration over entries.

Functions of a `Store` only. See docs/protocol.md, section 11.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec

from shard.state.decision_log import Watermark
from ziplog.core.entries import Place, Skip
from ziplog.segments.entry import UnreadableError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shard.storage.store import Store
    from ziplog.segments.entry import Entry

#: Maximum number of entries in a digest.
_MAX_DIGESTED: Final = 4096
_UNKNOWN_DIGEST: Final = b"\0" * 16
#: Bytes of one read from the store.
_READ_BYTES: Final = 4 * 1024 * 1024


def digest_of(store: Store) -> bytes:
    """Return a digest of the log's last entries of one view, 4,096 at most.

    Sixteen zeros if one of them was trimmed or cannot be read.
    """
    last = store.last_fseq
    base = max(store.last_of(store.last_view - 1), last - _MAX_DIGESTED) if last else 0
    if store.first_fseq > base + 1:
        return _UNKNOWN_DIGEST
    digest = blake2b(digest_size=16)
    try:
        for entry in entries_after(store, base):
            digest.update(msgspec.msgpack.encode(entry))
    except UnreadableError:
        return _UNKNOWN_DIGEST
    return digest.digest()


def may_be_same(digest: bytes, other: bytes) -> bool:
    """Whether two digests may belong to the same log."""
    return digest == other or _UNKNOWN_DIGEST in {digest, other}


def watermark_at(store: Store, fseq: int) -> Watermark:
    """Return the watermark after entry `fseq`; of a trimmed entry, where the log begins."""
    end = next(filter(None, map(first_gsn_of, entries_after(store, fseq))), store.last_end)
    return Watermark(fseq, end, store.last_record_below(end))


def first_gsn_of(entry: Entry) -> int:
    """Return the first gsn of an entry; 0 if it has none."""
    decision = entry.decision
    if type(decision) is Place:
        return decision.gsns[0]
    return decision.start if type(decision) is Skip else 0


def entries_after(store: Store, fseq: int) -> Iterable[Entry]:
    """Yield all entries after `fseq`."""
    while fseq < store.last_fseq:
        entries = store.read_after(fseq, _READ_BYTES)
        yield from entries
        fseq = entries[-1].fseq
