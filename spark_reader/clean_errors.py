"""How what went wrong reaches whoever uses Spark: as the error's own line, and one of its origin.

Spark shows the trace of an error in a Python worker, and its text last. The text of a `ZiplogError`
says what happened and what to do, so its trace is left out; that of our own bugs stays.

Rule: whatever Spark calls is a function in `without_traceback`, generators too.
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
    """Return the function, but errors of this library leave it without their traces.

    Args:
        function: any function, or a generator function: then what its generators raise.

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
