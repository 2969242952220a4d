"""The replicated state machine behind Raft: its interface, and the adapter that applies commands.

A service (the membership service, the failure handler) implements `Machine`. Each Raft node applies
the committed commands to its own copy through a `Consumer`, which also posts the events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ziplog.core.node import Committed, Restored

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.core.node import Event


class Machine(Protocol):
    """A replicated state machine: total and deterministic; used on the tick thread only."""

    def apply(self, command: bytes) -> bytes:
        """Apply a command and return its result; never raises."""
        ...

    def snapshot(self) -> bytes:
        """Return the whole state."""
        ...

    def restore(self, snapshot: bytes) -> None:
        """Replace the whole state."""
        ...


class Consumer:
    """Applies committed commands and snapshots to the machine, and posts an event for each."""

    def __init__(self, machine: Machine, on_event: Callable[[Event], None]) -> None:
        self._machine, self._on_event = machine, on_event

    def apply(self, command: bytes) -> bytes:
        """Apply a committed command; every node applies the same ones in the same order."""
        result = self._machine.apply(command)
        self._on_event(Committed(command, result))
        return result

    def take_snapshot(self) -> bytes:
        """Return the machine's state."""
        return self._machine.snapshot()

    def restore(self, state: bytes) -> None:
        """Replace the machine's state."""
        self._machine.restore(state)
        self._on_event(Restored(state))
