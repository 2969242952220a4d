"""What ends when its owner is collected as garbage: subscriptions, scans, snapshots.

An owner may be collected at any moment, in any thread, in the middle of a step; and what a signal's
handler raises there is lost together with the rest of the callback. So the callback of the weak
reference is the `append` of a queue, which is written in C: it runs as a whole, and takes no lock.
Whoever drives the engine empties the queue, before its next sleep or a call later.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ziplog.client.common.requests import Request

    Ending = Callable[[], Iterable[Request]]


class Owned(weakref.ref[Any]):
    """A reference to an owner; `ending` returns the requests that end what it has."""

    __slots__ = ("ending",)

    ending: Ending


class Owners:
    """All owners of one client."""

    def __init__(self) -> None:
        #: A reference that nothing holds would not call back. By id: they need not be hashable.
        self._refs: Final[dict[int, Owned]] = {}
        #: Those whose owners were collected.
        self.gone: Final[deque[Owned]] = deque()

    def __len__(self) -> int:
        return len(self._refs)

    def add(self, owner: object, ending: Ending) -> Owned:
        """Watch an owner. To be called before there is something to end."""
        ref = Owned(owner, self.gone.append)
        ref.ending = ending
        self._refs[id(ref)] = ref
        return ref

    def remove(self, ref: Owned) -> None:
        """Forget one that has ended it itself."""
        self._refs.pop(id(ref), None)

    def endings(self) -> Iterator[Request]:
        """Return the requests of those that are gone, each once."""
        while self.gone:
            ref = self.gone.popleft()
            if self._refs.pop(id(ref), None) is not None:
                yield from ref.ending()
