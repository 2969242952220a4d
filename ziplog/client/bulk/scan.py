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

from collections import deque
from typing import TYPE_CHECKING, Final

from ziplog.client.common.requests import Scanned
from ziplog.client.reads.shard_stream import ShardStream
from ziplog.errors import ClosedError, ConfigError, DeadlineError, TrimmedError
from ziplog.types import RecordId

if TYPE_CHECKING:
    from ziplog.client.common.requests import ScanCloseRequest, ScanFetchRequest, ScanRequest
    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.core.entries import Unit
    from ziplog.wire import Deliver, Refused, Trimmed


class OpenScan:
    """One open scan."""

    def __init__(
        self,
        context: StepContext,
        routing: Routing,
        numbers: dict[int, OpenScan],
        call: int,
        request: ScanRequest,
    ) -> None:
        self._context: Final = context
        self._routing: Final = routing
        #: All scans, by the numbers of their streams at the servers.
        self._numbers: Final = numbers
        self.number: Final = call
        self.request: Final = request
        #: The end of the units that were returned.
        self.position = request.start
        #: The last result, for a reader that lost it.
        self._units: list[Unit] = []
        #: None before the shard's route is known, and after the end.
        self.stream: ShardStream | None = None
        self.fetches: Final[deque[tuple[int, ScanFetchRequest]]] = deque()
        self._error: Exception | None = None
        #: Whether the call that opens it was completed.
        self.is_open = False
        #: Something arrived since `end_batch`.
        self.is_dirty = False

    def open(self) -> None:
        """Open the stream; the shards are known now."""
        shard, known = self.request.shard, self._routing.shards
        if self._routing.route(shard) is None:
            self.fail(ConfigError("shard", shard, f"one of {known}"))
            return
        self.is_open = True
        self._context.complete(self.number, self.number)
        if not self.has_ended:
            self.stream = ShardStream(self._context, self._routing, shard, self.position)
            self.reopen()

    def reopen(self) -> None:
        """Open or reopen the stream where it was."""
        assert self.stream is not None
        self._numbers.pop(self.stream.number, None)
        self.stream.open(self.position)
        self._numbers[self.stream.number] = self

    # --- the stream ---

    def on_deliver(self, deliver: Deliver) -> None:
        """Handle a `Deliver` of the stream."""
        assert self.stream is not None
        if not self.stream.on_deliver(deliver):
            self.reopen()
        self.is_dirty = True

    def on_refused(self, on_refused: Refused) -> None:
        """Handle a server's refusal of the stream."""
        assert self.stream is not None
        if on_refused.code == "unknown-subscription":
            self.reopen()
        else:
            self._routing.refresh()
            self.stream.reopen_later()

    def on_trimmed(self, on_trimmed: Trimmed) -> None:
        """Handle the trim of the scan's position."""
        self._routing.find_owner(
            on_trimmed.first,
            lambda owner: self.fail(TrimmedError(RecordId(on_trimmed.first, owner))),
        )

    # --- results ---

    @property
    def has_ended(self) -> bool:
        """Whether all units were returned."""
        return self.position >= self.request.stop

    def end_batch(self) -> None:
        """Complete fetches, grant credit, and send `Want`, after a batch of messages."""
        self.is_dirty = False
        self.serve()
        stream, stop = self.stream, self.request.stop
        if stream is not None:
            stream.renew_credit()
            if stream.stable and stream.frontier < stop:
                stream.send_want(stop - 1)

    def serve(self) -> None:
        """Complete the pending fetches, as far as there are units."""
        while self.fetches:
            call, request = self.fetches[0]
            result = self._hand_out(request.position)
            if result is None:
                return
            self.fetches.popleft()
            self._context.complete(call, result)

    def _hand_out(self, position: int) -> Scanned | Exception | None:
        if position < self.position:
            return Scanned(self._units, self.position)
        stream, stop = self.stream, self.request.stop
        if stream is not None and stream.frontier > self.position:
            units = self._units = [unit for unit in stream.pop_units() if unit.gsns[0] < stop]
            self.position = min(stream.frontier, stop)
            self._context.counters.delivered += sum(len(unit.gsns) for unit in units)
            if self.has_ended:
                self.close_stream()
            return Scanned(units, self.position)
        if self.has_ended:
            return Scanned([], self.position)
        return self._error

    # --- time and the end ---

    def tick(self) -> None:
        """Do the work that is due."""
        context = self._context
        if not self.is_open and context.now >= self.request.deadline:
            what = f"timed out waiting for {self._routing} to report where shard"
            self.fail(DeadlineError(f"{what} {self.request.shard} is"))
            return
        for fetch in list(self.fetches):
            call, request = fetch
            if context.now >= request.deadline:
                self.fetches.remove(fetch)
                context.complete(call, Scanned([], self.position))
            else:
                context.set_timer(request.deadline)
        if self.stream is not None and not self.stream.tick():
            self.reopen()
        if not self.is_open:
            context.set_timer(self.request.deadline)
        self.is_dirty = True

    def fail(self, error: Exception) -> None:
        """Fail the scan: all fetches get the first error."""
        if self._error is not None:
            return
        self._error = error
        if self.is_open:
            self.close_stream()
            self.serve()
        else:
            self._context.complete(self.number, error)
            self._context.set_timer(self._context.now)

    @property
    def is_failed(self) -> bool:
        """Whether the opening call failed."""
        return self._error is not None and not self.is_open

    def close_stream(self) -> None:
        """Close the stream."""
        if self.stream is not None:
            self._numbers.pop(self.stream.number, None)
            self.stream.close()
            self.stream = None

    def close(self) -> None:
        """Close the scan, and end the pending fetches."""
        if not self.is_open and self._error is None:
            # It was closed before it was open: complete the opening call, too.
            self._context.complete(self.number, self.number)
        self.close_stream()
        for call, _ in self.fetches:
            self._context.complete(call, _closed())
        self.fetches.clear()

    def check(self) -> None:
        """Assert the invariants."""
        assert self.request.start <= self.position <= max(self.request.stop, self.request.start)
        if self.stream is not None:
            self.stream.check()
            assert self.position <= self.stream.frontier
            assert self._numbers[self.stream.number] is self
        for _, request in self.fetches:
            assert self._context.next_timer <= request.deadline, "a deadline would be missed"


class Scans:
    """The open scans of a client."""

    def __init__(self, context: StepContext, routing: Routing) -> None:
        self._context: Final = context
        self._routing: Final = routing
        self._open: Final[dict[int, OpenScan]] = {}
        self._numbers: Final[dict[int, OpenScan]] = {}
        routing.on_change.append(self._on_routes_changed)

    @property
    def waiting(self) -> bool:
        """Whether a fetch or an opening call is pending."""
        return any(scan.fetches or not scan.is_open for scan in self._open.values())

    # --- calls ---

    def start(self, call: int, request: ScanRequest) -> None:
        """Open a scan; its number is the call's."""
        scan = OpenScan(self._context, self._routing, self._numbers, call, request)
        self._open[call] = scan
        self._context.set_timer(request.deadline)
        if self._routing.route(request.shard) is not None:
            scan.open()
        else:
            self._routing.refresh(lambda: self._on_refreshed(scan))

    def _on_refreshed(self, scan: OpenScan) -> None:
        if scan.number in self._open and not scan.is_failed:
            scan.open()

    def fetch(self, call: int, request: ScanFetchRequest) -> None:
        """Start a fetch."""
        scan = self._open.get(request.scan)
        if scan is None:
            self._context.complete(call, _closed())
            return
        scan.fetches.append((call, request))
        self._context.set_timer(request.deadline)
        before = scan.position
        scan.serve()
        if scan.position > before:
            # The returned units may free credit; a fetch that waits does not.
            scan.is_dirty = True

    def close(self, call: int, request: ScanCloseRequest) -> None:
        """Close a scan."""
        self._close(request.scan)
        self._context.complete(call, None)

    def cancel(self, call: int) -> None:
        """Cancel an opening call or a fetch."""
        scan = self._open.get(call)
        if scan is not None and not scan.is_open:
            self._close(call)
        for other in self._open.values():
            for fetch in [fetch for fetch in other.fetches if fetch[0] == call]:
                other.fetches.remove(fetch)

    def _close(self, number: int) -> None:
        scan = self._open.pop(number, None)
        if scan is not None:
            scan.close()

    # --- messages ---

    def on_deliver(self, deliver: Deliver) -> None:
        """Handle a `Deliver`, if it is for a scan."""
        scan = self._numbers.get(deliver.subscription)
        if scan is not None:
            scan.on_deliver(deliver)

    def on_trimmed(self, on_trimmed: Trimmed) -> None:
        """Handle a `Trimmed`, if it is for a scan."""
        scan = self._numbers.get(on_trimmed.subscription)
        if scan is not None:
            scan.on_trimmed(on_trimmed)

    def on_refused(self, on_refused: Refused) -> None:
        """Handle a refusal, if it is for a scan."""
        scan = self._numbers.get(on_refused.request)
        if scan is not None:
            scan.on_refused(on_refused)

    def _on_routes_changed(self, shards: list[int]) -> None:
        """Reopen the streams of shards with a new view."""
        for scan in self._open.values():
            if scan.request.shard in shards and scan.stream is not None:
                route = self._routing.route(scan.request.shard)
                if route is not None and route.view != scan.stream.view:
                    scan.reopen()

    # --- time ---

    def on_batch_end(self) -> None:
        """End a batch of messages."""
        for scan in self._open.values():
            if scan.is_dirty:
                scan.end_batch()

    def tick(self) -> None:
        """Do the work that is due."""
        for number, scan in list(self._open.items()):
            if not scan.is_failed:
                scan.tick()
            if scan.is_failed:
                self._close(number)

    def check(self) -> None:
        """Assert the invariants."""
        for scan in self._open.values():
            scan.check()
        assert all(scan.number in self._open for scan in self._numbers.values())


def _closed() -> ClosedError:
    return ClosedError("this scan", "open another one to continue")
