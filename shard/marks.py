"""What a replica writes down of what it knows: its marks, and now and then its sessions.

A mark stands between the entries of the log, takes no number, and the last one counts: it is what a
server in limbo goes by. Rule: only a server that is up says where its log is stable; what it was
told of the trim point it writes down in every state (docs/protocol.md, sections 8 and 9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from ziplog.node import Persist
from ziplog.segments.entry import Entry, Mark, Table
from ziplog.view import NO_DIGEST

if TYPE_CHECKING:
    from shard.state import ReplicaState

_MS: Final = 1_000_000
#: A mark is written at most so often.
MARK_NS: Final = 100 * _MS
#: After so much of the log, what the sessions hold is stored.
TABLE_BYTES: Final = 16 * 1024 * 1024


class Marks:
    """The marks of one replica."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        #: When the next one is to be written; None: nothing is new.
        self.due: int | None = None
        self._marked = (0, 0, 0)

    def soon(self, now: int) -> None:
        """Note that there is something to write down, in a while."""
        if self.due is None:
            self.due = now + MARK_NS

    def write(self) -> None:
        """Write down what is known now."""
        state = self._state
        self.due = None
        last = state.clock.last
        marked = (state.stream.stable, state.trim, last.number if last else 0)
        if marked == self._marked or state.state != "up":
            return
        self._marked = marked
        mark = Mark(
            state.cluster, state.stream.stable, state.stream.stable_end, state.trim,
            marked[2], last.digest if last else NO_DIGEST,
        )  # fmt: skip
        state.out.append(Persist(Entry(0, state.view, mark)))
        if state.bytes_since_table > TABLE_BYTES:
            state.bytes_since_table = 0
            state.out.append(Persist(Entry(0, state.view, Table(state.sessions.tables()))))

    def trimmed(self) -> None:
        """Write down the trim point: the service counts on it once a heartbeat has told it."""
        state = self._state
        if state.state == "up":
            self.write()
        elif state.store.mark is not None:  # without one, it serves nobody before it hears of it
            mark = replace(state.store.mark, trim=state.trim)
            state.out.append(Persist(Entry(0, state.view, mark)))
