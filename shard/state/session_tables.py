"""Stores the sessions of a replica: a table from time to time, in small parts.

    idle --enough was recorded--> writing: part 0, part 1, ... --the last part--> idle

The log continues between two parts. Each part holds the state of its sessions at its position in
the log. Each session that existed at the first part is in a part, or has expired. So the parts,
followed by all entries after the first part, give the sessions at any later position: replaying an
entry that a part contains changes nothing. A table without its last part is ignored
(docs/protocol.md, section 10).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shard.state.sessions import end_of_table, size_of
from ziplog.core.node import Persist
from ziplog.core.units import NS_PER_MS
from ziplog.segments.entry import Entry, SessionTablePartRecord

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState

#: Bytes of log between two tables, at least; also at least a multiple of the last table's size, so
#: that tables stay a small part of what is written.
TABLE_BYTES: Final = 16 * 1024 * 1024
_LOG_PER_TABLE: Final = 4
#: More than any bound: a table is due at once.
OVERDUE_BYTES: Final = 2**62
#: Bytes of one part; a pause follows each part.
PART_BYTES: Final = 128 * 1024
_PAUSE_NS: Final = 10 * NS_PER_MS


class SessionTableWriter:
    """Writes the session tables of one replica."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        #: Time at which the next part is due, in ns; None: no table is being written.
        self.due: int | None = None
        #: Bytes of the last complete table.
        self._last_bytes = 0
        #: The table being written: its view, the last entry before it, the clients with sessions
        #: at its start, the position reached, its parts and bytes so far.
        self._view = self._begun = 0
        self._clients: list[bytes] = []
        self._after = (b"", 0)
        self._number = self._bytes = 0

    def _start(self, now: int) -> None:
        """Start a table: its first part is due now."""
        state = self._state
        state.bytes_since_table = 0
        self._view, self._begun = state.view, state.stream.last
        self._clients = sorted(state.sessions.by_client)
        self._after = (b"", 0)
        self._number = self._bytes = 0
        self.due = now

    def start_if_due(self, now: int) -> None:
        """Start a table, if enough was recorded since the last one."""
        least = max(TABLE_BYTES, _LOG_PER_TABLE * self._last_bytes)
        if self.due is None and self._state.bytes_since_table > least:
            self.due, self._number = now, 0

    def tick(self, now: int) -> None:
        """Store the next part, if it is due."""
        state = self._state
        if self.due is None or now < self.due:
            return
        if state.server_state != "up":
            self.due = None
            state.bytes_since_table = OVERDUE_BYTES
            return
        if state.view != self._view or not self._number:
            self._start(now)  # sessions may have been replaced or added
        tables, is_more = state.sessions.part(self._after, PART_BYTES, self._clients)
        part = SessionTablePartRecord(tables, self._begun, self._number, is_last=not is_more)
        state.effects.append(Persist(Entry(0, state.view, part)))
        self._bytes += sum(map(size_of, tables))
        self._number += 1
        if is_more:
            self._after, self.due = end_of_table(tables[-1]), now + _PAUSE_NS
        else:
            self._last_bytes, self.due, self._clients = self._bytes, None, []
