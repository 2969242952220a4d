"""The file of records that a target refused for good: one JSON object a line.

A line has the names of `ziplog tail --json`, the task, and the reason. The same record may have
several lines, if a process ended before its task had moved on.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ziplog.cli.rendering import fields_of_record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logplayer.contract import RejectedRecord, Task


def append(path: str, task: Task, rejected: Sequence[RejectedRecord]) -> None:
    """Append records to a file, and have them on stable storage.

    Raises:
        OSError: the file cannot be written.

    """
    lines = b"".join(msgspec.json.encode(_fields(task, one)) + b"\n" for one in rejected)
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        # Processes that append to the same file take turns, so that each can take its lines back.
        fcntl.flock(file, fcntl.LOCK_EX)
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            lines = b"\n" + lines  # A process died while it wrote the last line.
        try:
            _write(file, lines)
        except BaseException:  # As on a full disk: the next attempt writes all lines again.
            os.ftruncate(file, size)
            raise
    finally:
        os.close(file)
    # Each time: the process that created the file may have died before this point.
    directory = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _write(file: int, lines: bytes) -> None:
    written = 0
    while written < len(lines):
        written += os.write(file, lines[written:])
    os.fsync(file)


def _fields(task: Task, one: RejectedRecord) -> dict[str, Any]:
    return {
        "player": task.player,
        "target": task.target,
        "partition": task.partition,
        "why": one.why,
        **fields_of_record(one.record),
    }
