"""What targets hold, compared with the log and with the cursors.

A store holds exactly the records of its task in [start, position), each once, in order, and so does
a directory of files. A sink has first deliveries without a gap, and repeats only records from the
position of the claim on. A term has one owner. No step of an older term has an effect after a later
term was opened. A cursor is never ahead of what a power cut leaves of its target. No step passes
the position of a pause. A trim without force passes no record that a task needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logplayer.contract import cursor_name
from logplayer.partitions import partition_of
from logplayer.selection import Selection
from tests.sim.player.files import SharedFiles
from tests.sim.player.plan import LEASE_MS
from tests.simulator.kernel import MS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from logplayer.contract import Batch, TargetSpec, Task
    from logplayer.task import PlayerTask
    from tests.sim.player.targets import Row, Sink, Store
    from ziplog.core.cursors import Cursor
    from ziplog.types import CursorInfo, Record


class Era(NamedTuple):
    """A cursor from its creation or a seek to the next one."""

    birth: int
    seek: int


class Oracle:
    """What happened at the targets of one player."""

    def __init__(
        self,
        player: str,
        specs: Sequence[TargetSpec],
        targets: dict[str, Store | Sink | SharedFiles],
        cursor: Callable[[str], Cursor | None],
        trim: Callable[[], int],
    ) -> None:
        """Observe targets.

        Args:
            player: its name.
            specs: the settings of its targets.
            targets: by name.
            cursor: returns the committed state of a cursor.
            trim: returns the first position that is not trimmed.

        """
        self._player: Final = player
        self._specs: Final = {spec.name: spec for spec in specs}
        self._targets: Final = targets
        self._cursor: Final = cursor
        self._trim: Final = trim
        #: By cursor and term: the process that opened a target in it.
        self._owners: Final[dict[tuple[str, int], str]] = {}
        #: By cursor: since when it is seen to be paused, and up to where its owner may go on.
        self._paused: Final[dict[str, tuple[int, int]]] = {}
        #: A trim took records that cursors hold. Cursors that an operator deleted.
        self.is_forced = False
        self.deleted: Final[set[str]] = set()
        #: By cursor: the highest term that opened its target.
        self._opened: Final[dict[str, int]] = {}
        #: By cursor and era: where it began.
        self._starts: Final[dict[tuple[str, Era], int]] = {}
        #: Targets whose content was lost; their tasks fail at the next record, and are sought.
        self.emptied: Final[set[str]] = set()
        #: By cursor: the highest position of a target before its content was lost.
        self._emptied_at: Final[dict[str, int]] = {}
        #: Targets of which an older state was put back; and by cursor, the position before that.
        self._restored: Final[set[str]] = set()
        self._positions_before: Final[dict[str, int]] = {}
        #: Stretches of stores that a seek has ended.
        self._former: Final[list[tuple[TargetSpec, int, Row]]] = []
        #: Numbers of repetitions of records at sinks, and of stretches that a late step may touch.
        self.repetitions = 0
        self.late: set[str] = set()
        self._checked: Final[dict[str, int]] = {}

    # --- steps ---

    def began(self, task: Task, owner: str, stop: int, now: int) -> None:
        """Check the begin of a step, up to the position `stop`; 0: it opens the target."""
        name = task.cursor
        known = self._owners.setdefault((name, task.term), owner)
        assert known == owner, f"term-order: {known} and {owner} own term {task.term} of {name}"
        since, limit = self._paused.get(name, (now, 0))
        assert now <= since + LEASE_MS * MS or stop <= limit, (
            f"pause: {name} is delivered up to {stop}, although it was paused at {limit}"
        )

    def opened(self, task: Task) -> None:
        """Note that a term opened a target."""
        self._opened[task.cursor] = max(self._opened.get(task.cursor, 0), task.term)

    def ended(self, spec: TargetSpec, partition: int, row: Row) -> None:
        """Note the end of a stretch by a seek, or by a deletion of the cursor."""
        self._former.append((spec, partition, row.copy()))
        self._checked.pop(cursor_name(self._player, spec.name, partition), None)

    def edited(self, name: str) -> None:
        """Note that an operator changes a cursor: the time of a pause counts anew."""
        self._paused.pop(name, None)

    def put_back(self, target: str, positions: dict[int, int]) -> None:
        """Note that an older state was put back; `positions`: the former ones, by partition."""
        self._restored.add(target)
        for partition, position in positions.items():
            name = cursor_name(self._player, target, partition)
            before = self._positions_before.get(name, 0)  # It may go back again on its way there.
            self._positions_before[name] = max(before, position)
        self.power_cut(target)

    def lost_all(self, target: str, positions: dict[int, int]) -> None:
        """Note that a target lost its content; `positions`: the former ones, by partition."""
        self.emptied.add(target)
        for partition, position in positions.items():
            name = cursor_name(self._player, target, partition)
            self._emptied_at[name] = max(position, self._emptied_at.get(name, 0))
        self.forget(target)

    def may_lack_records(self, target: str) -> bool:
        """Whether an operator must seek the cursors of a target that needs what was trimmed."""
        return self.is_forced or target in self.emptied or target in self._restored

    def is_behind(self, target: str, partition: int, gsn: int) -> bool:
        """Whether a store of which an older state was put back lacks a position."""
        rows: Any = getattr(self._targets[target], "rows", {})
        row = rows.get(partition)
        return target in self._restored and row is not None and row.position <= gsn

    def power_cut(self, target: str) -> None:
        """Note that a target lost what was not durable, and check that no cursor is ahead of it."""
        self.forget(target)
        durable: dict[int, Row] = getattr(self._targets[target], "durable", {})
        for partition, row in durable.items():
            self._opened[cursor_name(self._player, target, partition)] = row.term
        self.check()

    def refused(self, batch: Batch, row: Row | None) -> None:
        """Check a delivery that the store refused."""
        name = batch.task.cursor
        is_own = row is not None and row.term == batch.task.term
        is_replaced = batch.task.target in self.emptied | self._restored
        is_explained = name in self.late or is_replaced
        assert not is_own or is_explained, (
            f"{name} delivers from {batch.start}, its target is at {row and row.position}"
        )

    def delivered(self, batch: Batch) -> None:
        """Check the effect of a step."""
        name = batch.task.cursor
        assert batch.task.term >= self._opened.get(name, 0), (
            f"fence: {name}: term {batch.task.term} has an effect after {self._opened[name]}"
        )
        self.check_of(batch.task)

    # --- checks at any time ---

    def check_pauses(self, now: int) -> None:
        """Note which cursors are paused."""
        for spec in self._specs.values():
            for partition in range(spec.partitions):
                name = cursor_name(self._player, spec.name, partition)
                cursor = self._cursor(name)
                if cursor is None or not cursor.is_paused:
                    self._paused.pop(name, None)
                elif self._paused.get(name, (0, -1))[1] != cursor.pause_at:
                    self._paused[name] = (now, cursor.pause_at)

    def check_trims(self, tasks: Iterable[PlayerTask]) -> None:
        """Check that the log has what tasks need."""
        for task in tasks:
            if not self.may_lack_records(task.spec.name):
                is_trimmed = task.reader.trimmed is not None or "trimmed" in task.error
                assert not is_trimmed, f"C7: {task.name} lacks what was trimmed: {task.error}"

    def check_of(self, task: Task) -> None:
        """Check one task."""
        self.check_task(self._specs[task.target], task.partition)

    def check(self) -> None:
        """Check all tasks."""
        for spec in self._specs.values():
            for partition in range(spec.partitions):
                self.check_task(spec, partition)

    def check_task(self, spec: TargetSpec, partition: int) -> None:
        """Check what can be seen of one task without the log."""
        target = self._targets[spec.name]
        name = cursor_name(self._player, spec.name, partition)
        if isinstance(target, SharedFiles):
            target.check(name, partition)
            position, era = target.position(partition), target.era(partition)
            self._check_cursor(name, position, lambda one: (one.birth, one.seek) == era)
            return
        rows: Any = target.rows.get(partition)
        if rows is None:
            return
        if isinstance(rows, list):
            self._check_sink(name, rows)
            return
        done = self._checked.get(name, 0)
        gsns = [record.rid.gsn for record in rows.records[max(done - 1, 0) :]]
        assert gsns == sorted(set(gsns)), f"exactly-once: {name} holds {gsns}"
        assert not gsns or rows.start <= gsns[0] <= gsns[-1] < rows.position, (
            f"exactly-once: {name} holds {gsns} of [{rows.start}, {rows.position})"
        )
        self._checked[name] = len(rows.records)
        durable: Any = target.durable.get(partition)  # type: ignore[union-attr]
        row = durable or rows
        position = durable.position if durable is not None else rows.start
        self._check_cursor(
            name, position, lambda one: (one.birth, one.seek) == (row.birth, row.seek)
        )

    def _check_cursor(self, name: str, position: int, is_of: Callable[[Cursor], bool]) -> None:
        """Check that the cursor is not ahead of what is durable, if both are of one era."""
        cursor = self._cursor(name)
        if cursor is None or cursor.position <= position:
            return
        # After an older state was put back, moves to the former position may be under way. An
        # emptied directory may get an identity from a paused `open` of an earlier term.
        before = max(self._positions_before.get(name, 0), self._emptied_at.get(name, 0))
        assert position < before or not is_of(cursor), (
            f"cursor-ahead: {name} is at {cursor.position}, its target at {position}"
        )

    def _check_sink(self, name: str, rows: Iterable[tuple[int, int, Record]]) -> None:
        for _, claimed_at, record in rows:
            assert record.rid.gsn >= claimed_at, f"at-least-once: {name} repeats {record.rid}"

    def sought(self, name: str, info: CursorInfo) -> None:
        """Note where an era of a cursor begins."""
        cursor = self._cursor(name)
        if cursor is not None:
            era = Era(cursor.birth, info.seek)
            self._starts.setdefault((name, era), info.position.gsn)
        _, target, partition = name.split("/")
        files = self._targets[target]
        if isinstance(files, SharedFiles):
            files.sought(int(partition), info.position.gsn)

    def forget(self, target: str) -> None:
        """Note that a target lost all that it had."""
        for partition in range(self._specs[target].partitions):
            self._checked.pop(cursor_name(self._player, target, partition), None)

    # --- the end ---

    def check_end(self, log: Sequence[Record]) -> None:
        """Compare everything with the log; `log`: all its records, in order."""
        for spec, partition, row in self._former:
            self._compare(spec, partition, row, log)
        for spec in self._specs.values():
            for partition in range(spec.partitions):
                self._check_end_of(spec, partition, log)

    def _check_end_of(self, spec: TargetSpec, partition: int, log: Sequence[Record]) -> None:
        name = cursor_name(self._player, spec.name, partition)
        target, cursor = self._targets[spec.name], self._cursor(name)
        assert cursor is not None, f"{name} is gone"
        last = log[-1].rid.gsn if log else 0
        if isinstance(target, SharedFiles):
            if not target.position(partition) and last < self._emptied_at.get(name, 0):
                return  # No step came since its files were removed.
            wanted = self._of(spec, partition, log)[0]
            target.compare(name, partition, wanted, self._trim())
            position = target.position(partition)
            assert position > last, f"{name} ends at {position}, the log at {last}"
            return
        rows: Any = target.rows.get(partition)
        if rows is None and last < self._emptied_at.get(name, 0):
            return  # No record came since its content was lost.
        assert rows is not None, f"{name} was never opened"
        era = Era(cursor.birth, cursor.seek)
        if isinstance(rows, list):
            is_sought = bool(cursor.seek) or self.is_forced or name in self.deleted
            self._compare_sink(spec, partition, rows, log, is_sought=is_sought)
            return
        assert (rows.birth, rows.seek) == era, f"seek: {name} is in {era}, its target is not"
        began = self._starts.get((name, era), self._trim())
        assert rows.start <= max(began, 1), f"loss: {name} begins at {rows.start}, not at {began}"
        self._compare(spec, partition, rows, log)
        assert rows.position > last, f"{name} ends at {rows.position}, the log at {last}"

    def _of(
        self, spec: TargetSpec, partition: int, log: Sequence[Record]
    ) -> tuple[list[Record], list[Record]]:
        """Return the records that a task must have, and those that its target rejects."""
        selection = Selection(spec, partition)
        own = [
            record
            for record in log
            if partition_of(record, spec.partitions) == partition and selection.matches(record)
        ]
        rejects = self._targets[spec.name].rejects
        return [r for r in own if not rejects(r)], [r for r in own if rejects(r)]

    def _compare(self, spec: TargetSpec, partition: int, row: Row, log: Sequence[Record]) -> None:
        part = [record for record in log if row.start <= record.rid.gsn < row.position]
        wanted, odd = self._of(spec, partition, part)
        records = row.records
        assert records == wanted, (
            f"loss: {spec.name}/{partition} lacks"
            f" {[str(r.rid) for r in wanted if r not in records]} of"
            f" [{row.start}, {row.position}), and has"
            f" {[str(r.rid) for r in records if r not in wanted]} more"
        )
        kept = [one.record for one in row.rejected]
        assert kept == (odd if spec.rejected == "dead-letter" else []), (
            f"dead letters: {spec.name}/{partition} keeps {[str(r.rid) for r in kept]}"
        )

    def _compare_sink(
        self,
        spec: TargetSpec,
        partition: int,
        rows: list[tuple[int, int, Record]],
        log: Sequence[Record],
        *,
        is_sought: bool,
    ) -> None:
        first: dict[int, Record] = {}
        for _, _, record in rows:
            known = first.setdefault(record.rid.gsn, record)
            assert known == record, f"at-least-once: two records are at {record.rid}"
        self.repetitions += len(rows) - len(first)
        if is_sought:
            return
        order = list(first)
        wanted = [record.rid.gsn for record in self._of(spec, partition, log)[0]]
        assert order == wanted, (
            f"at-least-once: {spec.name}/{partition} lacks {sorted({*wanted} - {*order})}, has"
            f" {sorted({*order} - {*wanted})} more, of {len(wanted)}"
        )
