"""The entries that a replica stores: decisions of its stream, and records about server state.

Entries are stored in stream order. A primary decides positions in increasing order, so this is gsn
order too (docs/protocol.md, section 10).
"""

from __future__ import annotations

import errno
from typing import Final

import msgspec

from ziplog.core.entries import Expire, Place, SessionTable, Skip
from ziplog.core.fields import Cluster, Unsigned
from ziplog.core.view import Digest, LeaseRun, Placement
from ziplog.types import Fseq, Gsn, View

#: Error numbers for a temporary lack of descriptors or memory, and for a full disk.
SCARCE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: An open or a write that fails with one of these may be repeated: earlier writes are not affected.
#: (After a failed sync, the state of all earlier writes is unknown.)
REFUSED: Final = SCARCE | NO_SPACE


class WatermarkRecord(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=4):
    """A server's watermarks, stored between entries without a stream position. The last counts."""

    cluster: Cluster
    #: The stream was stable up to here, inclusive.
    stable: Fseq
    #: All positions of the shard below this were stable.
    frontier: Gsn
    trim: Gsn
    #: The server's last lease, and its digest (D30).
    lease: Unsigned
    digest: Digest
    #: The leases that the server received since the record before, and those above its frontier in
    #: the first record of a file or process. A rebuild of the membership service reads them.
    leases: list[LeaseRun] = []
    #: The last announced placement of the shard; None: unknown.
    placement: Placement | None = None
    #: The end of the shard's positions, if it has left; 0: not known to have left.
    limit: Gsn = 0


class SessionTableRecord(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=5):
    """All session tables at this place of the log, in the format of earlier releases."""

    sessions: list[SessionTable]


class SessionTablePartRecord(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=6):
    """One part of the session tables at this place of the log, without a stream position.

    The parts of one table are numbered from 0, with other entries between them. Each part holds the
    sessions that follow those of the part before it.
    """

    sessions: list[SessionTable]
    #: The last entry before part 0; the same in all parts of a table.
    begun: Fseq
    number: Unsigned
    is_last: bool


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One stored entry. A `Place` has its body; a watermark record or table has fseq 0."""

    fseq: Fseq
    view: View
    decision: Place | Skip | Expire | WatermarkRecord | SessionTableRecord | SessionTablePartRecord


class UnreadableError(Exception):
    """The stored bytes of a position fail their checksum; reads answer `unknown` (D18, D19)."""


class BusyError(UnreadableError):
    """The system lacks a descriptor or memory for the read: a later read may succeed.

    The stored bytes were not read, so this does not indicate damage, and needs no repair.
    """


def unreadable(name: str, error: OSError) -> UnreadableError:
    """Return the error for a file that the system did not let this process read."""
    return (BusyError if error.errno in SCARCE else UnreadableError)(f"{name}: {error}")
