"""Live and dead bytes of each segment of the log, from which the cleaner chooses its cut.

A segment begins at a record and ends before the next segment's first record. Its size is the bytes
of its records, checkpoints excluded; its live bytes are what moving its live values would write.
Invariant: the live bytes are the sum over the present entries. See docs/logdb.md, section 8.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logdb.records import Segment

#: Size at which a segment ends.
SEGMENT_BYTES: Final = 4 * 1024 * 1024
#: Minimum of dead bytes for a cut.
MIN_DEAD_BYTES: Final = 64 * 1024 * 1024


class LogUsage:
    """Sizes and live bytes of the log's segments, in order."""

    def __init__(
        self, segment_bytes: int = SEGMENT_BYTES, min_dead_bytes: int = MIN_DEAD_BYTES
    ) -> None:
        """Start with an empty log.

        Args:
            segment_bytes: size at which a segment ends.
            min_dead_bytes: dead bytes required for a cut.

        """
        self._segment_bytes: Final = segment_bytes
        self._min_dead_bytes: Final = min_dead_bytes
        self._firsts: list[int] = []
        self._sizes: list[int] = []
        self._lives: list[int] = []
        #: Bytes of all records.
        self.log_bytes = 0
        #: Bytes that moving all present values would write.
        self.moving_bytes = 0

    def __len__(self) -> int:
        return len(self._firsts)

    @property
    def dead_bytes(self) -> int:
        """Bytes that the state does not need."""
        return max(self.log_bytes - self.moving_bytes, 0)

    def add_record(self, gsn: int, size: int) -> None:
        """Count a record."""
        sizes = self._sizes
        if not sizes or sizes[-1] >= self._segment_bytes:
            self._firsts.append(gsn)
            sizes.append(size)
            self._lives.append(0)
        else:
            sizes[-1] += size
        self.log_bytes += size

    def add_live(self, gsn: int, delta: int) -> None:
        """Add live bytes (negative: dead) to the segment of a gsn."""
        self.moving_bytes += delta
        firsts = self._firsts
        if gsn >= firsts[-1]:
            self._lives[-1] += delta
        else:
            self._lives[max(bisect_right(firsts, gsn) - 1, 0)] += delta

    def choose_cut(self, position: int) -> int:
        """Return the gsn before which to clean the log, at most `position`; 0: no cut is worth it.

        Among the cuts that free half of the dead bytes, it chooses the one with the fewest moved
        bytes for each freed byte.
        """
        dead = self.dead_bytes
        if dead <= self._min_dead_bytes or dead * 2 <= self.log_bytes:
            return 0
        best, best_cost = 0, float("inf")
        freed = moved = 0
        for index in range(min(self._count_before(position), len(self._firsts) - 1)):
            freed += self._sizes[index] - self._lives[index]
            moved += self._lives[index]
            if freed * 2 >= dead and moved / freed <= best_cost:
                best, best_cost = self._firsts[index + 1], moved / freed
        return best

    def trim(self, gsn: int) -> None:
        """Forget the segments before a gsn, where the log is trimmed, unless one has live bytes."""
        count = self._count_before(gsn)
        if count and not any(self._lives[:count]):
            self.log_bytes -= sum(self._sizes[:count])
            for column in (self._firsts, self._sizes, self._lives):
                del column[:count]

    def export(self) -> list[Segment]:
        """Return all segments, for a checkpoint."""
        return list(zip(self._firsts, self._sizes, self._lives, strict=True))

    def load(self, segments: Iterable[Segment]) -> None:
        """Load the segments of a checkpoint into an empty table."""
        assert not self._firsts, "a checkpoint is loaded into an empty state"
        for first, size, live in segments:
            self._firsts.append(first)
            self._sizes.append(size)
            self._lives.append(live)
        self.log_bytes = sum(self._sizes)
        self.moving_bytes = sum(self._lives)

    def _count_before(self, gsn: int) -> int:
        """Return the number of segments that end before a gsn; the last one has no end yet."""
        return max(bisect_right(self._firsts, gsn) - 1, 0)
