"""What the processes of a cluster wrote to their logs, `logs/NAME.log` in the data directory.

A log that has grown to its limit becomes `NAME.log.1`, the former one `NAME.log.2`, and so on. The
processes keep the file open, so its content is copied and the file is emptied: a line that is
written in the instant between the two is lost.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

LOG_DIRECTORY: Final = "logs"
#: The name of the log of `ziplog up --detach`.
SUPERVISOR: Final = "supervisor"
#: ... and of the coordinator of `ziplog up --logdb`.
COORDINATOR: Final = "logdb"
#: ... and of its monitor, which is also the name of its directory.
MONITOR: Final = "monitor"
#: All logs of processes that are not in the cluster file.
COMPANIONS: Final = (SUPERVISOR, COORDINATOR, MONITOR)
_READ_BYTES: Final = 32_768
_TAIL_LINES: Final = 5
#: Maximum length of each line: a server that halts logs its reason first, then its state.
_LINE_LENGTH: Final = 400
_MAX_WARNINGS: Final = 3

#: In logfmt and in JSON.
_WARNING: Final = re.compile(r'\blevel(?:=|": ?")(?:warning|error|critical)\b', re.IGNORECASE)
#: How a line of an event begins.
_EVENT: Final = re.compile(r"timestamp=|level=|\{")
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


def last_words(directory: Path, name: str, start: int = 0) -> list[str]:
    """Return the error with which a process ended its start; empty: its log ends with an event."""
    lines = [line for line in _last_lines(directory, name, start) or [] if line]
    ended = lines and not _EVENT.match(lines[-1])
    return [lines[-1][:_LINE_LENGTH]] if ended else []


def rotate(path: Path, max_bytes: int, files: int) -> bool:
    """Start a new log if one has reached a size; return whether it has.

    Args:
        path: the log, which a process has open to append.
        max_bytes: the size.
        files: the number of files to keep, with the present one.

    Raises:
        OSError: a file cannot be copied or renamed; the log stays as it is. Nothing is deleted if
            it cannot be copied, to a full disk for example.

    """
    if not path.exists() or path.stat().st_size < max_bytes:
        return False
    former = [path.with_name(f"{path.name}.{number}") for number in range(1, files)]
    if former:
        copy = _copied(path)
        for newer, older in reversed(list(pairwise(former))):
            if newer.exists():
                newer.replace(older)
        copy.replace(former[0])
    os.truncate(path, 0)
    return True


def _copied(path: Path) -> Path:
    """Return a complete copy of a log."""
    copy = path.with_name(f"{path.name}.new")
    try:
        shutil.copyfile(path, copy)
    except OSError:
        copy.unlink(missing_ok=True)
        raise
    return copy


def _message(line: str) -> str:
    """Return the event of a line and, if it has one, the reason."""
    if line.startswith("{"):
        try:
            found = json.loads(line)
        except ValueError:
            return ""  # The line is being written.
        return ": ".join(str(found[name]) for name in ("event", "reason") if name in found)
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
