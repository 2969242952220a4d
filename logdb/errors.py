"""The exceptions of LogDB; those of the log (`ziplog.errors`) pass through as they are.

ZiplogError
├── TransactionAborted      .conflicts: keys that somebody else changed; retriable
├── TransactionClosed       the transaction was committed, aborted or rolled back before
├── SnapshotExpired         the state is no longer kept
├── NoCheckpointError       also a TrimmedError: what is left of the log does not make a database
├── TooManyReadsError       also a RecordTooLargeError: a transaction reads more than it may
└── UnsupportedValueError   also a TypeError: MessagePack cannot carry it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ziplog.errors import RecordTooLargeError, TrimmedError, ZiplogError

if TYPE_CHECKING:
    from ziplog.types import RecordId


class TransactionAborted(ZiplogError):  # noqa: N818 - says what became of the transaction
    """The transaction took no effect: what it read was changed before it could commit.

    It left no trace that any reader can see, and may be run again (`run` does).
    """

    retriable = True

    def __init__(self, conflicts: list[bytes], reason: str = "") -> None:
        #: Keys (or first keys of ranges) that others changed; empty if it waited for too long.
        self.conflicts = conflicts
        shown = ", ".join(repr(key.decode(errors="backslashreplace")) for key in conflicts[:5])
        more = f" and {len(conflicts) - 5} more" if len(conflicts) > 5 else ""
        reason = reason or f"somebody else changed {shown}{more}"
        super().__init__(f"transaction aborted: {reason}; nothing was written, run it again")


class TransactionClosed(ZiplogError):  # noqa: N818 - named like the one above
    """A transaction was used after its end."""

    def __init__(self, how: str) -> None:
        #: How it ended: "committed", "aborted", "rolled back", "committing", "in doubt".
        self.how = how
        super().__init__(f"this transaction is over ({how}); begin another one")


class SnapshotExpired(ZiplogError):  # noqa: N818 - named like the others
    """The state that a snapshot reads is no longer kept; take another one."""

    retriable = True

    def __init__(self, reason: str) -> None:
        #: Why, for whoever tells it on.
        self.reason = reason
        super().__init__(f"the snapshot has expired: {reason}; take another one")


class NoCheckpointError(TrimmedError):
    """The log was trimmed, and no checkpoint in it is whole: what it held is not in it any more."""

    def __init__(self, first: RecordId) -> None:
        super().__init__(first)
        reason = f"the log was trimmed before {first} and holds no whole checkpoint of LogDB; if it"
        reason += " is a database's, somebody else trimmed it, and it must be filled from a copy"
        self.args = (reason,)


class TooManyReadsError(RecordTooLargeError):
    """A transaction would read more than it may; it is still open, and nothing was read."""

    def __init__(self, size: int, limit: int, what: str = "keys") -> None:
        super().__init__(size, limit, what)
        reason = f"the transaction would read {size} {what}; one may read at most {limit}:"
        self.args = (f"{reason} split it up, or scan",)


class UnsupportedValueError(ZiplogError, TypeError):
    """A value that MessagePack cannot carry; nothing was written."""

    def __init__(self, value: object, reason: str) -> None:
        self.value = value
        super().__init__(
            f"a value of type {type(value).__name__} cannot be stored ({reason}); use None, bool,"
            " integers of 64 bits, float, str, bytes, lists and dictionaries of these"
        )
