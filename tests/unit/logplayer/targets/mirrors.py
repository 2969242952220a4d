"""A target log in memory, and owners of a mirror's cursor whose steps interleave in any order.

Every call of the log and of the cursor is a point at which an owner can be stopped, for a while or
for good, or can fail. Owners run in threads; one of them runs at a time.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from logplayer.contract import Batch, Rejected, Retry, Task
from logplayer.targets.log_target import LogTarget
from ziplog.client.bulk.extents import Extent, Extents
from ziplog.core.entries import Body, Origin, Unit, decode_body, encode_body
from ziplog.core.writer_table import WriterTable
from ziplog.errors import NoSuchRecordError, OutcomeUnknownError, UnavailableError
from ziplog.types import Record, RecordId
from ziplog.wire import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SOURCE, TARGET = 7, 2**100 + 5
#: Position of the first record of the source; those behind it follow it, ten apart.
FIRST: Final = 100
END: Final = 10**9


class Death(BaseException):
    """An owner dies."""


@dataclass
class Shard:
    """A shard of the target log."""

    state: str = "live"
    since: int = 1
    stop: int = END
    units: list[Unit] = field(default_factory=list)
    durable: int = 0
    #: While it leaves: its next position.
    next: int = 0


class TargetLog:
    """A log in memory; `at` is called before each step, and may raise."""

    def __init__(self, shards: int = 2, number: int = TARGET) -> None:
        self.number: Final = number
        self.shards: Final = {shard: Shard() for shard in range(shards)}
        self.limits = Limits(max_payload_bytes=1000)
        self.trimmed = 1
        self.tail = 0
        #: Number of changes so far.
        self.changes = 0
        #: Units that are still on their way: (shard, payloads, keys, origin).
        self.late: Final[list[tuple[int, list[bytes], list[bytes | None], Origin]]] = []

    def place(
        self, shard: int, payloads: Sequence[bytes], keys: Sequence[bytes | None], origin: Origin
    ) -> list[RecordId]:
        """Place a unit, if the shard takes it."""
        if self.shards[shard].state != "live":
            error = UnavailableError(f"shard {shard} takes no more records")
            error.retriable = False
            raise error
        gsns = list(range(self.tail + 1, self.tail + 1 + len(payloads)))
        self.tail = gsns[-1]
        return self._add(shard, gsns, payloads, keys, origin)

    def _add(
        self,
        shard: int,
        gsns: list[int],
        payloads: Sequence[bytes],
        keys: Sequence[bytes | None],
        origin: Origin,
    ) -> list[RecordId]:
        self.changes += 1
        body = encode_body(Body(0, None, list(payloads), origin, list(keys)))
        self.shards[shard].units.append(Unit(1, gsns, body))
        return [RecordId(gsn, shard) for gsn in gsns]

    def place_late(self) -> None:
        """Place the units that were on their way; also at a shard that leaves."""
        late = list(self.late)
        self.late.clear()
        for shard, payloads, keys, origin in late:
            found, count = self.shards[shard], len(payloads)
            if found.state == "live":
                self.place(shard, payloads, keys, origin)
            elif found.state == "leaving" and found.next + count <= found.stop:
                gsns = list(range(found.next, found.next + count))
                found.next += count
                self._add(shard, gsns, payloads, keys, origin)

    def flush(self) -> None:
        for shard in self.shards.values():
            shard.durable = max([shard.durable, *(unit.gsns[-1] for unit in shard.units)])

    def lose_memory(self) -> None:
        """Lose what is not durable, as after the failure of all servers at once."""
        self.changes += 1
        for shard in self.shards.values():
            shard.units = [unit for unit in shard.units if unit.gsns[-1] <= shard.durable]

    def trim(self, gsn: int) -> None:
        """Trim the rows before a position; units that reach it stay."""
        self.trimmed = gsn
        for shard in self.shards.values():
            shard.units = [unit for unit in shard.units if unit.gsns[-1] >= gsn]

    def leave(self, shard: int) -> None:
        found = self.shards[shard]
        found.state, found.next = "leaving", self.tail + 1
        self.tail += 20
        found.stop = self.tail + 1

    def finalize(self) -> None:
        """Finalize the shards that leave."""
        self.flush()
        for shard in self.shards.values():
            if shard.state == "leaving":
                shard.state = "finalized"

    def add_shard(self) -> None:
        self.shards[len(self.shards)] = Shard(since=self.tail + 1)

    def has(self, rid: RecordId) -> bool:
        return any(rid.gsn in unit.gsns for unit in self.shards[rid.shard].units)

    def read(self) -> list[tuple[bytes | None, bytes]]:
        """Return what a reader gets: keys and payloads, without repetitions."""
        found = []
        for shard in self.shards.values():
            table = WriterTable()
            for unit in shard.units:
                body = decode_body(unit.body, len(unit.gsns))
                assert body.origin is not None
                old = table.first_new_row(body.origin, len(unit.gsns))
                found += [
                    (gsn, body.key_of(index), body.payloads[index])
                    for index, gsn in enumerate(unit.gsns)
                    if index >= old
                ]
        return [(key, payload) for _, key, payload in sorted(found)]

    def written(self) -> int:
        """Return the number of rows that were written, with repetitions."""
        return sum(len(unit.gsns) for shard in self.shards.values() for unit in shard.units)


class Client:
    """One client of the log, as `ziplog.Log`; `step` is called at each point where it can stop."""

    def __init__(self, log: TargetLog, step: Callable[[str], str] = lambda _what: "") -> None:
        self._log: Final = log
        self._step: Final = step
        self._last: list[RecordId] = []
        self.is_closed = False

    @property
    def cluster_number(self) -> int:
        return self._log.number

    @property
    def limits(self) -> Limits:
        return self._log.limits

    def insert_rows(
        self, payloads: Any, *, keys: Any, shard: int, writer: bytes, batch: int, row: int = 0
    ) -> list[RecordId]:
        origin = Origin(writer, batch, row)
        failure = self._step("insert")
        if failure == "lost":
            raise UnavailableError("nothing was inserted")
        if failure == "late":
            self._log.late.append((shard, list(payloads), list(keys), origin))
            raise OutcomeUnknownError("it is on its way", shard=shard, seq=1)
        rids = self._log.place(shard, payloads, keys, origin)
        self._last.append(rids[-1])
        if self._step("inserted") or failure:
            raise OutcomeUnknownError("the answer was lost", shard=shard, seq=1)
        return rids

    def sync(self) -> RecordId:
        if self._step("sync"):
            raise UnavailableError("no answer")
        last, self._last = self._last, []
        for rid in last:
            if not self._log.has(rid):
                raise NoSuchRecordError(rid, "it was lost")
        self._log.flush()
        return last[-1]

    def scan(self, shard: int, start: int, stop: int) -> Iterator[tuple[list[Unit], int]]:
        assert start < stop
        found = self._log.shards[shard]
        assert found.since <= start
        assert stop <= found.stop, "the scan would never end"
        if self._step("scan"):
            raise UnavailableError("no answer")
        units = [unit for unit in found.units if unit.gsns[-1] >= start and unit.gsns[0] < stop]
        for unit in units:
            yield [unit], min(unit.gsns[-1] + 1, stop)
        yield [], stop

    def extents(self, start: int = 1, stop: int | None = None) -> Extents:
        assert stop is None
        found = [
            Extent(number, max(shard.since, start, self._log.trimmed), shard.stop)
            for number, shard in self._log.shards.items()
            if max(shard.since, start, self._log.trimmed) < shard.stop
        ]
        return Extents(self._log.trimmed, END, found, [])

    def check_tail(self, *, sealed: bool = False) -> RecordId:
        assert sealed
        self._step("tail")
        return RecordId(self._log.tail, 0)

    def seal(self, rid: RecordId) -> RecordId:
        raise AssertionError(f"the tail is below {rid}")

    def cluster(self) -> dict[str, Any]:
        if self._step("cluster"):
            raise UnavailableError("no answer")
        return {
            "shards": [
                {"id": number, "state": shard.state, "durable_gsn": shard.durable}
                for number, shard in self._log.shards.items()
            ]
        }

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Cursor:
    """The cursor of the task, as the membership service keeps it."""

    position: int = FIRST
    mark: bytes = b""
    term: int = 0
    has_moved: bool = False

    def claim(self) -> Task:
        self.term += 1
        return task(self)

    def commit(self, term: int, position: int, mark: bytes) -> bool:
        if term != self.term or position < self.position:
            return False
        self.position, self.mark, self.has_moved = position, mark, True
        return True


def task(cursor: Cursor, **more: Any) -> Task:
    fields = {
        "player": "orders", "target": "copy", "partition": 0, "partitions": 1, "cluster": SOURCE,
        "birth": 1, "term": cursor.term, "seek": 0, "position": cursor.position,
        "mark": cursor.mark, "has_moved": cursor.has_moved,
    }  # fmt: skip
    return Task(**(fields | more))


def record(number: int, payload: bytes | None = None) -> Record:
    """Return the source's record of a number."""
    gsn = FIRST + 10 * number
    key = b"key" if number % 3 else None
    if payload is None:
        payload = b"%d" % number + bytes(2000 if is_too_large(number) else 0)
    return Record(RecordId(gsn, 1), payload, key, 10**15 + number, 3)


def is_too_large(number: int) -> bool:
    """Whether the target log rejects a record of the source."""
    return number % 7 == 5


def expected(count: int) -> list[tuple[bytes | None, bytes]]:
    """Return what a reader of the mirror gets of the first records of the source."""
    records = [record(number) for number in range(count) if not is_too_large(number)]
    return [(one.key, one.payload) for one in records]


def batch(task: Task, start: int, first: int, stop: int) -> Batch:
    """Return a batch of the records [first, stop), which ends before the next one."""
    records = [record(number) for number in range(first, stop)]
    return Batch(task, start, FIRST + 10 * stop - 5, records, 1)


def number_at(position: int) -> int:
    """Return the number of the first record from a position on."""
    return max(position - FIRST + 9, 0) // 10


class Owner:
    """A process with a claim; it stops before each call, until it is continued."""

    def __init__(self, cursor: Cursor, log: TargetLog, count: int, size: int) -> None:
        """Claim the cursor; `count`: of records to copy, in batches of `size`."""
        self._cursor, self._count, self._size = cursor, count, size
        self._task: Final = cursor.claim()
        self._target: Final = LogTarget(
            lambda: Client(log, self._point),
            None,
            has_envelope=False,  # type: ignore[arg-type]
        )
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._order = ""
        self.error: BaseException | None = None
        self.has_ended = False
        self._thread: Final = threading.Thread(target=self._run)
        self._thread.start()

    def resume(self, order: str = "") -> None:
        """Continue to the next point; `order`: what goes wrong here, or "die"."""
        if self.has_ended:
            return
        self._order = order
        self._go.release()
        self._stopped.acquire()
        if self.has_ended:
            self._thread.join()
            if self.error is not None:
                raise self.error

    def end(self) -> None:
        """Let it die."""
        while not self.has_ended:
            self._order = "die"
            self._go.release()
            self._stopped.acquire()
        self._thread.join()

    def _point(self, _what: str) -> str:
        """Wait for the next order."""
        self._stopped.release()
        self._go.acquire()
        if self._order == "die":
            raise Death
        return self._order

    def _run(self) -> None:
        self._go.acquire()
        try:
            if self._order != "die":
                self._play()
        except Death:
            pass
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            self.error = error
        self.has_ended = True
        self._stopped.release()

    def _commit(self, position: int, mark: bytes) -> bool:
        self._point("commit")
        return self._cursor.commit(self._task.term, position, mark)

    def _play(self) -> None:
        """Do what a player's core does with a target that stores positions."""
        committed = self._task
        position, mark = committed.position, committed.mark
        while True:
            try:
                opened = self._target.open(committed)
                assert opened.position is not None
                if opened.mark != mark:
                    if not self._commit(opened.position, opened.mark):
                        return
                    committed = task(
                        self._cursor, term=committed.term, position=opened.position,
                        mark=opened.mark, has_moved=True,
                    )  # fmt: skip
                position, mark = opened.position, opened.mark
                while number_at(position) < self._count:
                    position, mark = self._deliver(committed, position)
                    if self._point("deliver") != "lazy" and not self._commit(position, mark):
                        return
            except (Retry, UnavailableError, OutcomeUnknownError, NoSuchRecordError):
                self._point("retry")
                continue
            return

    def _deliver(self, committed: Task, position: int) -> tuple[int, bytes]:
        """Deliver a batch, without the records that the target rejects."""
        first = number_at(position)
        given = batch(committed, position, first, min(first + self._size, self._count))
        records = list(given.records)
        while True:
            try:
                return given.stop, self._target.deliver(
                    Batch(committed, position, given.stop, records, 1)
                )
            except Rejected as error:
                del records[error.index or 0]
