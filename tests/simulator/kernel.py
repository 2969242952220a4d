"""The clock and the order of everything: a heap of what happens when, and one random generator.

Nothing in a simulation reads another clock or draws another random number, and what happens at the
same time happens in the order in which it was asked for. So a seed is a whole history, and the hash
of its trace tells whether two are the same.
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

#: Virtual time begins here: clocks of machines do not begin at 0 either.
_BEGINNING_NS: Final = 1 * S


class Kernel:
    """Virtual time.

    Args:
        seed: of all that is random.
        on_trace: given every line of the trace, if anybody reads it.

    """

    def __init__(self, seed: int, on_trace: Callable[[str], object] | None = None) -> None:
        self.random: Final = Random(seed)
        #: Nanoseconds.
        self.now = _BEGINNING_NS
        #: How many actions were carried out.
        self.steps = 0
        self._heap: list[tuple[int, int, Callable[[], object]]] = []
        self._asked = 0
        self._digest = blake2b(digest_size=8)
        self._on_trace: Final = on_trace

    # --- the trace ---

    @property
    def is_traced(self) -> bool:
        """Whether somebody reads the trace: only then a line should be made readable."""
        return self._on_trace is not None

    def record(self, what: bytes) -> None:
        """Let something that happened now be part of the trace's hash."""
        self._digest.update(b"%d %b\n" % (self.now, what))

    def tell(self, line: str) -> None:
        """Put a line into the trace that is read (and not into its hash)."""
        if self._on_trace is not None:
            self._on_trace(f"{self.now / S:12.6f} {line}")

    def trace_hash(self) -> str:
        """Return the hash of all that was recorded so far."""
        return self._digest.hexdigest()

    # --- time ---

    def at(self, when: int, action: Callable[[], object]) -> None:
        """Do something at a time (now, if that is over)."""
        self._asked += 1
        heapq.heappush(self._heap, (max(when, self.now), self._asked, action))

    def after(self, delay_ns: int, action: Callable[[], object]) -> None:
        """Do something so much later."""
        self.at(self.now + delay_ns, action)

    def run_until(self, condition: Callable[[], object], within_ns: int) -> bool:
        """Let time pass until a condition holds; whether it does, after `within_ns` at most."""
        end = self.now + within_ns
        heap, pop = self._heap, heapq.heappop
        while not condition():
            if not heap or heap[0][0] > end:
                self.now = end
                return bool(condition())
            self.now, _, action = pop(heap)
            self.steps += 1
            action()
        return True

    def run(self, duration_ns: int) -> None:
        """Let so much time pass."""
        self.run_until(lambda: False, duration_ns)
