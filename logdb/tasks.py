"""The log, as a node around its client core calls it: with callbacks, or from top to bottom.

A *task* is a generator that yields requests of `ziplog.client.common.requests`: it goes on with
each one's result, or with its exception raised at the `yield`. Of a list of requests, all are under
way at once; it goes on with the list of their results when all are there, and an exception stands
in the list like any result. Of any other step, whoever runs the task says what it waits for
(`Task`). Rules: only exceptions of the log and of LogDB end a task quietly, others are our own
errors; nobody else takes the core's effects. Deterministic, like the core.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ziplog.client.common.requests import Request
from ziplog.core.node import Call, Cancelled, Complete
from ziplog.errors import ZiplogError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from ziplog.client.client_node import ClientCore
    from ziplog.core.node import Effect, Event

    TaskSteps = Generator[Request | list[Request], Any, Any]
    StepStarter = Callable[["Task", Any], Callable[[], object] | None]


class LogTasks:
    """Calls of a log's client core."""

    def __init__(self, core: ClientCore, now: int) -> None:
        """Take over a core.

        Args:
            core: steps only here from now on.
            now: monotonic nanoseconds.

        """
        self.core: Final = core
        #: The time of the event that is being stepped, in monotonic nanoseconds.
        self.now = now
        #: What the core orders, and what those who are called back order; the node takes it.
        self.effects: list[Effect] = []
        self._calls = 0
        self._callbacks: Final[dict[int, Callable[[Any], None]]] = {}

    def step(self, event: Event, now: int) -> None:
        """Let the core take an event."""
        self.now = now
        self._handle_effects(self.core.step(event, now))

    def call(self, request: Request, on_result: Callable[[Any], None]) -> int:
        """Begin a call; `on_result` gets its result or exception, maybe at once.

        Returns its number, for `cancel`.
        """
        self._calls += 1
        call = self._calls
        self._callbacks[call] = on_result
        self._handle_effects(self.core.step(Call(call, request), self.now))
        return call

    def cancel(self, call: int) -> None:
        """Forget a call: nobody is called back."""
        if self._callbacks.pop(call, None) is not None:
            self._handle_effects(self.core.step(Cancelled(call), self.now))

    def run(self, steps: TaskSteps, on_done: Callable[[Any], None]) -> None:
        """Run a task; `on_done` gets what it returns, or the exception that ended it."""
        Task(steps, on_done, lambda: self).resume()

    def take(self) -> list[Effect]:
        """Return the effects since the last time."""
        effects, self.effects = self.effects, []
        return effects

    def _handle_effects(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Complete):
                on_result = self._callbacks.pop(effect.id, None)
                if on_result is not None:
                    on_result(effect.result)
            else:
                self.effects.append(effect)


def ignore(*_: object) -> None:
    """Take an answer that nobody waits for."""


class OpenCalls:
    """What one owner has under way in the log, to be forgotten together."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        """Begin with none."""
        self._numbers: Final[set[int]] = set()

    def __len__(self) -> int:
        return len(self._numbers)

    def call(self, calls: LogTasks, request: Request, then: Callable[[Any], None]) -> None:
        """Begin a call; `then` gets its result or exception, maybe at once."""
        number = 0
        is_answered = False

        def on_result(result: Any) -> None:
            nonlocal is_answered
            is_answered = True
            self._numbers.discard(number)
            then(result)

        number = calls.call(request, on_result)
        if not is_answered:
            self._numbers.add(number)

    def cancel(self, calls: LogTasks) -> None:
        """Forget them: nobody is called back."""
        for number in list(self._numbers):
            calls.cancel(number)
        self._numbers.clear()


class Task:
    """A task that has begun, or will with the first `resume`."""

    __slots__ = (
        "_is_advancing",
        "_log",
        "_on_done",
        "_open",
        "_results",
        "_start_step",
        "_steps",
        "_stop",
        "is_over",
    )  # fmt: skip

    def __init__(
        self,
        steps: Generator[Any, Any, Any],
        on_done: Callable[[Any], None],
        log: Callable[[], LogTasks],
        start_step: StepStarter | None = None,
    ) -> None:
        """Prepare a task.

        Args:
            task: see the module.
            on_done: gets what it returns, or the exception that ended it, unless it is cancelled.
            log: where its requests go; it may not be known before the first one.
            begin: the hook for steps that are no requests: called with this and the step, sees to
                it that `resume` is called once, maybe at once, and may return how to stop that.

        """
        self._steps: Final = steps
        self._on_done: Final = on_done
        self._log: Final = log
        self._start_step: Final = start_step
        #: What it waits for.
        self._open: Final = OpenCalls()
        self._stop: Callable[[], object] | None = None
        #: Results that came while the task was running: in a loop, as there may be thousands.
        self._results: Final[list[Any]] = []
        self._is_advancing = False
        #: It was ended, by itself or by `cancel`.
        self.is_over = False

    def resume(self, result: Any = None) -> None:
        """Let the task go on to what it wants next."""
        self._results.append(result)
        if not self._is_advancing:
            self._is_advancing = True
            while self._results:
                self._advance(self._results.pop())
            self._is_advancing = False

    def cancel(self) -> None:
        """End it where it stands: nobody waits for it any more. May be called again."""
        if self.is_over:
            return
        self.is_over = True
        if self._stop is not None:
            self._stop()
        if self._open:
            self._open.cancel(self._log())
        self._steps.close()

    def _advance(self, result: Any) -> None:
        if self.is_over:
            return
        self._stop = None
        try:
            if isinstance(result, Exception):
                step = self._steps.throw(result)
            else:
                step = self._steps.send(result)
        except StopIteration as end:
            self._finish(end.value)
        except ZiplogError as error:
            self._finish(error)
        else:
            self._start_wait(step)

    def _finish(self, result: Any) -> None:
        self.is_over = True
        self._on_done(result)

    def _start_wait(self, step: Any) -> None:
        if isinstance(step, Request):
            self._open.call(self._log(), step, self.resume)
        elif isinstance(step, list):
            self._gather(step)
        else:
            assert self._start_step is not None, f"no step of a task: {step!r}"
            self._stop = self._start_step(self, step)

    def _gather(self, requests: list[Request]) -> None:
        results: list[Any] = [None] * len(requests)
        missing = len(requests)

        def on_result(index: int, result: Any) -> None:
            nonlocal missing
            results[index] = result
            missing -= 1
            if not missing:
                self.resume(results)

        if not requests:
            self.resume(results)
        for index, request in enumerate(requests):
            self._open.call(self._log(), request, partial(on_result, index))
