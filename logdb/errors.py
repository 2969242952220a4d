"""The exceptions of LogDB; errors of the log (`ziplog.errors`) pass through unchanged.

ZiplogError
├── TransactionAborted      .conflicts: keys that other transactions changed; retriable
├── TransactionClosed       the transaction was committed, aborted or rolled back before
├── SnapshotExpired         the state is no longer kept
├── NoCheckpointError       also a TrimmedError: the rest of the log does not hold a database
├── TooManyReadsError       also a RecordTooLargeError: a transaction exceeds the limit of reads
└── UnsupportedValueError   also a TypeError: MessagePack cannot carry the value
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ziplog.errors import RecordTooLargeError, TrimmedError, ZiplogError

if TYPE_CHECKING:
    from ziplog.types import RecordId


class TransactionAborted(ZiplogError):  # noqa: N818 - a name of the public API
    """The transaction took no effect: what it read was changed before it could commit.

    No reader can see a trace of it. It may be run again (`run` does that).
    """

    retriable = True

    def __init__(self, conflicts: list[bytes], reason: str = "") -> None:
        #: Keys (or first keys of ranges) that other transactions changed; empty if the commit
        #: record was decided too late.
        self.conflicts = conflicts
        shown = ", ".join(repr(key.decode(errors="backslashreplace")) for key in conflicts[:5])
        more = f" and {len(conflicts) - 5} more" if len(conflicts) > 5 else ""
        reason = reason or f"another transaction changed {shown}{more}"
        super().__init__(f"transaction aborted: {reason}; nothing was written, run it again")


class TransactionClosed(ZiplogError):  # noqa: N818 - named like the one above
    """A transaction was used after its end."""

    def __init__(self, how: str) -> None:
        #: How it ended: "committed", "aborted", "rolled back", "committing", "in doubt".
        self.how = how
        super().__init__(f"this transaction is over ({how}); start a new one")


class SnapshotExpired(ZiplogError):  # noqa: N818 - named like the others
    """The state that a snapshot reads is no longer kept; take a new snapshot."""

    retriable = True

    def __init__(self, reason: str) -> None:
        #: Why it expired.
        self.reason = reason
        super().__init__(f"the snapshot has expired: {reason}; take a new one")


class NoCheckpointError(TrimmedError):
    """The log was trimmed and holds no complete checkpoint, so the database cannot be restored."""

    def __init__(self, first: RecordId) -> None:
        super().__init__(first)
        reason = f"the log was trimmed before {first} and holds no complete checkpoint of LogDB;"
        reason += " if it held a database, another program trimmed it: restore the data from a copy"
        self.args = (reason,)


class TooManyReadsError(RecordTooLargeError):
    """A transaction would exceed its limit of reads; it is still open, and nothing was read."""

    def __init__(self, size: int, limit: int, what: str = "keys") -> None:
        super().__init__(size, limit, what)
        reason = f"the transaction would read {size} {what}; the limit is {limit}:"
        self.args = (f"{reason} split it up, or use a scan",)


class UnsupportedValueError(ZiplogError, TypeError):
    """MessagePack cannot carry the value; nothing was written."""

    def __init__(self, value: object, reason: str) -> None:
        self.value = value
        super().__init__(
            f"a value of type {type(value).__name__} cannot be stored ({reason}); use None, bool,"
            " integers of 64 bits, float, str, bytes, lists and dictionaries of these"
        )
