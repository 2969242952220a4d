"""The blocking client: `Log`, and the subscription that it gives.

Rule: every method checks what it is given (`arguments`), makes a request of it, and returns the
engine's answer; each has a deadline. May be used from several threads (a subscription: from one
at a time).
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ziplog.client import arguments
from ziplog.client.client_node import ClientCore
from ziplog.client.common.requests import (
    NEVER,
    ConnectRequest,
    ProgressRequest,
    StatusRequest,
    SyncRequest,
    TailRequest,
    UnsubscribeRequest,
)
from ziplog.client.engines.blocking_engine import BlockingEngine
from ziplog.client.scan_iterators import Scan
from ziplog.client.subscription_buffer import SubscriptionBuffer
from ziplog.errors import ClosedError, DeadlineError
from ziplog.runtime.clock import now_ns
from ziplog.types import RID_GENESIS, Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from typing import Self

    from ziplog.client.arguments import BytesLike
    from ziplog.client.bulk.extents import Extents
    from ziplog.client.bulk.outline import ShardOutline
    from ziplog.client.common.requests import Blocked, Policy
    from ziplog.errors import OutcomeUnknownError


class Log:
    """A client of one log. Close it, or use it in a `with` statement.

    Time-outs are seconds; None means the default given to `connect`. A method that runs into its
    time-out raises `DeadlineError` (`OutcomeUnknownError` for an insert that may have happened); a
    closed client raises `ClosedError`. Does not survive `os.fork`: connect again in the child.
    """

    def __init__(
        self, bootstrap: str | Sequence[str], policy: Policy, timeout: float | None = None
    ) -> None:
        """Connect; see `ziplog.connect`."""
        self._timeout: Final = arguments.timeout_s(timeout, arguments.DEFAULT_TIMEOUT_S)
        endpoints = arguments.endpoints(bootstrap)
        self._core: Final = ClientCore(os.urandom(16), endpoints, policy)
        self._engine: Final = BlockingEngine(self._core)
        self._engine.resolve = self._resolve
        try:
            self._limits: Final = self._engine.call(ConnectRequest(self._deadline_ns(None)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Flush, unless an exception is under way, and close."""
        try:
            if kind is None and not self._engine.is_closed:
                self.flush()
        finally:
            self.close()

    def __repr__(self) -> str:
        return f"<ziplog.Log of {self._core.description}>"

    @property
    def endpoints(self) -> list[str]:
        """The "host:port" of the membership service's nodes that this client knows."""
        return self._core.endpoints

    @property
    def cluster_number(self) -> int:
        """The number by which servers tell clusters apart; other clusters have others."""
        return self._core.cluster

    def _deadline_ns(self, timeout: float | None) -> int:
        if timeout is None:
            return now_ns() + int(self._timeout * 1e9)
        return arguments.deadline_ns(timeout, self._timeout)

    # --- inserting ---

    def insert_after(
        self,
        payload: BytesLike,
        after: RecordId = RID_GENESIS,
        *,
        key: BytesLike | str | None = None,
        timeout: float | None = None,
    ) -> RecordId:
        """Insert one record at some position after another; returns when all replicas have it.

        Args:
            payload: up to the cluster's limit (1 MiB by default); may be empty.
            after: the record's gsn will be greater; it may be of any shard, empty or trimmed.
            key: goes with the record, and may steer the policy; a str is encoded as UTF-8.
            timeout: in seconds.

        Raises:
            NoSuchRecordError: `after` was never given to any shard.
            RecordTooLargeError: payload or key; nothing was sent.
            UnavailableError: nothing was inserted; try again.
            OutcomeUnknownError: the record may have been inserted; do not simply try again, but ask
                the error: its `resolve` waits until that is known.

        """
        request = arguments.insert((payload,), after, key, self._limits, self._deadline_ns(timeout))
        rids: list[RecordId] = self._engine.call(request)
        return rids[0]

    def insert_many(
        self,
        payloads: Iterable[BytesLike],
        after: RecordId = RID_GENESIS,
        *,
        key: BytesLike | str | None = None,
        keys: Iterable[BytesLike | str | None] | None = None,
        timeout: float | None = None,
    ) -> list[RecordId]:
        """Insert records in their order, all at one shard, pipelined; returns all their rids.

        The key is that of all, or `keys` has one (or None) for each; the policy is asked once, with
        the first payload and its key. On failure the error's `results` has the rid of each payload
        that is known to be in the log, and None for each other: of an UnavailableError, these are
        not there, and never will be, though later ones may be. Other arguments and errors are those
        of `insert_after`.
        """
        deadline_ns = self._deadline_ns(timeout)
        request = arguments.insert(
            payloads, after, key, self._limits, deadline_ns, many=True, keys=keys
        )
        if not request.payloads:
            return []
        rids: list[RecordId] = self._engine.call(request)
        return rids

    def insert_rows(
        self,
        payloads: Iterable[BytesLike],
        *,
        keys: Iterable[BytesLike | str | None] | None = None,
        shard: int,
        writer: BytesLike,
        batch: int,
        row: int = 0,
        timeout: float | None = None,
    ) -> list[RecordId]:
        """Insert rows that may be inserted again under the same identity: readers get each once.

        They go to the shard in order, up to 256 (with their keys, 256 KiB) at a time, each time
        once what went before is there for good. So a part of them that is in the log, after
        whatever failure, is their beginning; who repeats the call, with the same arguments,
        completes it.

        Args:
            payloads: the rows.
            keys: one for each row; None: none has one.
            shard: where to; while it is not live, the call waits.
            writer: 16 bytes that nobody else writes under; one writer's calls go one after another.
            batch: from 0 on; a writer goes on to a later one only when the one before is complete.
            row: the number in its batch of the first of these rows; the others follow.
            timeout: in seconds, for all.

        Returns:
            Each row's rid; that of a repetition is one that subscribers pass over.

        Raises:
            UnavailableError: not all were inserted, see `results` of the error; repeat the call.
            OutcomeUnknownError: likewise, and one more unit may be in the log.
            RecordTooLargeError: a row or a key, see its `index`; nothing was sent.
            ConfigError: an argument is wrong.

        """
        deadline_ns = self._deadline_ns(timeout)
        origin = (writer, batch, row)
        request = arguments.rows(payloads, keys, shard, origin, self._limits, deadline_ns)
        if not request.payloads:
            return []
        rids: list[RecordId] = self._engine.call(request)
        return rids

    def insert_nowait(
        self,
        payload: BytesLike,
        after: RecordId = RID_GENESIS,
        *,
        key: BytesLike | str | None = None,
        timeout: float | None = None,
    ) -> Future[RecordId]:
        """Begin to insert a record; returns a future of its rid.

        Blocks while 1,024 records or 16 MiB are under way. The future's callbacks run in a thread
        of the client's and delay the others; they must not wait for futures of this client.
        """
        deadline_ns = self._deadline_ns(timeout)
        request = arguments.insert((payload,), after, key, self._limits, deadline_ns)
        seconds = arguments.timeout_s(timeout, self._timeout)
        return self._engine.submit(request, len(request.payloads[0]), seconds)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every `insert_nowait` so far is done; raise the first failure, if any."""
        self._engine.flush(arguments.timeout_s(timeout, self._timeout))

    def sync(self, timeout: float | None = None) -> RecordId:
        """Wait until every insert of this client that is complete is on stable storage.

        That is at all replicas of its shard. What `insert_nowait` has under way does not count:
        `flush` first.

        Args:
            timeout: in seconds.

        Returns:
            The last such record's rid; RID_GENESIS if this client has inserted nothing.

        Raises:
            DeadlineError: a shard did not confirm it in time; it may be asked again.

        """
        rid: RecordId = self._engine.call(SyncRequest(self._deadline_ns(timeout)))
        return rid

    def _resolve(
        self, error: OutcomeUnknownError, timeout: float | None
    ) -> RecordId | list[RecordId | None] | None:
        """Find out what became of an insert; see `OutcomeUnknownError.resolve`."""
        request = arguments.resolve(error, self._deadline_ns(timeout))
        return arguments.resolved(error, self._engine.call(request))

    def set_policy(self, policy: Policy) -> None:
        """Let `policy` choose the shards of later inserts (see `ziplog.policy`)."""
        self._core.set_policy(arguments.policy(policy))

    # --- reading ---

    def read_record(self, rid: RecordId, *, timeout: float | None = None) -> Record:
        """Return the record at a position.

        Raises:
            NoSuchRecordError: there is none: undecided, a no-op, or another shard's position.
            TrimmedError: it was trimmed.

        """
        record: Record = self._engine.call(arguments.read(rid, self._deadline_ns(timeout)))
        return record

    def subscribe(
        self,
        start: RecordId = RID_GENESIS,
        *,
        follow: bool = True,
        timeout: float | None = None,
    ) -> Subscription:
        """Return an iterator over all records from `start` on (inclusive), in gsn order.

        Args:
            start: any position; RID_RECENT: the last stable record.
            follow: go on for ever; else end with the last record inserted before this call.
            timeout: iteration raises DeadlineError after so long without a record. None: a
                following iterator waits without limit, another one for the default.

        Raises:
            TrimmedError: records from `start` on were trimmed.

        """
        if timeout is not None:
            arguments.timeout_s(timeout, 0)
        request = arguments.subscribe(start, self._deadline_ns(None), follow=follow)
        limit = timeout if timeout is not None or follow else self._timeout
        number = self._engine.next_number()
        # Made first: whatever happens to the call, it ends with its owner.
        subscription = Subscription(self._engine, number, start, limit)
        self._engine.call(request, number)
        return subscription

    def check_tail(self, *, timeout: float | None = None) -> RecordId:
        """Return a position at or after all inserts that were complete before this call.

        An insert that begins later may still get a position before it, at a shard that has free
        ones there, unless it names it as `after`. What a subscription has passed stays as it was.
        """
        rid: RecordId = self._engine.call(TailRequest(self._deadline_ns(timeout)))
        return rid

    # --- reading in bulk ---

    def extents(
        self, start: int = 1, stop: int | None = None, *, timeout: float | None = None
    ) -> Extents:
        """Return which shards own positions of a range, and where epochs begin there.

        Args:
            start: the first gsn; what is trimmed is left out of the answer.
            stop: the gsn after the last one; None: as far as positions were given to shards.
            timeout: in seconds.

        Raises:
            NoSuchRecordError: the range goes beyond what was ever given to any shard.

        """
        found: Extents = self._engine.call(
            arguments.extents(start, stop, self._deadline_ns(timeout))
        )
        return found

    def outline(
        self, shard: int, start: int, stop: int, *, timeout: float | None = None
    ) -> ShardOutline:
        """Return how much a shard holds of the gsns [start, stop), and its archives.

        All its replicas are asked. Who does not answer 0.2 s after the first one is left out.

        Raises:
            ConfigError: there is no such shard.
            DeadlineError: no replica answered.

        """
        request = arguments.outline(shard, start, stop, self._deadline_ns(timeout))
        found: ShardOutline = self._engine.call(request)
        return found

    def scan(self, shard: int, start: int, stop: int, *, timeout: float | None = None) -> Scan:
        """Return an iterator over a shard's units of the gsns [start, stop), as they are stored.

        The shard must own its share of the positions all through (see `extents`), else it may never
        get to `stop`. Goes on by itself with another replica when one fails.

        Args:
            shard: the shard to read, live or not.
            start: the first gsn.
            stop: the gsn after the last one; the shard is asked to decide what it has not.
            timeout: seconds without progress after which iteration raises DeadlineError.

        Raises:
            ConfigError: there is no such shard.

        """
        limit = arguments.timeout_s(timeout, self._timeout)
        request = arguments.scan(shard, start, stop, self._deadline_ns(timeout))
        number = self._engine.next_number()
        scan = Scan(self._engine, number, start, stop, limit)
        self._engine.call(request, number)
        return scan

    # --- the cluster ---

    def trim(self, rid: RecordId, *, timeout: float | None = None) -> None:
        """Delete all records before `rid`, once they are stable; the record of `rid` stays.

        That counts what is inserted before it meanwhile (see `check_tail`).

        Raises:
            NoSuchRecordError: `rid` was never given to any shard.

        """
        self._engine.call(arguments.trim(rid, self._deadline_ns(timeout)))

    def add_shard(
        self, shard: int, replicas: Mapping[str, str], *, timeout: float | None = None
    ) -> None:
        """Add a shard; returns when it takes records (T 4.2.3).

        Its servers must be in the cluster file and run. This client sends records there from then
        on, others a second later; who reads the log follows by itself. Doing it again does no harm.

        Args:
            shard: a number that no shard ever had.
            replicas: its f+1 servers, the primary first: name in the cluster file -> "host:port".
            timeout: in seconds.

        Raises:
            ConfigError: an argument is wrong; the number, or a server, is or was of another shard;
                or `replicas` are more or fewer than each other shard has.
            DeadlineError: it was not live in time; says what it waits for, and goes on.

        """
        self._engine.call(arguments.change(shard, "add", self._deadline_ns(timeout), replicas))

    def remove_shard(self, shard: int, *, timeout: float | None = None) -> None:
        """Take a shard out for good; returns when it gets no more positions (T 4.2.3).

        What it holds stays where it is and can be read, so its servers must go on. Inserts are sent
        elsewhere, those under way too; only who pins them to this shard waits in vain. Its number
        is never used again.

        Args:
            shard: a shard that is live, parked, joining or recovering.
            timeout: in seconds.

        Raises:
            ConfigError: there is no such shard, or it is the last one that takes records.
            DeadlineError: it was not out in time; says what it waits for, and goes on.

        """
        self._engine.call(arguments.change(shard, "remove", self._deadline_ns(timeout)))

    def finalize_shard(self, shard: int, *, timeout: float | None = None) -> None:
        """Remove a shard, and wait until all it holds is on stable storage at all its servers.

        From then on nothing of it changes but by `trim`. Arguments and errors are those of
        `remove_shard`.
        """
        self._engine.call(arguments.change(shard, "finalize", self._deadline_ns(timeout)))

    def cluster(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Return the status document."""
        document: bytes = self._engine.call(StatusRequest(self._deadline_ns(timeout)))
        return arguments.status(document)

    def stats(self) -> dict[str, int]:
        """Return what this client did: counts since it was made."""
        return msgspec.structs.asdict(self._core.counters)

    def close(self) -> None:
        """Close; calls under way in other threads raise ClosedError. May be called again."""
        self._engine.close()


class Subscription:
    """Records in gsn order, each once: an iterator, and a context manager.

    It closes itself at its end, and when it is collected as garbage. An exception (Ctrl-C, a signal
    handler's) in a call loses nothing: the next call gives what this one would have given.
    """

    def __init__(
        self, engine: BlockingEngine, number: int, start: RecordId, timeout: float | None
    ) -> None:
        self._engine: Final = engine
        self._number: Final = number
        self._timeout: Final = timeout
        self._buffer: Final = SubscriptionBuffer(start)
        request = UnsubscribeRequest(NEVER, number)
        self._owned: Final = engine.owners.add(self, lambda: (request,))

    def __enter__(self) -> Self:
        """Return the subscription."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def __iter__(self) -> Iterator[Record]:
        """Return the subscription itself."""
        return self

    def __next__(self) -> Record:
        """Return the next record; waits for it.

        Raises:
            DeadlineError: none came within the subscription's time-out.
            TrimmedError: the next position was trimmed meanwhile.

        """
        while True:
            for record in self._buffer.batch:
                return record
            if not self._fill(arguments.READ_AHEAD, self._timeout):
                if self._buffer.ended:
                    self.close()
                    raise StopIteration
                raise DeadlineError(f"no record came within {self._timeout:g} s")

    def fetch(self, max_records: int = 1000, timeout: float | None = None) -> list[Record]:
        """Return up to `max_records` records: what is there, at least one.

        Empty at the end, or when nothing came within `timeout` seconds (None: as iteration).
        """
        limit = self._timeout if timeout is None else arguments.timeout_s(timeout, 0)
        arguments.fetch(self._number, max_records, NEVER, 0)
        if not self._buffer.pending and not self._fill(max_records, limit) and self._buffer.ended:
            self.close()
        return self._buffer.pop(max_records)

    def _fill(self, max_records: int, timeout: float | None) -> bool:
        buffer = self._buffer
        if buffer.ended:
            return False
        deadline_ns = NEVER if timeout is None else arguments.deadline_ns(timeout, 0)
        request = arguments.fetch(self._number, max_records, deadline_ns, buffer.after)
        return buffer.fill(self._engine.call(request))

    @property
    def position(self) -> RecordId:
        """Where a later subscription goes on without loss or repetition."""
        self._update_progress()
        return self._buffer.position

    @property
    def caught_up(self) -> bool:
        """Whether everything that the servers last reported was handed out."""
        self._update_progress()
        return self._buffer.caught_up

    @property
    def blocked_on(self) -> Blocked | None:
        """The shard and the epoch that hold records back, if any do."""
        self._update_progress()
        return self._buffer.blocked_on

    def _update_progress(self) -> None:
        if self._buffer.needs_progress and not self._engine.is_closed:
            request = ProgressRequest(NEVER, self._number, self._buffer.after)
            self._buffer.progress = self._engine.call(request)

    def close(self) -> None:
        """End the subscription. May be called again."""
        if not self._buffer.closed:
            self._engine.shielded(self._close)

    def _close(self) -> None:
        with contextlib.suppress(ClosedError):
            self._update_progress()
        self._engine.post(UnsubscribeRequest(NEVER, self._number))
        self._buffer.close()
        self._engine.owners.remove(self._owned)
