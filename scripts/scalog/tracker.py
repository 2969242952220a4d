"""The report hop: the stable frontiers of all shards, as their servers send them.

The servers send a frontier each time it moves, because the credit has no end. The tracker asks no
shard to give up positions: a record is covered by its own shard's frontier alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ziplog.client.client_node import ClientCore
from ziplog.client.common.requests import Preferences
from ziplog.client.reads.frontier_stream import FrontierStream
from ziplog.client.seals.settled_prefix import SettledPrefix
from ziplog.core.units import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.core.node import Effect
    from ziplog.wire import Deliver

_NO_LIMIT: Final = 2**63 - 1


class _Frontiers(SettledPrefix):
    """The streams of appends, with a credit that has no end, until `close`."""

    def __init__(self, *arguments: Any) -> None:
        """Create them; arguments as for `SettledPrefix`."""
        super().__init__(*arguments)
        #: Those that moved since the tracker returned them.
        self.moved: dict[int, int] = {}

    def start(self) -> None:
        """Follow all shards."""
        self.prepare()
        self._idle_since = NEVER

    def _new_stream(self, shard: int) -> FrontierStream:
        return FrontierStream(self._context, self._routing, shard, self.position, _NO_LIMIT)

    def on_deliver(self, stream: FrontierStream, deliver: Deliver) -> None:
        """Keep the frontier before the stream may be closed."""
        super().on_deliver(stream, deliver)
        self.moved[stream.shard] = stream.frontier


class Tracker(ClientCore):
    """A client that follows all shards between `start` and `stop`."""

    def __init__(self, client: bytes, endpoints: Sequence[str]) -> None:
        """Create it; arguments as for `ClientCore`."""
        super().__init__(client, endpoints, Preferences(lambda _payload, _key, live: live[0]))
        self._frontiers: Final = _Frontiers(
            self._context, self._routing, self._seals.numbers, self._tail_queries
        )
        self._is_started = False

    def start(self, now: int) -> list[Effect]:
        """Begin to follow the shards."""
        self._is_started, self._context.now = True, now
        self._frontiers.start()
        return self._context.pop_effects()

    def stop(self) -> list[Effect]:
        """Close the streams."""
        self._is_started = False
        self._frontiers.close()
        return self._context.pop_effects()

    def pop(self) -> dict[int, int]:
        """Return the frontiers that moved since the last time, by shard."""
        moved, self._frontiers.moved = self._frontiers.moved, {}
        return moved

    def _end_batch(self) -> None:
        super()._end_batch()
        if self._frontiers.is_dirty:
            self._frontiers.end_batch()

    def _tick(self) -> None:
        self._frontiers.is_dirty = True
        super()._tick()
        self._frontiers.tick()

    def _is_waiting(self) -> bool:
        return self._is_started

    def check(self) -> None:
        """Assert the invariants."""
        super().check()
        self._frontiers.check()
