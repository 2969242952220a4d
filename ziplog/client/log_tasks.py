"""Tasks: coroutines that call the log through a node's client core.

A *task* is a generator that yields requests of `ziplog.client.common.requests`. It resumes with the
result of the request, or with its exception raised at the `yield`. It may yield a list of requests,
which run concurrently; it resumes with the list of their results, exceptions included. Any other
step is started by a hook of the `Task`. A `ZiplogError` that it does not catch ends a task; other
exceptions are programming errors. A `finally` of a task must not start calls: it also runs when
Python collects an abandoned generator. Only the node may pop the core's effects. LogDB's
coordinators and clients use it, and players. Deterministic, like the core.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ziplog.client.common.requests import Request
from ziplog.core.node import Cancelled, Complete
from ziplog.errors import ZiplogError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from ziplog.client.client_node import ClientCore
    from ziplog.core.node import Effect, Event
    from ziplog.wire import InsertAck

    TaskSteps = Generator[Request | list[Request], Any, Any]
    StepStarter = Callable[["Task", Any], Callable[[], object] | None]


class LogTasks:
    """Runs calls and tasks on a log's client core."""

    def __init__(self, core: ClientCore, now: int) -> None:
        """Take over a core.

        Args:
            core: stepped only here from now on.
            now: monotonic nanoseconds.

        """
        self.core: Final = core
        #: The time of the current event, in monotonic nanoseconds.
        self.now = now
        #: Effects of the core and of the callbacks, popped by the node.
        self.effects: list[Effect] = []
        self._calls = 0
        self._callbacks: Final[dict[int, Callable[[Any], None]]] = {}

    def step(self, event: Event, now: int) -> None:
        """Pass an event to the core."""
        self.now = now
        effects = self.core.step(event, now)
        if effects:
            self._handle_effects(effects)

    def step_ack(self, src: bytes, ack: InsertAck, now: int) -> None:
        """Do the same as `step(Received(src, ack), now)`."""
        self.now = now
        effects = self.core.step_ack(src, ack, now)
        if effects:
            self._handle_effects(effects)

    def call(self, request: Request, on_result: Callable[[Any], None]) -> int:
        """Start a call; `on_result` gets its result or exception, possibly before this returns.

        Returns the call's number, for `cancel`.
        """
        self._calls += 1
        call = self._calls
        self._callbacks[call] = on_result
        effects = self.core.step_call(call, request, self.now)
        if effects:
            self._handle_effects(effects)
        return call

    def cancel(self, call: int) -> None:
        """Cancel a call; its callback is not called."""
        if self._callbacks.pop(call, None) is not None:
            self._handle_effects(self.core.step(Cancelled(call), self.now))

    def run(self, steps: TaskSteps, on_done: Callable[[Any], None]) -> None:
        """Run a task; `on_done` gets its return value, or the exception that ended it."""
        Task(steps, on_done, lambda: self).resume()

    def pop_effects(self) -> list[Effect]:
        """Pop the pending effects."""
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
    """Ignore a result."""


class OpenCalls:
    """The open calls of one owner, which are cancelled together."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        """Start without calls."""
        self._numbers: Final[set[int]] = set()

    def __len__(self) -> int:
        return len(self._numbers)

    def call(self, calls: LogTasks, request: Request, then: Callable[[Any], None]) -> None:
        """Start a call; `then` gets its result or exception, possibly before this returns."""
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
        """Cancel all calls; their callbacks are not called."""
        for number in list(self._numbers):
            calls.cancel(number)
        self._numbers.clear()


class Task:
    """A running task; it starts with the first `resume`."""

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
            steps: the generator; see the module.
            on_done: gets its return value or the exception that ended it, unless it is cancelled.
            log: returns the log; called at the first request.
            start_step: hook for steps that are not requests. It gets the task and the step, must
                have `resume` called once, possibly before it returns, and may return a function
                that stops the step.

        """
        self._steps: Final = steps
        self._on_done: Final = on_done
        self._log: Final = log
        self._start_step: Final = start_step
        #: The requests that the task waits for.
        self._open: Final = OpenCalls()
        self._stop: Callable[[], object] | None = None
        #: Results that arrived while the generator ran; a loop handles them, as there may be
        #: thousands.
        self._results: Final[list[Any]] = []
        self._is_advancing = False
        #: The task has finished, or was cancelled.
        self.is_over = False

    def resume(self, result: Any = None) -> None:
        """Resume the task with a result."""
        self._results.append(result)
        if not self._is_advancing:
            self._is_advancing = True
            while self._results:
                self._advance(self._results.pop())
            self._is_advancing = False

    def cancel(self) -> None:
        """Stop the task where it is. Idempotent."""
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
            assert self._start_step is not None, f"a task yielded an unknown step: {step!r}"
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
