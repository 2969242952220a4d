"""The settled prefix of the log: no record that is inserted later gets a position in it.

    idle --a call waits--> surveying --tail query--> following --no call for 5 s--> resting
                               ^----------- a gap in the leases, a trim ---------------'

A shard's stable frontier is final: what it has not placed below, it never will. `position` is the
minimum of the frontiers of all shards that own positions: those that a tail query names, and those
of the leases since then, without a gap. Shards that recover, leave or are silent count, too. Any
number of calls share one question to each shard (docs/protocol.md, section 17).

Invariant: `position` never decreases, and never passes the end of the known leases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from ziplog.client.reads.frontier_stream import FrontierStream
from ziplog.client.reads.lease_follower import LeaseFollower
from ziplog.client.reads.stream_set import StreamSet
from ziplog.core.units import NEVER, NS_PER_MS, NS_PER_S
from ziplog.errors import DeadlineError

if TYPE_CHECKING:
    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.reads.stream_set import Numbers
    from ziplog.client.reads.tail import LogTail, TailQueries
    from ziplog.wire import Deliver, Early, Trimmed

#: Time without a waiting call after which the streams are closed.
REST_AFTER_NS: Final = 5 * NS_PER_S
#: Time without streams after which a new tail query is cheaper than the leases since then.
FORGET_AFTER_NS: Final = 60 * NS_PER_S
#: Up to this many shards, primaries send each other hints, so questions cost little.
_FEW_SHARDS: Final = 16
#: Time from a question to the next one, for each of more shards.
_PAUSE_NS: Final = NS_PER_MS // 20
#: The number of the tail query; no call has it.
_SURVEY: Final = -1


class SettledPrefix(StreamSet[FrontierStream]):
    """What one client knows about the settled prefix."""

    def __init__(
        self, context: StepContext, routing: Routing, numbers: Numbers, tail_queries: TailQueries
    ) -> None:
        super().__init__(context, routing, numbers, 0)
        self._tail_queries: Final = tail_queries
        self._leases = LeaseFollower(context, routing, self._on_history)
        self._state: Literal["resting", "surveying", "following"] = "resting"
        #: The highest position that a call waits for.
        self.wanted = 0
        #: The highest position that a call waited for and that a shard certainly has.
        self._near = 0
        #: The shard that owns the wanted position; None: unknown.
        self._owner: int | None = None
        #: The highest position that the shards were asked for, and when to ask for a higher one.
        self._asked = 0
        self._ask_at = 0
        #: When the last call ended its wait; `NEVER`: calls wait.
        self._idle_since = 0
        self._closed_at = 0
        routing.on_change.append(self.on_routes_changed)

    # --- what calls need ---

    def prepare(self) -> None:
        """Begin to follow the shards, because a call will wait soon."""
        if self._state == "resting":
            self._resume()
        if self._idle_since != NEVER:
            self.rest()

    def want(self, gsn: int, owner: int | None) -> None:
        """Ask all shards, at the end of this batch, to settle their positions up to `gsn`.

        Args:
            gsn: a position.
            owner: the shard that has an append there. Its servers know that the client waits.

        """
        self.prepare()
        self._idle_since = NEVER
        if gsn > self.wanted:
            self.wanted, self._owner = gsn, owner
        if owner is not None or gsn < self._leases.known.stop:
            self._near = max(self._near, gsn)
        self.is_dirty = True

    def lower(self, gsn: int) -> None:
        """Note that no call waits for a position above `gsn` any more; 0: none waits.

        Primaries ignore a position far behind their leases, so it must not hide lower ones.
        """
        if gsn < self.wanted:
            self.wanted, self._owner = gsn, None
            self._asked = min(self._asked, gsn)

    def rest(self) -> None:
        """Note that no call waits any more."""
        self._idle_since = self._context.now
        self._context.set_timer(self._idle_since + REST_AFTER_NS)

    @property
    def leases_end(self) -> int:
        """The end of the known leases; 0: none is known."""
        return self._leases.known.stop

    def unsettled(self, gsn: int) -> list[int]:
        """Return the shards that may not have settled a position of theirs up to `gsn`."""
        if self._state == "surveying":
            return self._tail_queries.unanswered(_SURVEY)
        known = self._leases.known
        return sorted(
            shard
            for shard, stream in self._streams.items()
            if (owned := known.next_owned(shard, stream.frontier)) is not None and owned <= gsn
        )

    # --- beginning and end ---

    def _resume(self) -> None:
        """Continue where the streams were closed, or begin with a tail query."""
        if not self._leases.known.stop or self._context.now - self._closed_at > FORGET_AFTER_NS:
            self._survey()
        else:
            self._state = "following"
            self._open_streams()
            if self.position >= self._leases.known.stop:
                # The request for more leases ended with the streams.
                self._leases.pass_end(is_urgent=True)

    def _survey(self) -> None:
        """Query the tail. The leases name all owners from its settled position on."""
        self._close()
        self._leases.close()
        self._leases = LeaseFollower(self._context, self._routing, self._on_history)
        self._state = "surveying"
        self._tail_queries.query(_SURVEY, NEVER, self._on_tail, with_recent=False)

    def _on_tail(self, tail: LogTail | DeadlineError) -> None:
        assert not isinstance(tail, DeadlineError), "the query has no deadline"
        self._state = "following"
        self.position = max(self.position, tail.settled)
        self._leases.request(self.position)

    def _close(self) -> None:
        if self._state == "surveying":
            self._tail_queries.cancel(_SURVEY)
        self._leases.cancel()
        self._close_streams()
        self._state, self._closed_at = "resting", self._context.now

    def fail(self, _error: Exception) -> None:
        """Begin with a tail query again."""
        self._survey()

    # --- leases and streams ---

    def _on_history(self, trim: int, is_whole: bool) -> None:
        if trim > self.position or not is_whole or self._leases.known.base > self.position:
            self._survey()
            return
        self._open_streams()
        self.is_dirty = True

    def _open_streams(self) -> None:
        """Open a stream of each shard that owns positions from here on, and close the others."""
        if self._state == "following":
            self._leases.known.forget(self.position)
            self._open_members(self._leases.known.shards, self._new_stream, self._open_streams)

    def _new_stream(self, shard: int) -> FrontierStream:
        return FrontierStream(self._context, self._routing, shard, self.position, self.wanted)

    def on_deliver(self, stream: FrontierStream, deliver: Deliver | Early) -> None:
        """Handle a `Deliver` of a stream."""
        super().on_deliver(stream, deliver)
        if self._leases.extend(deliver.leases, self.position):
            self._open_streams()

    def on_trimmed(self, _stream: FrontierStream, _trimmed: Trimmed) -> None:
        """Begin with a tail query again: the leases from here on may be forgotten."""
        self._survey()

    def end_batch(self) -> None:
        """Advance after a batch of messages, and ask the shards for what calls wait for."""
        self.is_dirty = False
        frontiers = {shard: stream.frontier for shard, stream in self._streams.items()}
        position = self._leases.known.settled_end(self.position, frontiers)
        if position > self.position:
            self.position = position
            self._open_streams()
            if position >= self._leases.known.stop:
                self._leases.pass_end(is_urgent=self.wanted >= position)
        if self.wanted >= position:
            self._ask()

    def _ask(self) -> None:
        """Ask the shards that have not passed the wanted position; share one question each."""
        wanted, owner, context = self.wanted, self._owner, self._context
        if wanted >= self._leases.known.stop and self.position <= self._near < wanted:
            # Perhaps no shard has the wanted position yet: then primaries ignore the question.
            wanted, owner = self._near, None
        if self._streams and wanted != self._asked:
            if context.now < self._ask_at:
                context.set_timer(self._ask_at)
                return
            self._asked = wanted
            if len(self._streams) > _FEW_SHARDS:
                self._ask_at = context.now + _PAUSE_NS * len(self._streams)
        for shard, stream in self._streams.items():
            if stream.frontier <= wanted:
                stream.grant(wanted, known=shard == owner)
                if shard != owner:
                    stream.send_want(wanted)

    # --- time ---

    def tick(self) -> None:
        """Do the work that is due; close the streams if no call waited for long."""
        if self._state == "resting":
            return
        if self._idle_since != NEVER and self._context.now >= self._idle_since + REST_AFTER_NS:
            self._close()
            return
        if self._idle_since != NEVER:
            self._context.set_timer(self._idle_since + REST_AFTER_NS)
        self._leases.tick(self.position)
        self._tick_streams()
        self.is_dirty = True

    def close(self) -> None:
        """Close the streams: the client is closing."""
        self._close()

    def check(self) -> None:
        """Assert the invariants."""
        super().check()
        assert self._state == "following" or not self._streams
        assert self._leases.known.base <= self.position, "an owner may be unknown"
        assert (
            self._idle_since == NEVER
            or self._state == "resting"
            or (self._context.next_timer <= self._idle_since + REST_AFTER_NS)
        ), "it would never rest"
