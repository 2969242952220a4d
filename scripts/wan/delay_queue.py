"""When packets between regions are due (pure).

Each ordered pair of regions is one path. A packet waits for the packets before it, if the path has
a rate; then it is under way for the path's delay, a jitter by chance added. Invariant: a path
delivers in order, as due times never go back.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from random import Random

_NS_PER_S: Final = 1_000_000_000
#: Bytes that one path holds before it drops packets: 100 ms at 5 Gbit/s.
MAX_PATH_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True)
class Path:
    """What a path does to its packets. Frozen: a change replaces it.

    Attributes:
        delay_ns: time under way, in nanoseconds, from 0.
        jitter_ns: largest extra time by chance, from 0.
        loss: share of the packets that are lost, 0 to 1.
        bytes_per_s: rate of the path; 0: unlimited.
        is_cut: every packet is lost.

    """

    delay_ns: int = 0
    jitter_ns: int = 0
    loss: float = 0.0
    bytes_per_s: int = 0
    is_cut: bool = False


@dataclass
class Counters:
    """What one path has carried.

    Attributes:
        packets: packets delivered, or still under way.
        bytes: their bytes, IP headers included.
        lost: packets dropped: by chance, by a cut, or because the path was full.

    """

    packets: int = 0
    bytes: int = 0
    lost: int = 0


@dataclass
class _State:
    """The present state of one path."""

    path: Path
    counters: Counters
    #: When the last packet leaves the sender, and when it arrives.
    free_at: int = 0
    last_due: int = 0
    held_bytes: int = 0


class DelayQueue:
    """The packets under way between `count` regions, numbered from 0."""

    def __init__(self, count: int, random: Random) -> None:
        """Begin with paths without delay.

        Args:
            count: number of regions.
            random: decides jitter and loss.

        """
        self._random: Final = random
        self._states: Final = {
            (source, target): _State(Path(), Counters())
            for source in range(count)
            for target in range(count)
        }
        #: Due time, order of arrival, source, target, packet.
        self._heap: Final[list[tuple[int, int, int, int, bytes]]] = []
        self._arrivals = 0

    def set_path(self, source: int, target: int, path: Path) -> None:
        """Replace a path. Packets under way keep their due times, and a later one its order."""
        self._states[source, target].path = path

    def counters(self, source: int, target: int) -> Counters:
        """Return what a path has carried."""
        return self._states[source, target].counters

    def push(self, now: int, source: int, target: int, packet: bytes) -> None:
        """Accept a packet at `now` (ns); drop it if the path is cut, lossy or full."""
        state = self._states[source, target]
        path, size = state.path, len(packet)
        if (
            path.is_cut
            or (path.loss and self._random.random() < path.loss)
            or state.held_bytes + size > MAX_PATH_BYTES
        ):
            state.counters.lost += 1
            return
        state.free_at = max(state.free_at, now)
        if path.bytes_per_s:
            state.free_at += size * _NS_PER_S // path.bytes_per_s
        jitter = self._random.randrange(path.jitter_ns + 1) if path.jitter_ns else 0
        state.last_due = max(state.last_due, state.free_at + path.delay_ns + jitter)
        state.held_bytes += size
        state.counters.packets += 1
        state.counters.bytes += size
        self._arrivals += 1
        heapq.heappush(self._heap, (state.last_due, self._arrivals, source, target, packet))

    def pop_due(self, now: int) -> list[tuple[int, bytes]]:
        """Remove the packets that are due at `now`; return each with its target, in order."""
        heap = self._heap
        due: list[tuple[int, bytes]] = []
        while heap and heap[0][0] <= now:
            _, _, source, target, packet = heapq.heappop(heap)
            self._states[source, target].held_bytes -= len(packet)
            due.append((target, packet))
        return due

    def next_due(self) -> int | None:
        """Return when the next packet is due; None: none is under way."""
        return self._heap[0][0] if self._heap else None
