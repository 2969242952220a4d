"""Fault files: one small file per node contains its active faults; its process polls the file.

Rule: the file is replaced as a whole; no file means no fault. A process checks it for changes at
most every 20 ms.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

_FOLDER: Final = "faults"
_LOOK_NS: Final = 20_000_000


class ActiveFaults(msgspec.Struct, frozen=True):
    """The active faults of a node."""

    #: Nodes that receive none of its messages.
    silent_to: frozenset[str] = frozenset()
    #: Cut from clients (all peers that are not nodes), in both directions.
    no_clients: bool = False
    #: Percentage of its messages that are lost.
    lost_percent: float = 0.0
    #: Delay of its messages, in milliseconds.
    send_ms: float = 0.0
    #: The nodes that receive these messages late; empty: all nodes and clients.
    late_to: frozenset[str] = frozenset()
    #: Additional duration of a disk flush, in milliseconds.
    flush_ms: float = 0.0
    #: It records the part of its log that is on stable storage (`synced`), for a power cut.
    notes_syncs: bool = False
    #: Remaining bytes on its disk; None: no limit.
    disk_bytes: int | None = None

    def delay_ms(self, peer: str | None) -> float:
        """Return the delay of messages to a node, or to a client (None)."""
        return self.send_ms if not self.late_to or peer in self.late_to else 0.0


_WELL: Final = ActiveFaults()


def path_of(data_dir: Path, node: str) -> Path:
    """Return the file of a node."""
    return data_dir / _FOLDER / f"{node}.json"


def read(data_dir: Path, node: str) -> ActiveFaults:
    """Return the active faults of a node."""
    try:
        return msgspec.json.decode(path_of(data_dir, node).read_bytes(), type=ActiveFaults)
    except FileNotFoundError:
        return _WELL


def write(data_dir: Path, node: str, current: ActiveFaults) -> None:
    """Let this be wrong with a node from now on, and nothing else."""
    path = path_of(data_dir, node)
    if current == _WELL:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(current))
    fresh.replace(path)


def note_sync(data_dir: Path, node: str, path: str, size: int) -> None:
    """Note that a file is on stable storage up to a size."""
    fresh = _syncs(data_dir, node).with_suffix(".next")
    fresh.write_text(f"{size} {path}")
    fresh.replace(_syncs(data_dir, node))


def synced(data_dir: Path, node: str, path: Path) -> int:
    """Return how many bytes of a file of a node are noted as on stable storage."""
    try:
        size, _, noted = _syncs(data_dir, node).read_text().partition(" ")
    except FileNotFoundError:
        return 0
    return int(size) if noted == str(path) else 0


def _syncs(data_dir: Path, node: str) -> Path:
    return data_dir / _FOLDER / f"{node}.synced"


class FaultSource:
    """The active faults of one node, polled from its file."""

    def __init__(self, data_dir: Path, node: str) -> None:
        self.data_dir, self.node = data_dir, node
        self._path = path_of(data_dir, node)
        self._current = _WELL
        self._seen: tuple[int, int] | None = None
        self._look_at = 0

    def current(self) -> ActiveFaults:
        """Return the active faults, at most 20 ms old."""
        now = time.monotonic_ns()
        if now >= self._look_at:
            self._look_at = now + _LOOK_NS
            self._look()
        return self._current

    def _look(self) -> None:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            self._current, self._seen = _WELL, None
            return
        if (found.st_mtime_ns, found.st_ino) != self._seen:
            self._seen = found.st_mtime_ns, found.st_ino
            self._current = read(self.data_dir, self.node)
