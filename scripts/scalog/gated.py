"""A gated client: what it inserts and receives counts once a cut of the ordering layer covers it.

The core holds two things until the cut's frontier of their shard has passed them: the answer to an
insert, and the records of a subscription. In Scalog a storage server waits for the cut and answers
then, which is one more message delay; here the client gets the cut itself. So the gate is faster
than Scalog on the same code would be. A held answer does not end at the call's deadline.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import ziplog.aio
from scalog.messages import Cut, Follow, decode
from scalog.ordering import FOLLOW_NS, Frontiers, raise_to
from ziplog.client import blocking_base
from ziplog.client.client_node import ClientCore
from ziplog.client.common.requests import InsertRequest
from ziplog.client.engines.asyncio_engine import AsyncioEngine
from ziplog.client.engines.blocking_engine import BlockingEngine
from ziplog.core.node import Call, Cancelled, Complete, Received
from ziplog.wire import Deliver

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ziplog.client.common.requests import Request
    from ziplog.core.node import Effect, Event
    from ziplog.types import RecordId
    from ziplog.wire import InsertAck


class GatedCore(ClientCore):
    """A client core behind the gate."""

    def __init__(self, layer: Sequence[str], *arguments: Any) -> None:
        """Create it; `layer`: endpoints of the layer's nodes; the others as for `ClientCore`."""
        super().__init__(*arguments)
        self._endpoints: Final = layer
        #: The connections to the layer, and when to send `Follow` next.
        self._layer: list[bytes] = []
        self._follow_at = 0
        #: The connection to the node that sent the last cut.
        self.leader = b""
        self._cut: Final[Frontiers] = {}
        #: The pending calls of inserts.
        self._gated: Final[set[int]] = set()
        self._held_answers: list[tuple[list[RecordId], Complete]] = []
        #: By server: its deliveries in order, from the first one that is held, each with its shard
        #: and last position.
        self._held: Final[dict[bytes, deque[tuple[int, int, Received]]]] = {}

    def step(self, event: Event, now: int) -> list[Effect]:
        """Take one event; see `ziplog.core.node`."""
        if now >= self._follow_at:
            self._follow(now)
        if isinstance(event, Received):
            message = event.message
            if isinstance(message, Cut):
                return self._on_cut(event.src, message, now)
            if isinstance(message, Deliver):
                queue = self._held.setdefault(event.src, deque())
                if queue or not self._is_covered(message.shard, message.frontier - 1):
                    queue.append((message.shard, message.frontier - 1, event))
                    return self._context.pop_effects()
        elif isinstance(event, Call) and isinstance(event.request, InsertRequest):
            self._gated.add(event.id)
        elif isinstance(event, Cancelled):
            self._gated.discard(event.id)
        return self._without_held(super().step(event, now))

    def step_call(self, number: int, request: Request, now: int) -> list[Effect]:
        """Do the same as `step(Call(number, request), now)`."""
        return self.step(Call(number, request), now)

    def step_ack(self, src: bytes, ack: InsertAck, now: int) -> list[Effect]:
        """Do the same as `step(Received(src, ack), now)`."""
        return self.step(Received(src, ack), now)

    def next_wakeup(self) -> int | None:
        """Return when this node wants to be woken."""
        theirs = super().next_wakeup()
        return self._follow_at if theirs is None else min(theirs, self._follow_at)

    def _follow(self, now: int) -> None:
        """Ask all nodes of the layer for cuts."""
        if not self._layer:
            self._layer = [self._context.connect(endpoint) for endpoint in self._endpoints]
        for name in self._layer:
            self._context.send(name, Follow(0))
        self._follow_at = now + FOLLOW_NS // 4

    def _is_covered(self, shard: int, gsn: int) -> bool:
        return gsn < self._cut.get(shard, 0)

    def _on_cut(self, src: bytes, cut: Cut, now: int) -> list[Effect]:
        """Release what a cut covers."""
        self.leader = src
        raise_to(self._cut, cut.frontiers)
        effects = [*self._context.pop_effects()]  # it may be the list of the next step
        for queue in self._held.values():
            while queue and self._is_covered(*queue[0][:2]):
                effects += super().step(queue.popleft()[2], now)
        held, self._held_answers = self._held_answers, []
        for rids, answer in held:
            effects += self._answer(rids, answer)
        return effects

    def _without_held(self, effects: list[Effect]) -> list[Effect]:
        """Return effects without the answers that no cut covers."""
        released: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Complete) and effect.id in self._gated:
                self._gated.discard(effect.id)
                if not isinstance(effect.result, Exception):
                    released += self._answer(effect.result, effect)
                    continue
            released.append(effect)
        return released

    def _answer(self, rids: list[RecordId], answer: Complete) -> list[Effect]:
        """Return an answer if the cut covers its records, or keep it."""
        if all(self._is_covered(rid.shard, rid.gsn) for rid in rids):
            return [answer]
        self._held_answers.append((rids, answer))
        return []


@contextmanager
def installed(layer: Sequence[str]) -> Iterator[None]:
    """Put the clients of the log that this process connects behind a gate."""
    core = partial(GatedCore, layer)
    blocking = partial(BlockingEngine, decode=decode)
    asynchronous = partial(AsyncioEngine, decode=decode)
    with (
        patch.multiple(blocking_base, ClientCore=core, BlockingEngine=blocking),
        patch.multiple(ziplog.aio, ClientCore=core, AsyncioEngine=asynchronous),
    ):
        yield
