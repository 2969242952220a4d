"""The stream of one shard's records from a replica, as a part of a subscription or scan.

Rule: the server sends no more bytes than the credit window has (docs/protocol.md, section 7).

Invariant: buffered records are below the frontier, in gsn order, within about one credit window.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import repeat
from operator import itemgetter, lt
from typing import TYPE_CHECKING, ClassVar, Final

from ziplog.client.reads.frontier_stream import FrontierStream
from ziplog.core.entries import decode_body, decode_origin
from ziplog.core.writer_table import WriterTable
from ziplog.types import Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.core.entries import Origin, Unit
    from ziplog.wire import Deliver, Early, StreamKind

#: Default of the most bytes that a server may send before the next credit; a unit counts 64 bytes
#: more than its body.
WINDOW_BYTES: Final = 4 * 1024 * 1024
_UNIT_OVERHEAD_BYTES: Final = 64
#: The first credit. It doubles with each renewal, up to the window: a reader may end soon, and what
#: the server has sent to it by then is wasted.
FIRST_CREDIT_BYTES: Final = 256 * 1024
#: The next credit is sent at once when this part of the last one was used.
_RENEW_PART: Final = 4
_BY_GSN: Final = itemgetter(0)

Row = tuple[int, Record]


class ShardStream(FrontierStream):
    """The records of one shard from a position on."""

    KIND: ClassVar[StreamKind] = "units"

    def __init__(
        self,
        context: StepContext,
        routing: Routing,
        shard: int,
        start: int,
        writers: WriterTable | None = None,
        skip_writers: tuple[bytes, ...] = (),
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        super().__init__(context, routing, shard, start)
        self._units: deque[Unit] = deque()
        #: The rest of a unit that was popped in part.
        self._rows: list[Row] = []
        #: The rows that were popped, by writer; duplicates are dropped.
        self._writers: Final = WriterTable() if writers is None else writers
        #: Rows are dropped if their writer begins with one of these.
        self._skip_writers: Final = skip_writers
        #: Bytes received and not popped, and bytes popped minus those buffered at the opening.
        self._buffered = 0
        self._consumed = 0
        #: Most bytes that the server may be ahead of what was popped; `_credit`: now.
        self._window: Final = window_bytes
        self._credit = min(window_bytes, FIRST_CREDIT_BYTES)

    def _first_credit(self) -> int:
        self._consumed = -self._buffered
        return self._credit + self._consumed if self._buffered < self._credit else 0

    # --- receiving ---

    def _is_sound(self, deliver: Deliver | Early) -> bool:
        return _is_sound(deliver)

    def _take_units(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self._buffered += len(unit.body) + _UNIT_OVERHEAD_BYTES
        self._units += units

    @property
    def highest(self) -> int:
        """The last buffered gsn; 0 if nothing is buffered."""
        if self._units:
            return self._units[-1].gsns[-1]
        return self._rows[-1][0] if self._rows else 0

    @property
    def caught_up(self) -> bool:
        """Whether everything that the server last reported was popped."""
        return 0 < self.stable <= self.frontier and not self.highest

    @property
    def is_current(self) -> bool:
        """Whether everything that the server last reported was received."""
        return 0 < self.stable <= self.frontier

    def unpopped(self) -> tuple[list[Unit], list[Row]]:
        """Return the buffered units, and the rest of a unit that was popped in part."""
        return list(self._units), list(self._rows)

    def pop_records(self, start: int, stop: int) -> list[Row]:
        """Return the records of [start, stop), in order; drop records below `start`.

        Also drop duplicate rows (docs/protocol.md, section 14.3), and those of skipped writers.

        Raises:
            ProtocolError: a unit's body is malformed.

        """
        rows, units, shard = self._rows, self._units, self.shard
        while units and units[0].gsns[0] < stop:
            unit = units.popleft()
            size = len(unit.body) + _UNIT_OVERHEAD_BYTES
            self._buffered -= size
            self._consumed += size
            gsns, epoch = unit.gsns, unit.epoch
            body = decode_body(unit.body, len(gsns))
            key, timestamp_us, payloads = body.key, body.timestamp_us, body.payloads
            keys = body.keys
            if body.origin is not None and (old := self._old_rows(body.origin, len(gsns))):
                gsns, payloads, keys = gsns[old:], payloads[old:], keys and keys[old:]
            rows += [
                (gsn, Record(RecordId(gsn, shard), payload, key, timestamp_us, epoch))
                for gsn, payload, key in zip(
                    gsns, payloads, repeat(key, len(gsns)) if keys is None else keys, strict=True
                )
            ]
        if not rows:
            return rows
        self._rows = []
        if rows[-1][0] >= stop:
            at = bisect_left(rows, stop, key=_BY_GSN)
            self._rows = rows[at:]
            del rows[at:]
        if rows and rows[0][0] < start:
            del rows[: bisect_left(rows, start, key=_BY_GSN)]
        return rows

    def _old_rows(self, origin: Origin, count: int) -> int:
        """Return how many rows of a unit, from its first one on, are dropped."""
        old = self._writers.first_new_row(origin, count)
        return count if origin.writer.startswith(self._skip_writers) else old

    def skip(self, stop: int) -> None:
        """Pop the units below `stop` without their records; their origins count as rows before.

        Raises:
            ProtocolError: a unit's body is malformed.

        """
        units = self._units
        while units and units[0].gsns[-1] < stop:
            unit = units.popleft()
            size = len(unit.body) + _UNIT_OVERHEAD_BYTES
            self._buffered -= size
            self._consumed += size
            origin = decode_origin(unit.body)
            if origin is not None:
                self._writers.first_new_row(origin, len(unit.gsns))

    def pop_units(self) -> list[Unit]:
        """Return all buffered units as they were received; for a scan, which pops no records."""
        units = list(self._units)
        self._units.clear()
        self._consumed += self._buffered
        self._buffered = 0
        return units

    # --- messages to the server ---

    def renew_credit(self) -> None:
        """Send more credit if enough of it was used."""
        if self._credit + self._consumed - self._granted >= self._credit // _RENEW_PART:
            self._credit = min(2 * self._credit, self._window)
            self._send_credit()

    def _send_credit(self) -> None:
        self._granted = max(self._granted, self._credit + self._consumed)
        super()._send_credit()

    def check(self) -> None:
        """Assert the invariant."""
        super().check()
        assert self.highest < self.frontier
        sizes = [len(unit.body) + _UNIT_OVERHEAD_BYTES for unit in self._units]
        assert self._buffered == sum(sizes)


def _is_sound(deliver: Deliver | Early) -> bool:
    """Whether the units are in order within [start, frontier); the first may begin earlier."""
    below = -1
    for unit in deliver.units:
        gsns = unit.gsns
        if gsns[0] <= below or (len(gsns) > 1 and not all(map(lt, gsns, gsns[1:]))):
            return False
        below = gsns[-1]
    if deliver.frontier < deliver.start:
        return False
    if not deliver.units:
        return True
    return deliver.units[0].gsns[-1] >= deliver.start and below < deliver.frontier
