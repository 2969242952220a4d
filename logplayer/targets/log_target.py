"""A target that is another log: a mirror. Each record exactly once, in order.

    no mark, or the shard is finalized --> a mark with a live shard --committed--> rows

A task writes its rows under one writer, and every owner gives them the same numbers. So a reader of
the mirror drops what two owners wrote (docs/protocol.md, section 14.3), and no term is stored. Two
rules make that enough. A unit is sent only after all rows before it are on the disks of the shard.
Nothing is sent to a shard before the cursor has the mark that names it. See docs/player.md,
section 9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, get_args

import msgspec

import ziplog
from logplayer.contract import Fenced, Opened, Rejected, Retry
from logplayer.targets.mirror_mark import (
    Mark,
    choose_shard,
    cluster_bytes,
    decode_mark,
    new_cursor_advice,
    writer_id,
)
from logplayer.targets.settings import check_timeout
from ziplog.client import arguments
from ziplog.client.inserts.insert_calls import ROW_UNIT_RECORDS, split_into_row_units
from ziplog.core.entries import decode_body, decode_origin
from ziplog.errors import ClusterMismatchError, ConfigError, RecordTooLargeError
from ziplog.types import RecordId, cluster_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from logplayer.contract import Batch, Task
    from ziplog.client.bulk.extents import Extents
    from ziplog.core.entries import Unit
    from ziplog.types import Record
    from ziplog.wire import Limits

#: The order of a mirror: that of the source, or that of each key.
Order = Literal["total", "key"]
ORDERS: Final[tuple[Order, ...]] = get_args(Order)
#: The default of `batch_records`: a batch is one unit, as each unit waits for the disks.
BATCH_RECORDS: Final = ROW_UNIT_RECORDS
#: Pause until the state of a shard that leaves is requested again, in seconds.
_LEAVING_S: Final = 1.0
_MAX_SHARD: Final = 2**31 - 1


class MirrorLog(Protocol):
    """The part of `ziplog.Log` that a mirror needs."""

    @property
    def cluster_number(self) -> int:
        """The number of the cluster."""

    @property
    def limits(self) -> Limits:
        """The limits of payloads and keys."""

    def insert_rows(
        self,
        payloads: Iterable[bytes],
        *,
        keys: Iterable[bytes | None] | None = None,
        shard: int,
        writer: bytes,
        batch: int,
        row: int = 0,
    ) -> list[RecordId]:
        """Insert rows of a writer, in order."""
        ...

    def sync(self) -> RecordId:
        """Wait until completed inserts are on stable storage."""
        ...

    def scan(self, shard: int, start: int, stop: int) -> Iterable[tuple[list[Unit], int]]:
        """Return the stored units of a range."""
        ...

    def extents(self, start: int = 1, stop: int | None = None) -> Extents:
        """Return the owners of a range."""
        ...

    def check_tail(self, *, sealed: bool = False) -> RecordId:
        """Return the position of the last record."""
        ...

    def seal(self, rid: RecordId) -> RecordId:
        """Wait until every later insert gets a higher position."""
        ...

    def cluster(self) -> dict[str, Any]:
        """Return the status document."""
        ...

    def close(self) -> None:
        """Close the client."""


class LogTarget:
    """One task's connection to a mirror."""

    def __init__(
        self, connect: Callable[[], MirrorLog], shard: int | None, *, has_envelope: bool
    ) -> None:
        self._connect: Final = connect
        self._first_shard: Final = shard
        self._has_envelope: Final = has_envelope
        self._log: MirrorLog | None = None
        self._writer = b""
        #: Where this claim is, and the mark there; None: it was not opened yet.
        self._position = 0
        self._mark: Mark | None = None
        #: Number of rows that are in the target log, as far as this claim knows.
        self._placed = 0
        #: Key and payload of the last of them, as far as `open` has found it.
        self._last: tuple[bytes | None, bytes] | None = None

    # --- opening ---

    def open(self, task: Task) -> Opened:
        """Find out which rows the target log has, and which shard gets the next ones.

        Raises:
            Retry: the shard leaves, or none is live.
            ConfigError: the target is the task's own log, or another one than before; or the
                cursor was sought.
            ClusterMismatchError: another cluster answers; the next `open` connects to it.

        """
        try:
            return self._open(task)
        except ClusterMismatchError:
            self.close()
            self._mark, self._placed, self._last = None, 0, None
            raise

    def _open(self, task: Task) -> Opened:
        log = self._connected()
        self._check(log, task)
        self._writer = writer_id(task)
        if self._mark is None:
            self._position = task.position
            self._mark = self._first_mark(log, task)
        mark, shards = self._mark, _shards(log)
        state = shards[mark.shard]["state"] if mark.shard in shards else None
        if state in {None, "leaving"}:
            known = f"leaves shard {mark.shard}" if state else f"has no shard {mark.shard}"
            raise Retry(f"the target log {known}; waiting until it is finalized", _LEAVING_S)
        if state == "finalized":
            # Nothing is added to it any more, so what it has counts for good.
            self._placed = self._find_placed(log, mark.base, None)
            shard = choose_shard(task, _live(shards))
            self._mark = mark.moved(shard, self._bound(log, mark), self._placed)
        elif task.mark:
            self._placed = self._find_placed(log, mark.gsn, shards[mark.shard]["durable_gsn"] + 1)
        return Opened(self._position, self._mark.encode())

    def _check(self, log: MirrorLog, task: Task) -> None:
        """Refuse what cannot be a mirror of the task's log."""
        number = log.cluster_number
        refuse_source(task.target, number, task.cluster)
        if task.seek:
            problem = (
                f"the cursor {task.cursor} was sought, and a mirror cannot tell which rows it has"
                f" from there on: {new_cursor_advice(task)}"
            )
            raise ConfigError("position", task.position, "that of the mirror", message=problem)
        if (task.mark or task.has_moved) and decode_mark(task).cluster != cluster_bytes(number):
            problem = (
                f"the target log is not the one that {task.cursor} has filled so far: put that one"
                f" back, or {new_cursor_advice(task)}"
            )
            raise ConfigError("bootstrap", number, "that of the mirror so far", message=problem)

    def _first_mark(self, log: MirrorLog, task: Task) -> Mark:
        """Return the mark of the cursor; if it has none, one with a shard that is live."""
        if task.mark:
            mark = decode_mark(task)
            self._placed = mark.placed
            return mark
        live, limits = _live(_shards(log)), log.limits
        shard = choose_shard(task, live) if self._first_shard is None else self._first_shard
        if shard not in live:
            known = ", ".join(map(str, live))
            raise ConfigError("shard", shard, f"a shard of the target log that is live: {known}")
        base = log.check_tail(sealed=True).gsn
        return Mark(
            cluster=cluster_bytes(log.cluster_number), shard=shard, base=base, gsn=base,
            max_payload_bytes=limits.max_payload_bytes, max_key_bytes=limits.max_key_bytes,
        )  # fmt: skip

    def _find_placed(self, log: MirrorLog, after: int, stop: int | None) -> int:
        """Return how many rows are in the target log.

        Args:
            log: the target log.
            after: search behind this position of the mark's shard.
            stop: the position to end at; None: the end of the shard, which is finalized.

        """
        assert self._mark is not None
        found, shard = self._placed, self._mark.shard
        extents = log.extents(max(after, 1))
        for extent in extents.shards:
            first = max(extent.start, after + 1, extents.trim)
            end = extent.stop if stop is None else min(extent.stop, stop)
            if extent.shard != shard or first >= end:
                continue
            if stop is None and end >= extents.end:
                raise Retry(f"shard {shard} of the target log has positions yet", _LEAVING_S)
            for units, _ in log.scan(shard, first, end):
                found = self._placed_by(units, end, found)
        return found

    def _placed_by(self, units: Iterable[Unit], end: int, found: int) -> int:
        """Return how many rows are in the log if units are, and `found` rows were before."""
        for unit in units:
            origin = decode_origin(unit.body)
            if origin is None or origin.writer != self._writer:
                continue
            count = sum(gsn < end for gsn in unit.gsns)
            if count and origin.row + count >= found:
                found, body = origin.row + count, decode_body(unit.body, len(unit.gsns))
                self._last = body.key_of(count - 1), body.payloads[count - 1]
        return found

    def _bound(self, log: MirrorLog, mark: Mark) -> int:
        """Return a position behind all rows so far and before those of every later insert."""
        tail = log.check_tail(sealed=True).gsn
        return tail if tail >= mark.gsn else log.seal(RecordId(mark.gsn, mark.shard)).gsn

    # --- delivering ---

    def deliver(self, batch: Batch) -> bytes:
        """Insert the rows that are not in the target log yet, and have them on its disks.

        Raises:
            Rejected: a record is larger than the target log allows.
            Fenced: the batch is not the next one.
            ConfigError: the target log has lower limits than it had; or it has other rows than
                those of the records.

        """
        mark = self._mark
        if mark is None or batch.start != self._position:
            raise Fenced(f"the mirror is at gsn {self._position}, not {batch.start}")
        payloads = [self._payload(record) for record in batch.records]
        keys = [record.key for record in batch.records]
        # Also of rows that are passed over: a rejected record has no number.
        _check_sizes(payloads, keys, mark)
        gsn, first = mark.gsn, max(self._placed - mark.rows, 0)
        if 0 < first <= len(payloads):
            self._check_last(batch, keys[first - 1], payloads[first - 1])
        if first < len(payloads):
            gsn = self._insert(payloads[first:], keys[first:], mark.shard, mark.rows + first)
        rows = mark.rows + len(payloads)
        self._placed = max(self._placed, rows)
        self._mark = msgspec.structs.replace(mark, gsn=gsn, rows=rows, placed=self._placed)
        self._position = batch.stop
        return self._mark.encode()

    def _check_last(self, batch: Batch, key: bytes | None, payload: bytes) -> None:
        """Refuse to continue behind a row that is not the one with its number."""
        if self._last is None or self._last == (key, payload):
            return
        task, number = batch.task, self._placed - 1
        problem = (
            f"row {number} of the target log is not the record to which {task.cursor} gives this"
            f" number in [{batch.start}, {batch.stop}), so a further row would repeat or omit a"
            " record: put `map`, `keys` and `not_from` back if they were changed, and start the"
            " archives of the log if some are down; if the log repeats rows that were trimmed,"
            f" {new_cursor_advice(task)}"
        )
        raise ConfigError("row", number, "that of the record", message=problem)

    def _insert(self, payloads: list[bytes], keys: list[bytes | None], shard: int, row: int) -> int:
        """Insert rows, a unit at a time; return the position of the last one."""
        log, gsn = self._connected(), 0
        for start, stop in split_into_row_units(payloads, keys):
            try:
                rids = log.insert_rows(
                    payloads[start:stop], keys=keys[start:stop], shard=shard, writer=self._writer,
                    batch=0, row=row + start,
                )  # fmt: skip
            except RecordTooLargeError as error:
                problem = f"{error}, and more when the mirror began: raise that limit again"
                raise ConfigError(error.what, error.size, "allowed", message=problem) from None
            # If all servers lost it now, a later unit would stay without it for good.
            log.sync()
            gsn = rids[-1].gsn
        return gsn

    def _payload(self, record: Record) -> bytes:
        if not self._has_envelope:
            return record.payload
        rid = record.rid
        envelope = (rid.gsn, rid.shard, record.epoch, record.timestamp_us, record.payload)
        return msgspec.msgpack.encode(envelope)

    # --- the connection ---

    def check(self) -> None:
        """Connect, and insert nothing.

        Raises:
            UnavailableError: the target log cannot be reached.

        """
        try:
            self._connected()
        finally:
            self.close()

    def _connected(self) -> MirrorLog:
        if self._log is None:
            self._log = self._connect()
        return self._log

    def close(self) -> None:
        """Close the connection."""
        log, self._log = self._log, None
        if log is not None:
            log.close()


def refuse_source(target: str, cluster: int, source: int) -> None:
    """Raise ConfigError if a target's cluster is that of the log that the player reads."""
    if cluster == source:
        problem = (
            f"the target {target} is the log that it would mirror, cluster {cluster_id(source)}:"
            " set its bootstrap to the nodes of another cluster"
        )
        raise ConfigError("bootstrap", cluster_id(cluster), "another cluster's", message=problem)


def _shards(log: MirrorLog) -> Mapping[int, Mapping[str, Any]]:
    """Return what the status document has of each shard."""
    return {shard["id"]: shard for shard in log.cluster()["shards"]}


def _live(shards: Mapping[int, Mapping[str, Any]]) -> list[int]:
    live = sorted(number for number, shard in shards.items() if shard["state"] == "live")
    if not live:
        raise Retry("no shard of the target log is live")
    return live


def _check_sizes(payloads: Sequence[bytes], keys: Sequence[bytes | None], mark: Mark) -> None:
    for index, (payload, key) in enumerate(zip(payloads, keys, strict=True)):
        for what, value, limit in (
            ("payload", payload, mark.max_payload_bytes), ("key", key, mark.max_key_bytes)
        ):  # fmt: skip
            if value is not None and len(value) > limit:
                raise Rejected(index, str(RecordTooLargeError(len(value), limit, what)))


def connector(
    where: str,
    bootstrap: str | Sequence[str],
    *,
    order: Order,
    shard: int | None,
    envelope: bool,
    timeout_s: float,
    partitions: int,
) -> Callable[[], LogTarget]:
    """Return how tasks connect to a target log.

    Raises:
        ConfigError: an argument is invalid.

    """
    endpoints = arguments.endpoints(bootstrap, where=where)
    if order not in ORDERS:
        raise ConfigError("order", order, " or ".join(map(repr, ORDERS)), where)
    if order == "total" and partitions != 1:
        raise ConfigError("partitions", partitions, "1 with order='total'", where)
    is_shard = type(shard) is int and 0 <= shard <= _MAX_SHARD
    if shard is not None and not (is_shard and order == "total"):
        raise ConfigError("shard", shard, "a shard's number with order='total', or left out", where)
    if type(envelope) is not bool:
        raise ConfigError("envelope", envelope, "true or false", where)
    check_timeout(timeout_s, where)

    def connect() -> MirrorLog:
        return ziplog.connect(endpoints, timeout=timeout_s, cluster_id="")

    return lambda: LogTarget(connect, shard, has_envelope=envelope)


def source_check(name: str, bootstrap: str | Sequence[str]) -> Callable[[int, float], None]:
    """Return the function that refuses the log that the player reads as its target."""
    endpoints = arguments.endpoints(bootstrap)

    def check_source(source: int, timeout_s: float) -> None:
        with ziplog.connect(endpoints, timeout=timeout_s, cluster_id="") as log:
            refuse_source(name, log.cluster_number, source)

    return check_source
