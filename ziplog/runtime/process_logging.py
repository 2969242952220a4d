"""Log configuration of a process: one line per event on stderr, as `key=value` or as JSON.

Every line has timestamp (UTC), level, node and event, also those of libraries and of exceptions
that nothing handles. Our code only calls `ziplog.event_log`; a process calls `configure` once.
There is no log line per record: frequent events are counted instead.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import traceback
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NoReturn

from ziplog import event_log
from ziplog.config_tables import LogConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
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
    handler = _LineHandler(node, is_json=log.format == "json")
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler], force=True)
    logging.getLogger(event_log.LOGGER).setLevel(level)
    logging.captureWarnings(capture=True)
    sys.excepthook = _log_exception
    threading.excepthook = lambda found: _log_exception(
        found.exc_type, found.exc_value, found.exc_traceback
    )


def is_configured() -> bool:
    """Whether this process logs to stderr."""
    return any(isinstance(handler, _LineHandler) for handler in logging.root.handlers)


class _LineHandler(logging.Handler):
    """Writes each record as a line: our events, and what libraries log."""

    def __init__(self, node: str, *, is_json: bool) -> None:
        super().__init__()
        self._node, self._is_json = node, is_json

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; a failed write (to a closed pipe) does not stop a server."""
        fields = self._fields(record)
        line = json.dumps(fields, default=repr) if self._is_json else event_log.logfmt(fields)
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

    def _fields(self, record: logging.LogRecord) -> dict[str, object]:
        at = datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z")
        event: str = record.getMessage()
        own: Mapping[str, object] = {"logger": record.name}
        if isinstance(record.msg, event_log.Event):
            event, own = record.msg.name, record.msg.fields
        fields = {"timestamp": at, "level": record.levelname.lower(), "node": self._node}
        trace = {"exception": _trace(record.exc_info)} if any(record.exc_info or ()) else {}
        return {**fields, "event": event, **own, **trace}


def _trace(found: Any) -> str:
    return "".join(traceback.format_exception(*found)).removesuffix("\n")


def _log_exception(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    """Log an exception that nothing handles."""
    if issubclass(kind, KeyboardInterrupt | SystemExit):
        return
    found = None if error is None else (kind, error, trace)
    event_log.critical("unhandled exception", exc_info=found, reason=f"{kind.__name__}: {error}")


def halt(reason: str, state: str = "") -> NoReturn:
    """Log the reason, and end the process at once with code 70, without a checkpoint or message.

    From any thread. After a restart without a checkpoint, a server is in limbo and gets its state
    from the other replicas, which is intended (docs/protocol.md, section 9).
    """
    try:
        event_log.critical("halted", reason=reason, state=state[:8192])
    finally:
        os._exit(HALTED)
