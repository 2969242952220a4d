"""Parts of a state of the shard model, and their layout.

A state is a flat tuple of small integers: the servers, the queues of forwards to each backup, the
acks (a bit for each), the control state, the deliveries to subscribers, the merge, and whether an
append of another shard returned. Each part except the acks and the last two is stored once in a
table and referenced by its number.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, Generic, NamedTuple, TypeVar

from tests.model.rules import RULES

T = TypeVar("T")
State = tuple[int, ...]
#: A step: its name and details.
Step = tuple[Any, ...]
Slots = tuple[int, ...]

#: Content of a slot: nothing, a no-op, or record number r as r + 2.
NONE: Final = 0
NOOP: Final = 1
PRIMARY: Final = 0


class Bounds(NamedTuple):
    """The size of the model."""

    records: int = 2
    #: Positions of this shard in both epochs; epoch 1 has the first `epoch` of them.
    positions: int = 3
    epoch: int = 2
    servers: int = 2
    #: The highest view number; the number of recovery attempts is one less.
    views: int = 2
    crashes: int = 1
    #: Whether a subscriber merges another shard, which owns one position before our second.
    merge: bool = False
    #: An append of another shard lies right after this position of ours, and the last record is
    #: inserted once it returned; 0: there is no append.
    append: int = 0
    #: An operator gave up the regions of all other servers: one copy confirms a view.
    alone: bool = False


class Server(NamedTuple):
    """The state of one server."""

    slots: Slots
    #: Bit g: the content of slot g is decided, not guessed.
    decided: int = 0
    is_alive: bool = True
    #: The recovery that it is frozen for; 0: none.
    frozen: int = 0
    view: int = 1
    #: Bit r: record r arrived from its client, in this view.
    seen: int = 0
    stable: int = 0


class Control(NamedTuple):
    """The state of consensus, the handler leader's memory, and the grants."""

    view: int = 1
    #: The newest recovery; open while it is above `view`.
    attempt: int = 1
    candidate: int | None = None
    confirmed: int = 1
    finished: int = 1
    #: The start state of `view`, and the survivor; None once all servers are in it.
    decision: tuple[Slots, int] | None = None
    #: The view that epoch 2 was granted to; 0: none yet.
    grant: int = 0
    crashes: int = 0
    #: The leader's memory: the state of the candidate.
    answer: Slots | None = None
    #: The view before the decision, for a handler that forgets it ("durable-decision" off).
    base: int = 0

    @property
    def is_under_way(self) -> bool:
        """Whether an attempt is not decided yet."""
        return self.attempt > self.view


class Message(NamedTuple):
    """A forward: `value` is in the slots first..last."""

    value: int
    first: int
    last: int
    view: int


class Table(Generic[T]):
    """Values with a small number for each."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._numbers: dict[T, int] = {}

    def number(self, value: T) -> int:
        """Return the number of a value."""
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class Frame:
    """The bounds, the active rules, the tables, and the layout of a state."""

    def __init__(self, bounds: Bounds, off: frozenset[str]) -> None:
        assert off <= set(RULES), f"no such rule: {off - set(RULES)}"
        assert 1 <= bounds.epoch <= bounds.positions
        assert 0 <= bounds.append <= bounds.positions
        self.bounds: Final = bounds
        self.on: Final = {rule: rule not in off for rule in RULES}
        self.servers: Final[Table[Server]] = Table()
        self.queues: Final[Table[tuple[Message, ...]]] = Table()
        self.controls: Final[Table[Control]] = Table()
        self.deliveries: Final[Table[Slots]] = Table()
        self.n: Final = bounds.servers
        #: The indices of the parts after servers and queues.
        first = 2 * self.n - 1
        self.acks, self.control, self.delivered, self.merge, self.answered = range(first, first + 5)
        self.completed = cache(self._completed)

    def initial(self) -> State:
        """Return the initial state."""
        server = self.servers.number(Server((NONE,) * self.bounds.positions))
        queue, control = self.queues.number(()), self.controls.number(Control())
        delivered = self.deliveries.number(())
        return (server,) * self.n + (queue,) * (self.n - 1) + (0, control, delivered, 0, 0)

    def servers_of(self, state: State) -> list[Server]:
        """Return all servers."""
        return [self.servers.values[number] for number in state[: self.n]]

    def control_of(self, state: State) -> Control:
        """Return the control state."""
        return self.controls.values[state[self.control]]

    def delivered_in(self, state: State) -> Slots:
        """Return the shard's deliveries to subscribers, from its first position on."""
        return self.deliveries.values[state[self.delivered]]

    def with_control(self, state: State, control: Control) -> list[int]:
        """Return a mutable state with another control state."""
        new = list(state)
        new[self.control] = self.controls.number(control)
        return new

    def disconnect(self, new: list[int], index: int) -> None:
        """Drop the forwards to a server that it will never apply."""
        if index != PRIMARY:
            new[self.n + index - 1] = self.queues.number(())

    def settled(self, grant: int) -> int:
        """Return the last position that a recovery settles."""
        b = self.bounds
        return b.positions if grant and self.on["announced-epochs"] else b.epoch

    def begins_with(self, control: Control) -> int:
        """Return the last position that the current view's recovery settled."""
        b = self.bounds
        return b.positions if 0 < control.grant < control.view else b.epoch

    def ack(self, record: int, server: int, gsn: int, view: int) -> int:
        """Return the bit of an acknowledgement."""
        b = self.bounds
        index = view - 1 if self.on["views"] else 0
        return 1 << (((index * self.n + server) * b.positions + gsn - 1) * b.records + record)

    def _completed(self, acks: int) -> tuple[tuple[int, int], ...]:
        """Return (value, position) of everything that all servers of one view acked."""
        b = self.bounds
        found = {
            (record + 2, gsn)
            for view in range(1, b.views + 1)
            for record in range(b.records)
            for gsn in range(1, b.positions + 1)
            if all(acks & self.ack(record, server, gsn, view) for server in range(self.n))
        }
        return tuple(found)


def bits(first: int, last: int) -> int:
    """Return the bits of the positions first..last."""
    return (1 << (last + 1)) - (1 << first) if last >= first else 0
