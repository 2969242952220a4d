"""History file format: the lines of a file, and how to write and read them.

A file records the actions of one process: a `Header`, then one JSON array per line; the first
element is the kind. Rule: the line of a call is written to the kernel before the call, so a process
that is killed at any moment leaves at most calls without a result and half of its last line.
Times are CLOCK_MONOTONIC in nanoseconds, comparable between processes of one machine.
docs/history.md documents the format.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Self

VERSION: Final = 1
SUFFIX: Final = ".history"
#: Lines of results that wait for the next call, in bytes.
_MAX_WAITING: Final = 64 * 1024


class HistoryError(Exception):
    """A history that cannot be read: which file, which line, and why."""


class _Line(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Header(_Line, frozen=True, tag="history"):
    """The first line of a file: the process, the cluster and the format version."""

    version: int
    process: str
    note: dict[str, Any] = {}


class Call(_Line, frozen=True):
    """The beginning of an operation."""

    #: Counts up in a file.
    op: int
    at: int


class Insert(Call, frozen=True, tag="insert"):
    """`insert_after`, `insert_many`, `insert_nowait`: payloads, in order, after a gsn.

    `sealed`: `append`, `append_many`, `append_nowait`. `min_regions`: as in the call; 0: no number.
    """

    after: int
    payloads: list[int]
    sealed: bool = False
    min_regions: int = 0


class Resolve(Call, frozen=True, tag="resolve"):
    """`OutcomeUnknownError.resolve` of the insert `of`."""

    of: int


class Read(Call, frozen=True, tag="read"):
    """`read_record`."""

    gsn: int
    shard: int


class Subscribe(Call, frozen=True, tag="subscribe"):
    """`subscribe`; -1: RID_RECENT."""

    start: int
    follow: bool
    #: The earlier subscription that this one continues: `start` is its `position`.
    resumes: int = 0
    #: The shards whose records were requested; none: all.
    shards: list[int] = []


class Sync(Call, frozen=True, tag="sync"):
    """`sync`."""


class Tail(Call, frozen=True, tag="tail"):
    """`check_tail`."""

    sealed: bool = False


class Seal(Call, frozen=True, tag="seal"):
    """`seal` of a position."""

    gsn: int


class Barrier(Call, frozen=True, tag="barrier"):
    """`barrier` of the subscription `of`."""

    of: int


class Trim(Call, frozen=True, tag="trim"):
    """`trim`: everything before a gsn."""

    gsn: int


class Claim(Call, frozen=True, tag="claim"):
    """`cursor`: claims the cursor of this name."""

    name: str


class Commit(Call, frozen=True, tag="commit"):
    """`commit` of the claim `of`. Its mark is the gsn in decimals."""

    of: int
    gsn: int


class SeekCursor(Call, frozen=True, tag="seek_cursor"):
    """`seek_cursor`."""

    name: str


class Open(Call, frozen=True, tag="open"):
    """A player opens the target of a task: the claim's numbers, and the cursor's position then."""

    #: The name of the task's cursor.
    task: str
    birth: int
    term: int
    seek: int
    gsn: int
    #: Its kind stores positions: each record once.
    is_exactly_once: bool
    #: The process that holds the claim; "": a receiver does not know it.
    owner: str = ""


class Deliver(Call, frozen=True, tag="deliver"):
    """A player has records of [start, stop) delivered, in the claim of the open `of`."""

    of: int
    start: int
    stop: int
    gsns: list[int]


class Result(_Line, frozen=True):
    """Result of an operation. A subscription has many."""

    op: int
    at: int


class Inserted(Result, frozen=True, tag="inserted"):
    """The rids, one for each payload."""

    gsns: list[int]
    shards: list[int]


class Resolved(Result, frozen=True, tag="resolved"):
    """The rids, one for each payload; gsn 0: it will never exist."""

    gsns: list[int]
    shards: list[int]


class Found(Result, frozen=True, tag="found"):
    """The payload read."""

    payload: int


class Delivered(Result, frozen=True, tag="delivered"):
    """Records of a subscription, in its order."""

    gsns: list[int]
    shards: list[int]
    payloads: list[int]


class Ended(Result, frozen=True, tag="ended"):
    """A subscription with `follow=False` handed out its last record."""


class Synced(Result, frozen=True, tag="synced"):
    """Result of `sync`."""

    gsn: int


class TailIs(Result, frozen=True, tag="tail_is"):
    """Result of `check_tail`."""

    gsn: int


class Sealed(Result, frozen=True, tag="sealed"):
    """`seal` returned."""


class Barred(Result, frozen=True, tag="barred"):
    """Result of `barrier`."""

    gsn: int


class Trimmed(Result, frozen=True, tag="trimmed"):
    """`trim` returned."""


class Failed(Result, frozen=True, tag="failed"):
    """An operation raised; it ends a subscription too."""

    error: str
    retriable: bool
    text: str = ""
    #: The `results` of a failed `insert_many` or append; gsn 0: None.
    gsns: list[int] = []
    shards: list[int] = []
    #: The `first` of a TrimmedError, or the `rid` of a NoSuchRecordError.
    first: int = 0


class Claimed(Result, frozen=True, tag="claimed"):
    """The cursor as it was claimed; `birth` 0: unknown, and no cursor of its name is deleted."""

    birth: int
    term: int
    seek: int
    gsn: int
    mark: str = ""


class Committed(Result, frozen=True, tag="committed"):
    """`commit` returned this position."""

    gsn: int


class Sought(Result, frozen=True, tag="sought"):
    """`seek_cursor` returned."""


class Opened(Result, frozen=True, tag="opened"):
    """Where the target stands; -1: it stores no position."""

    gsn: int


class Done(Result, frozen=True, tag="done"):
    """The target has the records of a step durably."""


class Undone(Result, frozen=True, tag="undone"):
    """An open or a step failed; the name of the exception."""

    error: str


#: A step of a transaction: operation, key, and the value written or read.
Step = tuple[str, str, Any]


class Invoke(Call, frozen=True, tag="invoke"):
    """A transaction begins; `process` is one that does one thing at a time (a thread)."""

    process: int
    #: Its planned steps; None for values that are not known yet.
    steps: list[Step]


class Ok(Result, frozen=True, tag="ok"):
    """It was committed."""

    steps: list[Step]
    #: The gsn of its commit record, if it wrote and the client received it.
    position: int = 0


class Fail(Result, frozen=True, tag="fail"):
    """Certain failure: the transaction took no effect. `steps`: its completed steps."""

    error: str
    steps: list[Step] = []
    text: str = ""


class Info(Result, frozen=True, tag="info"):
    """Unknown outcome: the transaction may have taken effect. `steps`: its completed steps."""

    error: str
    steps: list[Step] = []
    text: str = ""


class Losses(_Line, frozen=True, tag="losses"):
    """Positions that the cluster says may be lost: (shard, start, stop)."""

    at: int
    ranges: list[tuple[int, int, int]]


class Left(_Line, frozen=True, tag="left"):
    """`remove_shard` or `finalize_shard` returned: the shard has no free positions any more."""

    at: int
    shard: int


class PlacementIs(_Line, frozen=True, tag="placement"):
    """From this time on, the servers of a shard are in these regions, in this view."""

    at: int
    shard: int
    view: int
    regions: list[str]


class CursorIs(_Line, frozen=True, tag="cursor"):
    """A cursor in the result of `cursors`, which was called and returned at these times."""

    called: int
    at: int
    name: str
    birth: int
    term: int
    seek: int
    gsn: int


class Holds(_Line, frozen=True, tag="holds"):
    """The gsns that a task's target has at the end, in its order; of a task that was not sought."""

    at: int
    task: str
    gsns: list[int]


class Replaced(_Line, frozen=True, tag="replaced"):
    """The contents of a task's target were replaced or lost, by a fault or an operator."""

    at: int
    task: str


class Fault(_Line, frozen=True, tag="fault"):
    """A fault or another change of the cluster, for human readers; no rule uses it."""

    at: int
    text: str


#: What `tests.history.cursors` and `tests.history.players` take.
CursorEvent = Claim | Claimed | Commit | Committed | SeekCursor | Sought | CursorIs
PlayerEvent = Open | Opened | Deliver | Done | Undone | Holds | Replaced

Event = (
    Header
    | Insert
    | Resolve
    | Read
    | Subscribe
    | Sync
    | Tail
    | Seal
    | Barrier
    | Trim
    | Inserted
    | Resolved
    | Found
    | Delivered
    | Ended
    | Synced
    | TailIs
    | Sealed
    | Barred
    | Trimmed
    | Failed
    | Invoke
    | Ok
    | Fail
    | Info
    | Losses
    | Left
    | PlacementIs
    | Fault
    | CursorEvent
    | PlayerEvent
)

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Event).decode


class Recorder:
    """Writes the history of one process. For any threads; after `close`, what comes is dropped."""

    def __init__(self, path: Path, process: str, **note: Any) -> None:
        """Create a file; it must not exist.

        Args:
            path: the file; its name should end in `SUFFIX`.
            process: the name of the process, unique in the history.
            note: a note for human readers.

        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o644)
        self._lock: Final = threading.Lock()
        self._waiting = bytearray()
        self._ops = 0
        self.call(Header(VERSION, process, {"pid": os.getpid(), "time": time.time(), **note}))

    def __enter__(self) -> Self:
        """Do nothing more."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._file < 0

    def next_op(self) -> int:
        """Return the number of a new operation."""
        with self._lock:
            self._ops += 1
            return self._ops

    def call(self, event: Event) -> None:
        """Write a line, and all before it, at once."""
        with self._lock:
            self._waiting += _encode(event) + b"\n"
            self._flush()

    def result(self, event: Event) -> None:
        """Write a line soon: with the next call, when there are many, or at the end."""
        with self._lock:
            self._waiting += _encode(event) + b"\n"
            if len(self._waiting) >= _MAX_WAITING:
                self._flush()

    def flush(self) -> None:
        """Write what waits."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        while self._waiting and self._file >= 0:
            del self._waiting[: os.write(self._file, self._waiting)]

    def close(self) -> None:
        """Write what waits, and close the file. May be called twice."""
        with self._lock:
            if self._file >= 0:
                self._flush()
                os.close(self._file)
                self._file = -1


def now() -> int:
    """Return the time of an event."""
    return time.monotonic_ns()


def read(path: Path) -> Iterator[tuple[int, Event]]:
    """Yield the lines of a history file: (number from 1, event).

    An incomplete last line, left by a killed process, is skipped.

    Raises:
        HistoryError: the file cannot be read, or a line is malformed.

    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield number, _decode(line)
    except OSError as error:
        raise HistoryError(f"{path}: cannot be read ({error.strerror})") from error
    except msgspec.MsgspecError as error:
        raise HistoryError(f"{path}:{number}: no line of a history ({error})") from error


def files_of(paths: list[Path]) -> list[Path]:
    """Return the history files of `paths`; a directory means all history files in it.

    Raises:
        HistoryError: there are none.

    """
    found: list[Path] = []
    for path in paths:
        found += sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not found:
        places = ", ".join(map(str, paths))
        raise HistoryError(f"no history in {places}: files there end in {SUFFIX}")
    return found
