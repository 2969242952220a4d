"""The steps of an operation, and what carries them out.

An operation is a task of `logdb/tasks.py` that yields requests of the log, or one of the steps
below, and goes on with each one's result, or with its exception raised at the `yield`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from logdb.client.commits import CommitDoubt
from logdb.tasks import Running
from ziplog.client.common.requests import Request
from ziplog.core.message import Message
from ziplog.types import RecordId

if TYPE_CHECKING:
    from logdb.client.commits import Commits
    from logdb.client.coordinators import Coordinators
    from logdb.tasks import LogCalls
    from ziplog.client.common.step_context import StepContext


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

    doubt: CommitDoubt


class SleepUntil(Step, frozen=True, gc=False):
    """Wait until the deadline, which ends nothing. Result: None."""


Wanted = Step | Request | list[Request]
Operation = Generator[Wanted, Any, Any]


class Machines:
    """What steps are carried out by."""

    __slots__ = ("calls", "commits", "coordinators", "sleepers", "turn")

    def __init__(self, turn: StepContext, coordinators: Coordinators, commits: Commits) -> None:
        self.turn: Final = turn
        self.coordinators: Final = coordinators
        self.commits: Final = commits
        #: The operations that sleep, and until when.
        self.sleepers: list[tuple[int, Running]] = []
        #: The log, once it is known.
        self.calls: LogCalls | None = None

    def prepare(self, operation: Operation, on_done: Callable[[Any], None]) -> Running:
        """Return an operation, to be begun by `resume`; see `logdb.tasks.Running`."""
        return Running(operation, on_done, self._log, self._begin)

    def _log(self) -> LogCalls:
        assert self.calls is not None, "an operation on the log before it is known"
        return self.calls

    def _begin(self, running: Running, step: Step) -> Callable[[], object] | None:
        """Begin a step; returns how to stop it."""
        match step:
            case Query(deadline=deadline, build=build, pinned=pinned):
                told = partial(_told, running)
                question = self.coordinators.ask(build, told, deadline, pinned)
                return partial(self.coordinators.forget, question)
            case Alive(deadline):
                question = self.coordinators.when_alive(partial(_signed, running), deadline)
                return partial(self.coordinators.forget, question)
            case Insert(deadline, number, payload, after):
                commit = self.commits.start(number, payload, after, deadline, running.resume)
                return partial(self.commits.cancel, commit)
            case Resolve(deadline, doubt):
                commit = self.commits.resolve(doubt, deadline, running.resume)
                return partial(self.commits.cancel, commit)
            case SleepUntil(deadline):
                self.sleepers.append((deadline, running))
                self.turn.set_timer(deadline)
        return None

    def wake(self) -> None:
        """Let those go on who have slept enough."""
        sleepers, self.sleepers = self.sleepers, []
        for until, running in sleepers:
            if self.turn.now >= until:
                if not running.is_over:
                    running.resume()
            elif not running.is_over:
                self.sleepers.append((until, running))
                self.turn.set_timer(until)

    def check(self) -> None:
        """Assert the invariants."""
        for until, _ in self.sleepers:
            assert self.turn.next_timer <= until, "somebody would sleep for ever"


def _told(running: Running, reply: Any, src: bytes) -> None:
    running.resume(reply if isinstance(reply, Exception) else (reply, src))


def _signed(running: Running, result: Any, _src: bytes) -> None:
    running.resume(result)
