"""Early streams: a primary sends what it has decided, before that is stable.

A reader that speculates takes these units for what the log will have, and compares them with the
stable ones later. Rules: only a primary that is up in the stream's view serves it; a stream ends
with the view. The units decided in a batch are sent at its end, and do not wait for the disk.

Invariants: what was sent is a prefix of this view's decisions (J3), and below the decided frontier
(J4). See docs/protocol.md, section 18.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from shard.serving.subscription import (
    BATCH_WORK,
    MAX_CREDIT_BYTES,
    MAX_DELIVER_BYTES,
    SILENCE_NS,
    Key,
    Part,
    Subscription,
    stable_part,
    units_of,
)
from shard.state.decision_log import end_of
from ziplog.segments.entry import BusyError, UnreadableError
from ziplog.wire import Early

if TYPE_CHECKING:
    from collections.abc import Callable

    from shard.state.replica_state import ReplicaState
    from ziplog.core.entries import Unit
    from ziplog.wire import Credit, Subscribe


class EarlyStreams:
    """The early streams of a replica; only a primary has any."""

    def __init__(self, state: ReplicaState, on_change: Callable[[], None]) -> None:
        """Create it without streams; `on_change` is called when one is opened or dropped."""
        self._state: Final = state
        self._on_change: Final = on_change
        self.streams: Final[dict[Key, Subscription]] = {}
        #: Streams to which not everything decided was sent.
        self._lagging: Final[dict[Key, Subscription]] = {}
        #: The view of the streams.
        self._view = state.view
        #: The last entry and the decided frontier that the other streams were sent, and whether
        #: missing leases held that frontier back.
        self._last = 0
        self._frontier = 0
        self._is_held_back = True

    @property
    def _decided_frontier(self) -> int:
        """The first owned position that is not decided, within the leases held."""
        clock = self._state.clock
        return max(self._frontier, min(clock.next_owned(self._state.stream.end), clock.limit))

    # --- messages ---

    def subscribe(self, route: bytes, message: Subscribe, now: int) -> None:
        """Open a stream; a repetition of the message renews it."""
        state, number = self._state, message.subscription
        if state.server != 0 or state.server_state != "up":
            state.refuse(route, number, "not-ready", "only a primary that is up has early streams")
            return
        if message.view != state.view:
            state.refuse(route, number, "wrong-view", f"the view is {state.view}")
            return
        self._begin_view()
        key = (message.client, number)
        stream = self.streams.get(key)
        if stream is None:
            credit = min(message.credit, MAX_CREDIT_BYTES)
            stream = Subscription(route, number, message.start, credit, now)
            self.streams[key] = self._lagging[key] = stream
            self._on_change()
        stream.last_seen = now
        self._answer(key, stream)

    def _answer(self, key: Key, stream: Subscription) -> None:
        if key in self._lagging:
            stream.is_asked = True  # The end of the batch answers.
        else:
            self._send(stream, Part([], stream.sent, 0, 0))

    def _begin_view(self) -> None:
        """Forget the decisions of an earlier view, whose streams were closed."""
        if self._view != self._state.view:
            assert not self.streams, "an early stream outlived its view"
            self._view, self._last, self._frontier = self._state.view, 0, 0
            self._is_held_back = True

    def renew(self, route: bytes, message: Credit, now: int) -> None:
        """Renew a stream, and add credit."""
        key = (message.client, message.subscription)
        stream = self.streams[key]
        if self._state.server_state != "up":
            self._refuse(key, stream)
            return
        stream.route, stream.last_seen = route, now
        stream.add_credit(message.credit, MAX_CREDIT_BYTES)
        self._answer(key, stream)

    def drop(self, key: Key) -> None:
        """Drop a stream."""
        del self.streams[key]
        self._lagging.pop(key, None)
        self._on_change()

    def _refuse(self, key: Key, stream: Subscription) -> None:
        state = self._state
        state.refuse(stream.route, stream.id, "not-ready", "the server begins another view")
        self.drop(key)

    def close_all(self) -> None:
        """Close all streams: the view ends."""
        for key, stream in list(self.streams.items()):
            self._refuse(key, stream)

    def on_trim(self) -> None:
        """Notify the streams that are below the new trim point."""
        for key, stream in list(self.streams.items()):
            if stream.notify_if_trimmed(self._state):
                self.drop(key)

    def drop_idle(self, now: int) -> None:
        """Drop the streams whose readers sent no message for too long."""
        for key, stream in list(self.streams.items()):
            if now - stream.last_seen >= SILENCE_NS:
                self.drop(key)

    # --- units ---

    @property
    def has_work(self) -> bool:
        """Whether `on_batch_end` has more units to send."""
        return self._state.server_state == "up" and any(
            stream.is_asked or stream.used < stream.credit for stream in self._lagging.values()
        )

    @property
    def needs_store(self) -> bool:
        """Whether `on_batch_end` reads stable units from the store."""
        return self._state.stream.stable > self._last or self.has_work

    def on_batch_end(self) -> None:
        """Send what was decided since the last batch."""
        state = self._state
        if state.server_state != "up":
            return
        stream, frontier = state.stream, self._decided_frontier
        was_held_back, self._is_held_back = self._is_held_back, stream.end > frontier
        if frontier != self._frontier:
            is_all_news = not (was_held_back or self._is_held_back) and stream.stable <= self._last
            news = islice(stream.window, self._last - stream.stable, None) if is_all_news else ()
            units, size = units_of(news)
            for key, reader in self.streams.items():
                if key in self._lagging:
                    continue
                fits = reader.used + size <= reader.credit and size <= MAX_DELIVER_BYTES
                if is_all_news and fits and reader.sent == self._frontier:
                    self._send(reader, Part(units, frontier, size, 0))
                else:
                    self._lagging[key] = reader
        self._last, self._frontier = stream.last, frontier
        left = BATCH_WORK
        for key, reader in list(self._lagging.items()):
            if left > 0 or reader.is_asked:
                left -= self._send_part(key, reader, left)

    def _send_part(self, key: Key, stream: Subscription, max_entries: int) -> int:
        """Send the next part, of at most `max_entries`, or the answer; return the work."""
        state, frontier = self._state, self._decided_frontier
        if stream.notify_if_trimmed(state):
            self.drop(key)
            return 0
        part = Part([], stream.sent, 0, 0)
        if max_entries > 0 and stream.used < stream.credit and stream.sent < frontier:
            try:
                limit = min(MAX_DELIVER_BYTES, stream.credit - stream.used)
                part = self._decided_part(stream.sent, limit, max_entries)
            except UnreadableError as error:
                if not isinstance(error, BusyError):
                    state.damaged = (stream.sent, error)
                self._refuse(key, stream)
                return 0
            self._lagging[key] = self._lagging.pop(key)  # Others are first in the next batch.
        if part.stop >= frontier:
            del self._lagging[key]
        if stream.is_asked or part.stop > stream.sent:
            self._send(stream, part)
        return part.work

    def _decided_part(self, start: int, limit: int, max_entries: int) -> Part:
        """Return decided units from `start` on; arguments as of `stable_part`."""
        state, frontier = self._state, self._decided_frontier
        units: list[Unit] = []
        reached, size, count = start, 0, 0
        if start < state.frontier:
            units, reached, size, count = stable_part(state, start, limit, max_entries)
            if reached < state.frontier:
                return Part(units, reached, size, count)
        for entry in state.stream.window:
            end = end_of(entry, reached)
            if end <= reached:
                continue
            added, more = units_of([entry])
            if added and added[0].gsns[0] >= frontier:
                break
            if count >= max_entries or (units and size + more > limit):
                return Part(units, reached, size, count)
            count += 1
            units += added
            size += more
            reached = min(end, frontier)
        return Part(units, max(reached, frontier), size, count)

    def _send(self, reader: Subscription, part: Part) -> None:
        state, stop, units = self._state, max(part.stop, reader.sent), part.units
        start, leases = reader.advance(state, stop)
        reader.is_asked = False
        reader.used += part.size
        state.counters.delivered_records += sum(len(unit.gsns) for unit in units)
        state.counters.delivered_bytes += part.size
        state.send(
            reader.route,
            Early(
                state.cluster, state.shard, state.view, state.server, reader.id,
                start, stop, units, leases, self._decided_frontier,
            ),
        )  # fmt: skip

    def check(self) -> None:
        """Assert the invariants."""
        state = self._state
        if not self.streams:
            assert not self._lagging
            return
        assert self._lagging.keys() <= self.streams.keys()
        assert state.server == 0, "a backup has an early stream"
        if state.server_state == "up":
            assert self._view == state.view, "an early stream outlived its view"
            assert self._last <= state.stream.last, "an early stream has what was not decided"
            assert self._frontier <= self._decided_frontier
            clock, end = state.clock, state.stream.end
            is_known = clock.lease_of(end) is not None
            assert not is_known or clock.next_owned(end) >= self._frontier, "it is not decided"
            for key, stream in self.streams.items():
                assert key in self._lagging or stream.sent >= self._frontier
