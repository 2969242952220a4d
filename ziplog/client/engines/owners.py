"""Subscriptions, scans and snapshots that are closed when they are garbage-collected.

An owner may be collected at any moment, in any thread, in the middle of a step. An exception of a
signal handler there would also end the callback. So the weak reference's callback is the `append`
of a deque, which is written in C: it runs as a whole, and takes no lock. The driver empties the
deque, before its next sleep or one call later.

A forked child gets copies of what its parent's streams read ahead. It must not return these, as the
parent does, so they are dropped in the child.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ziplog.client.common.requests import Request

    Ending = Callable[[], Iterable[Request]]


class Owned(weakref.ref[Any]):
    """A weak reference to an owner; `ending` returns the requests that close it."""

    __slots__ = ("ending", "on_fork")

    ending: Ending
    #: Called in a forked child.
    on_fork: Callable[[], None] | None


class Owners:
    """The owners of one client."""

    def __init__(self) -> None:
        #: Without a reference to it, a weak reference makes no callback. By id: they need no hash.
        self._refs: Final[dict[int, Owned]] = {}
        #: The references to owners that were collected.
        self.collected: Final[deque[Owned]] = deque()
        #: Whether this is a forked child of the client's process. (`os.getpid` is a system call.)
        self.is_in_child = False
        _ALL.add(self)

    def __len__(self) -> int:
        return len(self._refs)

    def add(
        self, owner: object, ending: Ending, on_fork: Callable[[], None] | None = None
    ) -> Owned:
        """Watch an owner; call this before there is something to close.

        `ending` and `on_fork` must not keep the owner alive.
        """
        ref = Owned(owner, self.collected.append)
        ref.ending, ref.on_fork = ending, on_fork
        self._refs[id(ref)] = ref
        return ref

    def remove(self, ref: Owned) -> None:
        """Forget an owner that was closed explicitly."""
        self._refs.pop(id(ref), None)

    def on_fork(self) -> None:
        """Drop what the streams read ahead, in a forked child."""
        for ref in list(self._refs.values()):
            if ref.on_fork is not None:
                ref.on_fork()

    def endings(self) -> Iterator[Request]:
        """Return the requests that close the collected owners, each once."""
        while self.collected:
            ref = self.collected.popleft()
            if self._refs.pop(id(ref), None) is not None:
                yield from ref.ending()


#: Those of every client of this process.
_ALL: Final[weakref.WeakSet[Owners]] = weakref.WeakSet()


def _on_fork() -> None:
    of_clients = list(_ALL)
    for owners in of_clients:
        owners.is_in_child = True
    for owners in of_clients:
        owners.on_fork()


os.register_at_fork(after_in_child=_on_fork)
