"""What was fetched and not yet returned to the caller: the common part of both buffers.

Values that belong together are computed first and stored in one statement, so that no signal
handler's exception separates them (CPython runs handlers at calls and loops).
"""

from __future__ import annotations

from operator import length_hint
from typing import TYPE_CHECKING, Generic, TypeVar

from ziplog.client.common.requests import Progress
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Iterator

ItemT = TypeVar("ItemT")


class ReadBuffer(Generic[ItemT]):
    """Items between a fetch and the caller."""

    __slots__ = ("_items", "batch", "closed", "ended", "is_complete", "progress")

    def __init__(self, start: RecordId) -> None:
        self._items: list[ItemT] = []
        #: Iterates over the buffered items. (A list's iterator knows how many are left.)
        self.batch: Iterator[ItemT] = iter(self._items)
        #: The client node's progress, with the items that it returned to this buffer.
        first = RecordId(max(start.gsn, 1), start.shard)
        self.progress = Progress(first, caught_up=False, blocked_on=None)
        #: No item will follow the buffered ones.
        self.ended = False
        self.closed = False
        #: Every item was returned before it was closed.
        self.is_complete = False

    @property
    def left(self) -> int:
        """Number of buffered items."""
        return length_hint(self.batch)

    def forget(self) -> None:
        """Drop the buffered items, of which the caller is not the reader any more."""
        none = list[ItemT]()
        rest = iter(none)
        self._items, self.batch, self.ended = none, rest, self.closed

    def pop(self, max_items: int) -> list[ItemT]:
        """Return up to `max_items` items and remove them."""
        items = self._items
        start = len(items) - self.left
        stop = min(start + max_items, len(items))
        rest = iter(items)
        rest.__setstate__(stop)  # type: ignore[attr-defined]
        # A copy: the client node shares the list, and the caller may change the result.
        result = items[start:stop]
        self.batch = rest
        return result
