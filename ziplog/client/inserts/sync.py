"""Waiting until what this client inserted is on stable storage (docs/protocol.md, sections 4, 5).

    primaries asked --durable beyond our last record--> that shard done; all done --> answered

Rules: each shard's primary is asked again, with growing pauses, and at once when the shard has
another view; what is durable stays so, so an answer of any view counts. A record that a shard has
lost fails the call, once. Invariant: a call under way has a question that is not answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

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

_MS: Final = 1_000_000
_MIN_BACKOFF_NS: Final = 20 * _MS
_MAX_BACKOFF_NS: Final = 500 * _MS


class PendingSync(msgspec.Struct):
    """One call under way."""

    number: int
    deadline: int
    #: The last record of this client, of all shards.
    last: RecordId
    #: The records that are asked for, by the number of the question.
    open: dict[int, RecordId]
    retry_at: int = 0
    backoff: int = _MIN_BACKOFF_NS


class Syncs:
    """All such calls of a client."""

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
        """Whether a call is under way."""
        return bool(self._pending)

    @property
    def _unsynced(self) -> list[RecordId]:
        """The last record of this client at each shard, in each view since it last synced there.

        What servers lose together is the end of a view: if its last record is there, all are.
        """
        return [
            RecordId(gsn, shard)
            for shard, window in self._windows.items()
            for gsn in window.highest_gsns.values()
        ]

    def _forget_synced(self, rid: RecordId) -> None:
        """All up to a record of its shard is on stable storage.

        The last one stays: it tells the next call how far this client has come. It need not be the
        one that was heard of last: who asks for a record may hear of an older view's late.
        """
        highest_gsns = self._windows[rid.shard].highest_gsns
        durable = [view for view, gsn in highest_gsns.items() if gsn <= rid.gsn]
        for view in sorted(durable, key=highest_gsns.__getitem__)[:-1]:
            del highest_gsns[view]

    def _forget_lost(self, rid: RecordId) -> None:
        """A record is lost, and its user was told."""
        highest_gsns = self._windows[rid.shard].highest_gsns
        for view in [view for view, gsn in highest_gsns.items() if gsn == rid.gsn]:
            del highest_gsns[view]

    def start(self, number: int, request: SyncRequest) -> None:
        """Take a call."""
        context, unsynced = self._context, self._unsynced
        if not unsynced:
            context.complete(number, RID_GENESIS)
            return
        open_requests = {context.request(): rid for rid in unsynced}
        pending = PendingSync(number, request.deadline, max(unsynced), open_requests)
        self._pending[number] = pending
        context.set_timer(request.deadline)
        self._send(pending)

    def cancel(self, number: int) -> None:
        """The user waits no longer."""
        self._pending.pop(number, None)

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
        """Take a primary's word on how far its shard is durable."""
        pending = self._pending_of(synced.request)
        if pending is None:
            return
        rid = pending.open[synced.request]
        if synced.shard != rid.shard or synced.durable <= rid.gsn:
            return
        del pending.open[synced.request]
        self._forget_synced(rid)
        if not pending.open:
            del self._pending[pending.number]
            self._context.complete(pending.number, pending.last)

    def on_refused(self, refused: Refused) -> bool:
        """Take a refusal: a record is lost, or its shard has another view; False: of no call."""
        pending = self._pending_of(refused.request)
        if pending is None:
            return False
        rid = pending.open[refused.request]
        if refused.code != "no-such-position" or refused.shard != rid.shard:
            self._routing.refresh()
            return True
        del self._pending[pending.number]
        self._forget_lost(rid)
        where = self._routing.describe(rid.shard)
        why = f"it was acknowledged from the memory of {where}, all of whose servers failed at once"
        self._context.complete(pending.number, NoSuchRecordError(rid, why))
        return True

    def _on_routes_changed(self, shards: Iterable[int]) -> None:
        changed = set(shards)
        for pending in self._pending.values():
            if changed & {rid.shard for rid in pending.open.values()}:
                pending.backoff = _MIN_BACKOFF_NS
                pending.retry_at = self._context.now
                self._context.set_timer(self._context.now)

    def tick(self) -> None:
        """Ask again what is due; end what is late."""
        context = self._context
        for number, pending in list(self._pending.items()):
            if context.now >= pending.deadline:
                del self._pending[number]
                shards = sorted({rid.shard for rid in pending.open.values()})
                who = ", ".join(map(self._routing.describe, shards))
                context.complete(
                    pending.number,
                    DeadlineError(
                        f"{who} did not confirm before the deadline that all records of this client"
                        " are on stable storage"
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
            assert pending.open, "a call that is done was not answered"
            assert self._context.next_timer <= min(pending.retry_at, pending.deadline)
