"""Scans: the stored units of one shard's range, for bulk reads without an archive.

    opened --stream--> units returned --frontier at the range's end--> ended

Rules: the returned units are complete up to `reached`, in order, after the previous ones. Units are
whole, so the first and the last may exceed the range. The reader may lose a result, so the last one
is kept until a fetch names its end. The client asks the shard to decide undecided positions
(`Want`).

Invariant: `position` never passes the stream's frontier or the range's end. See docs/protocol.md,
sections 7 and 14.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from ziplog.client.common.requests import (
    ScanCloseRequest,
    ScanFetchRequest,
    Scanned,
    ScanRequest,
)
from ziplog.client.reads.shard_stream import ShardStream
from ziplog.client.reads.stream_readers import StreamReader, StreamReaders
from ziplog.errors import ClosedError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.core.entries import Unit


class OpenScan(StreamReader[ScanFetchRequest]):
    """One open scan; it has no stream before the shard's route is known, and after the end."""

    def __init__(self, scans: Scans, call: int, request: ScanRequest) -> None:
        super().__init__(scans, call, request.deadline, request.start)
        self._shard: Final = request.shard
        self._start: Final = request.start
        self._stop: Final = request.stop
        #: The last result, for a reader that lost it.
        self._units: list[Unit] = []

    def open(self) -> None:
        """Open the stream; the shards are known now."""
        shard, known = self._shard, self._routing.shards
        if self._routing.route(shard) is None:
            self.fail(ConfigError("shard", shard, f"one of {known}"))
            return
        self._complete_opening()
        if not self._has_ended:
            self._open(ShardStream(self._context, self._routing, shard, self.position))

    # --- results ---

    @property
    def _has_ended(self) -> bool:
        """Whether all units were returned."""
        return self.position >= self._stop

    def _wanted(self) -> int:
        return self._stop - 1 if any(s.stable for s in self._streams.values()) else -1

    def _result(self, request: ScanFetchRequest) -> Scanned | Exception | None:
        if request.position < self.position:
            return Scanned(self._units, self.position)
        stream, stop = self._streams.get(self._shard), self._stop
        if stream is not None and stream.frontier > self.position:
            units = self._units = [unit for unit in stream.pop_units() if unit.gsns[0] < stop]
            self.position = min(stream.frontier, stop)
            self._context.counters.delivered += sum(len(unit.gsns) for unit in units)
            if self._has_ended:
                self._close_stream(self._shard)
            return Scanned(units, self.position)
        return Scanned([], self.position) if self._has_ended else self._error

    def _result_at_deadline(self) -> Scanned:
        return Scanned([], self.position)

    def _result_at_close(self) -> ClosedError:
        return ClosedError(*Scans.CLOSED)

    # --- time and the end ---

    def _awaited(self) -> str:
        return f"where shard {self._shard} is"

    def fail(self, error: Exception) -> None:
        """Close the stream, and fail; see `StreamReader.fail`."""
        if self._shard in self._streams:
            self._close_stream(self._shard)
        super().fail(error)

    def check(self) -> None:
        """Assert the invariants."""
        super().check()
        assert self._start <= self.position <= max(self._stop, self._start)
        assert all(self.position <= stream.frontier for stream in self._streams.values())


class Scans(StreamReaders[OpenScan]):
    """The open scans of a client."""

    CLOSED: ClassVar[tuple[str, str]] = ("this scan", "open another one to continue")

    @property
    def calls(self) -> dict[type, Callable[[int, Any], None]]:
        """The handler of each request."""
        return {
            ScanRequest: self.start,
            ScanFetchRequest: self.fetch,
            ScanCloseRequest: self.close,
        }

    def start(self, call: int, request: ScanRequest) -> None:
        """Open a scan; its number is the call's."""
        scan = OpenScan(self, call, request)
        self._add(scan)
        if self.routing.route(request.shard) is not None:
            scan.open()
        else:
            scan.look_up_shards(lambda: self._on_looked_up(scan))

    def _on_looked_up(self, scan: OpenScan) -> None:
        if scan.number in self._open and not scan.is_failed:
            scan.open()

    def fetch(self, call: int, request: ScanFetchRequest) -> None:
        """Start a fetch."""
        self._fetch(request.scan, call, request)

    def close(self, call: int, request: ScanCloseRequest) -> None:
        """Close a scan."""
        self._close(request.scan)
        self.context.complete(call, None)
