"""Players in this process whose target notes when it was called, and their rate."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from logplayer import Player

if TYPE_CHECKING:
    from logplayer import Batch, Target, TargetSpec
    from ziplog.local import Cluster
    from ziplog.types import RecordId

_LIMIT_S: Final = 300.0


class Deliveries:
    """The steps of one target."""

    def __init__(self) -> None:
        #: Number of records of each step.
        self.batches: Final[list[int]] = []
        self._first = self._last = 0.0
        self._closing_s = 0.0

    def per_s(self) -> float:
        """Return the records a second, from the first step's start to the last one's end.

        The time of the target's close counts: a target of files writes them there.
        """
        return sum(self.batches) / (self._last - self._first + self._closing_s)

    def note(self, began: float, ended: float, count: int) -> None:
        """Note a step."""
        self._first = self._first or began
        self._last = ended
        self.batches.append(count)

    def note_close(self, seconds: float) -> None:
        """Note the end of the connection."""
        self._closing_s += seconds


class _Timed:
    """A target that notes its steps; the rest is that of another one."""

    def __init__(self, inner: Target, steps: Deliveries) -> None:
        self._inner, self._steps = inner, steps

    def deliver(self, batch: Batch) -> bytes | None:
        """Deliver, and note the time."""
        began = time.monotonic()
        mark = self._inner.deliver(batch)
        self._steps.note(began, time.monotonic(), len(batch.records))
        return mark

    def close(self) -> None:
        """Close the target, and note the time."""
        began = time.monotonic()
        self._inner.close()
        self._steps.note_close(time.monotonic() - began)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def play(cluster: Cluster, name: str, spec: TargetSpec, last: RecordId) -> Deliveries:
    """Play the log from its beginning up to a position into one target; return the steps."""
    steps = Deliveries()

    def connect() -> Any:
        return _Timed(spec.connect(), steps)

    timed = msgspec.structs.replace(spec, connect=connect)
    with Player(cluster.endpoint, name, [timed], hold_s=0, commit_ms=100) as player:
        player.wait_until(last, timeout=_LIMIT_S)
    return steps
