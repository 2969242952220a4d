"""Steps of a single server in the shard model.

The effect of a step on a server depends only on that server and few numbers, so it is computed once
and cached: a search mostly consists of dictionary lookups. The names are those of
docs/spec/Shard.tla.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from tests.model.parts import NONE, NOOP, PRIMARY, Message, Server, bits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.model.parts import Frame, Slots, Step


class Arrival(NamedTuple):
    """A server's reaction to a record or a timeout."""

    step: Step
    server: int
    ack: int = 0
    message: Message | None = None


class Local:
    """The servers' local steps."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._on = frame.on
        self._bounds = frame.bounds
        self.arrivals = cache(self._arrivals)
        self.forwards = cache(self._forwards)
        self.appended = cache(self._appended)
        self.freeze = cache(self._freeze)
        self.entered = cache(self._entered)
        self.crashed = cache(self._crashed)
        self.with_stable = cache(self._with_stable)
        self.deliver = cache(self._deliver)

    # --- positions ---

    def _first(self, view: int) -> int:
        return 1 if view == 1 else self._bounds.epoch + 1

    def _last(self, view: int, grant: int) -> int:
        """Return the last position of a view; the one before its first if it has none."""
        return self._bounds.positions if grant == view else self._bounds.epoch

    def _next(self, server: Server, grant: int) -> int:
        """Return the position after the server's last filled one in its view."""
        first, last = self._first(server.view), self._last(server.view, grant)
        filled = [g for g in range(first, last + 1) if server.slots[g - 1] != NONE]
        return filled[-1] + 1 if filled else first

    def _choices(self, index: int, server: Server, grant: int) -> Iterator[int]:
        """Yield the possible slots of a new record."""
        epoch, last = self._bounds.epoch, self._last(server.view, grant)
        gsn = self._next(server, grant)
        if gsn <= last:
            yield gsn
        # A backup enters epoch 2 by its own clock; the primary decides the rest of epoch 1 first.
        if gsn <= epoch < last and (index != PRIMARY or not self._on["token"]):
            yield epoch + 1
        if index == PRIMARY and not self._on["closed-epoch"] and server.view == 1 and gsn > epoch:
            yield from (g for g in range(1, epoch + 1) if server.slots[g - 1] == NOOP)

    # --- replication ---

    def _arrivals(self, index: int, number: int, grant: int, is_answered: bool) -> list[Arrival]:
        """Insert each record that has not arrived yet, or skip.

        The last record comes only once the append of another shard returned.
        """
        server = self._frame.servers.values[number]
        found = []
        for record in range(self._bounds.records - (not is_answered)):
            if not server.seen >> record & 1:
                found += self._insert(index, server, record, grant)
        if index == PRIMARY or not self._on["primary-noops"]:
            found += self._skips(index, server, grant)
        return found

    def _insert(self, index: int, server: Server, record: int, grant: int) -> Iterator[Arrival]:
        """Ack a record at its slot, or place it."""
        value, number, ack = record + 2, self._frame.servers.number, self._frame.ack
        server = server._replace(seen=server.seen | 1 << record)
        if self._on["recognise"] and value in server.slots:
            gsn = server.slots.index(value) + 1
            step = ("InsertAgain", index, value, gsn)
            yield Arrival(step, number(server), ack(record, index, gsn, server.view))
            return
        for gsn in self._choices(index, server, grant):
            new = _put(index, server, value, gsn, gsn)
            message = Message(value, gsn, gsn, server.view) if index == PRIMARY else None
            step = ("Insert", index, value, gsn)
            yield Arrival(step, number(new), ack(record, index, gsn, server.view), message)

    def _skips(self, index: int, server: Server, grant: int) -> Iterator[Arrival]:
        """Decide no-ops up to a position, or to the end of an epoch."""
        first = self._next(server, grant)
        for last in range(first, self._last(server.view, grant) + 1):
            new = self._frame.servers.number(_put(index, server, NOOP, first, last))
            message = Message(NOOP, first, last, server.view) if index == PRIMARY else None
            yield Arrival(("Skip", index, first, last), new, 0, message)

    def _forwards(
        self, index: int, number: int, queue: int, grant: int
    ) -> list[tuple[Step, int, int, int]]:
        """Apply the next forward: (step, server, queue, ack)."""
        frame = self._frame
        server, messages = frame.servers.values[number], frame.queues.values[queue]
        found = []
        for length in range(1, len(messages) + 1):
            message = messages[length - 1]
            new, ack = server, 0
            if not self._on["views"] or message.view == server.view:
                new = self._apply(server, message, grant)
                if message.value != NOOP:
                    ack = frame.ack(message.value - 2, index, message.first, server.view)
            rest = frame.queues.number(messages[length:])
            found.append((("Forward", index, *message[:3]), frame.servers.number(new), rest, ack))
            if self._on["gapless-stream"]:
                break
        return found

    def _apply(self, server: Server, message: Message, grant: int) -> Server:
        value, first, last, _ = message
        old, slots = server.slots[first - 1], list(server.slots)
        if self._on["remove-copies"] and value != NOOP:
            slots = [NONE if held == value else held for held in slots]
        slots[first - 1 : last] = [value] * (last - first + 1)
        end = self._last(server.view, grant)
        if not self._on["no-reslot"] and old > NOOP and old != value and last + 1 <= end:
            # A displaced record takes the next slot, and moves the record there by one.
            if last + 2 <= end and slots[last] > NOOP:
                slots[last + 1] = slots[last]
            slots[last] = old
        return server._replace(slots=tuple(slots), decided=server.decided | bits(first, last))

    def _appended(self, queue: int, message: Message) -> int:
        return self._frame.queues.number((*self._frame.queues.values[queue], message))

    def held(self, server: Server) -> int:
        """Return the last position up to which the server reports the primary's decisions."""
        if self._on["decided-only"]:
            return server.decided.bit_length() - 1 if server.decided else 0
        return max((g for g, held in enumerate(server.slots, 1) if held != NONE), default=0)

    def _with_stable(self, number: int, stable: int) -> int:
        servers = self._frame.servers
        return servers.number(servers.values[number]._replace(stable=stable))

    def _deliver(self, delivered: int, number: int, frontier: int) -> int:
        """Deliver a server's records up to a frontier to subscribers."""
        known = self._frame.deliveries.values[delivered]
        slots = self._frame.servers.values[number].slots
        return self._frame.deliveries.number(known + slots[len(known) : frontier])

    # --- failures ---

    def _freeze(self, number: int, recovery: int, grant: int) -> tuple[int, Slots]:
        """Return the server after its promise, and its state, rolled forward."""
        server, limit = self._frame.servers.values[number], self._frame.settled(grant)
        keeps_guesses = self._on["roll-forward-guesses"]
        slots = [
            held if held != NONE and (keeps_guesses or server.decided >> g & 1) else NOOP
            for g, held in enumerate(server.slots[:limit], 1)
        ]
        if self._on["freeze"]:
            server = server._replace(frozen=recovery)
        rest = (NONE,) * (self._bounds.positions - limit)
        return self._frame.servers.number(server), (*slots, *rest)

    def _entered(self, slots: Slots, view: int, stable: int, grant: int) -> int:
        """Return a server with the start state of a view."""
        decided = bits(1, self._frame.settled(grant))
        return self._frame.servers.number(Server(slots, decided, view=view, stable=stable))

    def _crashed(self, number: int) -> int:
        """Return a server without its memory: stable entries are on its disk."""
        server = self._frame.servers.values[number]
        kept = server.stable
        slots = server.slots[:kept] + (NONE,) * (self._bounds.positions - kept)
        decided = server.decided & bits(1, kept)
        lost = Server(slots, decided, is_alive=False, view=server.view, stable=kept)
        return self._frame.servers.number(lost)


def _put(index: int, server: Server, value: int, first: int, last: int) -> Server:
    """Put a value into slots; decided if by the primary, or if a backup makes no-ops."""
    slots = list(server.slots)
    slots[first - 1 : last] = [value] * (last - first + 1)
    is_decided = index == PRIMARY or value == NOOP
    decided = server.decided | bits(first, last) if is_decided else server.decided
    return server._replace(slots=tuple(slots), decided=decided)
