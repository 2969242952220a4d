"""The contract between a player and its targets.

A target receives the records of one task, in order, in batches that follow each other without a
gap. A target that stores positions does the effect of a batch and stores `Batch.stop` in one atomic
step, which it refuses unless it stores `Batch.start` and the term of the task. Or a repetition of a
batch has no effect, whichever owner repeats it: then it returns the position and mark of the cursor
as its own. See docs/player.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple, Protocol, overload

import msgspec

from ziplog.core.numbers import whole
from ziplog.types import Record

#: A pure function of a record: what a target receives in its place; None or []: nothing.
Map = Callable[[Record], Record | list[Record] | None]
MAP_RULE: Final = "a function of a record that returns a record, a list of records or None"

#: The names of players and targets; they are parts of the names of cursors.
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}", re.ASCII)
NAME_RULE: Final = "1 to 48 letters, digits, '.', '_' or '-', the first a letter or digit"


class Task(msgspec.Struct, frozen=True):
    """A partition of a target, as one claim plays it."""

    player: str
    target: str
    #: From 0 to `partitions` - 1.
    partition: int
    partitions: int
    #: The number of the log's cluster.
    cluster: int
    #: The term of the cursor's creation, and that of this claim.
    birth: int
    term: int
    #: The number of seeks of the cursor so far.
    seek: int
    #: The committed position of the cursor, a gsn, and what was committed with it.
    position: int
    mark: bytes
    #: The cursor was moved since it was created or sought.
    has_moved: bool

    @property
    def cursor(self) -> str:
        """The name of its cursor."""
        return cursor_name(self.player, self.target, self.partition)


class RejectedRecord(NamedTuple):
    """A record that the target refused for good."""

    record: Record
    why: str


class Batch(msgspec.Struct, frozen=True):
    """The records of a task in the positions [start, stop).

    A target with `TargetSpec.roll_s` may collect records: they are durable, but not yet where
    readers find them. With `start == stop` it finishes them, and so it does in `open` and `close`.
    """

    task: Task
    start: int
    stop: int
    records: Sequence[Record]
    #: Size of their payloads and keys, in bytes.
    size: int
    #: Records of the range that the target refused before; it keeps them aside, with the reason.
    rejected: Sequence[RejectedRecord] = ()


class Opened(NamedTuple):
    """Where a target stands."""

    #: The gsn below which it has everything; None: it stores no position, so the cursor's counts.
    position: int | None = None
    #: If it is not the cursor's mark, it is committed before the first batch; b"": no change.
    mark: bytes = b""


class Target(Protocol):
    """One task's connection to its target. All methods are called by one thread."""

    def open(self, task: Task) -> Opened:
        """Refuse lower terms from now on, and return where the target stands.

        Called before the first batch of a claim, and again after a failure of unknown outcome.

        Raises:
            Retry: it cannot be reached now.
            Fenced: it knows a later term.
            ConfigError: it belongs to another player, task or cluster.

        """
        ...

    def deliver(self, batch: Batch) -> bytes | None:
        """Do the effect of a batch durably; may return a mark for the cursor.

        Raises:
            Retry: it failed; the same batch is delivered again.
            Rejected: nothing of it was done; a record will never be accepted.
            Fenced: the target stores another term, or another position than `batch.start`.

        """
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class Retry(Exception):  # noqa: N818 - it is a verdict
    """A target failed for now; any exception that is not named here counts as this one."""

    def __init__(self, why: str, after_s: float | None = None) -> None:
        """Give the reason, and the pause until the next attempt in seconds; None: the default."""
        super().__init__(why)
        self.after_s: Final = after_s


class Rejected(Exception):  # noqa: N818
    """A target will never accept a record of a batch; nothing of the batch was done."""

    @overload
    def __init__(self, why: str, /) -> None: ...

    @overload
    def __init__(self, index: int | None, why: str) -> None: ...

    def __init__(self, index: object = None, why: object = None) -> None:
        """Give the reason alone, or the record's index in the batch and the reason.

        Args:
            index: from 0 on; None, or left out: it is the only record, or the target cannot tell.
            why: the reason.

        Raises:
            TypeError: the index is not a whole number from 0 on, or the reason is not a str.

        """
        if why is None:
            index, why = None, index
        number = whole(index)
        is_valid = index is None or (number is not None and number >= 0)
        if not isinstance(why, str) or not is_valid:
            allowed = "(why) or (index, why), with a str and a number from 0 on"
            raise TypeError(f"Rejected takes {allowed}; it got index {index!r} and why {why!r}")
        super().__init__(why)
        self.index: Final = number


class Fenced(Exception):  # noqa: N818
    """A target refuses this claim: a later one has opened it."""


#: What happens to a rejected record: the task stops before it, it is skipped, or it is kept aside.
OnRejected = Literal["stop", "skip", "dead-letter"]


#: Where a seek of the cursors may go: anywhere, not before the position, or it fails the tasks.
Seeks = Literal["anywhere", "forward", "nowhere"]


class TargetSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A target of a player: its settings, and how its tasks connect."""

    name: str
    #: Returns the connection of a task; connects to nothing. None: the target has a receiver.
    connect: Callable[[], Target] | None
    #: The endpoint of its receiver, "host:port", with which the player exchanges messages.
    receiver: str = ""
    #: It stores positions with its effects, or repetitions have none (exactly once); False: at
    #: least once.
    stores_position: bool
    seeks: Seeks = "anywhere"
    #: It keeps rejected records itself; False: they are appended to the file `dead_letter`.
    keeps_rejected: bool = False
    #: Maximum age of the records that it collects, in seconds; 0: it collects none.
    roll_s: int = 0
    #: Number of tasks; records with equal keys belong to the same one. Fixed once cursors exist.
    partitions: int = 1
    #: Patterns of keys as in a shell; (): all records, also those without keys.
    keys: tuple[str, ...] = ()
    map: Map | None = None
    #: Rows of the log are left out if their writer begins with one of these.
    skip_writers: tuple[bytes, ...] = ()
    #: Raises ConfigError if the target is the log of a cluster, by its number; the second argument
    #: is its time limit, in seconds.
    check_source: Callable[[int, float], None] | None = None
    batch_records: int = 1000
    batch_bytes: int = 1024 * 1024
    #: Age up to which a batch that is not full waits for further records, in ms.
    linger_ms: int = 0
    #: Pauses between attempts double from the first to the last; with jitter of a fifth.
    retry_first_ms: int = 100
    retry_last_ms: int = 30_000
    #: Time of failures after which a task stops, in seconds; 0: it never does.
    retry_s: int = 0
    rejected: OnRejected = "stop"
    dead_letter: str = ""


def cursor_name(player: str, target: str, partition: int) -> str:
    """Return the name of a task's cursor."""
    return f"{player}/{target}/{partition}"
