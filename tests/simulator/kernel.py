"""Virtual time of a simulation: one clock, one heap of events, one random generator.

A simulation reads no other clock and draws no other random number. Events at the same time run in
the order in which they were scheduled. A seed therefore determines a whole history, and equal trace
hashes mean equal histories.
"""

from __future__ import annotations

import heapq
from hashlib import blake2b
from random import Random
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

US: Final = 1_000
MS: Final = 1_000_000
S: Final = 1_000_000_000

#: Start of virtual time: clocks of real machines do not start at 0 either.
_BEGINNING_NS: Final = 1 * S


class Kernel:
    """Virtual time.

    Args:
        seed: seed of the random generator.
        on_trace: receives every line of the trace; None: no readable trace.

    """

    def __init__(self, seed: int, on_trace: Callable[[str], object] | None = None) -> None:
        self.random: Final = Random(seed)
        #: Nanoseconds.
        self.now = _BEGINNING_NS
        #: Number of executed actions.
        self.steps = 0
        self._heap: list[tuple[int, int, Callable[[], object]]] = []
        self._scheduled = 0
        self._digest = blake2b(digest_size=8)
        self._on_trace: Final = on_trace

    # --- the trace ---

    @property
    def is_traced(self) -> bool:
        """Whether the trace has a reader: only then are lines worth formatting."""
        return self._on_trace is not None

    def record(self, what: bytes) -> None:
        """Add an event at the current time to the trace's hash."""
        self._digest.update(b"%d %b\n" % (self.now, what))

    def trace(self, line: str) -> None:
        """Add a line to the readable trace (not to its hash)."""
        if self._on_trace is not None:
            self._on_trace(f"{self.now / S:12.6f} {line}")

    def trace_hash(self) -> str:
        """Return the hash of all recorded events."""
        return self._digest.hexdigest()

    # --- time ---

    def at(self, when: int, action: Callable[[], object]) -> None:
        """Schedule an action at a time (now, if the time has passed)."""
        self._scheduled += 1
        heapq.heappush(self._heap, (max(when, self.now), self._scheduled, action))

    def after(self, delay_ns: int, action: Callable[[], object]) -> None:
        """Schedule an action after a delay."""
        self.at(self.now + delay_ns, action)

    def run_until(self, condition: Callable[[], object], within_ns: int) -> bool:
        """Run until a condition holds, `within_ns` at most; return whether it holds.

        An action may call it, too: everything else goes on while that action stands still.
        """
        end = self.now + within_ns
        heap, pop = self._heap, heapq.heappop
        while not condition():
            if not heap or heap[0][0] > end:
                self.now = max(self.now, end)
                return bool(condition())
            self.now, _, action = pop(heap)
            self.steps += 1
            action()
        return True

    def run(self, duration_ns: int) -> None:
        """Run for a duration."""
        self.run_until(lambda: False, duration_ns)
