"""The highest value of a field of the watermark records that is on a server's own disk.

A record has no number, so the store reports only that the entry after it is on the disk, or that
everything is. Rule: a step checks before its own records, because the store gets those at the end
of the step.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shard.storage.store import Store


class RecordedValue:
    """A value that only grows: of a lease number, or of the trim point."""

    def __init__(self, store: Store, on_disk: int) -> None:
        """`on_disk`: the value in the log when the process started; 0: none."""
        self._store: Final = store
        #: The highest value known to be on the disk.
        self.on_disk = on_disk
        #: The highest value that this process recorded; 0: none.
        self.recorded = 0
        #: Records that may not be on the disk: their values, and the last entry before each.
        self._pending: Final[deque[tuple[int, int]]] = deque()

    def on_record(self, value: int, fseq: int) -> None:
        """Note a record with a value, after entry `fseq`; the store gets it after this step."""
        if value > self.recorded:
            self.recorded = value
            self._pending.append((value, fseq))

    def update(self) -> bool:
        """Find out which records are on the disk; return whether its value rose."""
        before, pending = self.on_disk, self._pending
        is_all = self._store.backlog_bytes == 0
        while pending and (is_all or self._store.flushed_fseq > pending[0][1]):
            self.on_disk = max(self.on_disk, pending.popleft()[0])
        return self.on_disk > before
