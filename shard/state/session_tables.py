"""When a replica stores its sessions: a table now and then, in parts, each of which is quick.

    idle --enough was recorded--> writing: part 0, part 1, ... --the last part--> idle

The log goes on between two parts. Rule: a part holds what the sessions hold at its place of the
log, and each session that was there at the first part is in a part, or gone by then. So the parts,
and then all entries after the first part, give the sessions at any later place: an entry that a
part knows changes nothing. A table whose last part is missing counts as none
(docs/protocol.md, section 10).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shard.state.sessions import end_of_table, size_of
from ziplog.core.node import Persist
from ziplog.segments.entry import Entry, SessionTablePartRecord

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState

_MS: Final = 1_000_000
#: After so much of the log, what the sessions hold is stored; or after a multiple of what the last
#: table had: tables are a small part of what is written.
TABLE_BYTES: Final = 16 * 1024 * 1024
_LOG_PER_TABLE: Final = 4
#: A table is due at once.
OVERDUE_BYTES: Final = 2**62
#: So much of a table is stored at a time, with a pause before the next part.
PART_BYTES: Final = 128 * 1024
_PAUSE_NS: Final = 10 * _MS


class SessionTableWriter:
    """The tables of one replica."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        #: When the next part is to be stored; None: no table is under way.
        self.due: int | None = None
        #: Bytes of the last whole table.
        self._last_bytes = 0
        #: Of the table under way: its view, the last entry before it, the clients that had sessions
        #: then, up to where it goes, its parts and bytes so far.
        self._view = self._begun = 0
        self._clients: list[bytes] = []
        self._after = (b"", 0)
        self._number = self._bytes = 0

    def _start(self, now: int) -> None:
        """Begin a table: its first part is to be stored now."""
        state = self._state
        state.bytes_since_table = 0
        self._view, self._begun = state.view, state.stream.last
        self._clients = sorted(state.sessions.by_client)
        self._after = (b"", 0)
        self._number = self._bytes = 0
        self.due = now

    def start_if_due(self, now: int) -> None:
        """Begin a table, if enough was recorded since the last one."""
        least = max(TABLE_BYTES, _LOG_PER_TABLE * self._last_bytes)
        if self.due is None and self._state.bytes_since_table > least:
            self.due, self._number = now, 0

    def tick(self, now: int) -> None:
        """Store the next part, if that is due."""
        state = self._state
        if self.due is None or now < self.due:
            return
        if state.state != "up":
            self.due = None
            state.bytes_since_table = OVERDUE_BYTES
            return
        if state.view != self._view or not self._number:
            self._start(now)  # the sessions may be those of another server, or have got more
        tables, is_more = state.sessions.part(self._after, PART_BYTES, self._clients)
        part = SessionTablePartRecord(tables, self._begun, self._number, is_last=not is_more)
        state.effects.append(Persist(Entry(0, state.view, part)))
        self._bytes += sum(map(size_of, tables))
        self._number += 1
        if is_more:
            self._after, self.due = end_of_table(tables[-1]), now + _PAUSE_NS
        else:
            self._last_bytes, self.due, self._clients = self._bytes, None, []
