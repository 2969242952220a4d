"""Log events: a name and fields, through the standard library's logger `ziplog.events`.

A program that uses this package gets them as it configured `logging`. Our own processes write each
as a line of fields (`ziplog.runtime.process_logging`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None]

#: The name of the logger.
LOGGER: Final = "ziplog.events"
_logger: Final = logging.getLogger(LOGGER)


class Event:
    """The message of a log record: a name and fields. Its text is the name, then `key=value`."""

    __slots__ = ("fields", "name")

    def __init__(self, name: str, fields: Mapping[str, object]) -> None:
        self.name: Final = name
        self.fields: Final = fields

    def __str__(self) -> str:
        return f"{self.name} {logfmt(self.fields)}" if self.fields else self.name


def logfmt(fields: Mapping[str, object]) -> str:
    r"""Return fields as `key=value`, separated by spaces.

    A value with a space, "=" or '"' is quoted. A line end is "\n", None an empty value.
    """
    return " ".join(f"{key}={_value(value)}" for key, value in fields.items())


def _value(value: object) -> str:
    if value is None:
        return ""
    text = str(value) if not isinstance(value, bool) else "true" if value else "false"
    is_quoted = " " in text or "=" in text or '"' in text
    if is_quoted:
        text = text.replace("\\", "\\\\")
    text = text.replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"' if is_quoted else text


def debug(event: str, **fields: object) -> None:
    """Log an event that helps to find a fault."""
    _log(logging.DEBUG, event, fields)


def info(event: str, **fields: object) -> None:
    """Log an event of normal operation."""
    _log(logging.INFO, event, fields)


def warning(event: str, **fields: object) -> None:
    """Log an event that may need the operator."""
    _log(logging.WARNING, event, fields)


def error(event: str, **fields: object) -> None:
    """Log a failure."""
    _log(logging.ERROR, event, fields)


def exception(event: str, **fields: object) -> None:
    """Log a failure with the traceback of the exception that is being handled."""
    _log(logging.ERROR, event, fields, exc_info=True)


def critical(event: str, *, exc_info: ExceptionInfo | None = None, **fields: object) -> None:
    """Log an event that ends the process, or a thread: with the traceback of `exc_info`, if any."""
    _log(logging.CRITICAL, event, fields, exc_info)


def _log(
    level: int,
    event: str,
    fields: Mapping[str, object],
    exc_info: ExceptionInfo | bool | None = None,
) -> None:
    # The record's place in the code is that of the caller of `debug` to `critical`.
    _logger.log(level, Event(event, fields), exc_info=exc_info, stacklevel=3)
