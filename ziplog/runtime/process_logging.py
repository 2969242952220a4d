"""Log configuration of a process: one `key=value` line per event on stderr.

Libraries only call `structlog.get_logger()`; a process calls `configure` once. There is no log line
per record: frequent events are counted instead.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from typing import Final, NoReturn, TextIO, cast

import structlog

#: Exit code of a process that stopped because it could not continue safely (EX_SOFTWARE).
HALTED: Final = 70


def configure(node: str, level: str = "info") -> None:
    """Log events of `level` and above to stderr from now on, with the name of `node`."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _Named(node),
            structlog.processors.LogfmtRenderer(
                key_order=["timestamp", "level", "node", "event"], bool_as_flag=False
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", _Stderr())),
        cache_logger_on_first_use=True,
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
