"""What a replica stores: the decided entries of its stream, and the store that keeps them.

Entries are stored in stream order, and a primary only ever decides upwards, so that is gsn order
too (docs/protocol.md, section 10).
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from ziplog.types import Fseq, Gsn, View
from ziplog.view import Digest
from ziplog.wire import Cluster, Expire, Place, Skip, Unsigned


class Mark(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=4):
    """What a server knew: kept between entries, takes no stream position. The last one counts."""

    cluster: Cluster
    #: The stream is stable up to here, inclusive.
    stable: Fseq
    #: All that the shard owns below this was stable.
    frontier: Gsn
    trim: Gsn
    #: The last lease held, and its digest (D30).
    lease: Unsigned
    digest: Digest


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One decided entry. A `Place` here always has its body; a `Mark` has fseq 0."""

    fseq: Fseq
    view: View
    decision: Place | Skip | Expire | Mark


class UnreadableError(Exception):
    """The stored bytes of a position fail their checksum: the answer is `unknown` (D18, D19)."""


class Store(Protocol):
    """Keeps entries. Everything appended is found at once, flushed or not."""

    #: The last entry's stream position; 0 if there is none.
    last_fseq: int
    #: The last `Mark`, if any.
    mark: Mark | None

    @property
    def backlog_bytes(self) -> int:
        """What was appended and is not on stable storage yet."""
        ...

    def append(self, entry: Entry) -> None:
        """Take the next entry."""
        ...

    def find(self, gsn: int) -> Entry | None:
        """Return the `Place` that holds `gsn` or the `Skip` that covers it, else None.

        Raises:
            UnreadableError: the bytes that would tell are damaged.

        """
        ...

    def scan(self, gsn: int, limit_bytes: int) -> list[Entry]:
        """Return `Place` and `Skip` entries, in order, from the first that reaches `gsn` or beyond.

        About `limit_bytes` of bodies; at least one entry if there is any.

        Raises:
            UnreadableError: the first of them is damaged.

        """
        ...

    def last_record_below(self, gsn: int) -> int:
        """Return the highest gsn below `gsn` that holds a record; 0 if there is none."""
        ...

    def trim(self, gsn: int) -> None:
        """Give back the space of what lies wholly below `gsn`."""
        ...
