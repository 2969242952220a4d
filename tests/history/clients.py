"""Workload clients and subscribers, each in a separate process.

Rule: a call is recorded before it is made, and every result after its return; only the public API
is used. The next operation depends on the seed and on earlier results.
"""

from __future__ import annotations

import random
import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final

import ziplog
from tests.history import events
from tests.history.events import now
from tests.history.payloads import PER_CLIENT, number_of, payload
from tests.history.processes import Pace, Plan, Stopped
from ziplog import (
    RID_GENESIS,
    RID_RECENT,
    NoSuchRecordError,
    OutcomeUnknownError,
    RecordId,
    TrimmedError,
    ZiplogError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from tests.history.events import Recorder

OPERATIONS: Final = ("insert", "nowait", "batch", "read", "scan", "sync", "tail", "seal", "trim")
#: Rids that a client remembers, of its own and of others.
_MEMORY: Final = 2000
#: Errors of unknown outcome that wait to be resolved.
_MAX_DOUBTS: Final = 500
_RESOLVE_S: Final = 1.0
#: Records that one scan takes.
_SCAN: Final = 2000
_TEXT: Final = 300
_RETRY_S: Final = 0.2


class LogPlan(Plan, frozen=True, kw_only=True):
    """Settings of the processes that use the log itself."""

    #: "host:port,..." of the membership service.
    bootstrap: str
    payload_bytes: int = 100
    #: Inserts name the record that they come after.
    chains: bool = True
    #: Share of the inserts that are appends, and of the tail queries that are sealed. Subscribers
    #: ask for barriers if it is above 0.
    appends: float = 0.0
    #: Of one client; 0: until it is stopped.
    operations: int = 0


def failed(op: int, error: Exception) -> events.Failed:
    """Return the line of an operation that raised."""
    rids = getattr(error, "results", None) or []
    return events.Failed(
        op,
        now(),
        type(error).__name__,
        retriable=bool(getattr(error, "retriable", False)),
        text=str(error)[:_TEXT],
        gsns=[rid.gsn if rid else 0 for rid in rids],
        shards=[rid.shard if rid else 0 for rid in rids],
        first=_named(error),
    )


def _named(error: Exception) -> int:
    """Return the gsn that an error names; 0 if it names none."""
    if isinstance(error, TrimmedError):
        return error.first.gsn
    return error.rid.gsn if isinstance(error, NoSuchRecordError) else 0


def delivered(op: int, records: Sequence[ziplog.Record]) -> events.Delivered:
    """Return the line of delivered records."""
    return events.Delivered(
        op,
        now(),
        [record.rid.gsn for record in records],
        [record.rid.shard for record in records],
        [number_of(record.payload) for record in records],
    )


def batches(subscription: Iterator[ziplog.Record], size: int) -> Iterator[list[ziplog.Record]]:
    """Go through all records of a subscription, up to `size` at a time."""
    while batch := list(islice(subscription, size)):
        yield batch


def connected(plan: LogPlan, stopped: Stopped) -> ziplog.Log | None:
    """Connect, with retries; None if it was stopped first."""
    while not stopped:
        try:
            return ziplog.connect(plan.bootstrap, timeout=plan.timeout_s)
        except ZiplogError:
            time.sleep(_RETRY_S)
    return None


def run_client(plan: LogPlan, number: int) -> None:
    """Be client `number` until SIGTERM, or as many operations as planned."""
    stopped = Stopped()
    with plan.recorder(f"client-{number}") as recorder:
        log = connected(plan, stopped)
        if log is not None:
            client = Client(plan, number, log, recorder)
            try:
                client.run(stopped)
            finally:
                log.close()


class Client:
    """Inserts, reads and asks, one call at a time."""

    def __init__(self, plan: LogPlan, number: int, log: ziplog.Log, recorder: Recorder) -> None:
        self._plan: Final = plan
        self._log: Final = log
        self._recorder: Final = recorder
        self._random: Final = random.Random(f"{plan.seed} {number}")
        self._next_payload = number * PER_CLIENT
        self._own: Final[deque[RecordId]] = deque(maxlen=_MEMORY)
        self._learned: Final[deque[RecordId]] = deque(maxlen=_MEMORY)
        #: Inserts of unknown outcome: their number, the number of records, and the error.
        self._doubts: Final[deque[tuple[int, OutcomeUnknownError]]] = deque(maxlen=_MAX_DOUBTS)
        self._actions: Final[dict[str, Callable[[], None]]] = {
            "insert": self._insert,
            "nowait": self._nowait,
            "batch": self._batch,
            "read": self._read,
            "scan": self._scan,
            "sync": self._sync,
            "tail": self._tail,
            "seal": self._seal,
            "trim": self._trim,
        }

    def run(self, stopped: Stopped) -> None:
        """Run until stopped; then wait for pending inserts and resolve those in doubt."""
        mix, plan = self._plan.mix, self._plan
        names, weights = list(mix), list(mix.values())
        pace, done = Pace(plan.rate_per_s), 0
        while not stopped and (done < plan.operations or not plan.operations):
            self._actions[self._random.choices(names, weights)[0]]()
            done += 1
            if self._doubts and self._random.random() < 0.2:
                self._resolve()
            pace.wait()
        self._flush()
        for _ in range(2 * len(self._doubts)):
            if self._doubts:
                self._resolve()

    # --- inserting ---

    def _payload(self) -> tuple[int, bytes]:
        self._next_payload += 1
        return self._next_payload, payload(self._next_payload, self._plan.payload_bytes)

    def _after(self) -> RecordId:
        if not self._plan.chains:
            return RID_GENESIS
        kind = self._random.random()
        if kind < 0.5 and self._own:
            return self._own[-1]
        if kind < 0.8 and self._learned:
            return self._random.choice(self._learned)
        return RID_GENESIS

    def _is_sealed(self) -> bool:
        """Return whether the next call is an append, or a sealed tail query."""
        return bool(self._plan.appends) and self._random.random() < self._plan.appends

    def _call_insert(self, after: RecordId, payloads: list[int], *, sealed: bool) -> int:
        op = self._recorder.next_op()
        self._recorder.call(events.Insert(op, now(), after.gsn, payloads, sealed))
        return op

    def _inserted(self, op: int, rids: Sequence[RecordId]) -> None:
        gsns, shards = [rid.gsn for rid in rids], [rid.shard for rid in rids]
        self._recorder.result(events.Inserted(op, now(), gsns, shards))
        self._own.extend(rids)

    def _insert_failed(self, op: int, error: Exception) -> None:
        self._recorder.result(failed(op, error))
        if isinstance(error, OutcomeUnknownError):
            self._doubts.append((op, error))

    def _insert(self) -> None:
        number, contents = self._payload()
        after, sealed = self._after(), self._is_sealed()
        op = self._call_insert(after, [number], sealed=sealed)
        insert = self._log.append if sealed else self._log.insert_after
        try:
            self._inserted(op, [insert(contents, after)])
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what the client saw
            self._insert_failed(op, error)

    def _batch(self) -> None:
        rows = [self._payload() for _ in range(self._random.randint(2, 20))]
        after, sealed = self._after(), self._is_sealed()
        op = self._call_insert(after, [number for number, _ in rows], sealed=sealed)
        insert = self._log.append_many if sealed else self._log.insert_many
        try:
            self._inserted(op, insert([contents for _, contents in rows], after))
        except Exception as error:  # noqa: BLE001
            self._insert_failed(op, error)

    def _nowait(self) -> None:
        for _ in range(self._random.randint(1, 8)):
            number, contents = self._payload()
            after, sealed = self._after(), self._is_sealed()
            op = self._call_insert(after, [number], sealed=sealed)
            insert = self._log.append_nowait if sealed else self._log.insert_nowait
            try:
                future = insert(contents, after)
            except Exception as error:  # noqa: BLE001
                self._insert_failed(op, error)
            else:
                future.add_done_callback(self._when_done(op))
        if self._random.random() < 0.3:
            self._flush()

    def _when_done(self, op: int) -> Callable[[Future[RecordId]], None]:
        def done(future: Future[RecordId]) -> None:
            error = future.exception()
            if error is None:
                self._inserted(op, [future.result()])
            elif isinstance(error, Exception):
                self._insert_failed(op, error)

        return done

    def _flush(self) -> None:
        try:
            self._log.flush()
        except ZiplogError:
            return  # each insert has said it for itself

    def _resolve(self) -> None:
        of, error = self._doubts.popleft()
        op = self._recorder.next_op()
        self._recorder.call(events.Resolve(op, now(), of))
        try:
            answer = error.resolve(_RESOLVE_S)
        except OutcomeUnknownError as again:
            self._recorder.result(failed(op, again))
            self._doubts.append((of, again))
        except Exception as other:  # noqa: BLE001
            self._recorder.result(failed(op, other))
        else:
            rids = answer if isinstance(answer, list) else [answer]
            gsns = [rid.gsn if rid else 0 for rid in rids]
            shards = [rid.shard if rid else 0 for rid in rids]
            self._recorder.result(events.Resolved(op, now(), gsns, shards))
            self._own.extend(rid for rid in rids if rid)

    # --- reading ---

    def _read(self) -> None:
        known = self._learned if self._learned and self._random.random() < 0.5 else self._own
        if not known:
            return
        rid = self._random.choice(known)
        if self._random.random() < 0.1:  # perhaps no record, perhaps one of another client
            rid = RecordId(rid.gsn + self._random.randint(1, 4), rid.shard)
        op = self._recorder.next_op()
        self._recorder.call(events.Read(op, now(), *rid))
        try:
            record = self._log.read_record(rid)
            self._recorder.result(events.Found(op, now(), number_of(record.payload)))
        except Exception as error:  # noqa: BLE001
            self._recorder.result(failed(op, error))

    def _scan(self) -> None:
        """Read some way along from somewhere, to the end if it is near."""
        kind = self._random.random()
        if kind < 0.5:
            start = RID_RECENT
        elif kind < 0.9 and self._own:
            start = self._random.choice(self._own)
        else:
            start = RID_GENESIS
        op = self._recorder.next_op()
        self._recorder.call(events.Subscribe(op, now(), start.gsn, follow=False))
        try:
            with self._log.subscribe(start, follow=False) as subscription:
                for batch in batches(subscription, _SCAN):
                    self._recorder.result(delivered(op, batch))
                    self._learned.extend(record.rid for record in batch[-50:])
                    if len(batch) == _SCAN:
                        return  # far enough
                self._recorder.result(events.Ended(op, now()))
        except Exception as error:  # noqa: BLE001
            self._recorder.result(failed(op, error))

    # --- the rest ---

    def _sync(self) -> None:
        op = self._recorder.next_op()
        self._recorder.call(events.Sync(op, now()))
        try:
            rid = self._log.sync()
            self._recorder.result(events.Synced(op, now(), rid.gsn))
        except Exception as error:  # noqa: BLE001
            self._recorder.result(failed(op, error))

    def _tail(self) -> None:
        op, sealed = self._recorder.next_op(), self._is_sealed()
        self._recorder.call(events.Tail(op, now(), sealed))
        try:
            gsn = self._log.check_tail(sealed=sealed).gsn
            self._recorder.result(events.TailIs(op, now(), gsn))
        except Exception as error:  # noqa: BLE001
            self._recorder.result(failed(op, error))

    def _seal(self) -> None:
        """Seal one of the last known positions."""
        if not self._own:
            return
        op, rid = self._recorder.next_op(), self._own[-1]
        self._recorder.call(events.Seal(op, now(), rid.gsn))
        try:
            self._log.seal(rid)
            self._recorder.result(events.Sealed(op, now()))
        except Exception as error:  # noqa: BLE001
            self._recorder.result(failed(op, error))

    def _trim(self) -> None:
        """Trim the oldest tenth of what this client remembers."""
        if len(self._own) < 100:
            return
        rid = self._own[len(self._own) // 10]
        op = self._recorder.next_op()
        self._recorder.call(events.Trim(op, now(), rid.gsn))
        try:
            self._log.trim(rid)
            self._recorder.result(events.Trimmed(op, now()))
        except Exception as error:  # noqa: BLE001
            self._recorder.result(failed(op, error))
