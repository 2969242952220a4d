"""Models of targets: a store that keeps positions with its effects, and a sink that keeps none.

Both hold what reached them; the oracle compares that with the log after every step. A fault of a
step is one of: `before` (it fails, nothing was done), `after` (it was done, and fails), `late` (it
fails, and is done later), or an exception that the target raises. What a store has not answered is
not durable yet: a power cut loses it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from crc32c import crc32c

from logplayer.contract import Batch, Fenced, Opened, Rejected, RejectedRecord, Retry, Task
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ziplog.types import Record

#: What goes wrong with a step; None: nothing.
Fault = str | Exception | None


@dataclass
class Row:
    """What a store keeps of one task, as one row of a table."""

    birth: int
    term: int
    seek: int
    #: Where the effects below begin: the position of the row's creation, or of the last seek.
    start: int
    position: int
    mark: bytes = b""
    records: list[Record] = field(default_factory=list)
    rejected: list[RejectedRecord] = field(default_factory=list)
    #: (term, start, stop) of each effect.
    effects: list[tuple[int, int, int]] = field(default_factory=list)

    def copy(self) -> Row:
        """Return another row of the same contents."""
        return replace(
            self, records=[*self.records], rejected=[*self.rejected], effects=[*self.effects]
        )


class Store:
    """A transactional store: each step is one atomic transaction."""

    stores_position: Final = True

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.rows: dict[int, Row] = {}
        #: What a power cut leaves.
        self.durable: dict[int, Row] = {}
        #: Returns the reason if a record is rejected.
        self.rejects: Callable[[Record], str] = lambda _record: ""
        #: It says which record it rejects.
        self.names_rejected = True

    def open(self, task: Task) -> Opened:
        row = self.rows.get(task.partition)
        if row is None:
            if task.has_moved:
                return Opened(None)
            row = Row(task.birth, 0, task.seek, task.position, task.position)
            self.rows[task.partition] = row
        if row.birth != task.birth:
            raise ConfigError("birth", task.birth, f"{row.birth}")
        if row.term > task.term:
            raise Fenced(f"term {row.term} opened it")
        row.term = task.term
        if row.seek < task.seek:
            row.seek, row.mark = task.seek, b""
            row.start = row.position = task.position
            row.records, row.rejected, row.effects = [], [], []
        return Opened(row.position, row.mark)

    def deliver(self, batch: Batch) -> bytes | None:
        row = self.rows.get(batch.task.partition)
        if row is None or row.term != batch.task.term or row.position != batch.start:
            raise Fenced("another term, or another position")
        reject(self, batch)
        self.apply(row, batch)
        return None

    def apply(self, row: Row, batch: Batch) -> None:
        """Do the effect, and store the position."""
        row.records += batch.records
        row.rejected += batch.rejected
        row.position = batch.stop
        row.effects.append((batch.task.term, batch.start, batch.stop))

    def flush(self, partition: int) -> None:
        """Make the row of a partition durable."""
        row = self.rows.get(partition)
        if row is not None:
            self.durable[partition] = row.copy()

    def power_cut(self) -> None:
        """Lose what is not durable."""
        self.rows = {partition: row.copy() for partition, row in self.durable.items()}

    def put_back(self, partition: int, count: int) -> None:
        """Put an older state of a row back: that after its first `count` effects."""
        row = self.durable.get(partition)
        if row is not None:
            row = row.copy()
            del row.effects[count:]
            row.term, _, row.position = row.effects[-1] if row.effects else (0, 0, row.start)
            row.records = [one for one in row.records if one.rid.gsn < row.position]
            row.rejected = [one for one in row.rejected if one.record.rid.gsn < row.position]
            self.durable[partition] = row
            self.rows[partition] = row.copy()

    def drop(self, partition: int) -> None:
        """Remove the row of a partition, as an operator."""
        self.rows.pop(partition, None)
        self.durable.pop(partition, None)


class Sink:
    """A target that stores no position; the effect of a batch may happen again."""

    stores_position: Final = False

    def __init__(self, name: str) -> None:
        self.name: Final = name
        #: By partition: (term, position of the claim, record), in order.
        self.rows: dict[int, list[tuple[int, int, Record]]] = {}
        self.batches: list[Batch] = []
        self.rejects: Callable[[Record], str] = lambda _record: ""
        self.names_rejected = True

    def open(self, task: Task) -> Opened:
        self.rows.setdefault(task.partition, [])
        return Opened()

    def deliver(self, batch: Batch) -> bytes | None:
        reject(self, batch)
        self.batches.append(batch)
        row = self.rows[batch.task.partition]
        row += [(batch.task.term, batch.task.position, one) for one in batch.records]
        return None

    def flush(self, partition: int) -> None:
        """Do nothing: all that reached it counts."""


def is_odd(record: Record) -> bool:
    """Whether a target that rejects records rejects this one: about a seventh of them."""
    return crc32c(record.payload) % 7 == 0


def reject(target: Store | Sink, batch: Batch) -> None:
    """Raise `Rejected` if the target refuses a record of a batch."""
    for index, record in enumerate(batch.records):
        why = target.rejects(record)
        if why:
            raise Rejected(index if target.names_rejected else None, why)


class Connections:
    """The connections of one process to its targets: they carry out the effects of its node."""

    def __init__(
        self,
        targets: Mapping[str, Any],
        fault: Callable[[str, Task | Batch], Fault],
        later: Callable[[Callable[[], Any]], None],
    ) -> None:
        """Connect nothing yet.

        Args:
            targets: by name.
            fault: returns what goes wrong with a step: its kind, "open" or "deliver", and argument.
            later: has a function called some time later.

        """
        self._targets: Final = targets
        self._fault, self._later = fault, later

    def open(self, task: Task) -> Opened | Exception:
        target = self._targets[task.target]
        return self._run("open", task, lambda: target.open(task), target)

    def deliver(self, batch: Batch) -> bytes | Exception | None:
        target = self._targets[batch.task.target]
        return self._run("deliver", batch, lambda: target.deliver(batch), target)

    def _run(self, kind: str, argument: Any, act: Callable[[], Any], target: Any) -> Any:
        def quietly() -> Any:
            try:
                return act()
            except AssertionError:  # The oracle's.
                raise
            except Exception as error:  # noqa: BLE001 - targets are foreign code
                return error

        match self._fault(kind, argument):
            case None:
                result = quietly()
                target.flush(argument.partition if kind == "open" else argument.task.partition)
                return result
            case "before":
                return Retry("the connection was refused")
            case "after":
                quietly()
                return Retry("the connection was lost")
            case "late":
                self._later(quietly)
                return Retry("the answer did not come in time")
            case other:
                return other
