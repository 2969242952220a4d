"""Every exception that leaves this library. Exceptions carry data; the text is built from it.

ZiplogError                     .retriable: bool
├── ConfigError                 also a ValueError
├── ClosedError                 the client was closed
├── UnavailableError            nothing was done; safe to retry
│   └── DeadlineError           also a TimeoutError
├── OutcomeUnknownError         also a TimeoutError; an insert that may have happened; .resolve()
├── RecordTooLargeError         .size, .limit, .what, .index
├── NoSuchRecordError           the position holds no record
├── TrimmedError                .first: the first position still there
└── ProtocolError               a peer sent what it may not
    └── LocalProtocolError      we did
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.types import RecordId


#: Nobody else knows what became of the insert.
ONLY_ITS_CLIENT = "only the client that raised it can tell, while it is open"


class ZiplogError(Exception):
    """Base of all errors of this library."""

    #: True if the same call may be made again without harm.
    retriable: bool = False

    #: For `insert_many`: the rid of each payload, None where it has none; else empty.
    results: list[RecordId | None]

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.results = []


class ConfigError(ZiplogError, ValueError):
    """A bad file, option or argument: which one, what it was, and what it may be."""

    def __init__(self, name: str, value: object, allowed: str, where: str = "") -> None:
        self.name, self.value, self.allowed, self.where = name, value, allowed, where
        prefix = f"{where}: " if where else ""
        super().__init__(f"{prefix}{name} is {value!r}; it must be {allowed}")


class ClosedError(ZiplogError):
    """The client was closed before or during the call."""

    def __init__(self, what: str = "this client", hint: str = "connect again to go on") -> None:
        super().__init__(f"{what} is closed; {hint}")


class UnavailableError(ZiplogError):
    """Nothing was done; the call is safe to retry."""

    retriable = True


class DeadlineError(UnavailableError, TimeoutError):
    """The deadline passed. An insert certainly did not happen; anything else may be repeated."""


class OutcomeUnknownError(ZiplogError, TimeoutError):
    """The deadline passed while an insert was under way: it may have happened.

    `resolve` finds out, as long as the client is open and was not idle for more than 10 minutes.
    """

    def __init__(self, message: str, *, shard: int, seq: int, doubt: object = None) -> None:
        self.shard, self.seq = shard, seq
        #: What the client that raised this needs to find out.
        self.doubt = doubt
        #: How to ask it: the argument is the time-out. None: no client raised this.
        self.resolver: Callable[[float | None], Any] | None = None
        super().__init__(message)

    def resolve(self, timeout: float | None = None) -> Any:
        """Wait until it is known what became of the insert, and return that.

        Of a single insert: its RecordId, or None if it never will exist (then it may be repeated).
        Of `insert_many`: a list with one or the other for each payload, which `results` holds too.
        For an asyncio client this is a coroutine. May be called again, and from any thread that may
        use the client.

        Args:
            timeout: in seconds; None: the client's default.

        Raises:
            OutcomeUnknownError: it is still not known at the time-out, or never will be.
            ClosedError: the client was closed, or this error is not one that a client raised.

        """
        if self.resolver is None:
            raise ClosedError("the client of this error", ONLY_ITS_CLIENT)
        return self.resolver(timeout)


class RecordTooLargeError(ZiplogError, ValueError):
    """A payload or key is larger than the cluster allows; nothing was sent."""

    def __init__(
        self, size: int, limit: int, what: str = "payload", index: int | None = None
    ) -> None:
        self.size, self.limit, self.what = size, limit, what
        #: Of a call with several records: which one's, from 0 on.
        self.index = index
        super().__init__(f"{what} has {size} bytes; this cluster takes at most {limit}")


class NoSuchRecordError(ZiplogError, LookupError):
    """The position holds no record: undecided, a no-op, or of another shard."""

    def __init__(self, rid: RecordId, reason: str) -> None:
        self.rid = rid
        super().__init__(f"no record at {rid}: {reason}")


class TrimmedError(ZiplogError, LookupError):
    """The position was trimmed."""

    def __init__(self, first: RecordId) -> None:
        self.first = first
        super().__init__(f"trimmed; the first position still there is {first}")


class ProtocolError(ZiplogError):
    """A peer sent what it may not; the message was dropped."""


class LocalProtocolError(ProtocolError):
    """This side was about to send what it may not: a bug of ours or a misuse of the API."""
