"""Errors without tracebacks: Spark's users see the message of a `ZiplogError`, not its stack.

Spark prints the traceback of an error in a Python worker before its message. The message of a
`ZiplogError` says what happened and what to do, so its traceback is removed. Tracebacks of bugs in
this package stay.

Rule: every function that Spark calls is wrapped in `without_traceback`, generators too.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from ziplog.errors import ZiplogError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

_P = ParamSpec("_P")
_R = TypeVar("_R")


def without_traceback(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the function with the tracebacks of this library's errors removed.

    Args:
        function: a function or a generator function.

    """
    if inspect.isgeneratorfunction(function):
        return cast("Callable[_P, _R]", _generator_without_traceback(function))

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except ZiplogError as error:
            raise error.with_traceback(None) from None

    return wrapper


def _generator_without_traceback(
    function: Callable[_P, Generator[Any, None, None]],
) -> Callable[_P, Generator[Any, None, None]]:
    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> Generator[Any, None, None]:
        try:
            yield from function(*args, **kwargs)
        except ZiplogError as error:
            raise error.with_traceback(None) from None

    return wrapper
