"""Writer of watermark records, and of session tables, into a replica's log.

A watermark record stands between the entries, has no number, and the last one counts. A server in
limbo relies on it. Rule: only a server that is up records where its log is stable; it records a
received trim point in every state (docs/protocol.md, sections 8 and 9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from shard.state.session_tables import SessionTableWriter
from ziplog.core.node import Persist
from ziplog.core.units import NS_PER_MS
from ziplog.core.view import NO_DIGEST
from ziplog.segments.entry import Entry, WatermarkRecord

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState

#: Minimum interval between watermark records.
WATERMARK_INTERVAL_NS: Final = 100 * NS_PER_MS


class WatermarkWriter:
    """Writes the watermark records of one replica."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        #: When the next record is due; None: nothing is new.
        self._due: int | None = None
        self._written = (0, 0, 0)
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
        """Write a record now, if something is new and the server is up."""
        state = self._state
        self._due = None
        last = state.clock.last
        facts = (state.stream.stable, state.trim, last.number if last else 0)
        if facts == self._written or state.state != "up":
            return
        self._written = facts
        mark = WatermarkRecord(
            state.cluster, state.stream.stable, state.stream.stable_end, state.trim,
            facts[2], last.digest if last else NO_DIGEST,
        )  # fmt: skip
        state.effects.append(Persist(Entry(0, state.view, mark)))

    def write_trim_point(self) -> None:
        """Record the trim point: the service relies on it once a heartbeat has reported it."""
        state = self._state
        if state.state == "up":
            self.write()
        elif state.store.mark is not None:  # without one, it serves no reader before it learns it
            mark = replace(state.store.mark, trim=state.trim)
            state.effects.append(Persist(Entry(0, state.view, mark)))
