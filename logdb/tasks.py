"""The log, as a node around its client core calls it: with callbacks, or from top to bottom.

A *task* is a generator that yields requests of `ziplog.client.common.requests`: it goes on with
each one's result, or with its exception raised at the `yield`. Of a list of requests, all are under
way at once; it goes on with the list of their results when all are there, and an exception stands
in the list like any result. Of any other step, whoever runs the task says what it waits for
(`Running`). Rules: only exceptions of the log and of LogDB end a task quietly, others are our own
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

    Task = Generator[Request | list[Request], Any, Any]
    Begin = Callable[["Running", Any], Callable[[], object] | None]


class LogCalls:
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
        self._answers: Final[dict[int, Callable[[Any], None]]] = {}

    def step(self, event: Event, now: int) -> None:
        """Let the core take an event."""
        self.now = now
        self._take(self.core.step(event, now))

    def call(self, request: Request, on_answer: Callable[[Any], None]) -> int:
        """Begin a call; `on_answer` gets its result or exception, maybe at once.

        Returns its number, for `cancel`.
        """
        self._calls += 1
        call = self._calls
        self._answers[call] = on_answer
        self._take(self.core.step(Call(call, request), self.now))
        return call

    def cancel(self, call: int) -> None:
        """Forget a call: nobody is called back."""
        if self._answers.pop(call, None) is not None:
            self._take(self.core.step(Cancelled(call), self.now))

    def run(self, task: Task, on_done: Callable[[Any], None]) -> None:
        """Run a task; `on_done` gets what it returns, or the exception that ended it."""
        Running(task, on_done, lambda: self).resume()

    def take(self) -> list[Effect]:
        """Return the effects since the last time."""
        effects, self.effects = self.effects, []
        return effects

    def _take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Complete):
                on_answer = self._answers.pop(effect.id, None)
                if on_answer is not None:
                    on_answer(effect.result)
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

    def call(self, calls: LogCalls, request: Request, then: Callable[[Any], None]) -> None:
        """Begin a call; `then` gets its result or exception, maybe at once."""
        number = 0
        is_answered = False

        def answered(result: Any) -> None:
            nonlocal is_answered
            is_answered = True
            self._numbers.discard(number)
            then(result)

        number = calls.call(request, answered)
        if not is_answered:
            self._numbers.add(number)

    def cancel(self, calls: LogCalls) -> None:
        """Forget them: nobody is called back."""
        for number in list(self._numbers):
            calls.cancel(number)
        self._numbers.clear()


class Running:
    """A task that has begun, or will with the first `resume`."""

    __slots__ = (
        "_begin", "_is_advancing", "_log", "_on_done", "_open", "_results", "_stop", "_task",
        "is_over",
    )  # fmt: skip

    def __init__(
        self,
        task: Generator[Any, Any, Any],
        on_done: Callable[[Any], None],
        log: Callable[[], LogCalls],
        begin: Begin | None = None,
    ) -> None:
        """Prepare a task.

        Args:
            task: see the module.
            on_done: gets what it returns, or the exception that ended it, unless it is cancelled.
            log: where its requests go; it may not be known before the first one.
            begin: the hook for steps that are no requests: called with this and the step, sees to
                it that `resume` is called once, maybe at once, and may return how to stop that.

        """
        self._task: Final = task
        self._on_done: Final = on_done
        self._log: Final = log
        self._begin: Final = begin
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
        self._task.close()

    def _advance(self, result: Any) -> None:
        if self.is_over:
            return
        self._stop = None
        try:
            if isinstance(result, Exception):
                wanted = self._task.throw(result)
            else:
                wanted = self._task.send(result)
        except StopIteration as end:
            self._end(end.value)
        except ZiplogError as error:
            self._end(error)
        else:
            self._wait_for(wanted)

    def _end(self, result: Any) -> None:
        self.is_over = True
        self._on_done(result)

    def _wait_for(self, wanted: Any) -> None:
        if isinstance(wanted, Request):
            self._open.call(self._log(), wanted, self.resume)
        elif isinstance(wanted, list):
            self._gather(wanted)
        else:
            assert self._begin is not None, f"no step of a task: {wanted!r}"
            self._stop = self._begin(self, wanted)

    def _gather(self, requests: list[Request]) -> None:
        results: list[Any] = [None] * len(requests)
        missing = len(requests)

        def answered(index: int, result: Any) -> None:
            nonlocal missing
            results[index] = result
            missing -= 1
            if not missing:
                self.resume(results)

        if not requests:
            self.resume(results)
        for index, request in enumerate(requests):
            self._open.call(self._log(), request, partial(answered, index))
