"""Logging of processes: one line of `key=value` an event on stderr, and the last words.

Libraries only ask `structlog.get_logger()`; a process calls `configure` once. Nothing is logged
for a record: what happens often is counted.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from typing import Final, NoReturn, TextIO, cast

import structlog

#: Exit code of a process that stopped because to go on would do harm (EX_SOFTWARE).
HALTED: Final = 70


def configure(node: str, level: str = "info") -> None:
    """Log from now on as `node`, events of `level` and above, to stderr."""
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
    """Adds the node's name; threads have no common context that could carry it."""

    def __init__(self, node: str) -> None:
        self._node = node

    def __call__(
        self, _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event["node"] = self._node
        return event


class _Stderr(io.TextIOBase):
    """Standard error as it is now; what cannot be written (a closed pipe) stops no server."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()


def halt(reason: str, state: str = "") -> NoReturn:
    """Say why, and end the process at once with code 70: no checkpoint, no last message.

    From any thread. What was promised is in what others hold; a restart without a checkpoint is
    in limbo, which is the point (docs/protocol.md, section 9).
    """
    try:
        structlog.get_logger().critical("halted", reason=reason, state=state[:8192])
    finally:
        os._exit(HALTED)
