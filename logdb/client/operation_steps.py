"""The steps of an operation, and what carries them out.

An operation is a task of `logdb/tasks.py` that yields requests of the log, or one of the steps
below, and goes on with each one's result, or with its exception raised at the `yield`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from logdb.client.commits import UnknownCommit
from logdb.tasks import Task
from ziplog.client.common.requests import Request
from ziplog.core.message import Message
from ziplog.types import RecordId

if TYPE_CHECKING:
    from logdb.client.commits import Commits
    from logdb.client.coordinators import Coordinators
    from logdb.tasks import LogTasks
    from ziplog.client.common.step_context import Turn


class Step(msgspec.Struct, frozen=True, gc=False):
    """Base of all steps."""

    deadline: int


class Query(Step, frozen=True, gc=False):
    """Ask a coordinator. Result: its reply, and its name."""

    build: Callable[[int, int], Message]
    #: The only one that can answer; None: any.
    pinned: bytes | None = None


class Alive(Step, frozen=True, gc=False):
    """Wait for a coordinator's sign of life. Result: None."""


class Insert(Step, frozen=True, gc=False):
    """Insert a commit record, and wait for the decision. Result: the `Decided`."""

    number: int
    payload: bytes
    after: RecordId


class Resolve(Step, frozen=True, gc=False):
    """Find out about a commit. Result: the `Decided`; None: its record never will exist."""

    commit: UnknownCommit


class SleepUntil(Step, frozen=True, gc=False):
    """Wait until the deadline, which ends nothing. Result: None."""


Yielded = Step | Request | list[Request]
Operation = Generator[Yielded, Any, Any]


class StepRunner:
    """What steps are carried out by."""

    __slots__ = ("calls", "commits", "coordinators", "sleepers", "turn")

    def __init__(self, turn: Turn, coordinators: Coordinators, commits: Commits) -> None:
        self.turn: Final = turn
        self.coordinators: Final = coordinators
        self.commits: Final = commits
        #: The operations that sleep, and until when.
        self.sleepers: list[tuple[int, Task]] = []
        #: The log, once it is known.
        self.calls: LogTasks | None = None

    def prepare(self, operation: Operation, on_done: Callable[[Any], None]) -> Task:
        """Return an operation, to be begun by `resume`; see `logdb.tasks.Task`."""
        return Task(operation, on_done, self._log, self._start_step)

    def _log(self) -> LogTasks:
        assert self.calls is not None, "an operation on the log before it is known"
        return self.calls

    def _start_step(self, task: Task, step: Step) -> Callable[[], object] | None:
        """Begin a step; returns how to stop it."""
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
                self.turn.wake_at(deadline)
        return None

    def wake_sleepers(self) -> None:
        """Let those go on who have slept enough."""
        sleepers, self.sleepers = self.sleepers, []
        for until, task in sleepers:
            if self.turn.now >= until:
                if not task.is_over:
                    task.resume()
            elif not task.is_over:
                self.sleepers.append((until, task))
                self.turn.wake_at(until)

    def check(self) -> None:
        """Assert the invariants."""
        for until, _ in self.sleepers:
            assert self.turn.alarm <= until, "somebody would sleep for ever"


def _on_reply(task: Task, reply: Any, src: bytes) -> None:
    task.resume(reply if isinstance(reply, Exception) else (reply, src))


def _on_alive(task: Task, result: Any, _src: bytes) -> None:
    task.resume(result)
