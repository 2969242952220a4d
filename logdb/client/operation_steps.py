"""The steps of an operation, and the runner that executes them.

An operation is a task of `ziplog/client/log_tasks.py`. It yields requests of the log, or the steps
below, and resumes with the result, or with its exception raised at the `yield`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from logdb.client.commits import UnknownCommit
from ziplog.client.common.requests import Request
from ziplog.client.log_tasks import Task
from ziplog.core.message import Message
from ziplog.types import RecordId

if TYPE_CHECKING:
    from logdb.client.commits import Commits
    from logdb.client.coordinators import Coordinators
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.log_tasks import LogTasks


class Step(msgspec.Struct, frozen=True, gc=False):
    """Base of all steps."""

    deadline: int


class Query(Step, frozen=True, gc=False):
    """Query a coordinator. Result: its reply, and its name."""

    build: Callable[[int, int], Message]
    #: The only coordinator that can answer; None: any.
    pinned: bytes | None = None


class Alive(Step, frozen=True, gc=False):
    """Wait until the coordinator has replied recently. Result: None."""


class Insert(Step, frozen=True, gc=False):
    """Insert a commit record, and wait for the decision. Result: the `Decided`."""

    number: int
    payload: bytes
    after: RecordId


class Resolve(Step, frozen=True, gc=False):
    """Resolve a commit's outcome. Result: the `Decided`; None: the record will never exist."""

    commit: UnknownCommit


class SleepUntil(Step, frozen=True, gc=False):
    """Sleep until the deadline. Result: None."""


Yielded = Step | Request | list[Request]
Operation = Generator[Yielded, Any, Any]


class StepRunner:
    """Runs the steps of operations."""

    __slots__ = ("calls", "commits", "context", "coordinators", "sleepers")

    def __init__(self, context: StepContext, coordinators: Coordinators, commits: Commits) -> None:
        self.context: Final = context
        self.coordinators: Final = coordinators
        self.commits: Final = commits
        #: Sleeping operations, with their wake-up times.
        self.sleepers: list[tuple[int, Task]] = []
        #: The log; None: not connected yet.
        self.calls: LogTasks | None = None

    def prepare(self, operation: Operation, on_done: Callable[[Any], None]) -> Task:
        """Return an operation's task, which starts with `resume`; see `Task`."""
        return Task(operation, on_done, self._log, self._start_step)

    def _log(self) -> LogTasks:
        assert self.calls is not None, "an operation uses the log before it is connected"
        return self.calls

    def _start_step(self, task: Task, step: Step) -> Callable[[], object] | None:
        """Start a step; return a function that stops it."""
        match step:
            case Query(deadline=deadline, build=build, pinned=pinned):
                on_reply = partial(_on_reply, task)
                query = self.coordinators.send_query(build, on_reply, deadline, pinned)
                return partial(self.coordinators.forget, query)
            case Alive(deadline):
                query = self.coordinators.wait_until_alive(partial(_on_alive, task), deadline)
                return partial(self.coordinators.forget, query)
            case Insert(deadline, number, payload, after):
                commit = self.commits.start(number, payload, after, deadline, task.resume)
                return partial(self.commits.cancel, commit)
            case Resolve(deadline, unknown):
                commit = self.commits.resolve(unknown, deadline, task.resume)
                return partial(self.commits.cancel, commit)
            case SleepUntil(deadline):
                self.sleepers.append((deadline, task))
                self.context.set_timer(deadline)
        return None

    def wake_sleepers(self) -> None:
        """Resume the operations that have slept long enough."""
        sleepers, self.sleepers = self.sleepers, []
        for wake_time, task in sleepers:
            if self.context.now >= wake_time:
                if not task.is_over:
                    task.resume()
            elif not task.is_over:
                self.sleepers.append((wake_time, task))
                self.context.set_timer(wake_time)

    def check(self) -> None:
        """Assert the invariants."""
        for wake_time, _ in self.sleepers:
            assert self.context.next_timer <= wake_time, "a sleeping operation has no timer"


def _on_reply(task: Task, reply: Any, src: bytes) -> None:
    task.resume(reply if isinstance(reply, Exception) else (reply, src))


def _on_alive(task: Task, result: Any, _src: bytes) -> None:
    task.resume(result)
