"""The file `wire` in a node's directory: the wire version in use; without the file, 1.

Rules: a process reads it before it changes anything in the directory. A node stores a version there
before it sends or stores newer forms. So an earlier release, which does not know these forms, never
touches the directory (docs/protocol.md, section 15).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from ziplog.errors import ConfigError, VersionError

if TYPE_CHECKING:
    from pathlib import Path

    from ziplog.core.wire_use import Release

#: Its name.
WIRE_FILE: Final = "wire"
_MAX_DIGITS: Final = 3


def read(directory: Path, release: Release) -> int:
    """Return the version in use according to a node's directory, which may not exist.

    Raises:
        VersionError: the release does not know that version.
        ConfigError: the file is damaged, or cannot be read.

    """
    path = directory / WIRE_FILE
    try:
        text = path.read_bytes().decode("ascii", "replace").rstrip("\n")
    except (FileNotFoundError, NotADirectoryError):
        return 1
    except OSError as error:
        allowed = f"a file that this user can read ({error.strerror})"
        raise ConfigError("wire version", str(path), allowed) from error
    if not (text.isdecimal() and 0 < len(text) <= _MAX_DIGITS):
        allowed = "the number that `ziplog status --json` shows as wire_in_use: restore it"
        raise ConfigError("wire version", f"{text[:20]!r} in {path}", allowed)
    if problem := release.problem(int(text)):
        raise VersionError(f"{directory}: {problem}. Nothing was changed in the directory")
    return int(text)


def record(directory: Path, wire: int) -> None:
    """Store the version in use, durably and atomically.

    Raises:
        OSError: the disk refuses it; the former version may still be there.

    """
    names = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fresh = directory / f"{WIRE_FILE}.tmp"
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"%d\n" % wire)
            os.fsync(fd)
        finally:
            os.close(fd)
        fresh.replace(directory / WIRE_FILE)
        os.fsync(names)
    finally:
        os.close(names)
