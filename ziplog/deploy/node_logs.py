"""What the processes of a cluster wrote to their logs, `logs/NAME.log` in the data directory."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

LOG_DIRECTORY: Final = "logs"
_READ_BYTES: Final = 32_768
_TAIL_LINES: Final = 5
#: Maximum length of each line: a server that halts logs its reason first, then its state.
_LINE_LENGTH: Final = 400
_MAX_WARNINGS: Final = 3

_WARNING: Final = re.compile(r"\blevel=(?:warning|error|critical)\b", re.IGNORECASE)
_FIELD: Final = re.compile(r"""\b(event|reason)=("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\S+)""")


def tail(directory: Path, name: str, start: int = 0, *, line_length: int = _LINE_LENGTH) -> str:
    """Return the last lines of the log of `name`, from byte `start` on, joined to one."""
    lines = _last_lines(directory, name, start)
    if lines is None:
        return "(no log)"
    last = (line[:line_length] for line in lines[-_TAIL_LINES:] if line)
    return " | ".join(last) or "(empty log)"


def warnings(directory: Path, name: str, start: int = 0) -> list[str]:
    """Return the last warnings and errors in the log of `name`, from byte `start` on, whole."""
    lines = _last_lines(directory, name, start) or []
    found = dict.fromkeys(_message(line) for line in lines if _WARNING.search(line))
    return [message for message in found if message][-_MAX_WARNINGS:]


def _message(line: str) -> str:
    """Return the event of a line and, if it has one, the reason."""
    fields = {name: _unquoted(value) for name, value in reversed(_FIELD.findall(line))}
    return ": ".join(fields[name] for name in ("event", "reason") if name in fields)


def _unquoted(value: str) -> str:
    if value[0] not in "\"'":
        return value
    return re.sub(r"\\(.)", r"\1", value[1:-1])


def _last_lines(directory: Path, name: str, start: int) -> list[str] | None:
    """Return the last lines of a log; None: there is no such log."""
    try:
        with (directory / LOG_DIRECTORY / f"{name}.log").open("rb") as log:
            log.seek(max(start, log.seek(0, os.SEEK_END) - _READ_BYTES))
            return log.read().decode(errors="replace").splitlines()
    except OSError:
        return None
