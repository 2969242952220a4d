"""The watermarks that a primary sends to its backups: with each forward, or by themselves.

These are the last stable entry, the last durable one, and at level `disk` the last one on the
primary's own disk. A forward does not wait for that disk, so both disks write at the same time. The
only backup of a shard derives from the third watermark what is stable, so its readers do not wait
for the primary's next decision (docs/protocol.md, section 5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core.units import NEVER, NS_PER_MS

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState

#: Longest delay of a watermark to the backups if no decision is forwarded.
WATERMARK_DELAY_NS: Final = 5 * NS_PER_MS


class Watermarks:
    """A primary's own disk, and when newer watermarks are due."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        #: The last entry on this server's own disk.
        self.on_disk = state.stream.last
        #: The last watermarks sent.
        self._sent_stable = self._sent_durable = self._sent_on_disk = 0
        #: When newer ones are due by themselves, in ns; NEVER: they are not.
        self.due = NEVER

    @property
    def held(self) -> int:
        """The last entry that this server itself holds, by its level."""
        return self._state.stream.last if self._state.level.is_memory else self.on_disk

    @property
    def flushed(self) -> int | None:
        """The third watermark; None: this server acks from its memory."""
        return None if self._state.level.is_memory else self.on_disk

    def on_persisted(self, fseq: int, now: int, *, is_awaited: bool) -> None:
        """Record that entries up to `fseq` are on this server's disk.

        `is_awaited`: the only backup has readers.
        """
        self.on_disk = max(self.on_disk, fseq)
        if is_awaited and not self._state.level.is_memory and self._sent_on_disk < self.on_disk:
            self.due = now

    def on_stable(self, now: int) -> None:
        """Schedule newer watermarks, if there are some that the backups need."""
        state, stream = self._state, self._state.stream
        if self.due == NEVER and (
            self._sent_stable < stream.stable
            # The backups of a shard that has left must learn that all disks have all entries.
            or (state.has_no_positions and self._sent_durable < stream.durable)
        ):
            self.due = now + WATERMARK_DELAY_NS

    def on_sent(self) -> None:
        """Record that the newest watermarks are sent to all backups."""
        stream = self._state.stream
        self._sent_stable, self._sent_durable = stream.stable, stream.durable
        self._sent_on_disk, self.due = self.on_disk, NEVER
