"""Writer of watermark records, and of session tables, into a replica's log.

A watermark record stands between the entries, has no number, and the last one counts. A server in
limbo relies on it. Rule: only a server that is up, or has joined its view, records where its log is
stable; it records a received trim point in every state (docs/protocol.md, sections 8 and 9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shard.state.session_tables import SessionTableWriter
from ziplog.core.units import NS_PER_MS

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState
    from ziplog.core.view import Placement

#: Minimum interval between watermark records.
WATERMARK_INTERVAL_NS: Final = 100 * NS_PER_MS


class WatermarkWriter:
    """Writes the watermark records of one replica."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        #: When the next record is due; None: nothing is new.
        self._due: int | None = None
        self._written: tuple[int, int, int, Placement | None] = (0, 0, 0, None)
        self._tables: Final = SessionTableWriter(state)

    @property
    def due(self) -> int | None:
        """When the next record or table is due; None: nothing is new."""
        mark, table = self._due, self._tables.due
        return min(mark, table) if mark is not None and table is not None else mark or table

    def schedule(self, now: int) -> None:
        """Schedule a record after the interval."""
        if self._due is None:
            self._due = now + WATERMARK_INTERVAL_NS

    def tick(self, now: int) -> None:
        """Write the records and tables that are due."""
        if self._due is not None and now >= self._due:
            self.write()
            self._tables.start_if_due(now)
        self._tables.tick(now)

    def write(self) -> None:
        """Write a record now, if something is new and the server has the log of its view."""
        state = self._state
        self._due = None
        last = state.clock.last
        facts = (state.stream.stable, state.trim, last.number if last else 0, state.placement)
        if facts == self._written or state.server_state not in {"up", "joined"}:
            return
        self._written = facts
        state.record_watermark()

    def write_trim_point(self) -> None:
        """Record the trim point: a heartbeat reports it to the service once it is on the disk."""
        state = self._state
        if state.server_state == "up":
            self.write()
        elif state.store.mark is not None:  # without one, it serves no reader before it learns it
            state.record_watermark()
