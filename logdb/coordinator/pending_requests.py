"""Requests that cannot be answered yet: they wait for a position, a decision or a key's change.

Rule: a request that comes again while it waits is the same one. One that was not repeated for a
while is forgotten (its client is gone, or asks somebody else); a watch is answered then.
Invariant: never more than `limit` wait; each is in the index of what it waits for, and no other.
See docs/logdb.md, section 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logdb.wire import Ask, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: As many requests may wait.
MAX_WAITING: Final = 10_000
#: A request that was not repeated for so long is over.
PATIENCE_NS: Final = 10_000_000_000


class Waiting:
    """One request that waits."""

    __slots__ = ("_then", "asked_at", "is_over", "question", "route")

    def __init__(
        self, route: bytes, question: Any, now: int, then: Callable[[Waiting], None]
    ) -> None:
        self.route: Final = route
        self.question: Final = question
        #: When it came last, in monotonic nanoseconds.
        self.asked_at = now
        self.is_over = False
        self._then: Final = then

    def resume(self) -> None:
        """Go on, unless that is over."""
        if not self.is_over:
            self._then(self)


class Waitings:
    """All requests that wait."""

    def __init__(self, limit: int = MAX_WAITING) -> None:
        self._limit: Final = limit
        #: By route and number; the one that came last stands last.
        self._all: Final[dict[tuple[bytes, int], Waiting]] = {}
        #: Each group in the order of its coming.
        self._asks: Final[dict[tuple[bytes, int], dict[Waiting, None]]] = {}
        self._watches: Final[dict[bytes, dict[Waiting, None]]] = {}
        #: Watched keys that were changed since `changed` was asked for.
        self._touched: Final[set[bytes]] = set()

    def __len__(self) -> int:
        return len(self._all)

    @property
    def is_full(self) -> bool:
        """Whether no more may wait."""
        return len(self._all) >= self._limit

    def repeated(self, route: bytes, question: Any, now: int) -> bool:
        """Whether a request waits already; it has patience again then."""
        key = route, question.request
        waiting = self._all.get(key)
        if waiting is None:
            return False
        waiting.asked_at = now
        self._all[key] = self._all.pop(key)
        return True

    def add(
        self, route: bytes, question: Any, now: int, then: Callable[[Waiting], None]
    ) -> Waiting:
        """Let a request wait: for a position."""
        waiting = self._all[route, question.request] = Waiting(route, question, now, then)
        return waiting

    def end(self, waiting: Waiting) -> None:
        """It waits no longer."""
        if waiting.is_over:
            return
        waiting.is_over = True
        question = waiting.question
        del self._all[waiting.route, question.request]
        if type(question) is Ask:
            _drop(self._asks, (question.session, question.number), waiting)
        elif type(question) is Watch:
            _drop(self._watches, question.key, waiting)

    # --- decisions ---

    def for_decision(self, waiting: Waiting) -> None:
        """Let an `Ask` wait for the decision."""
        question = waiting.question
        self._asks.setdefault((question.session, question.number), {})[waiting] = None

    def decided(self, session: bytes, number: int) -> Iterable[Waiting]:
        """Return who waits for a decision."""
        return tuple(self._asks.get((session, number), ())) if self._asks else ()

    def undecided(self) -> list[Waiting]:
        """Return all who wait for some decision."""
        return [waiting for group in self._asks.values() for waiting in group]

    # --- changes ---

    def for_change(self, waiting: Waiting) -> None:
        """Let a `Watch` wait for a change of its key."""
        self._watches.setdefault(waiting.question.key, {})[waiting] = None

    @property
    def has_watches(self) -> bool:
        """Whether anybody waits for a change."""
        return bool(self._watches)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Take note that keys were changed."""
        self._touched.update(key for key in keys if key in self._watches)

    def touch_all(self) -> None:
        """Take note that any key may have changed."""
        self._touched.update(self._watches)

    def changed(self) -> list[Waiting]:
        """Return who watches a key that was changed since the last time."""
        if not self._touched:
            return []
        found = [waiting for key in self._touched for waiting in self._watches.get(key, ())]
        self._touched.clear()
        return found

    # --- time ---

    def late(self, now: int) -> list[Waiting]:
        """Return those that were not repeated for too long."""
        found = []
        for waiting in self._all.values():
            if now - waiting.asked_at < PATIENCE_NS:
                break
            found.append(waiting)
        return found

    def check(self) -> None:
        """Assert the invariant."""
        assert len(self._all) <= self._limit
        for index in (self._asks, self._watches):
            for group in index.values():
                assert group, "an empty group is left"
                for waiting in group:
                    assert self._all[waiting.route, waiting.question.request] is waiting


def _drop(index: dict[Any, dict[Waiting, None]], key: Any, waiting: Waiting) -> None:
    """Remove a request from an index, if it is in it: it may still wait for a position."""
    group = index.get(key)
    if group is not None and waiting in group:
        del group[waiting]
        if not group:
            del index[key]
