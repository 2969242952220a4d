"""Delayed inserts: a client core with the insert latency of another log, Scalog's 900 µs (T 4.4.1).

The core delays two things until `HOLD_NS` after the insert call: at the calling client, the
acknowledgement; at a coordinator, the delivery of the record by storage servers. Neither arrives
earlier than in a log that assigns positions only then. Slower inserts are not delayed. Reads,
refusals and coordinators' responses pass at once.

A record's timestamp is the time of its insert call. Values outside a commit record have no
timestamp, and have no effect alone: only their acknowledgements are delayed.

As a program, this file takes the place of `python -m logdb`, with the delay in microseconds before
its arguments.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ziplog.client.client_node import ClientCore
from ziplog.client.common.requests import InsertRequest
from ziplog.core.entries import Body
from ziplog.core.node import Call, Cancelled, Complete, Received
from ziplog.runtime.clock import now_ns
from ziplog.wire import Deliver

if TYPE_CHECKING:
    from ziplog.client.common.requests import Request
    from ziplog.core.node import Effect, Event
    from ziplog.wire import InsertAck

#: Scalog's insert in the thesis, section 4.4.1.
SCALOG_US: Final = 900

_decode_body: Final = msgspec.msgpack.Decoder(Body).decode


class DelayedCore(ClientCore):
    """A log's client core for which inserts take `HOLD_NS` at the least."""

    HOLD_NS = SCALOG_US * 1000

    def __init__(self, *arguments: Any, wall_offset_us: int | None = None) -> None:
        """Create the core.

        Args:
            arguments: those of `ClientCore`.
            wall_offset_us: difference between the wall clock (microseconds since 1970) and the
                monotonic clock; None: the current difference.

        """
        super().__init__(*arguments)
        if wall_offset_us is None:
            wall_offset_us = (time.time_ns() - now_ns()) // 1000
        self._wall_offset_us: Final = wall_offset_us
        #: Call time of each pending insert.
        self._called: Final[dict[int, int]] = {}
        #: Acknowledgements: until when, a number, and what.
        self._acks: Final[list[tuple[int, int, Complete]]] = []
        #: By server: its deliveries in order, each with the time until which it is delayed.
        self._delivered: Final[dict[bytes, deque[tuple[int, Received]]]] = {}

    def step(self, event: Event, now: int) -> list[Effect]:
        """Take one event; see `ziplog.core.node`."""
        effects: list[Effect] = []
        for queue in self._delivered.values():
            while queue and queue[0][0] <= now:
                effects += super().step(queue.popleft()[1], now)
        if type(event) is Received and type(event.message) is Deliver:
            until = self._until(event.message, now)
            queue = self._delivered.setdefault(event.src, deque())
            if queue or until > now:
                queue.append((until, event))
                return self._without_early(effects, now)
        elif type(event) is Call and isinstance(event.request, InsertRequest):
            self._called[event.id] = now
        elif type(event) is Cancelled:
            self._called.pop(event.id, None)
        effects += super().step(event, now)
        return self._without_early(effects, now)

    def step_call(self, number: int, request: Request, now: int) -> list[Effect]:
        """Do the same as `step(Call(number, request), now)`."""
        return self.step(Call(number, request), now)

    def step_ack(self, src: bytes, ack: InsertAck, now: int) -> list[Effect]:
        """Do the same as `step(Received(src, ack), now)`."""
        return self.step(Received(src, ack), now)

    def next_wakeup(self) -> int | None:
        """Return when this node wants to be woken."""
        due = [queue[0][0] for queue in self._delivered.values() if queue]
        due += [self._acks[0][0]] if self._acks else []
        theirs = super().next_wakeup()
        if theirs is not None:
            due.append(theirs)
        return min(due, default=None)

    def _until(self, deliver: Deliver, now: int) -> int:
        """Return until when a message is held: its last record's time, and `HOLD_NS`."""
        last_us = max((_decode_body(unit.body).timestamp_us for unit in deliver.units), default=0)
        if not last_us:
            return now
        # Another process took the clocks' difference: never longer than if it came at once.
        due = (last_us - self._wall_offset_us) * 1000 + self.HOLD_NS
        return min(max(due, now), now + self.HOLD_NS)

    def _without_early(self, effects: list[Effect], now: int) -> list[Effect]:
        """Keep acknowledgements that come too early; add those that are due."""
        due: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Complete) and effect.id in self._called:
                until = self._called.pop(effect.id) + self.HOLD_NS
                if until > now and not isinstance(effect.result, Exception):
                    heappush(self._acks, (until, effect.id, effect))
                    continue
            due.append(effect)
        while self._acks and self._acks[0][0] <= now:
            due.append(heappop(self._acks)[2])
        return due


def install(hold_us: int) -> None:
    """Let coordinators and clients of LogDB that this process makes from now on hold inserts."""
    import logdb.client.core  # noqa: PLC0415 - users of the core need neither
    import logdb.coordinator.node  # noqa: PLC0415

    DelayedCore.HOLD_NS = hold_us * 1000
    logdb.client.core.ClientCore = DelayedCore  # type: ignore[misc]
    logdb.coordinator.node.ClientCore = DelayedCore  # type: ignore[misc]


if __name__ == "__main__":
    from logdb.__main__ import main

    install(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
