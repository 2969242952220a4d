"""Waiting until what this client inserted is on stable storage (docs/protocol.md, sections 4, 5).

    primaries asked --durable beyond our last record--> that shard done; all done --> answered

Rules: each shard's primary is asked again, with growing pauses, and at once when the shard has
another view; what is durable stays so, so an answer of any view counts. Invariant: a call under way
has a shard that is not done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from ziplog.errors import DeadlineError
from ziplog.types import RID_GENESIS, RecordId
from ziplog.wire import Sync

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ziplog.client.insert import Inserts
    from ziplog.client.requests import SyncRequest
    from ziplog.client.routing import Routing
    from ziplog.client.turn import Turn
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
    #: The last gsn of this client at each shard that is not done.
    open: dict[int, int]
    retry_at: int = 0
    pause: int = _FIRST_PAUSE_NS


class Syncs:
    """All such calls of a client."""

    def __init__(self, turn: Turn, routing: Routing, inserts: Inserts) -> None:
        self._turn: Final = turn
        self._routing: Final = routing
        self._inserts: Final = inserts
        #: By the number of the question.
        self._syncings: Final[dict[int, Syncing]] = {}
        routing.on_change.append(self._rerouted)

    @property
    def waiting(self) -> bool:
        """Whether a call is under way."""
        return bool(self._syncings)

    def start(self, call: int, request: SyncRequest) -> None:
        """Take a call."""
        turn, highest = self._turn, self._inserts.highest
        if not highest:
            turn.complete(call, RID_GENESIS)
            return
        last = max(RecordId(gsn, shard) for shard, gsn in highest.items())
        syncing = Syncing(call, request.deadline, last, highest)
        number = turn.request()
        self._syncings[number] = syncing
        turn.wake_at(request.deadline)
        self._ask(number, syncing)

    def cancel(self, call: int) -> None:
        """The user waits no longer."""
        for number in [n for n, syncing in self._syncings.items() if syncing.call == call]:
            del self._syncings[number]

    def _ask(self, number: int, syncing: Syncing) -> None:
        turn, routing = self._turn, self._routing
        for shard, gsn in syncing.open.items():
            route = routing.route(shard)
            assert route is not None, "a record at an unknown shard"
            turn.send(route.names[0], Sync(routing.cluster, shard, route.view, number, gsn))
        syncing.retry_at = turn.now + syncing.pause
        syncing.pause = min(syncing.pause * 2, _LAST_PAUSE_NS)
        turn.wake_at(syncing.retry_at)

    def on_synced(self, synced: Synced) -> None:
        """Take a primary's word on how far its shard is durable."""
        syncing = self._syncings.get(synced.request)
        if syncing is None or synced.durable <= syncing.open.get(synced.shard, synced.durable):
            return
        del syncing.open[synced.shard]
        if not syncing.open:
            del self._syncings[synced.request]
            self._turn.complete(syncing.call, syncing.last)

    def on_refused(self, refused: Refused) -> bool:
        """Take a refusal: the shard may have another view; False if it is of no call."""
        if refused.request not in self._syncings:
            return False
        self._routing.refresh()
        return True

    def _rerouted(self, shards: Iterable[int]) -> None:
        changed = set(shards)
        for syncing in self._syncings.values():
            if changed & syncing.open.keys():
                syncing.pause = _FIRST_PAUSE_NS
                syncing.retry_at = self._turn.now
                self._turn.wake_at(self._turn.now)

    def tick(self) -> None:
        """Ask again what is due; end what is late."""
        turn = self._turn
        for number, syncing in list(self._syncings.items()):
            if turn.now >= syncing.deadline:
                del self._syncings[number]
                who = ", ".join(self._routing.describe(shard) for shard in syncing.open)
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
                self._ask(number, syncing)
            turn.wake_at(min(syncing.retry_at, syncing.deadline))

    def check(self) -> None:
        """Assert the invariant."""
        for syncing in self._syncings.values():
            assert syncing.open, "a call that is done was not answered"
            assert self._turn.alarm <= min(syncing.retry_at, syncing.deadline)
