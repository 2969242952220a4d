"""The workers of a player: a thread for each connection to a target, with a queue of steps.

The driver puts steps into the queues and never waits for them; a worker posts the result of each
step to the node. A worker ends with `CloseTarget`. A target that hangs keeps its thread, and delays
no other one. A worker also keeps rejected records aside for targets that do not keep them.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from logplayer import dead_letters
from logplayer.contract import Opened, Retry
from logplayer.retries import BUGS, text_of
from logplayer.steps import CloseTarget, Deliver, OpenTarget, StepEnded
from ziplog import event_log
from ziplog.core.cursors import MAX_MARK_BYTES
from ziplog.errors import ConfigError, UnavailableError
from ziplog.runtime.descriptors import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TypeGuard

    from logplayer.contract import Batch, Target, TargetSpec, Task
    from ziplog.core.node import Effect, Event


#: Maximum number of former workers of a task whose last step is still under way: a target that
#: hangs keeps no more threads, however often the claim is lost.
_MAX_ENDING: Final = 3
#: The greatest position of a log.
_MAX_GSN: Final = 2**63 - 1


class Workers:
    """The workers of one process."""

    def __init__(self, targets: Iterable[TargetSpec], post: Callable[[Event], None]) -> None:
        """Start without workers.

        Args:
            targets: the targets of the player.
            post: gets the results; called by the workers' threads.

        """
        self._specs: Final = {spec.name: spec for spec in targets}
        self._post: Final = post
        #: By number: those that may get further steps.
        self._open: Final[dict[int, _Worker]] = {}
        #: Those with a running thread, which removes its worker at its end.
        self._running: Final[dict[int, _Worker]] = {}

    @property
    def effects(self) -> dict[type[Effect], Callable[[Any], object]]:
        """What carries out the node's effects, for the driver."""
        return {OpenTarget: self.open, Deliver: self.deliver, CloseTarget: self.close}

    @property
    def running(self) -> list[str]:
        """The tasks with a worker that has not ended, sorted."""
        return sorted({worker.task for worker in list(self._running.values())})

    @property
    def has_current_thread(self) -> bool:
        """Whether this thread is a worker's."""
        current = threading.current_thread()
        return any(worker.thread is current for worker in list(self._running.values()))

    def open(self, step: OpenTarget) -> None:
        """Start a worker, or have it open its target again."""
        worker = self._open.get(step.worker)
        if worker is None:
            worker = self._start(step)
        if worker is not None:
            worker.steps.put(step)

    def _start(self, step: OpenTarget) -> _Worker | None:
        number, task = step.worker, step.task
        if self._count_ending(task.cursor) >= _MAX_ENDING:
            why = f"{_MAX_ENDING} steps of former claims are still under way: its target hangs"
            self._post(StepEnded(number, Retry(why)))
            return None
        worker = _Worker(number, task.cursor, self._specs[task.target], self._post, self._on_end)
        self._running[number] = worker
        try:
            start_thread(worker.thread, "cannot run a worker")
        except UnavailableError as error:
            del self._running[number]
            self._post(StepEnded(number, Retry(str(error))))
            return None
        self._open[number] = worker
        return worker

    def _count_ending(self, task: str) -> int:
        running = list(self._running.items())
        return sum(one.task == task and number not in self._open for number, one in running)

    def _on_end(self, number: int) -> None:
        self._running.pop(number, None)

    def deliver(self, step: Deliver) -> None:
        """Have a worker deliver a batch."""
        self._open[step.worker].steps.put(step)

    def close(self, step: CloseTarget) -> None:
        """End a worker after its step under way."""
        worker = self._open.pop(step.worker, None)
        if worker is not None:
            worker.steps.put(None)

    def stop(self, timeout_s: float) -> None:
        """End all workers; wait until they have ended, at most for `timeout_s`."""
        for number in list(self._open):
            self.close(CloseTarget(number))
        deadline = time.monotonic() + timeout_s
        for worker in list(self._running.values()):
            if worker.thread is threading.current_thread():
                continue  # A target stops its own player.
            worker.thread.join(max(deadline - time.monotonic(), 0))


class _Worker:
    """One connection to a target, and its thread."""

    def __init__(
        self,
        number: int,
        task: str,
        spec: TargetSpec,
        post: Callable[[Event], None],
        on_end: Callable[[int], None],
    ) -> None:
        self._number, self._spec, self._post, self._on_end = number, spec, post, on_end
        #: The name of the task's cursor.
        self.task: Final = task
        self.steps: Final[SimpleQueue[OpenTarget | Deliver | None]] = SimpleQueue()
        # A target that hangs must not keep the process from ending.
        self.thread: Final = threading.Thread(target=self._run, name=f"player {task}", daemon=True)
        self._target: Target | None = None
        #: By gsn: how many rejected records of the last batch are in the file; a `map` may make
        #: several of one. The batch, of which later ones may be parts, ends at `_kept_stop`.
        self._kept: Counter[int] = Counter()
        self._kept_stop = 0

    def _run(self) -> None:
        try:
            while (step := self.steps.get()) is not None:
                result = self._result(step)
                del step  # A worker that waits keeps no records.
                self._post(StepEnded(self._number, result))
            self._close()
        finally:
            self._on_end(self._number)

    def _result(self, step: OpenTarget | Deliver) -> Opened | bytes | Exception | None:
        try:
            if isinstance(step, OpenTarget):
                return self._open(step.task)
            return self._deliver(step.batch)
        except BUGS as error:
            # The task fails, so it is logged once. A ConfigError's text says what to do.
            if not isinstance(error, ConfigError):
                with contextlib.suppress(Exception):  # The program's log may fail.
                    event_log.exception("target failed", task=self.task)
            return error.with_traceback(None)
        except Exception as error:  # noqa: BLE001 - targets are foreign code; the node decides
            return _checked(error, self._spec.name).with_traceback(None)
        except BaseException as error:  # noqa: BLE001 - it must not end the thread
            return Retry(text_of(error))

    def _open(self, task: Task) -> Opened:
        if self._target is None:
            assert self._spec.connect is not None, "a target with a receiver has no worker"
            self._target = self._spec.connect()
        opened: object = self._target.open(task)
        if not isinstance(opened, Opened):
            raise TypeError(f"open() of {self._spec.name} returned {opened!r}, not an Opened")
        position: object = opened.position
        if position is not None and not (_is_whole(position) and position <= _MAX_GSN):
            allowed = "the number of a position, or None"
            raise TypeError(f"open() of {self._spec.name} returned {opened!r}, not {allowed}")
        _check_mark(opened.mark, f"open() of {self._spec.name}")
        return opened

    def _deliver(self, batch: Batch) -> bytes | None:
        assert self._target is not None, "a batch came before the target was opened"
        self._keep_rejected(batch)
        mark: object = self._target.deliver(batch)
        if mark is not None:
            _check_mark(mark, f"deliver() of {self._spec.name}")
        return mark  # type: ignore[return-value]

    def _keep_rejected(self, batch: Batch) -> None:
        """Append rejected records to the file, unless the target keeps them, or they are there."""
        spec = self._spec
        if spec.rejected != "dead-letter" or spec.keeps_rejected:
            return
        if batch.start >= self._kept_stop:
            self._kept.clear()
        new, seen = [], Counter[int]()
        for one in batch.rejected:
            gsn = one.record.rid.gsn
            seen[gsn] += 1
            if seen[gsn] > self._kept[gsn]:
                new.append(one)
        if new:
            dead_letters.append(spec.dead_letter, batch.task, new)
        self._kept |= seen
        self._kept_stop = max(self._kept_stop, batch.stop)

    def _close(self) -> None:
        if self._target is None:
            return
        try:
            self._target.close()
        except Exception as error:  # noqa: BLE001 - its connection may be broken already
            event_log.debug("target not closed", task=self.task, error=str(error))


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_mark(mark: object, what: str) -> None:
    if not isinstance(mark, bytes):
        raise TypeError(f"{what} returned the mark {mark!r}, not bytes")
    if len(mark) > MAX_MARK_BYTES:
        sentence = f"{what} returned a mark of {len(mark)} bytes; it has at most {MAX_MARK_BYTES}"
        raise ConfigError("mark", len(mark), f"at most {MAX_MARK_BYTES} bytes", message=sentence)


def _checked(error: Exception, target: str) -> Exception:
    """Return the error of a target, or one that says what is wrong with it."""
    if isinstance(error, Retry):
        after_s: object = error.after_s
        is_number = isinstance(after_s, (int, float)) and not math.isnan(after_s)
        if after_s is not None and not is_number:
            return TypeError(f"{target} raised Retry with after_s={after_s!r}, not with seconds")
    return error
