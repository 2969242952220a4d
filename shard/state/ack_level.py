"""The durability level of one server: whether it acks from its memory or from its disk.

    memory --requested--> raising --all that it acked is on its disk, and that is recorded--> disk
    disk --requested--> lowering --recorded--> memory

The cluster file requests a level, also while the server runs. `recorded` is in the directory of the
server. Rule: it is "disk" only while the disk has all that the server ever acked, so a server that
crashed knows whether it may have lost something. Raising and lowering, the server acks from its
disk (docs/protocol.md, section 10).

Invariant: a server that acks from its memory has "memory" recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core.node import FlushBeforeSend, LevelRequested, RecordLevel
from ziplog.core.units import NS_PER_S

if TYPE_CHECKING:
    from ziplog.core.node import Effect, LevelRecorded
    from ziplog.types import Durability

#: Interval between attempts to record a level.
_RETRY_NS: Final = NS_PER_S


class AckLevel:
    """The level of one server.

    Args:
        requested: the level in the cluster file.
        recorded: the level in the directory of the server.

    """

    def __init__(self, requested: Durability, recorded: Durability) -> None:
        self.requested = requested
        self.recorded = recorded
        #: Acks do not wait for the disk.
        self.is_memory = requested == recorded == "memory"
        self._retry_at = -(2**62)

    @property
    def reported(self) -> Durability | None:
        """The level that the server keeps to; None: it is raising or lowering it."""
        return self.recorded if self.is_memory or self.recorded == "disk" else None

    @property
    def is_changing(self) -> bool:
        """Whether the recorded level has to change."""
        return self.requested != self.recorded

    def on_event(self, event: LevelRequested | LevelRecorded) -> list[Effect]:
        """Handle a change of the cluster file, or the report that a level is recorded."""
        if isinstance(event, LevelRequested):
            self.requested = event.level
        else:
            self.recorded = event.level
        self._retry_at = -(2**62)
        # It acks from its memory only while that is requested and recorded.
        is_memory = self.requested == self.recorded == "memory"
        if is_memory == self.is_memory:
            return []
        self.is_memory = is_memory
        return [FlushBeforeSend(not is_memory)]

    def advance(self, now: int, *, is_complete: bool) -> list[Effect]:
        """Record the requested level, if it can be; call it after a batch while it changes.

        Args:
            now: monotonic nanoseconds.
            is_complete: the disk has all that the server ever acked.

        """
        is_possible = is_complete or self.requested == "memory"
        if not self.is_changing or not is_possible or now < self._retry_at:
            return []
        self._retry_at = now + _RETRY_NS
        return [RecordLevel(self.requested)]

    def check(self) -> None:
        """Assert the invariant."""
        assert not self.is_memory or self.recorded == "memory"
