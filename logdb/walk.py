"""A walk through all entries of one moment, for a checkpoint, while the state goes on.

Rule: what changes ahead of the walk is kept as it was until the walk has come there; what lies
behind it is not. Invariant: the walk's rows are exactly the entries of its moment, with the places
that they had, in key order. See docs/logdb.md, section 8.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from sortedcontainers import SortedList

from logdb.snapshots import in_order
from ziplog.errors import UnavailableError

if TYPE_CHECKING:
    from logdb.records import Entry
    from logdb.state import State
    from logdb.versions import Row

#: Entries that are kept ahead of a walk.
MAX_ENTRIES: Final = 1_000_000


class Walk:
    """A walk that has begun. It must be closed."""

    def __init__(self, state: State, max_entries: int = MAX_ENTRIES) -> None:
        """Begin at the present moment.

        Args:
            state: what to walk through.
            max_entries: if more change ahead of it, the walk fails.

        """
        self._state: Final = state
        self._max_entries: Final = max_entries
        self._former: Final[dict[bytes, Entry | None]] = {}
        #: The keys of `_former` that were there and are absent now.
        self._ghosts: Final[Any] = SortedList()
        #: The last key that was passed; None: at the beginning.
        self._passed: bytes | None = None
        self._failed = False
        self.is_done = False
        #: The rest of the checkpoint, of the same moment.
        self.image: Final = state.image()
        state.on_change.append(self._changed)

    def rows(self, count: int) -> list[Row]:
        """Pass at most `count` keys; returns those entries that were there. May be empty.

        Raises:
            UnavailableError: too much has changed ahead of the walk; begin another one.

        """
        if self._failed:
            raise UnavailableError(
                f"more than {self._max_entries:,} keys changed while a checkpoint was written"
            )
        versions, former, passed = self._state.versions, self._former, self._passed
        start, is_inside = passed or b"", passed is None
        found = in_order(
            versions.keys(start, None, after=not is_inside),
            self._ghosts.irange(start, None, (is_inside, True)),
        )
        keys = list(islice(found, count))
        rows = []
        for key in keys:
            entry = former.pop(key) if key in former else versions.get(key)
            if entry is not None:
                rows.append((key, entry))
        if keys:
            self._passed = keys[-1]
            del self._ghosts[: self._ghosts.bisect_right(keys[-1])]
        if len(keys) < count:
            self.is_done = True
            self.close()
        return rows

    def close(self) -> None:
        """End the walk; any number of times."""
        if self._changed in self._state.on_change:
            self._state.on_change.remove(self._changed)
        self._former.clear()
        self._ghosts.clear()

    def _changed(self, key: bytes, former: Entry | None, entry: Entry | None) -> None:
        """Keep what a key ahead was; observes the state."""
        if self._passed is not None and key <= self._passed:
            return
        if key not in self._former:
            if len(self._former) == self._max_entries:
                self._failed = True
                self.close()
                return
            self._former[key] = former
        if entry is not None:
            self._ghosts.discard(key)
        elif former is not None and self._former[key] is not None:
            self._ghosts.add(key)
