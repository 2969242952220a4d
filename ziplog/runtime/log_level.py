"""A request that changes the log level of one running process, as a file in its node's directory.

`ziplog node log-level` writes the file and sends SIGHUP; the process takes the file. Rule: a
process ignores a request for another process, so a request does not survive a restart.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

#: Its name in a node's directory.
LEVEL_FILE: Final = "log-level"


class LevelRequest(NamedTuple):
    """A log level for a process, until the process ends or the time is over."""

    #: The process that may take the request.
    pid: int
    #: None: the level of the cluster file.
    level: str | None
    #: How long the level holds, in seconds; None: until the process ends.
    seconds: int | None
    #: A random text that identifies the request.
    id: str


def request(directory: Path, pid: int, level: str | None, seconds: int | None) -> LevelRequest:
    """Write a request into a node's directory, and return it.

    Args:
        directory: of the node.
        pid: the node's process.
        level: the new level; None: that of the cluster file.
        seconds: how long it holds; None: until the process ends.

    Raises:
        OSError: the file cannot be written.

    """
    made = LevelRequest(pid, level, seconds, secrets.token_hex(8))
    fresh = directory / f"{LEVEL_FILE}.tmp"
    fresh.unlink(missing_ok=True)
    fresh.write_bytes(msgspec.json.encode(made))
    # Another user, such as root, may have written it for the node.
    fresh.chmod(0o644)
    fresh.replace(directory / LEVEL_FILE)
    return made


def take(directory: Path) -> LevelRequest | None:
    """Remove the request from a node's directory; return it if it is for this process."""
    taken = directory / f"{LEVEL_FILE}.taken"
    try:
        # A newer request may replace the file at any time.
        (directory / LEVEL_FILE).replace(taken)
        found = msgspec.json.decode(taken.read_bytes(), type=LevelRequest)
        taken.unlink()
    except (OSError, msgspec.DecodeError):
        return None
    return found if found.pid == os.getpid() else None
