"""A target that is a Python function: each record at least once, in order.

A record whose call returned is not repeated while this claim delivers its batch again. A coroutine
that the function returns is awaited, in an event loop of this target, before the next call.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import TYPE_CHECKING, Any, Final

from logplayer.contract import Batch, Fenced, Opened, Rejected, Target, Task
from logplayer.targets.settings import is_generator
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.types import Record

#: The methods of a target.
_METHODS: Final = ("open", "deliver", "close")


class FunctionTarget:
    """Calls a function with each record, or with the list of a batch's records."""

    def __init__(self, function: Callable[[Any], object], *, batch: bool) -> None:
        self._function: Final = function
        self._is_batch: Final = batch
        #: Where the batch under way starts, and how many of its records are done.
        self._start = -1
        self._done = 0
        #: The event loop of coroutines, once there was one.
        self._runner: asyncio.Runner | None = None

    def open(self, task: Task) -> Opened:  # noqa: ARG002
        """Begin; a function stores no position."""
        self._start, self._done = -1, 0
        return Opened()

    def deliver(self, batch: Batch) -> None:
        """Call the function.

        Raises:
            Rejected: as the function, with the index of its record.

        """
        if self._is_batch:
            if batch.records:
                self._call(list(batch.records))
            return
        if batch.start != self._start:
            self._start, self._done = batch.start, 0
        for index in range(self._done, len(batch.records)):
            try:
                self._call(batch.records[index])
            except Rejected as error:
                raise Rejected(index, str(error)) from error
            self._done = index + 1

    def _call(self, argument: Record | list[Record]) -> None:
        result = self._function(argument)
        if inspect.iscoroutine(result):
            if self._runner is None:
                self._runner = asyncio.Runner()
            self._runner.run(result)

    def close(self) -> None:
        """Close the event loop, and cancel the tasks in it that the function has started."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()


class SharedTarget:
    """A target object that the claims of a task use, one after the other."""

    def __init__(self, target: Target) -> None:
        """Take the object."""
        self.target: Final = target
        #: Held for each call, so the calls of two claims follow each other.
        self.lock: Final = threading.Lock()
        #: By cursor, the claim that has opened it last: a receiver may serve several players.
        self.owners: Final[dict[str, ClaimOfShared]] = {}

    def connect(self) -> ClaimOfShared:
        """Return what another claim uses."""
        return ClaimOfShared(self)


class ClaimOfShared:
    """One claim's use of a target object: it ends when a later claim opens the object."""

    def __init__(self, shared: SharedTarget) -> None:
        """Use nothing yet."""
        self._shared: Final = shared
        self._cursor = ""

    def open(self, task: Task) -> Opened:
        """Open the object, after the call of the former claim that is under way."""
        with self._shared.lock:
            self._cursor = task.cursor
            self._shared.owners[task.cursor] = self
            return self._shared.target.open(task)

    def deliver(self, batch: Batch) -> bytes | None:
        """Deliver a batch.

        Raises:
            Fenced: a later claim has opened the object.

        """
        with self._shared.lock:
            if not self._is_owner():
                raise Fenced("a later claim of this process has opened the target object")
            return self._shared.target.deliver(batch)

    def close(self) -> None:
        """Close the object, unless a later claim has opened it."""
        with self._shared.lock:
            if self._is_owner():
                del self._shared.owners[self._cursor]
                self._shared.target.close()

    def _is_owner(self) -> bool:
        return self._shared.owners.get(self._cursor) is self


def connector(
    function: Any, where: str, *, batch: bool, partitions: int
) -> tuple[Callable[[], Target], bool]:
    """Return how tasks connect, and whether what they connect to stores positions.

    Raises:
        ConfigError: `function` is neither a function nor a target, or is a target of one task only.

    """
    if all(callable(getattr(function, method, None)) for method in _METHODS):
        return _target_connector(function, where, batch=batch, partitions=partitions)
    if not callable(function) or inspect.isclass(function):
        allowed = "a function, or a target with the methods open, deliver and close"
        raise ConfigError("function", function, allowed, where)
    if is_generator(function):
        allowed = "a function without `yield`: a call of a generator does nothing"
        raise ConfigError("function", function, allowed, where)
    return (lambda: FunctionTarget(function, batch=batch)), False


def _target_connector(
    target: Any, where: str, *, batch: bool, partitions: int
) -> tuple[Callable[[], Target], bool]:
    stores_position = getattr(target, "stores_position", None)
    if type(stores_position) is not bool:
        allowed = "True if its `open` returns a position, else False"
        raise ConfigError("stores_position of the target", stores_position, allowed, where)
    if batch:
        raise ConfigError("batch", batch, "left out: a target receives batches", where)
    is_class = inspect.isclass(target)
    if partitions > 1 and not is_class:
        allowed = "1 with one target object; its class makes an object for each task"
        raise ConfigError("partitions", partitions, allowed, where)
    connect: Callable[[], Target] = target if is_class else SharedTarget(target).connect
    return connect, stores_position
