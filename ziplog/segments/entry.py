"""What a replica stores: the decided entries of its stream.

Entries are stored in stream order, and a primary only ever decides upwards, so that is gsn order
too (docs/protocol.md, section 10).
"""

from __future__ import annotations

import errno
from typing import Final

import msgspec

from ziplog.core.entries import Expire, Place, SessionTable, Skip
from ziplog.core.fields import Cluster, Unsigned
from ziplog.core.view import Digest
from ziplog.types import Fseq, Gsn, View

#: What the system reports when it lacks a descriptor or memory for now, and when there is no space.
SCARCE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: An open or a write that fails with one of these may be repeated: nothing that was written before
#: is in doubt. (A sync that fails with any of them leaves everything in doubt.)
REFUSED: Final = SCARCE | NO_SPACE


class WatermarkRecord(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=4):
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


class SessionTableRecord(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=5):
    """What the sessions hold at this place of the log, as servers stored it once."""

    sessions: list[SessionTable]


class SessionTablePartRecord(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=6):
    """What some of the sessions hold at this place of the log. Takes no stream position either.

    The parts of one table follow each other in the log, numbered from 0, with other entries between
    them. Each is about the sessions that follow those of the part before it.
    """

    sessions: list[SessionTable]
    #: The last entry before part 0: the same in all parts of a table.
    begun: Fseq
    number: Unsigned
    is_last: bool


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One decided entry. A `Place` always has its body; a watermark or table has fseq 0."""

    fseq: Fseq
    view: View
    decision: Place | Skip | Expire | WatermarkRecord | SessionTableRecord | SessionTablePartRecord


class UnreadableError(Exception):
    """The stored bytes of a position fail their checksum: the answer is `unknown` (D18, D19)."""


class BusyError(UnreadableError):
    """The system lacks a descriptor or memory to read with: a later read may succeed.

    Nothing is known about the stored bytes, so this is no damage, and needs no repair.
    """


def unreadable(name: str, error: OSError) -> UnreadableError:
    """Return the error that stands for a file that the system did not let this process read."""
    return (BusyError if error.errno in SCARCE else UnreadableError)(f"{name}: {error}")
