"""The history of a run with players: steps of targets and states of cursors, judged at the end.

The rules are those of histories of real processes (docs/history.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logplayer.contract import Opened
from logplayer.steps import OpenTarget
from tests.history import cursors, events, players

if TYPE_CHECKING:
    from collections.abc import Callable

    from logplayer.contract import Task
    from logplayer.steps import Deliver
    from ziplog.core.cursors import Cursor


class StepHistory:
    """What the processes of a run did with their targets, and how cursors moved."""

    def __init__(self, clock: Callable[[], int]) -> None:
        """Begin; `clock` returns the time of the run."""
        self._clock: Final = clock
        self._cursors: Final = cursors.Cursors()
        self._players: Final = players.Players()
        self._known: Final[dict[str, Cursor]] = {}
        self._line = 0

    def next_line(self) -> int:
        """Return the number of a new line, process or operation."""
        self._line += 1
        return self._line

    def on_cursor(self, name: str, cursor: Cursor | None) -> None:
        """Take the committed state of a cursor."""
        if cursor is not None and self._known.get(name) is not cursor:
            self._known[name], now = cursor, self._clock()
            seen = (name, cursor.birth, cursor.term, cursor.seek, cursor.position)
            self._on_cursor_event(events.CursorIs(now, now, *seen))

    def on_seek(self, name: str) -> None:
        """Note that a seek is requested."""
        self._on_cursor_event(events.SeekCursor(self.next_line(), self._clock(), name))

    def _on_cursor_event(self, event: events.CursorEvent) -> None:
        self._cursors.on_event(event, 0, self.next_line())

    def on_replaced(self, task: str) -> None:
        """Note that the contents of a task's target were replaced."""
        self._players.on_event(events.Replaced(self._clock(), task), 0, self.next_line())

    def on_player(self, event: events.PlayerEvent, process: int) -> None:
        """Take a line of a process."""
        self._players.on_event(event, process, self.next_line())

    def check(self) -> None:
        """Assert the rules."""
        found = [*cursors.check(self._cursors), *players.check(self._players, self._cursors)]
        assert not found, "; ".join(f"{one.rule}: {one.text}" for one in found[:5])


class ProcessSteps:
    """The steps of one process, by its workers."""

    def __init__(self, history: StepHistory, clock: Callable[[], int], owner: str) -> None:
        """Take no step yet; `owner`: the process that holds the claims; "": a receiver."""
        self._history: Final = history
        self._clock: Final = clock
        self._owner: Final = owner
        self._process: Final = history.next_line()
        #: By worker: the last open, and the step under way.
        self._opens: Final[dict[int, int]] = {}
        self._steps: Final[dict[int, int]] = {}

    def begin(self, step: OpenTarget | Deliver, *, is_exactly_once: bool) -> None:
        """Note the begin of a step; a worker carries out one at a time."""
        assert step.worker not in self._steps, f"two steps of worker {step.worker} at once"
        op, now, event = self._history.next_line(), self._clock(), None
        if isinstance(step, OpenTarget):
            self._opens[step.worker] = op
            event = _opening(op, now, step.task, self._owner, is_exactly_once=is_exactly_once)
        else:
            batch = step.batch
            gsns = [record.rid.gsn for record in batch.records]
            of = self._opens[step.worker]
            event = events.Deliver(op, now, of, batch.start, batch.stop, gsns)
        self._steps[step.worker] = op
        self._history.on_player(event, self._process)

    def end(self, worker: int, result: Opened | bytes | Exception | None) -> None:
        """Note the end of a step."""
        op, now = self._steps.pop(worker), self._clock()
        event: events.PlayerEvent = events.Done(op, now)
        if isinstance(result, Exception):
            event = events.Undone(op, now, type(result).__name__)
        elif isinstance(result, Opened):
            event = events.Opened(op, now, -1 if result.position is None else result.position)
        self._history.on_player(event, self._process)


def _opening(op: int, now: int, task: Task, owner: str, *, is_exactly_once: bool) -> events.Open:
    return events.Open(
        op, now, task.cursor, task.birth, task.term, task.seek, task.position, is_exactly_once,
        owner,
    )  # fmt: skip
