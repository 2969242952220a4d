"""Requests that cannot be answered yet: they wait for a position, a decision or a key's change.

Rule: a request that comes again while it waits is the same one. One that was not repeated for a
while is forgotten (its client is gone, or asks somebody else); a watch is answered then.
Invariant: never more than `limit` wait; each is in the index of what it waits for, and no other.
See docs/logdb.md, section 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logdb.wire import AwaitDecision, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: As many requests may wait.
MAX_PENDING: Final = 10_000
#: A request that was not repeated for so long is over.
EXPIRY_NS: Final = 10_000_000_000


class PendingRequest:
    """One request that waits."""

    __slots__ = ("_on_ready", "is_over", "last_received_at", "message", "route")

    def __init__(
        self, route: bytes, message: Any, now: int, on_ready: Callable[[PendingRequest], None]
    ) -> None:
        self.route: Final = route
        self.message: Final = message
        #: When it came last, in monotonic nanoseconds.
        self.last_received_at = now
        self.is_over = False
        self._on_ready: Final = on_ready

    def resume(self) -> None:
        """Go on, unless that is over."""
        if not self.is_over:
            self._on_ready(self)


class PendingRequests:
    """All requests that wait."""

    def __init__(self, limit: int = MAX_PENDING) -> None:
        self._limit: Final = limit
        #: By route and number; the one that came last stands last.
        self._all: Final[dict[tuple[bytes, int], PendingRequest]] = {}
        #: Each group in the order of its coming.
        self._decision_waiters: Final[dict[tuple[bytes, int], dict[PendingRequest, None]]] = {}
        self._watches: Final[dict[bytes, dict[PendingRequest, None]]] = {}
        #: Watched keys that were changed since `pop_changed` was asked for.
        self._changed_keys: Final[set[bytes]] = set()

    def __len__(self) -> int:
        return len(self._all)

    @property
    def is_full(self) -> bool:
        """Whether no more may wait."""
        return len(self._all) >= self._limit

    def refresh(self, route: bytes, message: Any, now: int) -> bool:
        """Whether a request waits already; it has patience again then."""
        key = route, message.request
        request = self._all.get(key)
        if request is None:
            return False
        request.last_received_at = now
        self._all[key] = self._all.pop(key)
        return True

    def add(
        self, route: bytes, message: Any, now: int, on_ready: Callable[[PendingRequest], None]
    ) -> PendingRequest:
        """Let a request wait: for a position."""
        request = self._all[route, message.request] = PendingRequest(route, message, now, on_ready)
        return request

    def remove(self, request: PendingRequest) -> None:
        """It waits no longer."""
        if request.is_over:
            return
        request.is_over = True
        message = request.message
        del self._all[request.route, message.request]
        if type(message) is AwaitDecision:
            _drop(self._decision_waiters, (message.session, message.number), request)
        elif type(message) is Watch:
            _drop(self._watches, message.key, request)

    # --- decisions ---

    def wait_for_decision(self, request: PendingRequest) -> None:
        """Let an `AwaitDecision` wait for the decision."""
        message = request.message
        self._decision_waiters.setdefault((message.session, message.number), {})[request] = None

    def decision_waiters(self, session: bytes, number: int) -> Iterable[PendingRequest]:
        """Return who waits for a decision."""
        return (
            tuple(self._decision_waiters.get((session, number), ()))
            if self._decision_waiters
            else ()
        )

    def all_decision_waiters(self) -> list[PendingRequest]:
        """Return all who wait for some decision."""
        return [request for group in self._decision_waiters.values() for request in group]

    # --- changes ---

    def wait_for_change(self, request: PendingRequest) -> None:
        """Let a `Watch` wait for a change of its key."""
        self._watches.setdefault(request.message.key, {})[request] = None

    @property
    def has_watches(self) -> bool:
        """Whether anybody waits for a change."""
        return bool(self._watches)

    def mark_changed(self, keys: Iterable[bytes]) -> None:
        """Take note that keys were changed."""
        self._changed_keys.update(key for key in keys if key in self._watches)

    def mark_all_changed(self) -> None:
        """Take note that any key may have changed."""
        self._changed_keys.update(self._watches)

    def pop_changed(self) -> list[PendingRequest]:
        """Return who watches a key that was changed since the last time."""
        if not self._changed_keys:
            return []
        requests = [request for key in self._changed_keys for request in self._watches.get(key, ())]
        self._changed_keys.clear()
        return requests

    # --- time ---

    def expired(self, now: int) -> list[PendingRequest]:
        """Return those that were not repeated for too long."""
        requests = []
        for request in self._all.values():
            if now - request.last_received_at < EXPIRY_NS:
                break
            requests.append(request)
        return requests

    def check(self) -> None:
        """Assert the invariant."""
        assert len(self._all) <= self._limit
        for index in (self._decision_waiters, self._watches):
            for group in index.values():
                assert group, "an empty group is left"
                for request in group:
                    assert self._all[request.route, request.message.request] is request


def _drop(index: dict[Any, dict[PendingRequest, None]], key: Any, request: PendingRequest) -> None:
    """Remove a request from an index, if it is in it: it may still wait for a position."""
    group = index.get(key)
    if group is not None and request in group:
        del group[request]
        if not group:
            del index[key]
