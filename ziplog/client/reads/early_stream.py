"""The early stream of one shard: what its primary has decided, as a part of a speculation's guess.

Rule: only the primary serves it, so it has no other replica to change to (docs/protocol.md, section
18).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ziplog.client.reads.shard_stream import ShardStream
from ziplog.wire import Deliver, Early

if TYPE_CHECKING:
    from ziplog.client.common.routing import Route, Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.core.writer_table import WriterTable
    from ziplog.wire import StreamKind


class EarlyStream(ShardStream):
    """The decided records of one shard from a position on."""

    KIND: ClassVar[StreamKind] = "early"
    MESSAGE: ClassVar[type[Deliver | Early]] = Early

    def __init__(
        self,
        context: StepContext,
        routing: Routing,
        shard: int,
        start: int,
        writers: WriterTable,
        stable: ShardStream | None = None,
    ) -> None:
        """Create a stream that continues what a stream of stable records has received."""
        super().__init__(context, routing, shard, start, writers)
        if stable is not None:
            units, self._rows = stable.unpopped()
            self.frontier = stable.frontier
            self._take_units(units)

    def _replica(self, route: Route) -> bytes:
        return route.names[0]
