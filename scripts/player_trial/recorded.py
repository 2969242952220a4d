"""Runs a program with a player or a receiver, and records the steps of its targets.

    python recorded.py DIRECTORY ziplog player run FILE
    python recorded.py DIRECTORY examples/player_receiver.py copy.db 7600
    python recorded.py DIRECTORY --broken ziplog player run FILE

The program's history (docs/history.md) is in the directory. With `--broken`, SQL targets go by the
cursor, not by their position: it shows that a trial finds what it looks for. A process that is
killed between a commit and the move of the cursor delivers records twice.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from msgspec import structs

from logplayer import workers
from logplayer.contract import Opened
from logplayer.targets.sql import SqlTarget
from tests.history import events
from tests.history.events import Recorder, now

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from logplayer.contract import Batch, Target, TargetSpec, Task

_REPOSITORY: Final = Path(__file__).resolve().parents[2]


class RecordedTarget:
    """A target that records its calls, each before it is made."""

    def __init__(self, target: Target, recorder: Recorder, *, is_exactly_once: bool) -> None:
        self._target: Final = target
        self._recorder: Final = recorder
        self._is_exactly_once: Final = is_exactly_once
        #: The last open.
        self._open = 0

    def open(self, task: Task) -> Opened:
        """Open the target."""
        op = self._open = self._recorder.next_op()
        numbers = (task.birth, task.term, task.seek, task.position)
        self._recorder.call(events.Open(op, now(), task.cursor, *numbers, self._is_exactly_once))
        opened = self._result(op, partial(self._target.open, task))
        gsn = -1 if opened.position is None else opened.position
        self._recorder.call(events.Opened(op, now(), gsn))
        return opened

    def deliver(self, batch: Batch) -> bytes | None:
        """Deliver a batch."""
        op, gsns = self._recorder.next_op(), [record.rid.gsn for record in batch.records]
        self._recorder.call(events.Deliver(op, now(), self._open, batch.start, batch.stop, gsns))
        mark = self._result(op, partial(self._target.deliver, batch))
        self._recorder.call(events.Done(op, now()))
        return mark

    def _result(self, op: int, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except BaseException as error:
            self._recorder.call(events.Undone(op, now(), type(error).__name__))
            raise

    def close(self) -> None:
        """Close the target."""
        self._target.close()


def _recorded(spec: TargetSpec, recorder: Recorder) -> TargetSpec:
    connect = spec.connect
    if connect is None:  # Its receiver records it.
        return spec

    def connected() -> RecordedTarget:
        return RecordedTarget(connect(), recorder, is_exactly_once=spec.stores_position)

    return structs.replace(spec, connect=connected)


def main() -> None:
    """Run the program that the arguments name."""
    directory, *command = sys.argv[1:]
    is_broken = command[0] == "--broken"
    program, *arguments = command[is_broken:]
    name = f"{Path(program).stem}-{os.getpid()}-{time.monotonic_ns()}"
    recorder = Recorder(Path(directory) / f"{name}{events.SUFFIX}", name)
    start = workers.Workers.__init__

    def started(self: workers.Workers, specs: Iterable[TargetSpec], *others: Any) -> None:
        start(self, [_recorded(spec, recorder) for spec in specs], *others)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(workers.Workers, "__init__", started))
        if is_broken:
            by_cursor = lambda _self, _cursor, task: Opened(task.position)  # noqa: E731
            stack.enter_context(patch.object(SqlTarget, "_fence", by_cursor))
            stack.enter_context(patch.object(SqlTarget, "_move", lambda *_: None))
        sys.argv = [program, *arguments]
        if program == "ziplog":
            runpy.run_module(program, run_name="__main__")
        else:
            runpy.run_path(str(_REPOSITORY / program), run_name="__main__")


if __name__ == "__main__":
    main()
