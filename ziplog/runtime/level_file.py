"""The file `level` in a storage server's directory: the durability level that it keeps to.

Rule: it says "disk" only while the disk has all that the server ever acked, so that a server that
crashed knows whether it may have lost something (docs/protocol.md, section 10).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.segments.durable_files import replace_contents, synced_names

if TYPE_CHECKING:
    from pathlib import Path

    from ziplog.types import Durability

#: Its name.
LEVEL_FILE: Final = "level"


def read(directory: Path) -> Durability:
    """Return the recorded level; "memory" if there is none.

    A damaged file counts as none: the server then reports possible losses after a crash.
    """
    try:
        recorded = (directory / LEVEL_FILE).read_bytes()
    except OSError:
        return "memory"
    return "disk" if recorded == b"disk\n" else "memory"


def record(directory: Path, level: Durability) -> None:
    """Record a level, durably and atomically.

    Raises:
        OSError: the disk refuses it; the former level is recorded.

    """
    with synced_names(directory):
        replace_contents(directory / LEVEL_FILE, level.encode() + b"\n")
