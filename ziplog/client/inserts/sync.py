"""`sync`: waits until the client's inserts are on stable storage (docs/protocol.md, 4 and 5).

    primaries asked --durable beyond our last record--> shard done; all shards done --> completed

Rules: the client asks each shard's primary again, with a growing backoff, and at once after a view
change. Durable records stay durable, so a reply of any view counts, for later calls too. A lost
record fails one call, and another one if an insert returns it after that. A shard that is over,
whose servers may be gone, is not waited for: all its records are trimmed.

Invariant: a pending call has an open request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from ziplog.client.common.pending_requests import PendingRequest, PendingRequests
from ziplog.core.units import NS_PER_MS
from ziplog.errors import DeadlineError, NoSuchRecordError
from ziplog.types import RID_GENESIS, RecordId
from ziplog.wire import LeaseQuery, Sync

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ziplog.client.common.requests import SyncRequest
    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.inserts.inflight import ShardWindow
    from ziplog.wire import LeaseHistory, Refused, Synced

_MIN_BACKOFF_NS: Final = 20 * NS_PER_MS
#: The recovery of a shard that is over begins when the first of its servers stops.
_MAY_BE_OVER: Final = frozenset({"finalized", "recovering"})


class PendingSync(PendingRequest, kw_only=True):
    """One pending call."""

    backoff: int = _MIN_BACKOFF_NS
    #: The last of the records that it waits for, at any shard.
    last: RecordId
    #: The record of each open request, by request number.
    open: dict[int, RecordId] = msgspec.field(default_factory=dict)


class Syncs(PendingRequests[PendingSync]):
    """The pending `sync` calls of a client."""

    MAX_BACKOFF_NS: ClassVar[int] = 500 * NS_PER_MS

    def __init__(
        self, context: StepContext, routing: Routing, windows: Mapping[int, ShardWindow]
    ) -> None:
        super().__init__(context, routing)
        self._windows: Final = windows

    @property
    def _last_records(self) -> list[RecordId]:
        """The last record of this client at each shard, in each view since its last `sync`.

        Servers lose the end of a view: if its last record is durable, all are.
        """
        return [
            RecordId(gsn, shard)
            for shard, window in self._windows.items()
            for gsn in window.highest_gsns.values()
        ]

    def _is_synced(self, rid: RecordId) -> bool:
        """Whether an earlier call found a record on stable storage."""
        window = self._windows.get(rid.shard)
        return window is not None and rid.gsn in window.synced_gsns

    def _forget_synced(self, rid: RecordId) -> None:
        """Forget the records that are known to be on stable storage, except the last of them.

        That one is the result of the next call. It may differ from the newest reply's record,
        because a reply of an older view may arrive late. A reply about a later view does not count
        for a record of an earlier one: that view may have lost its end.
        """
        window = self._windows.get(rid.shard)
        if window is None:  # It is another client's record.
            return
        highest_gsns, synced = window.highest_gsns, window.synced_gsns
        synced.add(rid.gsn)
        durable = [view for view, gsn in highest_gsns.items() if gsn in synced]
        for view in sorted(durable, key=highest_gsns.__getitem__)[:-1]:
            del highest_gsns[view]
        synced.intersection_update(highest_gsns.values())

    def _forget_lost(self, rid: RecordId) -> None:
        """Forget a lost record after its error was raised."""
        window = self._windows.get(rid.shard)
        if window is None:
            return
        for view in [view for view, gsn in window.highest_gsns.items() if gsn == rid.gsn]:
            window.note_lost(view)
        self._context.has_losses = True

    def start(self, call: int, request: SyncRequest) -> None:
        """Start a call."""
        records = {*self._last_records, *request.others}
        last = max(records, default=RID_GENESIS)
        unsynced = [rid for rid in records if not self._is_synced(rid)]
        if not unsynced:
            self._context.complete(call, last)
            return
        pending = PendingSync(call, request.deadline, last=last)
        self._add(pending)
        pending.open = {self._add_number(pending): rid for rid in unsynced}
        self._send(pending)

    def _send(self, pending: PendingSync) -> None:
        context, routing = self._context, self._routing
        for number, (gsn, shard) in pending.open.items():
            route = routing.route(shard)
            assert route is not None, "a record at an unknown shard"
            context.send(route.names[0], Sync(routing.cluster, shard, route.view, number, gsn))
        self._retry_at(pending, context.retry_at(pending.backoff))

    def on_synced(self, synced: Synced) -> None:
        """Handle a primary's report of its durable position."""
        pending = self._by_number.get(synced.request)
        rid = pending.open.get(synced.request) if pending is not None else None
        if pending is None or rid is None:
            return
        if synced.shard == rid.shard and synced.durable > rid.gsn:
            self._settle(pending, synced.request)

    def _settle(self, pending: PendingSync, number: int) -> None:
        """Note that the record of a request needs no further wait; complete the last one's call."""
        self._forget_synced(pending.open.pop(number))
        if not pending.open:
            self._finish(pending, pending.last)

    def _retry(self, pending: PendingSync) -> None:
        """Send a request again; ask the service about shards that may be over."""
        super()._retry(pending)
        routing, membership = self._routing, self._membership
        if membership.is_open(pending.service_request) or all(
            routing.state(rid.shard) not in _MAY_BE_OVER for rid in pending.open.values()
        ):
            return
        gsn = routing.lease.base if routing.lease is not None else 1

        def on_history(history: LeaseHistory) -> None:
            over = [n for n, rid in pending.open.items() if rid.shard in history.over]
            for number in over:
                self._settle(pending, number)

        pending.service_request = membership.send_request(
            lambda cluster, request: LeaseQuery(cluster, request, gsn), on_history
        )

    def _on_refusal(self, pending: PendingSync, refused: Refused) -> None:
        """Handle a refusal: the record is lost, or the view has changed."""
        rid = pending.open.get(refused.request)
        if rid is None:
            return
        if refused.code != "no-such-position" or refused.shard != rid.shard:
            self._routing.refresh()
            return
        self._forget_lost(rid)
        where = self._routing.describe(rid.shard)
        why = f"it was acknowledged from memory, and all servers of {where} failed at once"
        self._finish(pending, NoSuchRecordError(rid, why))

    def _on_routes_changed(self, shards: Iterable[int]) -> None:
        changed = set(shards)
        for pending in self._pending.values():
            if changed & {rid.shard for rid in pending.open.values()}:
                pending.backoff = _MIN_BACKOFF_NS // 2  # It doubles when the request is sent.
                self._retry_at(pending, self._context.now)

    def _result_at_deadline(self, pending: PendingSync) -> DeadlineError:
        shards = sorted({rid.shard for rid in pending.open.values()})
        where = ", ".join(map(self._routing.describe, shards))
        return DeadlineError(
            f"{where} did not confirm before the deadline that all records of this client are on"
            " stable storage"
        )

    def check(self) -> None:
        """Assert the invariant."""
        super().check()
        assert all(pending.open for pending in self._pending.values()), "a finished call is left"
