"""What the applications share: a table whose writes can be taken back, and two ways to run.

An application turns each record into new rows of its table, and perhaps into a line of output. The
rows that they replace are the record's effect: `undo` puts them back. The output of a record leaves
only once the record is final.

With `subscribe`, all records are final. With `speculate`, the application computes while the log
still replicates the records, so the output leaves earlier where replication takes long (level
`disk`, slow networks). (SpecLog, section 6.)
"""

from __future__ import annotations

import sqlite3
import time
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from ziplog import speculation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import ziplog
    from ziplog import Record, RecordId

_FETCH: Final = 1000

#: The payload of the record after all others.
END: Final = b""

Row = tuple[Any, ...]


class Former(NamedTuple):
    """What a write replaced: the row of a key, or None if there was none."""

    key: int
    row: Row | None


class Effect(NamedTuple):
    """What a record did: the rows that it replaced, and its line of output, if any."""

    formers: list[Former]
    output: str | None


class Table:
    """A table of a local database: a row of numbers for each key."""

    def __init__(self, *columns: str) -> None:
        """Create it in memory."""
        self._database: Final = sqlite3.connect(":memory:", check_same_thread=False)
        weakref.finalize(self, self._database.close)
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        self._database.execute(
            f"CREATE TABLE state (key INTEGER PRIMARY KEY, {names}) WITHOUT ROWID"
        )
        self._get: Final = f"SELECT {names} FROM state WHERE key = ?"  # noqa: S608 - our columns
        self._put: Final = f"INSERT OR REPLACE INTO state VALUES (?, {marks})"  # noqa: S608

    def get(self, key: int) -> Row | None:
        """Return the row of a key."""
        row: Row | None = self._database.execute(self._get, (key,)).fetchone()
        return row

    def put(self, key: int, *row: float) -> Former:
        """Write the row of a key; return what it replaced."""
        former = Former(key, self.get(key))
        self._database.execute(self._put, (key, *row))
        return former

    def restore(self, former: Former) -> None:
        """Take a write back."""
        if former.row is None:
            self._database.execute("DELETE FROM state WHERE key = ?", (former.key,))
        else:
            self._database.execute(self._put, (former.key, *former.row))

    def dump(self) -> str:
        """Return the whole content."""
        return "\n".join(self._database.iterdump())


class Application(ABC):
    """An application, for one run."""

    def __init__(self, *columns: str, compute_ms: float = 0.0, is_busy: bool = False) -> None:
        """Begin with an empty table.

        Args:
            columns: of the table.
            compute_ms: time that a batch takes besides, for models that take longer than these.
            is_busy: spend that time computing, not asleep.

        """
        self.table: Final = Table(*columns)
        #: The lines that have left.
        self.outputs: Final[list[str]] = []
        self._compute_s: Final = compute_ms / 1000
        self._is_busy: Final = is_busy

    @abstractmethod
    def on_record(self, payload: bytes) -> Effect:
        """Compute on one record."""

    def apply(self, records: list[Record]) -> list[Effect]:
        """Compute on the next records; if one of them cannot be read, nothing has changed."""
        effects: list[Effect] = []
        try:
            for record in records:
                is_end = record.payload == END
                effects.append(Effect([], None) if is_end else self.on_record(record.payload))
        except msgspec.MsgspecError:
            for record, effect in reversed(list(zip(records, effects, strict=False))):
                self.undo(record, effect)
            raise
        end = time.monotonic() + self._compute_s
        if not self._is_busy:
            time.sleep(self._compute_s)
        while time.monotonic() < end:
            pass
        return effects

    def undo(self, _record: Record, effect: Effect) -> None:
        """Take the effect of a record on the table back."""
        for former in reversed(effect.formers):
            self.table.restore(former)

    def emit(self, _record: Record, effect: Effect) -> None:
        """Let the output of a final record leave."""
        if effect.output is not None:
            self.outputs.append(effect.output)


def subscribe(
    log: ziplog.Log,
    application: Application,
    start: RecordId,
    until: Callable[[Record], bool],
    shards: Sequence[int] | None = None,
) -> None:
    """Run an application on final records, until one for which `until` is true."""
    with log.subscribe(start, shards=shards) as records:
        while True:
            batch = records.fetch(_FETCH)
            for record, effect in zip(batch, application.apply(batch), strict=True):
                application.emit(record, effect)
                if until(record):
                    return


def speculate(
    log: ziplog.Log,
    application: Application,
    start: RecordId,
    until: Callable[[Record], bool],
    shards: Sequence[int] | None = None,
) -> None:
    """Run an application on records before they are final; only final ones have output."""
    with log.speculate(start, shards=shards) as events:
        speculation.process(
            events,
            apply=application.apply,
            undo=application.undo,
            emit=application.emit,
            until=until,
        )


#: By the word on the command line.
WAYS: Final = {"subscribe": subscribe, "speculate": speculate}


def encoded(message: msgspec.Struct) -> bytes:
    """Return a message as the payload of a record."""
    return msgspec.msgpack.encode(message)
