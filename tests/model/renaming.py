"""Permutations of the records' names in states of the shard model."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from tests.model.parts import NOOP

if TYPE_CHECKING:
    from tests.model.parts import Frame, Slots, State


class Renaming:
    """One permutation of the records: record r is called `names[r]`."""

    def __init__(self, frame: Frame, names: tuple[int, ...]) -> None:
        self._frame = frame
        self._names = names
        self._server = cache(self._rename_server)
        self._queue = cache(self._rename_queue)
        self._acks = cache(self._rename_acks)
        self._control = cache(self._rename_control)
        self._delivered = cache(self._rename_delivered)

    def of(self, state: State) -> State:
        """Return a state under the other names."""
        frame = self._frame
        return (
            *map(self._server, state[: frame.n]),
            *map(self._queue, state[frame.n : frame.acks]),
            self._acks(state[frame.acks]),
            self._control(state[frame.control]),
            self._delivered(state[frame.delivered]),
            state[frame.merge],
            state[frame.answered],
        )

    def _slots(self, slots: Slots) -> Slots:
        return tuple(held if held <= NOOP else self._names[held - 2] + 2 for held in slots)

    def _rename_server(self, number: int) -> int:
        server = self._frame.servers.values[number]
        seen = sum(1 << name for r, name in enumerate(self._names) if server.seen >> r & 1)
        renamed = server._replace(slots=self._slots(server.slots), seen=seen)
        return self._frame.servers.number(renamed)

    def _rename_queue(self, number: int) -> int:
        messages = self._frame.queues.values[number]
        renamed = [m._replace(value=self._slots((m.value,))[0]) for m in messages]
        return self._frame.queues.number(tuple(renamed))

    def _rename_acks(self, acks: int) -> int:
        # A record's number is the least significant part of an ack's index.
        renamed, index, count = 0, 0, len(self._names)
        while acks >> index:
            if acks >> index & 1:
                renamed |= 1 << (index - index % count + self._names[index % count])
            index += 1
        return renamed

    def _rename_control(self, number: int) -> int:
        control = self._frame.controls.values[number]
        if control.answer is not None:
            control = control._replace(answer=self._slots(control.answer))
        if control.decision is not None:
            slots, survivor = control.decision
            control = control._replace(decision=(self._slots(slots), survivor))
        return self._frame.controls.number(control)

    def _rename_delivered(self, number: int) -> int:
        return self._frame.deliveries.number(self._slots(self._frame.deliveries.values[number]))
