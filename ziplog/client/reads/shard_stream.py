"""The stream of one shard's records from a replica, as a part of a subscription or scan.

    opened --Deliver at the frontier--> opened;  --gap, silence, refusal, new view--> reopened

Rules: only a `Deliver` that starts at the frontier counts. An older one is a duplicate; a later one
shows a loss, so the client reopens the stream at the frontier under a new number. Records from a
server of an older view count, because they are stable; but that server gets no new ones, so the
client changes to another replica.

Invariant: buffered records are below the frontier, in gsn order, within about one credit window.
See docs/protocol.md, sections 7 and 11.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import repeat
from operator import itemgetter, lt
from typing import TYPE_CHECKING, Final

from ziplog.core.entries import decode_body
from ziplog.core.units import NS_PER_MS, NS_PER_S
from ziplog.core.writer_table import WriterTable
from ziplog.types import Record, RecordId
from ziplog.wire import Credit, Subscribe, Unsubscribe, Want

if TYPE_CHECKING:
    from ziplog.client.common.routing import Route, Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.core.entries import Unit
    from ziplog.wire import Deliver

#: Bytes that a server may send before the next credit; a unit counts 64 bytes more than its body.
WINDOW_BYTES: Final = 4 * 1024 * 1024
_UNIT_OVERHEAD_BYTES: Final = 64
#: Interval between `Credit` messages, and used bytes after which one is sent at once.
_RENEW_INTERVAL_NS: Final = 500 * NS_PER_MS
_RENEW_BYTES: Final = WINDOW_BYTES // 4
#: Time without a reply to a `Credit` after which the client changes to the next replica.
_SILENCE_TIMEOUT_NS: Final = NS_PER_S
#: Interval before a refused stream is reopened; it doubles up to `_SILENCE_TIMEOUT_NS`.
_MIN_BACKOFF_NS: Final = 20 * NS_PER_MS
#: Interval between `Want` messages to a shard, and to one that is not available.
_WANT_INTERVAL_NS: Final = 50 * NS_PER_MS
_WANT_UNAVAILABLE_NS: Final = 500 * NS_PER_MS
_PAIR: Final = 2
_BY_GSN: Final = itemgetter(0)

Row = tuple[int, Record]


class ShardStream:
    """The records of one shard from a position on."""

    def __init__(
        self,
        context: StepContext,
        routing: Routing,
        shard: int,
        start: int,
        writers: WriterTable | None = None,
    ) -> None:
        self._context: Final = context
        self._routing: Final = routing
        self.shard: Final = shard
        #: The number of the server's subscription; each opening has its own.
        self.number = 0
        self.view = 0
        self._name = b""
        #: Number of replicas of this view that failed, beginning with the preferred one.
        self._failed = 0
        #: All records of the shard below it were received.
        self.frontier = start
        #: The end of what the server could have sent; 0 before its first message.
        self.stable = 0
        self._units: deque[Unit] = deque()
        #: The rest of a unit that was popped in part.
        self._rows: list[Row] = []
        #: The rows that were popped, by writer; duplicates are dropped.
        self._writers: Final = WriterTable() if writers is None else writers
        #: Bytes received and not popped, and bytes popped minus those buffered at the opening.
        self._buffered = 0
        self._consumed = 0
        self._granted = 0
        #: The send time of an unanswered message; 0: none.
        self._unanswered_since = 0
        self._renew_at = 0
        #: When to reopen it after a refusal; 0: it is open.
        self._reopen_at = 0
        self._backoff = _MIN_BACKOFF_NS
        #: The position that the shard was asked to decide up to, and when to ask again.
        self._wanted = 0
        self._want_due = 0

    # --- opening ---

    def open(self, position: int) -> None:
        """Open or reopen the stream at its frontier, but at `position` at least."""
        context, routing = self._context, self._routing
        self.frontier = max(self.frontier, position)
        route = routing.route(self.shard)
        assert route is not None, "a member without a placement"
        self.close()
        if route.view != self.view:
            self._failed = 0
        self.number = context.request()
        self.view = route.view
        self._name = route.names[(_best(route) + self._failed) % len(route.names)]
        self._consumed = -self._buffered
        self._granted = WINDOW_BYTES + self._consumed if self._buffered < WINDOW_BYTES else 0
        self._unanswered_since = context.now
        self._renew_at = context.now + _RENEW_INTERVAL_NS
        self._reopen_at = self._want_due = 0
        context.set_timer(self._renew_at)
        context.send(
            self._name,
            Subscribe(
                routing.cluster, self.shard, route.view, context.client, self.number,
                self.frontier, self._granted,
            ),
        )  # fmt: skip

    def reopen_later(self) -> None:
        """Reopen the stream at the next replica after a backoff, because this server refused it."""
        self._failed += 1
        self._reopen_at = self._context.now + self._backoff
        self._backoff = min(self._backoff * 2, _SILENCE_TIMEOUT_NS)
        self._context.set_timer(self._reopen_at)

    def close(self) -> None:
        """Unsubscribe at the server."""
        if self.number:
            message = Unsubscribe(
                self._routing.cluster, self.shard, self._context.client, self.number
            )
            self._context.send(self._name, message)

    # --- receiving ---

    def on_deliver(self, deliver: Deliver) -> bool:
        """Buffer a `Deliver`; return False if the stream must be reopened."""
        self._unanswered_since = 0
        if deliver.view >= self.view:
            self._backoff = _MIN_BACKOFF_NS
        elif not self._reopen_at:
            self.reopen_later()
        if deliver.start != self.frontier:
            return deliver.start < self.frontier
        if deliver.shard != self.shard or not _is_sound(deliver):
            self._context.counters.protocol_errors += 1
            self._failed += 1
            return False
        for unit in deliver.units:
            self._buffered += len(unit.body) + _UNIT_OVERHEAD_BYTES
        self._units += deliver.units
        self.frontier = deliver.frontier
        self.stable = max(deliver.stable, deliver.frontier)
        return True

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

    def pop_records(self, start: int, stop: int) -> list[Row]:
        """Return the records of [start, stop), in order; drop records below `start`.

        Also drop duplicate rows (docs/protocol.md, section 14.3).

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
            if body.origin is not None and (
                old := self._writers.first_new_row(body.origin, len(gsns))
            ):
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

    def pop_units(self) -> list[Unit]:
        """Return all buffered units as they were received; for a scan, which pops no records."""
        units = list(self._units)
        self._units.clear()
        self._consumed += self._buffered
        self._buffered = 0
        return units

    # --- messages to the server ---

    def renew_credit(self) -> None:
        """Send more credit if enough of the window was used."""
        if WINDOW_BYTES + self._consumed - self._granted >= _RENEW_BYTES:
            self._send_credit()

    def _send_credit(self) -> None:
        context = self._context
        self._granted = max(self._granted, WINDOW_BYTES + self._consumed)
        self._unanswered_since = self._unanswered_since or context.now
        self._renew_at = context.now + _RENEW_INTERVAL_NS
        context.set_timer(self._renew_at)
        context.send(
            self._name,
            Credit(
                self._routing.cluster, self.shard, self.view, context.client, self.number,
                self._granted,
            ),
        )  # fmt: skip

    def send_want(self, gsn: int) -> None:
        """Ask the primary to decide its positions up to `gsn`, because readers wait (D49)."""
        context = self._context
        if self.stable > gsn:
            return
        if self._wanted >= self.frontier and context.now < self._want_due:
            context.set_timer(self._want_due)
            return
        route = self._routing.route(self.shard)
        assert route is not None, "a member without a placement"
        self._wanted = gsn
        self._want_due = context.now + (
            _WANT_UNAVAILABLE_NS if route.is_unavailable else _WANT_INTERVAL_NS
        )
        context.set_timer(self._want_due)
        context.send(route.names[0], Want(self._routing.cluster, self.shard, 0, gsn))

    def tick(self) -> bool:
        """Send the credit that is due; return False if the stream must be reopened."""
        context = self._context
        if self._reopen_at:
            context.set_timer(self._reopen_at)
            return context.now < self._reopen_at
        if self._unanswered_since and context.now - self._unanswered_since >= _SILENCE_TIMEOUT_NS:
            self._failed += 1
            self._routing.refresh()
            return False
        if context.now >= self._renew_at:
            self._send_credit()
        context.set_timer(self._renew_at)
        return True

    def check(self) -> None:
        """Assert the invariant."""
        assert self._context.next_timer <= (self._reopen_at or self._renew_at)
        assert self.highest < self.frontier
        sizes = [len(unit.body) + _UNIT_OVERHEAD_BYTES for unit in self._units]
        assert self._buffered == sum(sizes)


def _best(route: Route) -> int:
    """Return the replica that is the first to know what is stable.

    With two replicas that is the backup: both have what it has applied. With more it is the
    primary, because the others report to it (docs/protocol.md, section 13).
    """
    return 1 if len(route.names) == _PAIR else 0


def _is_sound(deliver: Deliver) -> bool:
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
