"""The client of one log: `AsyncLog`.

Every method checks its arguments (`arguments`), makes a request, and returns the engine's result;
each has a deadline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ziplog import policy as policies
from ziplog.client import arguments, cursor_arguments
from ziplog.client.async_administration import AsyncAdministration
from ziplog.client.async_cursors import AsyncCursor
from ziplog.client.async_iterators import AsyncScan, AsyncSubscription
from ziplog.client.async_speculation import AsyncSpeculation
from ziplog.client.common.requests import MeasureRequest, PolicyRequest, SyncRequest, TailRequest
from ziplog.core.units import NEVER
from ziplog.types import RID_GENESIS, RID_RECENT, Record, RecordId

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Collection, Iterable
    from typing import Self

    from ziplog.client.arguments import BytesLike
    from ziplog.client.bulk.extents import Extents
    from ziplog.client.bulk.outline import ShardOutline
    from ziplog.client.common.requests import InsertRequest, Policy
    from ziplog.client.inserts.measurements import Measurements
    from ziplog.wire import Limits


class AsyncLog(AsyncAdministration):
    """A client of one log. Close it, or use it in an `async with` statement.

    Time-outs are in seconds; None means the default given to `connect`. A method that reaches its
    time-out raises `DeadlineError`, or `OutcomeUnknownError` for an insert that may have happened.
    A closed client raises `ClosedError`.

    A blocking client may be used from several threads, its subscriptions from one at a time. An
    asyncio client belongs to the event loop in which it was connected. No client survives
    `os.fork`: connect again in the child.
    """

    async def __aenter__(self) -> Self:
        """Return the client."""
        self._engine.check_open()
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        """Flush, unless an exception is being raised, and close."""
        try:
            if kind is None and not self._engine.is_closed:
                await self.flush()
        finally:
            await self.close()

    def __repr__(self) -> str:
        return f"<ziplog.aio.AsyncLog of {self._core.description}>"

    @property
    def endpoints(self) -> list[str]:
        """The "host:port" of the membership service's nodes that this client knows."""
        return self._core.endpoints

    @property
    def cluster_number(self) -> int:
        """The number by which servers distinguish clusters."""
        return self._core.cluster

    @property
    def limits(self) -> Limits:
        """The cluster's limits of payloads and keys, as of the connection."""
        limits: Limits = self._limits
        return limits

    # --- inserting ---

    async def insert_after(
        self,
        payload: BytesLike,
        after: RecordId = RID_GENESIS,
        *,
        key: BytesLike | str | None = None,
        shard: int | None = None,
        min_regions: int | None = None,
        timeout: float | None = None,
    ) -> RecordId:
        """Insert one record after another position; return when all replicas have it.

        Args:
            payload: at most the cluster's limit (1 MiB by default); may be empty.
            after: the record's gsn will be greater. Any shard's position, even an empty or trimmed
                one.
            key: stored with the record, and passed to the policy; a str is encoded as UTF-8.
            shard: the shard that gets the record; the call waits while it is not live. None: the
                policy selects one.
            min_regions: least number of regions of the shard's servers, 1 to 16; the record is in
                all of them when the call returns. None: that of the client, else of the cluster.
            timeout: in seconds.

        Raises:
            NoSuchRecordError: no shard owns the position `after` yet.
            RecordTooLargeError: payload or key; nothing was sent.
            ConfigError: no shard, or not `shard`, spans `min_regions` regions.
            UnavailableError: nothing was inserted; try again, unless the shard was removed.
            OutcomeUnknownError: the record may have been inserted. Do not simply try again: the
                error's `resolve` waits until the outcome is known.

        """
        request = arguments.insert(
            payload, after, key, self._limits, self._deadline_ns(timeout), shard,
            regions=min_regions,
        )  # fmt: skip
        rids: list[RecordId] = await self._engine.call(request)
        return rids[0]

    async def insert_many(
        self,
        payloads: Iterable[BytesLike],
        after: RecordId = RID_GENESIS,
        *,
        key: BytesLike | str | None = None,
        keys: Iterable[BytesLike | str | None] | None = None,
        shard: int | None = None,
        min_regions: int | None = None,
        timeout: float | None = None,
    ) -> list[RecordId]:
        """Insert records in order at one shard, pipelined; return their rids.

        `key` is the key of all records, or `keys` has one (or None) for each. The policy is called
        once, with the first payload and its key. On failure the error's `results` has the rid of
        each record that is known to be in the log, and None for the others. With an
        UnavailableError those are not in the log and never will be, though later records may be.
        Other arguments and errors are those of `insert_after`.
        """
        deadline_ns = self._deadline_ns(timeout)
        limits = self._limits
        request = arguments.insert_many(
            payloads, after, key, keys, limits, deadline_ns, shard, regions=min_regions
        )
        return await self._insert_all(request)

    async def insert_rows(
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
        """Insert rows under an identity that allows retries: readers get each row once.

        The rows go to the shard in order, in units of up to 4,096 rows (1 MiB with their keys).
        Each unit is sent after the previous one is placed. So after any failure, the rows in the
        log are the first ones; a second call with the same arguments adds the others.

        Args:
            payloads: the rows.
            keys: one for each row; None: no row has a key.
            shard: the shard that gets the rows; the call waits while it is not live.
            writer: 16 bytes that no other writer uses; calls of one writer must not overlap.
            batch: from 0 on; a writer may start a batch only when the previous one is complete.
            row: the number of the first of these rows in its batch; the others follow.
            timeout: in seconds, for all rows.

        Returns:
            The rid of each row; for a duplicate row, a rid that subscribers skip.

        Raises:
            UnavailableError: some rows were not inserted, see `results` of the error; call again.
            OutcomeUnknownError: likewise, and one more unit may be in the log.
            RecordTooLargeError: a row or a key, see its `index`; nothing was sent.
            ConfigError: an argument is invalid.

        """
        deadline_ns = self._deadline_ns(timeout)
        origin = (writer, batch, row)
        request = arguments.rows(payloads, keys, shard, origin, self._limits, deadline_ns)
        return await self._insert_all(request)

    async def _insert_all(self, request: InsertRequest) -> list[RecordId]:
        """Insert any number of records."""
        if not request.payloads:
            self._engine.check_open()
            return []
        rids: list[RecordId] = await self._engine.call(request)
        return rids

    def insert_nowait(
        self,
        payload: BytesLike,
        after: RecordId = RID_GENESIS,
        *,
        key: BytesLike | str | None = None,
        shard: int | None = None,
        min_regions: int | None = None,
        timeout: float | None = None,
    ) -> asyncio.Future[RecordId]:
        """Start to insert a record; return a future of its rid.

        A blocking client blocks while 1,024 records or 16 MiB are pending. The future's callbacks
        run in a background thread of the client, one after another; they must not wait for futures
        of this client. An asyncio client raises UnavailableError while 65,536 records or 64 MiB are
        pending, until `flush` returns.

        The future raises the errors of `insert_after`. After an OutcomeUnknownError, and while the
        future is not done, the record may be in the log: do not insert it again.
        """
        request = arguments.insert(
            payload, after, key, self._limits, self._deadline_ns(timeout), shard,
            regions=min_regions,
        )  # fmt: skip
        return self._engine.submit_insert(request)

    # --- appending ---

    async def append(
        self,
        payload: BytesLike,
        after: RecordId = RID_GENESIS,
        *,
        key: BytesLike | str | None = None,
        shard: int | None = None,
        min_regions: int | None = None,
        timeout: float | None = None,
    ) -> RecordId:
        """Insert one record; return when no later record can get a position before it.

        A record whose insert or append begins after this call returned gets a higher position, at
        any shard and from any client: appends are linearizable (T 3.1). An append takes four
        message delays (three in a log of one shard), an insert two; when a server
        fails, it waits until the next view of that server's shard has begun.

        Arguments and errors are those of `insert_after`, and one more:

        Raises:
            OutcomeUnknownError: with `results`: the record has this position, but a later record
                may still get before it; `resolve` waits until that is over.

        """
        request = arguments.insert(
            payload, after, key, self._limits, self._deadline_ns(timeout), shard, sealed=True,
            regions=min_regions,
        )  # fmt: skip
        rids: list[RecordId] = await self._engine.call(request)
        return rids[0]

    async def append_many(
        self,
        payloads: Iterable[BytesLike],
        after: RecordId = RID_GENESIS,
        *,
        key: BytesLike | str | None = None,
        keys: Iterable[BytesLike | str | None] | None = None,
        shard: int | None = None,
        min_regions: int | None = None,
        timeout: float | None = None,
    ) -> list[RecordId]:
        """Insert records as `insert_many`; return when no later record can get before any of them.

        Arguments are those of `insert_many`, errors those of `insert_many` and `append`. After an
        UnavailableError, later records may still get before those in its `results`.
        """
        deadline_ns = self._deadline_ns(timeout)
        limits = self._limits
        request = arguments.insert_many(
            payloads, after, key, keys, limits, deadline_ns, shard, sealed=True,
            regions=min_regions,
        )  # fmt: skip
        return await self._insert_all(request)

    def append_nowait(
        self,
        payload: BytesLike,
        after: RecordId = RID_GENESIS,
        *,
        key: BytesLike | str | None = None,
        shard: int | None = None,
        min_regions: int | None = None,
        timeout: float | None = None,
    ) -> asyncio.Future[RecordId]:
        """Start to append a record; return a future of its rid, as `insert_nowait` does.

        Two appends that are pending at the same time have no order. The future raises the errors of
        `append`; after an OutcomeUnknownError the record may be in the log.
        """
        request = arguments.insert(
            payload, after, key, self._limits, self._deadline_ns(timeout), shard, sealed=True,
            regions=min_regions,
        )  # fmt: skip
        return self._engine.submit_insert(request)

    async def seal(self, rid: RecordId, *, timeout: float | None = None) -> RecordId:
        """Return `rid` when no later record can get a position at or before it.

        What an insert got at `rid` is then ordered like an append.

        Raises:
            DeadlineError: at the time-out, a shard had not passed the position, or no shard owned
                it; the text names the cause. The call may be repeated.

        """
        sealed: RecordId = await self._engine.call(arguments.seal(rid, self._deadline_ns(timeout)))
        return sealed

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until every `insert_nowait` and `append_nowait` so far is done.

        Raises:
            ZiplogError: the first failure of one of them since the last `flush`.
            DeadlineError: some were pending at the time-out, and may still happen: call `flush`
                again or wait for their futures; do not insert them again.

        """
        await self._engine.flush(arguments.timeout_s(timeout, self._timeout))

    async def sync(self, timeout: float | None = None) -> RecordId:
        """Wait until every completed insert of this client is on stable storage at all replicas.

        Pending `insert_nowait` calls do not count: call `flush` first.

        Args:
            timeout: in seconds.

        Returns:
            The rid of the last such record; RID_GENESIS if this client has inserted nothing.

        Raises:
            DeadlineError: a shard did not confirm it in time; the call may be repeated.

        """
        rid: RecordId = await self._engine.call(SyncRequest(self._deadline_ns(timeout)))
        return rid

    def set_policy(self, policy: Policy) -> None:
        """Select the shards of later inserts by `policy` (see `ziplog.policy`)."""
        request = PolicyRequest(NEVER, policies.checked("policy", policy))
        self._engine.check_open()
        self._engine.post(request)

    # --- reading ---

    async def read_record(self, rid: RecordId, *, timeout: float | None = None) -> Record:
        """Return the record at a position.

        Raises:
            NoSuchRecordError: the position is undecided, a no-op, or owned by another shard.
            TrimmedError: it was trimmed.

        """
        record: Record = await self._engine.call(arguments.read(rid, self._deadline_ns(timeout)))
        return record

    def subscribe(
        self,
        start: RecordId = RID_GENESIS,
        *,
        follow: bool = True,
        shards: Collection[int] | None = None,
        known_rows: bool = False,
        timeout: float | None = None,
    ) -> AsyncSubscription:
        """Return an iterator over all records from `start` on (inclusive), in gsn order.

        Args:
            start: any position; RID_RECENT: the last stable record.
            follow: continue without end; otherwise end with the last record inserted before now.
            shards: only the records of these shards, which may have been removed; the subscription
                waits for no other shard, so its `position` is for subscriptions of these shards
                only. None: all shards, also later ones.
            known_rows: also drop each row of `insert_rows` that repeats a row before `start`. The
                first record then waits until the rows before `start` are known
                (docs/protocol.md, 14.3). False: a row counts as new if this subscription has not
                passed it.
            timeout: iteration raises DeadlineError after this time without a record. None: no limit
                if `follow`, otherwise the client's default. Opening the subscription has the
                client's default time-out.

        An asyncio subscription opens in the background. Awaiting it, or its first record, waits
        until it is open, and raises the errors.

        Raises:
            TrimmedError: records from `start` on were trimmed.
            ConfigError: one of `shards` never was a shard of this log.

        """
        has_limit = timeout is not None or not follow
        limit = arguments.timeout_s(timeout, self._timeout) if has_limit else None
        deadline_ns = self._deadline_ns(None)
        request = arguments.subscribe(
            start, deadline_ns, follow=follow, shards=shards, known_rows=known_rows
        )
        return AsyncSubscription(self._engine, request, request.start, limit)

    def cursor(
        self,
        name: str,
        *,
        start: RecordId = RID_GENESIS,
        lease_s: float = 10.0,
        hold_s: int = 604_800,
        wait: bool = True,
        timeout: float | None = None,
    ) -> AsyncCursor:
        """Claim a named position, and return an iterator over the records from there on.

        The membership service keeps the position by consensus, and at most one client owns it. A
        client that is silent for its lease loses it to the next client that claims it. The records
        are those of `subscribe` with `known_rows`.

        Args:
            name: 1 to 128 letters, digits and . _ / -, the first one a letter or a digit.
            start: the position, if there is no such cursor; RID_RECENT: after the last record.
            lease_s: 1 to 300 seconds.
            hold_s: records from the position on are not trimmed, until the cursor is unused for so
                many seconds, 0 to 2**31 - 1; 0: they may be trimmed at any time.
            wait: wait while another client owns it; False: raise CursorHeldError at once.
            timeout: in seconds, for the claim; infinity is allowed.

        An asyncio cursor is claimed in the background. Awaiting it, or its first record, waits
        until this client owns it, and raises the errors.

        Raises:
            CursorHeldError: another client owns it.
            TrimmedError: it was trimmed by force, or held nothing; `seek_cursor` sets it anew.
            NoSuchRecordError: no shard owns the position `start` yet.
            UnavailableError: there are 1,024 cursors already.

        """
        deadline_ns = self._deadline_ns(timeout)
        request = cursor_arguments.claim(name, start, lease_s, hold_s, deadline_ns, wait=wait)
        return AsyncCursor(self._engine, request, self._deadline_ns)

    def speculate(
        self,
        start: RecordId = RID_RECENT,
        *,
        shards: Collection[int] | None = None,
        max_pending: int = 10_000,
        timeout: float | None = None,
    ) -> AsyncSpeculation:
        """Return an iterator over events: records before they are final, and what becomes of them.

        A `Delivery` brings a record early. `Confirmed(upto)` makes all deliveries at or before
        `upto` final: they are what `subscribe` returns. `Failed(after)` makes all deliveries behind
        `after` void; what counts follows again. Failures are rare: they need a server that fails.
        Use no result of a delivery outside of this process before it is confirmed;
        `ziplog.speculation.process` holds results back (docs/speculation.md).

        Args:
            start: any position; RID_RECENT: the last stable record.
            shards: as for `subscribe`.
            max_pending: the maximum number of deliveries that are neither confirmed nor void, 1 to
                1,000,000.
            timeout: iteration raises DeadlineError after this time without an event. None: no
                limit. Opening the speculation has the client's default time-out.

        Raises:
            TrimmedError: records from `start` on were trimmed.
            ConfigError: one of `shards` never was a shard of this log.

        """
        limit = None if timeout is None else arguments.timeout_s(timeout, 0)
        request = arguments.speculate(
            start, self._deadline_ns(None), shards=shards, max_pending=max_pending
        )
        return AsyncSpeculation(self._engine, request, limit)

    async def check_tail(self, *, sealed: bool = False, timeout: float | None = None) -> RecordId:
        """Return a position at or after all inserts that completed before this call.

        A later insert may still get an earlier position, at a shard that has free positions there,
        unless it passes this one as `after`. Positions that a subscription has passed do not
        change.

        Args:
            sealed: return only when no later record can get a position at or before it; so the
                tail is linearizable, together with appends.
            timeout: in seconds.

        Raises:
            DeadlineError: a server did not report its end, or with `sealed`, a shard had not passed
                the position, at the time-out.

        """
        request = TailRequest(self._deadline_ns(timeout), bool(sealed))
        rid: RecordId = await self._engine.call(request)
        return rid

    # --- reading in bulk ---

    async def extents(
        self, start: int = 1, stop: int | None = None, *, timeout: float | None = None
    ) -> Extents:
        """Return the shards that own positions of a range, and the epochs of the range.

        Args:
            start: the first gsn; trimmed positions are left out of the result.
            stop: the gsn after the last one; None: the end of the known leases.
            timeout: in seconds.

        Raises:
            NoSuchRecordError: the range exceeds the positions that shards own so far.

        """
        found: Extents = await self._engine.call(
            arguments.extents(start, stop, self._deadline_ns(timeout))
        )
        return found

    async def outline(
        self, shard: int, start: int, stop: int, *, timeout: float | None = None
    ) -> ShardOutline:
        """Return a shard's size and archives for the gsns [start, stop).

        All its replicas are asked. A replica without a reply 0.2 s after the first one is left out.

        Raises:
            ConfigError: there is no such shard.
            DeadlineError: no replica replied.

        """
        request = arguments.outline(shard, start, stop, self._deadline_ns(timeout))
        found: ShardOutline = await self._engine.call(request)
        return found

    def scan(self, shard: int, start: int, stop: int, *, timeout: float | None = None) -> AsyncScan:
        """Return an iterator over a shard's stored units of the gsns [start, stop).

        The shard must own its share of the positions throughout the range (see `extents`);
        otherwise the scan may never reach `stop`. If a replica fails, the scan continues with
        another one. An asyncio scan opens like a subscription.

        Args:
            shard: the shard to read, live or not.
            start: the first gsn.
            stop: the gsn after the last one; the shard is asked to decide undecided positions.
            timeout: seconds without progress after which iteration raises DeadlineError.

        Raises:
            ConfigError: there is no such shard.

        """
        limit = arguments.timeout_s(timeout, self._timeout)
        request = arguments.scan(shard, start, stop, self._deadline_ns(timeout))
        return AsyncScan(self._engine, request, request.start, request.stop, limit)

    # --- the client ---

    def stats(self) -> dict[str, int]:
        """Return the counters of this client since it was created."""
        return msgspec.structs.asdict(self._core.counters)

    def measure(self) -> Measurements:
        """Count the durations of inserts from now on, for `ziplog.metrics`.

        The result has the present counters, durations and number of units in flight at any time.
        """
        measurements: Measurements = self._engine.call_now(MeasureRequest(NEVER))
        return measurements

    async def close(self) -> None:
        """Close the client; pending calls raise ClosedError. Idempotent.

        It waits up to a second if claims of cursors are under way, so as to release them.
        """
        try:
            await self._end_claims()
        finally:
            self._engine.close()
