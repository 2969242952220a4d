"""The holdings of a stopped server: `python -m shard --holdings` (see `ziplog.core.holdings`).

Rule: the directory is locked while it is read, and no stored data changes. The whole log is read,
because watermark records in all segments have leases (docs/protocol.md, section 16).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shard.recovery.checkpoint import Checkpoint
from shard.storage.data_directory import DataDirectory
from ziplog.core.holdings import ServerHoldings
from ziplog.core.view import extend_runs, fingerprint
from ziplog.errors import UnavailableError
from ziplog.runtime import level_file
from ziplog.segments.directory import listed_segments
from ziplog.segments.entry import WatermarkRecord
from ziplog.segments.entry_codec import MARK, PLACE, decode, view_of, walk
from ziplog.segments.identity import IDENTITY_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from ziplog.core.view import LeaseRun
    from ziplog.segments.directory import ListedSegment


class _Log:
    """What the entries of a log state, so far as they were read."""

    def __init__(self) -> None:
        self.runs: list[LeaseRun] = []
        self.mark: WatermarkRecord | None = None
        self.last_view = self.records_end = 0
        self.end = 1

    def read(self, directory: Path, listed: ListedSegment) -> None:
        """Read a segment; entries that a newer segment replaces do not count."""
        segment, limit = listed.segment, listed.limit
        self.end = max(self.end, segment.base)
        data = (directory / segment.name).read_bytes()
        for found in walk(data, segment.salt):
            if not found.is_whole:
                continue
            if found.kind == MARK:
                mark = decode(data, found, segment.name).decision
                assert isinstance(mark, WatermarkRecord), "the header has the kind"
                self.mark = mark
                extend_runs(self.runs, mark.leases)
            elif found.is_numbered and (not limit or found.fseq < limit):
                self.last_view = max(self.last_view, view_of(data, found))
                self.end = max(self.end, found.last + 1)
                if found.kind == PLACE:
                    self.records_end = max(self.records_end, found.last + 1)


def read(path: Path, cluster: str, node: str, *, wire: int) -> ServerHoldings:
    """Return what the data directory of `node` of `cluster` holds.

    `wire`: the wire version in use according to the directory.

    Raises:
        ConfigError: it is another server's.
        UnavailableError: there is no directory, or a process uses it.

    """
    if not (path / IDENTITY_FILE).exists():
        raise UnavailableError(f"there is no data directory {path}; put it back")
    directory = DataDirectory(path, cluster, node)
    try:
        return _read(directory, node, wire)
    finally:
        directory.close()


def _read(directory: DataDirectory, name: str, wire: int) -> ServerHoldings:
    log = _Log()
    names = [path.name for path in directory.segments.iterdir()]
    for listed in listed_segments(names):
        log.read(directory.segments, listed)
    saved = directory.read_checkpoint()
    checkpoint = None if saved is None else msgspec.msgpack.decode(saved, type=Checkpoint)
    if checkpoint is not None:
        extend_runs(log.runs, checkpoint.leases)
    mark = log.mark
    number = log.runs[-1].last.number if log.runs else 0
    resumes = checkpoint is not None and not checkpoint.limbo
    return ServerHoldings(
        name,
        fingerprint(directory.identity.server),
        mark.cluster if mark else checkpoint.cluster if checkpoint else 0,
        checkpoint.view if checkpoint is not None and resumes else 0,
        max(log.last_view, checkpoint.view if checkpoint else 0),
        log.end,
        log.records_end,
        max(mark.trim if mark else 0, checkpoint.trim if checkpoint else 0),
        max(number, mark.lease if mark else 0),
        log.runs,
        mark.placement if mark else None,
        mark.limit if mark else 0,
        wire,
        level_file.read(directory.path),
    )
