"""What a replica stores: the decided entries of its stream.

Entries are stored in stream order, and a primary only ever decides upwards, so that is gsn order
too (docs/protocol.md, section 10).
"""

from __future__ import annotations

import msgspec

from ziplog.types import Fseq, Gsn, View
from ziplog.view import Digest
from ziplog.wire import Cluster, Expire, Place, SessionTable, Skip, Unsigned


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


class Table(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=5):
    """What the sessions hold at this place of the log. Takes no stream position either."""

    sessions: list[SessionTable]


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One decided entry. A `Place` here always has its body; a `Mark` or `Table` has fseq 0."""

    fseq: Fseq
    view: View
    decision: Place | Skip | Expire | Mark | Table


class UnreadableError(Exception):
    """The stored bytes of a position fail their checksum: the answer is `unknown` (D18, D19)."""
