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
    from ziplog.client.common.step_context import Turn
    from ziplog.client.inserts.inflight import Lane
    from ziplog.wire import Refused, Synced

_MS: Final = 1_000_000
_FIRST_PAUSE_NS: Final = 20 * _MS
_LAST_PAUSE_NS: Final = 500 * _MS


class Syncing(msgspec.Struct):
    """One call under way."""

    call: int
    deadline: int
    #: The last record of this client, of all shards.
    last: RecordId
    #: The records that are asked for, by the number of the question.
    open: dict[int, RecordId]
    retry_at: int = 0
    pause: int = _FIRST_PAUSE_NS


class Syncs:
    """All such calls of a client."""

    def __init__(self, turn: Turn, routing: Routing, lanes: Mapping[int, Lane]) -> None:
        self._turn: Final = turn
        self._routing: Final = routing
        self._lanes: Final = lanes
        #: By call.
        self._syncings: Final[dict[int, Syncing]] = {}
        routing.on_change.append(self._rerouted)

    @property
    def waiting(self) -> bool:
        """Whether a call is under way."""
        return bool(self._syncings)

    @property
    def _unsynced(self) -> list[RecordId]:
        """The last record of this client at each shard, in each view since it last synced there.

        What servers lose together is the end of a view: if its last record is there, all are.
        """
        return [
            RecordId(gsn, shard)
            for shard, lane in self._lanes.items()
            for gsn in lane.highest.values()
        ]

    def _forget_synced(self, rid: RecordId) -> None:
        """All up to a record of its shard is on stable storage.

        The last one stays: it tells the next call how far this client has come. It need not be the
        one that was heard of last: who asks for a record may hear of an older view's late.
        """
        highest = self._lanes[rid.shard].highest
        durable = [view for view, gsn in highest.items() if gsn <= rid.gsn]
        for view in sorted(durable, key=highest.__getitem__)[:-1]:
            del highest[view]

    def _forget_lost(self, rid: RecordId) -> None:
        """A record is lost, and its user was told."""
        highest = self._lanes[rid.shard].highest
        for view in [view for view, gsn in highest.items() if gsn == rid.gsn]:
            del highest[view]

    def start(self, call: int, request: SyncRequest) -> None:
        """Take a call."""
        turn, unsynced = self._turn, self._unsynced
        if not unsynced:
            turn.complete(call, RID_GENESIS)
            return
        asked = {turn.request(): rid for rid in unsynced}
        syncing = Syncing(call, request.deadline, max(unsynced), asked)
        self._syncings[call] = syncing
        turn.wake_at(request.deadline)
        self._ask(syncing)

    def cancel(self, call: int) -> None:
        """The user waits no longer."""
        self._syncings.pop(call, None)

    def _ask(self, syncing: Syncing) -> None:
        turn, routing = self._turn, self._routing
        for number, (gsn, shard) in syncing.open.items():
            route = routing.route(shard)
            assert route is not None, "a record at an unknown shard"
            turn.send(route.names[0], Sync(routing.cluster, shard, route.view, number, gsn))
        syncing.retry_at = turn.now + syncing.pause
        syncing.pause = min(syncing.pause * 2, _LAST_PAUSE_NS)
        turn.wake_at(syncing.retry_at)

    def _asking(self, number: int) -> Syncing | None:
        return next((s for s in self._syncings.values() if number in s.open), None)

    def on_synced(self, synced: Synced) -> None:
        """Take a primary's word on how far its shard is durable."""
        syncing = self._asking(synced.request)
        if syncing is None:
            return
        rid = syncing.open[synced.request]
        if synced.shard != rid.shard or synced.durable <= rid.gsn:
            return
        del syncing.open[synced.request]
        self._forget_synced(rid)
        if not syncing.open:
            del self._syncings[syncing.call]
            self._turn.complete(syncing.call, syncing.last)

    def on_refused(self, refused: Refused) -> bool:
        """Take a refusal: a record is lost, or its shard has another view; False: of no call."""
        syncing = self._asking(refused.request)
        if syncing is None:
            return False
        rid = syncing.open[refused.request]
        if refused.code != "no-such-position" or refused.shard != rid.shard:
            self._routing.refresh()
            return True
        del self._syncings[syncing.call]
        self._forget_lost(rid)
        where = self._routing.describe(rid.shard)
        why = f"it was acknowledged from the memory of {where}, all of whose servers failed at once"
        self._turn.complete(syncing.call, NoSuchRecordError(rid, why))
        return True

    def _rerouted(self, shards: Iterable[int]) -> None:
        changed = set(shards)
        for syncing in self._syncings.values():
            if changed & {rid.shard for rid in syncing.open.values()}:
                syncing.pause = _FIRST_PAUSE_NS
                syncing.retry_at = self._turn.now
                self._turn.wake_at(self._turn.now)

    def tick(self) -> None:
        """Ask again what is due; end what is late."""
        turn = self._turn
        for call, syncing in list(self._syncings.items()):
            if turn.now >= syncing.deadline:
                del self._syncings[call]
                shards = sorted({rid.shard for rid in syncing.open.values()})
                who = ", ".join(map(self._routing.describe, shards))
                turn.complete(
                    syncing.call,
                    DeadlineError(
                        f"{who} did not confirm before the deadline that all records of this client"
                        " are on stable storage"
                    ),
                )
                continue
            if turn.now >= syncing.retry_at:
                turn.counters.retries += 1
                self._routing.refresh()
                self._ask(syncing)
            turn.wake_at(min(syncing.retry_at, syncing.deadline))

    def check(self) -> None:
        """Assert the invariant."""
        for syncing in self._syncings.values():
            assert syncing.open, "a call that is done was not answered"
            assert self._turn.alarm <= min(syncing.retry_at, syncing.deadline)
