"""The operations of a client: what each user request does, as a task.

If a value is not at the place that a coordinator reported (it was moved, and the place trimmed),
the key is requested again. A commit first requires a live coordinator, and inserts its values
before its record. See docs/logdb.md, sections 3, 5 and 7.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from logdb import records, wire
from logdb.client.arguments import RANGE_BYTES, READ_BYTES, RECORD_BYTES, WRITE_BYTES
from logdb.client.operation_steps import Alive, Insert, Operation, Query, Resolve, SleepUntil
from logdb.client.requests import (
    CommitRequest,
    CompareAndPutRequest,
    CoordinatorStatusRequest,
    GetRequest,
    KeyState,
    OpenRequest,
    Page,
    PutRequest,
    ResolveCommitRequest,
    ScanRequest,
    SnapshotId,
    SnapshotRequest,
    TakenSnapshot,
    ValidateRequest,
    Values,
    WatchRequest,
)
from logdb.errors import TransactionAborted
from logdb.records import INLINE_BYTES, KeyRead, RangeRead, TransactionId, Write
from logdb.values import decode_value
from ziplog.client.common.requests import ConnectRequest, InsertRequest, ReadRequest
from ziplog.core.units import NS_PER_MS
from ziplog.errors import (
    DeadlineError,
    NoSuchRecordError,
    OutcomeUnknownError,
    ProtocolError,
    RecordTooLargeError,
    TrimmedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from logdb.client.known_states import KnownStates
    from logdb.wire import Decided, KeyResult
    from ziplog.client.common.requests import Request
    from ziplog.core.message import Message
    from ziplog.types import RecordId
    from ziplog.wire import Limits

    Fetch = Generator[Any, Any, list[bytes | None] | None]
    States = tuple[Sequence[bytes], Sequence[KeyResult]]

#: Values read from the log concurrently.
_READ_AT_ONCE: Final = 64
#: Bytes of values in one insert; several inserts go to several shards.
_INSERT_BYTES: Final = 256 * 1024
#: Why a transaction was aborted without conflicts.
_REASONS: Final = {
    "expired": "too many transactions committed in the meantime",
    "aborted": "it conflicted with another transaction, or its record was late",
}
#: First and maximum delay before a key is requested again after its place was trimmed.
_FIRST_GONE_BACKOFF_NS: Final = 1 * NS_PER_MS
_LAST_GONE_BACKOFF_NS: Final = 100 * NS_PER_MS


class OperationCounters(Protocol):
    """The counters that operations increment."""

    commits: int
    aborts: int
    repeated_puts: int
    known_reads: int


class OperationContext(Protocol):
    """What an operation needs of the client: clock, limits, known positions, counters."""

    @property
    def now(self) -> int:
        """Monotonic nanoseconds."""

    @property
    def session(self) -> bytes:
        """The client's session, 8 bytes."""

    @property
    def known_position(self) -> RecordId:
        """The greatest position that a coordinator has reported."""

    @property
    def known_states(self) -> KnownStates:
        """The states of keys that the client knows."""

    @property
    def limits(self) -> Limits:
        """The cluster's limits."""

    @property
    def counters(self) -> OperationCounters:
        """Counts of commits, aborts and repeated writes."""

    def next_number(self) -> int:
        """Return an unused transaction number."""

    def endpoint(self, name: bytes) -> str:
        """Return the address of a coordinator."""

    def accept_connected_log(self) -> bool:
        """Return whether the current coordinator tails the log that the client is connected to."""


def open_database(request: OpenRequest, db: OperationContext) -> Operation:
    """Find a coordinator and the log, which must be the log that the coordinator tails."""
    while True:
        yield Alive(request.deadline)
        limits = yield ConnectRequest(request.deadline)
        if db.accept_connected_log():
            return limits


# --- reading ---


def get(request: GetRequest, db: OperationContext) -> Operation:
    """Read keys: from the known states if the read may be slightly old, or from a coordinator."""
    keys, known_states = request.keys, db.known_states
    may_be_old = not (request.fresh or request.snapshot or request.ranges)
    if may_be_old:
        known = known_states.find(keys, request.reads, db.known_position.gsn, db.now)
        if known is not None:
            db.counters.known_reads += 1
            return Values([one.version for one in known], [one.value for one in known])
    pinned, number = _pinned_snapshot(request.snapshot)

    def build(at_least: int, cluster: int, request_number: int) -> wire.Get:
        return wire.Get(
            cluster,
            request_number,
            keys,
            at_least,
            request.fresh,
            request.reads,
            request.ranges,
            number,
        )

    def states(reply: wire.Got) -> States | None:
        if len(reply.found) != len(keys):
            raise ProtocolError(f"{len(reply.found)} states for {len(keys)} keys")
        return (keys, reply.found) if request.wants_values else None

    reply, values = yield from _query_until_readable(request.deadline, build, states, pinned, db)
    if request.snapshot is None and all(map(_has_state, reply.found)):
        known_states.on_got(keys, reply, db.now)
    versions = [0 if found.entry is None else found.entry.version for found in reply.found]
    return Values(versions, values if request.wants_values else [None] * len(versions))


def _has_state(found: KeyResult) -> bool:
    """Whether a result has the key's value, or the key is absent; its value needs no read."""
    return found.entry is None or found.value is not None


def scan(request: ScanRequest, db: OperationContext) -> Operation:
    """Read a range."""
    pinned, number = _pinned_snapshot(request.snapshot)

    def build(at_least: int, cluster: int, request_number: int) -> wire.Scan:
        return wire.Scan(
            cluster, request_number, request.start, request.stop, request.limit, at_least,
            request.fresh, request.reads, request.ranges, number,

        )  # fmt: skip

    def states(reply: wire.Scanned) -> States:
        return [key for key, _ in reply.rows], [found for _, found in reply.rows]

    reply, values = yield from _query_until_readable(request.deadline, build, states, pinned, db)
    rows = [(k, v) for (k, _), v in zip(reply.rows, values, strict=True) if v is not None]
    return Page(rows, RangeRead(request.start, reply.stop, reply.digest), reply.is_end)


def _query_until_readable(
    deadline: int,
    build: Callable[[int, int, int], Message],
    states: Callable[[Any], States | None],
    pinned: bytes | None,
    db: OperationContext,
) -> Generator[Any, Any, tuple[Any, list[bytes | None]]]:
    """Query until all values could be read; return the reply and its values.

    Args:
        deadline: the deadline.
        build: makes the message from the required position, the cluster and the request number.
        states: returns the keys of a reply and their states; None: no values are requested.
        pinned: the only coordinator that can answer; None: any.
        db: the client.

    """
    known: dict[tuple[bytes, int], bytes] = {}
    backoff = _FIRST_GONE_BACKOFF_NS
    while True:
        reply, _ = yield Query(deadline, partial(build, db.known_position.gsn), pinned)
        if reply.conflicts:
            raise TransactionAborted(reply.conflicts)
        found = states(reply)
        if found is None:
            return reply, []
        values = yield from _values(*found, known, deadline)
        if values is not None:
            return reply, values
        yield SleepUntil(min(db.now + backoff, deadline))
        backoff = min(2 * backoff, _LAST_GONE_BACKOFF_NS)


def _pinned_snapshot(snapshot: SnapshotId | None) -> tuple[bytes | None, int]:
    return (None, 0) if snapshot is None else (snapshot.coordinator, snapshot.number)


def _values(
    keys: Sequence[bytes],
    found: Sequence[KeyResult],
    known: dict[tuple[bytes, int], bytes],
    deadline: int,
) -> Fetch:
    """Return the values of keys, from the reply or from the log; None: a place was trimmed.

    Args:
        keys: the keys.
        found: their states.
        known: values that were read before, by key and version; new ones are added.
        deadline: the deadline.

    """
    missing: list[tuple[bytes, int, RecordId]] = []
    for key, one in zip(keys, found, strict=True):
        entry = one.entry
        if entry is None:
            continue
        if one.value is not None:
            known[key, entry.version] = one.value
        elif (key, entry.version) not in known:
            missing.append((key, entry.version, entry.place))
    is_gone = False
    for start in range(0, len(missing), _READ_AT_ONCE):
        batch = missing[start : start + _READ_AT_ONCE]
        results = yield [ReadRequest(deadline, place) for _, _, place in batch]
        for (key, version, place), result in zip(batch, results, strict=True):
            if isinstance(result, (TrimmedError, NoSuchRecordError)):
                is_gone = True
                continue
            if isinstance(result, Exception):
                raise result
            value = records.value_at(records.decode(result.payload), key)
            if value is None:
                raise ProtocolError(f"the record at {place} does not hold the value of {key!r}")
            known[key, version] = value
    if is_gone:
        return None
    return [
        None if one.entry is None else known[key, one.entry.version]
        for key, one in zip(keys, found, strict=True)
    ]


def validate(request: ValidateRequest, _db: OperationContext) -> Operation:
    """Validate the reads of a transaction that wrote nothing."""
    reply, _ = yield Query(
        request.deadline,
        lambda cluster, request_number: wire.Validate(
            cluster, request_number, request.reads, request.ranges
        ),
    )
    if reply.conflicts:
        raise TransactionAborted(reply.conflicts)
    return reply.position


def watch(request: WatchRequest, db: OperationContext) -> Operation:
    """Wait for a key's next state; the first one is a fresh read."""
    keys, known = [request.key], {}  # type: ignore[var-annotated]
    at_least = db.known_position.gsn
    while True:
        if request.version < 0:
            build: Callable[[int, int], wire.Get | wire.Watch] = partial(_get_fresh, keys, at_least)
        else:
            build = partial(_watch, request, at_least)
        reply, _ = yield Query(request.deadline, build)
        at_least = db.known_position.gsn
        if len(reply.found) != 1:
            raise ProtocolError(f"{len(reply.found)} states for one key")
        entry = reply.found[0].entry
        version = 0 if entry is None else entry.version
        if version == request.version:
            continue
        values = yield from _values(keys, reply.found, known, request.deadline)
        if values is not None:
            return KeyState(version, values[0])
        yield SleepUntil(min(db.now + _FIRST_GONE_BACKOFF_NS, request.deadline))


def _get_fresh(keys: list[bytes], at_least: int, cluster: int, request_number: int) -> wire.Get:
    return wire.Get(cluster, request_number, keys, at_least, True, [], [])


def _watch(request: WatchRequest, at_least: int, cluster: int, request_number: int) -> wire.Watch:
    return wire.Watch(cluster, request_number, request.key, request.version, at_least)


def take_snapshot(request: SnapshotRequest, db: OperationContext) -> Operation:
    """Take a snapshot of the present state."""
    session = db.session
    reply, src = yield Query(
        request.deadline,
        lambda cluster, request_number: wire.TakeSnapshot(cluster, request_number, session),
    )
    return TakenSnapshot(SnapshotId(reply.snapshot, src), reply.position)


def get_status(request: CoordinatorStatusRequest, db: OperationContext) -> Operation:
    """Request the coordinator's status."""
    reply, src = yield Query(request.deadline, wire.Status)
    return reply.document, db.endpoint(src)


# --- writing ---


def commit(request: CommitRequest, db: OperationContext) -> Operation:
    """Commit a transaction."""
    decided = yield from _commit(
        request.reads, request.ranges, request.writes, request.deadline, db
    )
    if decided.outcome != "committed":
        raise _aborted(decided)
    return decided.position


def put(request: PutRequest, db: OperationContext) -> Operation:
    """Write; retry if the commit was late or overtaken, until the deadline."""
    while True:
        decided = yield from _commit([], [], request.writes, request.deadline, db)
        if decided.outcome == "committed":
            return decided.position
        db.counters.repeated_puts += 1
        if db.now >= request.deadline:
            raise _aborted(decided)


def test_and_put(request: CompareAndPutRequest, db: OperationContext) -> Operation:
    """Compare and write; a difference in a possibly old state is checked with a fresh read."""
    keys, is_fresh = list(request.expected), not request.writes
    while True:
        found = yield from get(GetRequest(request.deadline, keys, fresh=is_fresh), db)
        is_equal = all(map(_is_equal, found.values, request.expected.values()))
        if is_fresh and not (is_equal and request.writes):
            return is_equal
        is_fresh = not is_equal
        if not is_equal:
            continue
        reads = list(map(KeyRead, keys, found.versions))
        decided = yield from _commit(reads, [], request.writes, request.deadline, db)
        if decided.outcome == "committed":
            return True
        if db.now >= request.deadline:
            raise _aborted(decided)


def _is_equal(encoded: bytes | None, expected: Any) -> bool:
    value = None if encoded is None else decode_value(encoded)
    return bool(value == expected)


def resolve(request: ResolveCommitRequest, _db: OperationContext) -> Operation:
    """Resolve the outcome of a commit."""
    decided = yield Resolve(request.deadline, request.commit)
    if decided is None or decided.outcome != "committed":
        return None
    return decided.position


def _aborted(decided: Decided) -> TransactionAborted:
    return TransactionAborted(decided.conflicts, _REASONS.get(decided.outcome, ""))


def _commit(
    reads: list[KeyRead],
    ranges: list[RangeRead],
    values: dict[bytes, bytes | None],
    deadline: int,
    db: OperationContext,
) -> Generator[Any, Any, Decided]:
    yield Alive(deadline)
    after = db.known_position
    largest = db.limits.max_payload_bytes
    writes, separate = _inline(
        values, min(INLINE_BYTES, largest - _bytes_without_values(reads, ranges, values))
    )
    if separate:
        stored = yield from _store(separate, after, deadline)
        writes += stored
        after = max(after, *(write.rid for write in stored if write.rid is not None))
        yield Alive(deadline)
    number, known = db.next_number(), db.known_position
    payload = records.encode(
        records.Commit(TransactionId(db.session, number), known.gsn, reads, ranges, writes)
    )
    if len(payload) > largest:
        raise RecordTooLargeError(len(payload), largest, "commit record")
    if db.now >= deadline:
        raise DeadlineError(
            "timed out before the commit record was inserted; nothing was written, try again"
        )
    decided: Decided = yield Insert(deadline, number, payload, max(after, known))
    db.known_states.on_decided(decided, writes, values, db.now)
    if decided.outcome == "committed":
        db.counters.commits += 1
    else:
        db.counters.aborts += 1
    return decided


def _bytes_without_values(
    reads: list[KeyRead], ranges: list[RangeRead], values: dict[bytes, bytes | None]
) -> int:
    """Return the maximum bytes of a commit record without values, as `Sizes` counts them."""
    size = RECORD_BYTES + WRITE_BYTES * len(values) + sum(map(len, values))
    size += READ_BYTES * len(reads) + sum([len(read.key) for read in reads])
    for each in ranges:
        size += RANGE_BYTES + len(each.start) + len(each.stop or b"")
    return size


def _inline(
    values: dict[bytes, bytes | None], room: int
) -> tuple[list[Write], list[tuple[bytes, bytes]]]:
    """Return the writes to inline in the commit record (the smallest), and the other values."""
    writes, separate = [], []
    by_size = values.items()
    if len(values) > 1:
        by_size = sorted(values.items(), key=lambda item: len(item[1] or b""))  # type: ignore[assignment]
    for key, value in by_size:
        size = len(value) if value is not None else 0
        room -= len(key) + size
        if value is None:
            writes.append(Write(key))
        elif room >= 0:
            writes.append(Write(key, value, None, size))
        else:
            separate.append((key, value))
    return writes, separate


def _store(
    values: list[tuple[bytes, bytes]], after: RecordId, deadline: int
) -> Generator[Any, Any, list[Write]]:
    """Insert values together; return the writes that refer to them."""
    requests: list[Request] = []
    payloads: list[bytes] = []
    size = 0
    for key, value in values:
        payload = records.encode(records.Value(key, value))
        if payloads and size + len(payload) > _INSERT_BYTES:
            requests.append(InsertRequest(deadline, payloads, after, None, 0, many=True))
            payloads, size = [], 0
        payloads.append(payload)
        size += len(payload)
    requests.append(InsertRequest(deadline, payloads, after, None, 0, many=True))
    results = yield requests
    rids: list[RecordId] = []
    for result in results:
        if isinstance(result, OutcomeUnknownError):
            raise DeadlineError(
                f"timed out inserting the values of a transaction ({result}); nothing was written,"
                " try again"
            )
        if isinstance(result, Exception):
            raise result
        rids += result
    return [
        Write(key, None, rid, len(value)) for (key, value), rid in zip(values, rids, strict=True)
    ]


OPERATIONS: Final[dict[type[Request], Callable[[Any, OperationContext], Operation]]] = {
    OpenRequest: open_database,
    GetRequest: get,
    ScanRequest: scan,
    ValidateRequest: validate,
    WatchRequest: watch,
    SnapshotRequest: take_snapshot,
    CoordinatorStatusRequest: get_status,
    CommitRequest: commit,
    PutRequest: put,
    CompareAndPutRequest: test_and_put,
    ResolveCommitRequest: resolve,
}
