"""`sync`: waits until the client's inserts are on stable storage (docs/protocol.md, 4 and 5).

    primaries asked --durable beyond our last record--> shard done; all shards done --> completed

Rules: the client asks each shard's primary again, with a growing backoff, and at once after a view
change. Durable records stay durable, so a reply of any view counts. A lost record fails one call.

Invariant: a pending call has an open request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from ziplog.core.units import NS_PER_MS
from ziplog.errors import DeadlineError, NoSuchRecordError
from ziplog.types import RID_GENESIS, RecordId
from ziplog.wire import Sync

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ziplog.client.common.requests import SyncRequest
    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.inserts.inflight import ShardWindow
    from ziplog.wire import Refused, Synced

_MIN_BACKOFF_NS: Final = 20 * NS_PER_MS
_MAX_BACKOFF_NS: Final = 500 * NS_PER_MS


class PendingSync(msgspec.Struct):
    """One pending call."""

    call: int
    deadline: int
    #: The last record of this client at any shard.
    last: RecordId
    #: The record of each open request, by request number.
    open: dict[int, RecordId]
    retry_at: int = 0
    backoff: int = _MIN_BACKOFF_NS


class Syncs:
    """The pending `sync` calls of a client."""

    def __init__(
        self, context: StepContext, routing: Routing, windows: Mapping[int, ShardWindow]
    ) -> None:
        self._context: Final = context
        self._routing: Final = routing
        self._windows: Final = windows
        #: By call.
        self._pending: Final[dict[int, PendingSync]] = {}
        routing.on_change.append(self._on_routes_changed)

    @property
    def waiting(self) -> bool:
        """Whether a call is pending."""
        return bool(self._pending)

    @property
    def _unsynced(self) -> list[RecordId]:
        """The last record of this client at each shard, in each view since its last `sync`.

        Servers lose the end of a view: if its last record is durable, all are.
        """
        return [
            RecordId(gsn, shard)
            for shard, window in self._windows.items()
            for gsn in window.highest_gsns.values()
        ]

    def _forget_synced(self, rid: RecordId) -> None:
        """Forget the records up to one that is on stable storage, except the last one.

        The last one is the result of the next call. It may differ from the newest reply's record,
        because a reply of an older view may arrive late.
        """
        highest_gsns = self._windows[rid.shard].highest_gsns
        durable = [view for view, gsn in highest_gsns.items() if gsn <= rid.gsn]
        for view in sorted(durable, key=highest_gsns.__getitem__)[:-1]:
            del highest_gsns[view]

    def _forget_lost(self, rid: RecordId) -> None:
        """Forget a lost record after its error was raised."""
        highest_gsns = self._windows[rid.shard].highest_gsns
        for view in [view for view, gsn in highest_gsns.items() if gsn == rid.gsn]:
            del highest_gsns[view]

    def start(self, call: int, request: SyncRequest) -> None:
        """Start a call."""
        context, unsynced = self._context, self._unsynced
        if not unsynced:
            context.complete(call, RID_GENESIS)
            return
        open_requests = {context.request(): rid for rid in unsynced}
        pending = PendingSync(call, request.deadline, max(unsynced), open_requests)
        self._pending[call] = pending
        context.set_timer(request.deadline)
        self._send(pending)

    def cancel(self, call: int) -> None:
        """Cancel a call."""
        self._pending.pop(call, None)

    def _send(self, pending: PendingSync) -> None:
        context, routing = self._context, self._routing
        for number, (gsn, shard) in pending.open.items():
            route = routing.route(shard)
            assert route is not None, "a record at an unknown shard"
            context.send(route.names[0], Sync(routing.cluster, shard, route.view, number, gsn))
        pending.retry_at = context.now + pending.backoff
        pending.backoff = min(pending.backoff * 2, _MAX_BACKOFF_NS)
        context.set_timer(pending.retry_at)

    def _pending_of(self, number: int) -> PendingSync | None:
        return next((s for s in self._pending.values() if number in s.open), None)

    def on_synced(self, synced: Synced) -> None:
        """Handle a primary's report of its durable position."""
        pending = self._pending_of(synced.request)
        if pending is None:
            return
        rid = pending.open[synced.request]
        if synced.shard != rid.shard or synced.durable <= rid.gsn:
            return
        del pending.open[synced.request]
        self._forget_synced(rid)
        if not pending.open:
            del self._pending[pending.call]
            self._context.complete(pending.call, pending.last)

    def on_refused(self, refused: Refused) -> bool:
        """Handle a refusal: the record is lost, or the view has changed; False if not ours."""
        pending = self._pending_of(refused.request)
        if pending is None:
            return False
        rid = pending.open[refused.request]
        if refused.code != "no-such-position" or refused.shard != rid.shard:
            self._routing.refresh()
            return True
        del self._pending[pending.call]
        self._forget_lost(rid)
        where = self._routing.describe(rid.shard)
        why = f"it was acknowledged from memory, and all servers of {where} failed at once"
        self._context.complete(pending.call, NoSuchRecordError(rid, why))
        return True

    def _on_routes_changed(self, shards: Iterable[int]) -> None:
        changed = set(shards)
        for pending in self._pending.values():
            if changed & {rid.shard for rid in pending.open.values()}:
                pending.backoff = _MIN_BACKOFF_NS
                pending.retry_at = self._context.now
                self._context.set_timer(self._context.now)

    def tick(self) -> None:
        """Retry the requests that are due; end the calls at their deadlines."""
        context = self._context
        for call, pending in list(self._pending.items()):
            if context.now >= pending.deadline:
                del self._pending[call]
                shards = sorted({rid.shard for rid in pending.open.values()})
                where = ", ".join(map(self._routing.describe, shards))
                context.complete(
                    pending.call,
                    DeadlineError(
                        f"{where} did not confirm before the deadline that all records of this"
                        " client are on stable storage"
                    ),
                )
                continue
            if context.now >= pending.retry_at:
                context.counters.retries += 1
                self._routing.refresh()
                self._send(pending)
            context.set_timer(min(pending.retry_at, pending.deadline))

    def check(self) -> None:
        """Assert the invariant."""
        for pending in self._pending.values():
            assert pending.open, "a finished call was not completed"
            assert self._context.next_timer <= min(pending.retry_at, pending.deadline)
