"""Log configuration of a process: one line per event on stderr, as `key=value` or as JSON.

Every line has timestamp (UTC), level, node and event, also those of libraries and of exceptions
that nothing handles. Our code only calls `structlog.get_logger()`; a process calls `configure`
once. There is no log line per record: frequent events are counted instead.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, Final, NoReturn, TextIO, cast

import structlog

from ziplog.config_tables import LogConfig

if TYPE_CHECKING:
    from types import TracebackType

#: Exit code of a process that stopped because it could not continue safely (EX_SOFTWARE).
HALTED: Final = 70


def configure(node: str, log: LogConfig = LogConfig()) -> None:  # noqa: B008 - it is frozen
    """Log events to stderr from now on. May be called again, with other settings.

    Args:
        node: the node's name, which each line has.
        log: level and format. Libraries log from level `warning` on, or from a higher `level`.

    """
    level = logging.getLevelNamesMapping()[log.level.upper()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _Named(node),
            _in_order,
            _renderer(log.format),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", _Stderr())),
        cache_logger_on_first_use=False,  # A later call is for existing loggers, too.
    )
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[LibraryHandler()], force=True)
    logging.captureWarnings(capture=True)
    sys.excepthook = _log_exception
    threading.excepthook = lambda found: _log_exception(
        found.exc_type, found.exc_value, found.exc_traceback
    )


def _renderer(form: str) -> structlog.typing.Processor:
    if form == "json":
        return structlog.processors.JSONRenderer()
    return structlog.processors.LogfmtRenderer(bool_as_flag=False)


def _in_order(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Put the fields of every line first."""
    return {**dict.fromkeys(("timestamp", "level", "node", "event")), **event}


class LibraryHandler(logging.Handler):
    """Passes what libraries log to structlog, with the name of their logger."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log one record."""
        fields: dict[str, Any] = {"logger": record.name}
        if record.exc_info:
            fields["exc_info"] = record.exc_info
        structlog.get_logger().log(record.levelno, record.getMessage(), **fields)


def _log_exception(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    """Log an exception that nothing handles."""
    if issubclass(kind, KeyboardInterrupt | SystemExit):
        return
    reason = f"{kind.__name__}: {error}"
    structlog.get_logger().critical(
        "unhandled exception", reason=reason, exc_info=(kind, error, trace)
    )


class _Named:
    """Adds the node's name to each event; threads share no context that could carry it."""

    def __init__(self, node: str) -> None:
        self._node = node

    def __call__(
        self, _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event["node"] = self._node
        return event


class _Stderr(io.TextIOBase):
    """The current standard error; a failed write (to a closed pipe) does not stop a server."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()


def halt(reason: str, state: str = "") -> NoReturn:
    """Log the reason, and end the process at once with code 70, without a checkpoint or message.

    From any thread. After a restart without a checkpoint, a server is in limbo and gets its state
    from the other replicas, which is intended (docs/protocol.md, section 9).
    """
    try:
        structlog.get_logger().critical("halted", reason=reason, state=state[:8192])
    finally:
        os._exit(HALTED)
