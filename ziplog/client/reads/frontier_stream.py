"""The stream of one shard from a replica: what `Deliver` messages say about its positions.

    opened --Deliver at the frontier--> opened;  --gap, silence, refusal, new view--> reopened

Rules: only a `Deliver` that starts at the frontier counts. An older one is a duplicate; a later one
shows a loss, so the client reopens the stream at the frontier under a new number. What a server of
an older view delivers counts, because it is stable; but that server gets no new records, so the
client changes to another replica. The silence that counts as a failure grows up to fourfold while
all replicas are silent. A *bare* stream carries no units, only frontiers, and its credit
is a position: the server sends frontiers until it has sent one above it.

Invariant: the frontier never decreases. See docs/protocol.md, sections 7, 11 and 17.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from ziplog.core.distance import stream_silence_ns, want_interval_ns
from ziplog.core.units import NS_PER_MS, NS_PER_S
from ziplog.wire import Credit, Deliver, Early, Subscribe, Unsubscribe, Want

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.client.common.routing import Route, Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.core.entries import Unit
    from ziplog.wire import StreamKind

#: Interval between `Credit` messages.
_RENEW_INTERVAL_NS: Final = 500 * NS_PER_MS
#: Interval before a refused stream is reopened; it doubles up to the last value.
_MIN_BACKOFF_NS: Final = 20 * NS_PER_MS
_MAX_BACKOFF_NS: Final = NS_PER_S
#: How often the silence that ends an opening is doubled at most.
_MAX_DOUBLINGS: Final = 2
#: Interval between `Want` messages to a shard that is not available.
_WANT_UNAVAILABLE_NS: Final = 500 * NS_PER_MS


class FrontierStream:
    """A bare stream: the frontier of one shard."""

    KIND: ClassVar[StreamKind] = "frontier"
    #: The message of this kind of stream.
    MESSAGE: ClassVar[type[Deliver | Early]] = Deliver

    def __init__(
        self, context: StepContext, routing: Routing, shard: int, start: int, credit: int = 0
    ) -> None:
        self._context: Final = context
        self._routing: Final = routing
        self.shard: Final = shard
        #: The number of the server's subscription; each opening has its own.
        self.number = 0
        self.view = 0
        self._name = b""
        #: The replicas of this view in the order in which to open the stream, and how many of them
        #: failed.
        self._order: list[int] = []
        self._failed = 0
        #: Openings that ended in silence since the last quick answer.
        self._silences = 0
        #: Everything of the shard below it was received.
        self.frontier = start
        #: The end of what the server could have sent; 0 before its first message.
        self.stable = 0
        #: The position, or the total of bytes, up to which the server may send.
        self._granted = credit
        #: The send time of an unanswered message; 0: none.
        self._unanswered_since = 0
        self._renew_at = 0
        #: When to reopen it after a refusal; 0: it is open.
        self._reopen_at = 0
        self._backoff = _MIN_BACKOFF_NS
        #: The position that the shard was asked to decide up to, and when to ask again.
        self._wanted = 0
        self._want_due = 0

    # --- opening ---

    def open(self, position: int) -> None:
        """Open or reopen the stream at its frontier, but at `position` at least."""
        context, routing = self._context, self._routing
        self.frontier = max(self.frontier, position)
        route = routing.route(self.shard)
        assert route is not None, "a member without a placement"
        self.close()
        if route.view != self.view:
            self._failed = self._silences = 0
        self.number = context.request()
        self.view = route.view
        self._name = self._replica(route)
        self._granted = self._first_credit()
        self._unanswered_since = context.now
        self._renew_at = context.now + _RENEW_INTERVAL_NS
        self._reopen_at = self._want_due = 0
        context.set_timer(self._renew_at)
        context.send(
            self._name,
            Subscribe(
                routing.cluster, self.shard, route.view, context.client, self.number,
                self.frontier, self._granted, self.KIND,
            ),
        )  # fmt: skip

    def _replica(self, route: Route) -> bytes:
        """Return the server to subscribe to."""
        if not self._failed:
            self._order = self._routing.stream_order(route)
        return route.names[self._order[self._failed % len(self._order)]]

    def _first_credit(self) -> int:
        """Return the credit of a stream that is opened."""
        return self._granted

    def reopen_later(self) -> None:
        """Reopen the stream at the next replica after a backoff, because this server refused it."""
        self._failed += 1
        self._routing.proximity.on_failure(self._name)
        self._reopen_at = self._context.now + self._backoff
        self._backoff = min(self._backoff * 2, _MAX_BACKOFF_NS)
        self._context.set_timer(self._reopen_at)

    def close(self) -> None:
        """Unsubscribe at the server."""
        if self.number:
            message = Unsubscribe(
                self._routing.cluster, self.shard, self._context.client, self.number
            )
            self._context.send(self._name, message)

    # --- receiving ---

    def on_deliver(self, deliver: Deliver | Early) -> bool:
        """Take a `Deliver`; return False if the stream must be reopened."""
        since, now = self._unanswered_since, self._context.now
        if since and now - since < stream_silence_ns(self._context.rtt_ms):
            self._silences = 0
        self._unanswered_since = 0
        if deliver.view >= self.view:
            self._backoff = _MIN_BACKOFF_NS
        elif not self._reopen_at:
            self.reopen_later()
        if deliver.start != self.frontier:
            return deliver.start < self.frontier
        is_kind = type(deliver) is self.MESSAGE
        if not is_kind or deliver.shard != self.shard or not self._is_sound(deliver):
            self._context.counters.protocol_errors += 1
            self._failed += 1
            return False
        self._take_units(deliver.units)
        self.frontier = deliver.frontier
        self.stable = max(deliver.stable, deliver.frontier)
        return True

    def _is_sound(self, deliver: Deliver | Early) -> bool:
        """Whether the message is one of this kind of stream."""
        return not deliver.units and deliver.frontier >= deliver.start

    def _take_units(self, units: Sequence[Unit]) -> None:
        """Keep the units of a `Deliver`."""

    # --- messages to the server ---

    def grant(self, gsn: int, *, known: bool = False) -> None:
        """Request the frontiers up to the first one above `gsn`; `known`: the server sends them.

        What a server may have forgotten is requested with the next keep-alive.
        """
        if gsn > self._granted:
            self._granted = gsn
            if not known and not self._reopen_at:
                self._send_credit()

    def _send_credit(self) -> None:
        context = self._context
        self._unanswered_since = self._unanswered_since or context.now
        self._renew_at = context.now + _RENEW_INTERVAL_NS
        context.set_timer(self._renew_at)
        context.send(
            self._name,
            Credit(
                self._routing.cluster, self.shard, self.view, context.client, self.number,
                self._granted,
            ),
        )  # fmt: skip

    def send_want(self, gsn: int) -> None:
        """Ask the primary to decide its positions up to `gsn`, because readers wait (D49)."""
        context = self._context
        if self.stable > gsn:
            return
        if self._wanted >= self.frontier and context.now < self._want_due:
            context.set_timer(self._want_due)
            return
        route = self._routing.route(self.shard)
        assert route is not None, "a member without a placement"
        self._wanted = gsn
        self._want_due = context.now + (
            _WANT_UNAVAILABLE_NS if route.is_unavailable else want_interval_ns(context.rtt_ms)
        )
        context.set_timer(self._want_due)
        context.send(route.names[0], Want(self._routing.cluster, self.shard, 0, gsn))

    def tick(self) -> bool:
        """Send the credit that is due; return False if the stream must be reopened."""
        context = self._context
        if self._reopen_at:
            context.set_timer(self._reopen_at)
            return context.now < self._reopen_at
        since = self._unanswered_since
        if since and context.now - since >= self._longest_silence_ns():
            self._failed += 1
            self._silences += 1
            self._routing.proximity.on_failure(self._name)
            self._routing.refresh()
            return False
        if context.now >= self._renew_at:
            self._send_credit()
        context.set_timer(self._renew_at)
        return True

    def _longest_silence_ns(self) -> int:
        """Return the silence after which to reopen the stream.

        It doubles once all replicas were silent: they may be busy, and an answer to a stream that
        was reopened meanwhile is lost.
        """
        doublings = min(self._silences // max(len(self._order), 1), _MAX_DOUBLINGS)
        return stream_silence_ns(self._context.rtt_ms) << doublings

    def check(self) -> None:
        """Assert the invariant."""
        assert self._context.next_timer <= (self._reopen_at or self._renew_at)
