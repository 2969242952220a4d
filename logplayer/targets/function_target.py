"""A target that is a Python function: each record at least once, in order.

A record whose call returned is not repeated while this claim delivers its batch again. A coroutine
that the function returns is awaited, in an event loop of this target, before the next call.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any, Final

from logplayer.contract import Batch, Opened, Rejected, Target, Task
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
    connect: Callable[[], Target] = target if is_class else lambda: target
    return connect, stores_position
