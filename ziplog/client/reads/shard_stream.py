"""One shard's part of a subscription: what a replica sends, in order, from a position on.

    opened --Deliver at the frontier--> opened;  --gap, silence, refusal, new view--> opened again

Rules: only a `Deliver` that begins at the frontier counts. An older one is a repetition, a later
one shows that something was lost, and the stream is opened again at the frontier, under a new
number. What a server says in an older view than the shard's is true, as it is stable, but it will
learn no more: another replica takes over. Invariant: what is buffered lies below the frontier, in
gsn order, within about one credit window. See docs/protocol.md, sections 7 and 11.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import repeat
from operator import itemgetter, lt
from typing import TYPE_CHECKING, Final

from ziplog.core.entries import decode_body
from ziplog.core.writer_table import WriterTable
from ziplog.types import Record, RecordId
from ziplog.wire import Credit, Subscribe, Unsubscribe, Want

if TYPE_CHECKING:
    from ziplog.client.common.routing import Route, Routing
    from ziplog.client.common.step_context import Turn
    from ziplog.core.entries import Unit
    from ziplog.wire import Deliver

_MS: Final = 1_000_000
#: Bytes that a server may send ahead of what was handed out; a unit counts 64 more than its body.
WINDOW_BYTES: Final = 4 * 1024 * 1024
_UNIT_OVERHEAD_BYTES: Final = 64
#: A sign of life goes out so often, and more credit after so much of the window.
_RENEW_NS: Final = 500 * _MS
_RENEW_BYTES: Final = WINDOW_BYTES // 4
#: A replica that does not answer a sign of life for so long is left for the next one.
_SILENCE_NS: Final = 1_000 * _MS
#: A refused stream is opened again after so long, doubling up to `_SILENCE_NS`.
_FIRST_PAUSE_NS: Final = 20 * _MS
#: A shard that holds others back is told so again after so long; one that is away, less often.
_WANT_AGAIN_NS: Final = 50 * _MS
_WANT_AWAY_NS: Final = 500 * _MS
_PAIR: Final = 2
_BY_GSN: Final = itemgetter(0)

Row = tuple[int, Record]


class Stream:
    """A shard's records from a position on."""

    def __init__(
        self,
        turn: Turn,
        routing: Routing,
        shard: int,
        start: int,
        writers: WriterTable | None = None,
    ) -> None:
        self._turn: Final = turn
        self._routing: Final = routing
        self.shard: Final = shard
        #: The number of the present subscription at the server; each opening has its own.
        self.number = 0
        self.view = 0
        self._name = b""
        #: How many replicas of this view, beginning with the best one, were given up.
        self._failed = 0
        #: All that the shard owns below it was received.
        self.frontier = start
        #: What the server could have sent; 0 while it was not heard of.
        self.stable = 0
        self._units: deque[Unit] = deque()
        #: Records of a unit of which only the beginning was taken.
        self._rows: list[Row] = []
        #: Who wrote the rows that were taken, and up to where: others are repetitions.
        self._writers: Final = WriterTable() if writers is None else writers
        #: Bytes received and not yet taken, and those taken, less what was there at the opening.
        self._buffered = 0
        self._taken = 0
        self._granted = 0
        #: Since when an answer is due; 0: none is.
        self._asked_at = 0
        self._renew_at = 0
        #: When to open it again after a refusal; 0: it is open.
        self._reopen_at = 0
        self._pause = _FIRST_PAUSE_NS
        #: Up to where the shard was asked to decide, and when to ask again.
        self._wanted = 0
        self._want_due = 0

    # --- opening ---

    def open(self, position: int) -> None:
        """Open the stream (again), at its frontier, but at `position` at least."""
        turn, routing = self._turn, self._routing
        self.frontier = max(self.frontier, position)
        route = routing.route(self.shard)
        assert route is not None, "a member without a placement"
        self.close()
        if route.view != self.view:
            self._failed = 0
        self.number = turn.request()
        self.view = route.view
        self._name = route.names[(_best(route) + self._failed) % len(route.names)]
        self._taken = -self._buffered
        self._granted = WINDOW_BYTES + self._taken if self._buffered < WINDOW_BYTES else 0
        self._asked_at = turn.now
        self._renew_at = turn.now + _RENEW_NS
        self._reopen_at = self._want_due = 0
        turn.wake_at(self._renew_at)
        turn.send(
            self._name,
            Subscribe(
                routing.cluster, self.shard, route.view, turn.client, self.number,
                self.frontier, self._granted,
            ),
        )  # fmt: skip

    def reopen_soon(self) -> None:
        """The server will not do it: try the next replica, after a pause."""
        self._failed += 1
        self._reopen_at = self._turn.now + self._pause
        self._pause = min(self._pause * 2, _SILENCE_NS)
        self._turn.wake_at(self._reopen_at)

    def close(self) -> None:
        """Tell the server to stop sending."""
        if self.number:
            message = Unsubscribe(self._routing.cluster, self.shard, self._turn.client, self.number)
            self._turn.send(self._name, message)

    # --- receiving ---

    def receive(self, deliver: Deliver) -> bool:
        """Take what came. False if the stream must be opened again: something was lost or wrong."""
        self._asked_at = 0
        if deliver.view >= self.view:
            self._pause = _FIRST_PAUSE_NS
        elif not self._reopen_at:
            self.reopen_soon()
        if deliver.start != self.frontier:
            return deliver.start < self.frontier
        if deliver.shard != self.shard or not _is_sound(deliver):
            self._turn.counters.protocol_errors += 1
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
        """Whether all that the server last reported was taken."""
        return 0 < self.stable <= self.frontier and not self.highest

    def take(self, start: int, stop: int) -> list[Row]:
        """Take the records of [start, stop), in order; what is below `start` is dropped.

        So are repetitions of rows (docs/protocol.md, section 14.3).

        Raises:
            ProtocolError: a unit's contents are not what servers may store.

        """
        rows, units, shard = self._rows, self._units, self.shard
        while units and units[0].gsns[0] < stop:
            unit = units.popleft()
            size = len(unit.body) + _UNIT_OVERHEAD_BYTES
            self._buffered -= size
            self._taken += size
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

    def take_units(self) -> list[Unit]:
        """Take all units that are here, as they came: those of a scan, which takes no records."""
        units = list(self._units)
        self._units.clear()
        self._taken += self._buffered
        self._buffered = 0
        return units

    # --- telling the server ---

    def renew(self) -> None:
        """Grant more credit if much of it was used."""
        if WINDOW_BYTES + self._taken - self._granted >= _RENEW_BYTES:
            self._send_credit()

    def _send_credit(self) -> None:
        turn = self._turn
        self._granted = max(self._granted, WINDOW_BYTES + self._taken)
        self._asked_at = self._asked_at or turn.now
        self._renew_at = turn.now + _RENEW_NS
        turn.wake_at(self._renew_at)
        turn.send(
            self._name,
            Credit(
                self._routing.cluster, self.shard, self.view, turn.client, self.number,
                self._granted,
            ),
        )  # fmt: skip

    def want(self, gsn: int) -> None:
        """Others are held back below `gsn`: ask the primary to decide up to it (D49)."""
        turn = self._turn
        if self.stable > gsn:
            return
        if self._wanted >= self.frontier and turn.now < self._want_due:
            turn.wake_at(self._want_due)
            return
        route = self._routing.route(self.shard)
        assert route is not None, "a member without a placement"
        self._wanted = gsn
        self._want_due = turn.now + (_WANT_AWAY_NS if route.is_away else _WANT_AGAIN_NS)
        turn.wake_at(self._want_due)
        turn.send(route.names[0], Want(self._routing.cluster, self.shard, 0, gsn))

    def tick(self) -> bool:
        """Give the signs of life that are due. False if the stream must be opened again."""
        turn = self._turn
        if self._reopen_at:
            turn.wake_at(self._reopen_at)
            return turn.now < self._reopen_at
        if self._asked_at and turn.now - self._asked_at >= _SILENCE_NS:
            self._failed += 1
            self._routing.refresh()
            return False
        if turn.now >= self._renew_at:
            self._send_credit()
        turn.wake_at(self._renew_at)
        return True

    def check(self) -> None:
        """Assert the invariant."""
        assert self._turn.alarm <= (self._reopen_at or self._renew_at)
        assert self.highest < self.frontier
        sizes = [len(unit.body) + _UNIT_OVERHEAD_BYTES for unit in self._units]
        assert self._buffered == sum(sizes)


def _best(route: Route) -> int:
    """Return which replica is the first to know what is stable.

    Of two, the backup: what it has applied, both have. The primary is a message behind; of more,
    it is the one that the others report to (docs/protocol.md, section 13).
    """
    return 1 if len(route.names) == _PAIR else 0


def _is_sound(deliver: Deliver) -> bool:
    """Whether its units lie in [start, frontier), in order; the first may begin below the start."""
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
