"""All exceptions of this library, and the record identifier that some of them carry.

ZiplogError                     .retriable: bool
├── ConfigError                 also a ValueError
├── ClosedError                 the client was closed
├── ClusterMismatchError        .expected, .found, .endpoint: another cluster answered
├── CursorLostError             .name, .term, .reason: a claim of a cursor ended
├── UnavailableError            nothing was done; safe to retry, but see `flush`
│   ├── CursorHeldError, TrimHeldError  .owner: of the cursor that another client needs
│   └── DeadlineError           also a TimeoutError
├── OutcomeUnknownError         also a TimeoutError; an insert that may have happened; .resolve()
├── RecordTooLargeError         .size, .limit, .what, .index
├── NoSuchRecordError, TrimmedError  no record is there; or no more, .first: the first one left
├── VersionError                the cluster speaks other versions of the wire format
└── ProtocolError, LocalProtocolError  the peer, or this side, built an invalid message
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

_TEXT_FORM: Final = re.compile(r"(\d{1,19})@(\d{1,10})", re.ASCII)

#: The outcome of an insert is known to the client that sent it, and to no other process.
ONLY_ITS_CLIENT = "only the client that raised it can resolve it, and only while it is open"


class RecordId(NamedTuple):
    """Record identifier: a global sequence number and the shard that stores the record.

    Ordered by `gsn`, hashable, immutable. The text form is ``"<gsn>@<shard>"``
    (thesis 4.2.2: "a tuple consisting of its global sequence number and the shard identifier").
    """

    gsn: int
    shard: int

    def __str__(self) -> str:
        return "recent" if self.gsn < 0 else f"{self.gsn}@{self.shard}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    @classmethod
    def parse(cls, text: str) -> RecordId:
        """Read the text form; `genesis` and `recent` name the two constants.

        Raises:
            TypeError: `text` is not a str.
            ConfigError: the text is not a record identifier.

        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, such as '5@0', not {type(text).__name__}")
        match text:
            case "genesis":
                return RID_GENESIS
            case "recent":
                return RID_RECENT
        found = _TEXT_FORM.fullmatch(text)
        if found is None or int(found[1]) >= 2**63 or int(found[2]) >= 2**31:
            raise ConfigError("rid", text, "'<gsn>@<shard>', 'genesis' or 'recent'")
        return cls(int(found[1]), int(found[2]))


#: The position before every record (thesis 4.2.1).
RID_GENESIS: Final = RecordId(0, 0)
#: As a start of readers: the last stable record below every shard's frontier (thesis 4.2.1). As a
#: position of cursors: behind that record.
RID_RECENT: Final = RecordId(-1, 0)


class ZiplogError(Exception):
    """Base of all errors of this library."""

    #: True if the same call may safely be repeated.
    retriable: bool = False

    #: For `insert_many`: the rid of each payload, None for a payload without one; else empty.
    results: list[RecordId | None]

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.results = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to copy it: with its attributes, because constructors take no text."""
        return _restored, (type(self), self.args, self._copied())

    def _copied(self) -> dict[str, Any]:
        """Return the attributes of a copy, perhaps in another process."""
        return self.__dict__ | {"results": [*self.results]}


def _restored(kind: type[ZiplogError], args: tuple[Any, ...], found: dict[str, Any]) -> ZiplogError:
    """Return a copy of an error, from its attributes."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(found)
    return error


class ConfigError(ZiplogError, ValueError):
    """A bad file, option or argument: its name, its value, and the values that are allowed.

    The text is "NAME is VALUE; it must be ALLOWED", or `message` where that would not be English.
    """

    def __init__(
        self, name: str, value: object, allowed: str, where: str = "", *, message: str = ""
    ) -> None:
        self.name, self.value, self.allowed, self.where = name, value, allowed, where
        #: The whole sentence, if one was given; otherwise empty.
        self.message = message
        prefix = f"{where}: " if where else ""
        super().__init__(prefix + (message or f"{name} is {value!r}; it must be {allowed}"))


class ClosedError(ZiplogError):
    """The client was closed before or during the call; an insert under way may be in the log."""

    def __init__(
        self,
        what: str = "this client",
        hint: str = "connect again to continue",
        state: str = "closed",
    ) -> None:
        super().__init__(f"{what} is {state}; {hint}")


class ClusterMismatchError(ZiplogError):
    """The membership service at the endpoints is another cluster's than the client's.

    An insert under way may be in the log of the expected cluster.
    """

    def __init__(self, expected: str, found: str, endpoint: str) -> None:
        #: The ids of the two clusters, 32 hexadecimal digits each.
        self.expected, self.found = expected, found
        #: Where a node of the other cluster answered, "host:port".
        self.endpoint = endpoint
        super().__init__(
            f"the cluster at {endpoint} is {found}, not {expected}; check the address and the"
            " data directory, or connect again to use that cluster"
        )


class VersionError(ZiplogError):
    """The cluster or the coordinator does not speak this client's version of the wire format."""


class UnavailableError(ZiplogError):
    """Nothing was done; the call is safe to retry.

    An error of `flush` concerns other calls: the inserts that it waited for. See `DeadlineError`.
    """

    retriable = True


class DeadlineError(UnavailableError, TimeoutError):
    """The deadline passed. An insert certainly did not happen; anything else may be repeated.

    Exception: if `flush` raises it, the pending inserts may still happen. Repeat the `flush`, or
    wait for their futures; an insert that is repeated may be in the log twice.
    """


#: The owner in the error of a client that claims a cursor twice.
THIS_CLIENT: Final = "this client"


class CursorHeldError(UnavailableError):
    """Another client owns the cursor."""

    def __init__(self, name: str, owner: str) -> None:
        #: The cursor, and its owner: "host:process".
        self.name, self.owner = name, owner
        if owner == THIS_CLIENT:
            advice = "close its other claim first"
        else:
            command = f"ziplog cursor release {name}"
            advice = f"wait for it with a longer time-out, or take it with `{command}`"
        super().__init__(f"the cursor {name} is owned by {owner}; {advice}")


class CursorLostError(ZiplogError):
    """The claim of a cursor ended: another client claimed it, or an operator changed it.

    Records that were returned and not committed will be returned again, to the next owner.
    """

    def __init__(self, name: str, term: int, reason: str) -> None:
        #: The cursor, the term of the claim, and what ended it.
        self.name, self.term, self.reason = name, term, reason
        super().__init__(f"the cursor {name} was lost: {reason}; claim it again to continue")


class TrimHeldError(UnavailableError):
    """A cursor needs records that a trim would delete."""

    def __init__(self, cursor: str, position: RecordId, owner: str) -> None:
        #: The cursor, its position, and its owner ("": none).
        self.cursor, self.position, self.owner = cursor, position, owner
        by = f" of {owner}" if owner else ""
        super().__init__(
            f"the cursor {cursor}{by} is at {position} and needs the records from there on; trim"
            " before that, or anyway with force"
        )


class OutcomeUnknownError(ZiplogError, TimeoutError):
    """The deadline passed while an insert was in flight: it may have happened.

    `resolve` determines the outcome while the client is open and was not idle for over 10 minutes.
    """

    def __init__(self, message: str, *, shard: int, seq: int, doubt: object = None) -> None:
        self.shard, self.seq = shard, seq
        #: The client's own data about the insert, for `resolver`.
        self.doubt = doubt
        #: Determines the outcome; the argument is the time-out. None: no client raised this error.
        self.resolver: Callable[[float | None], Any] | None = None
        super().__init__(message)

    def _copied(self) -> dict[str, Any]:
        """Return the attributes of a copy, which cannot be resolved."""
        return super()._copied() | {"doubt": None, "resolver": None}

    def resolve(self, timeout: float | None = None) -> Any:
        """Wait until the outcome of the insert is known, and return it.

        For a single insert: its RecordId, or None if it will never exist (repeating it is safe).
        For `insert_many`: a list with one of these for each payload; `results` holds it too.
        For an asyncio client this is a coroutine. It may be called repeatedly, and from any thread
        that may use the client.

        Args:
            timeout: in seconds; None: the client's default.

        Raises:
            OutcomeUnknownError: the outcome is not known at the time-out, or never will be.
            ClosedError: the client was closed, or no client raised this error.

        """
        if self.resolver is None:
            raise ClosedError("the client of this error", ONLY_ITS_CLIENT)
        return self.resolver(timeout)


class RecordTooLargeError(ZiplogError, ValueError):
    """A payload or key is larger than the cluster allows; nothing was sent.

    Or records that are placed together (`what`: "unit") outnumber a shard's positions in an epoch.
    """

    def __init__(
        self, size: int, limit: int, what: str = "payload", index: int | None = None,
        message: str = "",
    ) -> None:  # fmt: skip
        self.size, self.limit, self.what = size, limit, what
        #: For a call with several records: the index of the record, from 0.
        self.index = index
        text = f"{what} has {size} bytes; this cluster takes at most {limit}"
        super().__init__(message or text)


class NoSuchRecordError(ZiplogError, LookupError):
    """The position holds no record: it is undecided, a no-op, or owned by another shard."""

    def __init__(self, rid: RecordId, reason: str) -> None:
        self.rid = rid
        super().__init__(f"no record at {rid}: {reason}")


class TrimmedError(ZiplogError, LookupError):
    """The position was trimmed."""

    def __init__(self, first: RecordId) -> None:
        self.first = first
        super().__init__(f"the records before {first} were trimmed; read from there")


class ProtocolError(ZiplogError):
    """A peer sent an invalid message; the message was dropped."""


class LocalProtocolError(ProtocolError):
    """This side built an invalid message: a bug of this library, or a misuse of its API."""
