"""What a replica writes down of what it knows: its marks, and now and then its sessions.

A mark stands between the entries of the log, takes no number, and the last one counts: it is what a
server in limbo goes by. Rule: only a server that is up says where its log is stable; what it was
told of the trim point it writes down in every state (docs/protocol.md, sections 8 and 9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from shard.state.session_tables import Tables
from ziplog.core.node import Persist
from ziplog.core.view import NO_DIGEST
from ziplog.segments.entry import Entry, WatermarkRecord

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState

_MS: Final = 1_000_000
#: A mark is written at most so often.
WATERMARK_INTERVAL_NS: Final = 100 * _MS


class WatermarkWriter:
    """The marks of one replica."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        #: When the next mark is to be written; None: nothing is new.
        self._due: int | None = None
        self._written = (0, 0, 0)
        self._tables: Final = Tables(state)

    @property
    def due(self) -> int | None:
        """When something is to be written; None: nothing is new."""
        mark, table = self._due, self._tables.due
        return min(mark, table) if mark is not None and table is not None else mark or table

    def schedule(self, now: int) -> None:
        """Note that there is something to write down, in a while."""
        if self._due is None:
            self._due = now + WATERMARK_INTERVAL_NS

    def tick(self, now: int) -> None:
        """Write down what is due."""
        if self._due is not None and now >= self._due:
            self.write()
            self._tables.look(now)
        self._tables.woke(now)

    def write(self) -> None:
        """Write down what is known now."""
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
        state.out.append(Persist(Entry(0, state.view, mark)))

    def write_trim_point(self) -> None:
        """Write down the trim point: the service counts on it once a heartbeat has told it."""
        state = self._state
        if state.state == "up":
            self.write()
        elif state.store.mark is not None:  # without one, it serves nobody before it hears of it
            mark = replace(state.store.mark, trim=state.trim)
            state.out.append(Persist(Entry(0, state.view, mark)))
