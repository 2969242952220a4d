"""Requests that wait for a position, a decision or a key's change.

A repeated request counts as the same request. A request that its client does not repeat in time
expires; a watch is answered then. Invariant: at most `limit` requests of `limit_bytes` wait, each
only in the index of what it waits for. See docs/logdb.md, section 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logdb.wire import AwaitDecision, Get, Scan, TakeSnapshot, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: Maximum number of pending requests.
MAX_PENDING: Final = 10_000
#: Maximum bytes of pending requests, and the approximate bytes of one without what it names.
MAX_PENDING_BYTES: Final = 256 * 1024 * 1024
_REQUEST_BYTES: Final = 500
#: Approximate bytes of a key or range that a request names, without the key.
_KEY_BYTES: Final = 150
#: Time without a repetition after which a request expires, in nanoseconds.
EXPIRY_NS: Final = 10_000_000_000


class PendingRequest:
    """One pending request."""

    __slots__ = ("_on_ready", "is_over", "last_received_at", "message", "route", "size")

    def __init__(
        self, route: bytes, message: Any, now: int, on_ready: Callable[[PendingRequest], None]
    ) -> None:
        self.route: Final = route
        self.message: Final = message
        #: Approximate bytes.
        self.size: Final = bytes_of(message)
        #: When it was last received, in monotonic nanoseconds.
        self.last_received_at = now
        self.is_over = False
        self._on_ready: Final = on_ready

    def resume(self) -> None:
        """Continue, unless the request is over."""
        if not self.is_over:
            self._on_ready(self)


class PendingRequests:
    """All pending requests."""

    def __init__(self, limit: int = MAX_PENDING, limit_bytes: int = MAX_PENDING_BYTES) -> None:
        self._limit: Final = limit
        self._limit_bytes: Final = limit_bytes
        #: Approximate bytes of all requests.
        self.bytes = 0
        #: By route and number, ordered by the last receipt.
        self._all: Final[dict[tuple[bytes, int], PendingRequest]] = {}
        #: Each group is in the order of arrival.
        self._decision_waiters: Final[dict[tuple[bytes, int], dict[PendingRequest, None]]] = {}
        self._watches: Final[dict[bytes, dict[PendingRequest, None]]] = {}
        #: Watched keys that changed since the last `pop_changed`.
        self._changed_keys: Final[set[bytes]] = set()

    def __len__(self) -> int:
        return len(self._all)

    def refusal(self, size: int) -> str:
        """Return why a request of so many bytes cannot wait; "": it can."""
        if len(self._all) >= self._limit:
            return f"{len(self._all):,} requests are already waiting"
        if self.bytes + size > self._limit_bytes:
            return (
                f"{len(self._all):,} requests are already waiting, of {self.bytes:,} bytes: with"
                f" this one they would exceed the limit of {self._limit_bytes:,} bytes"
            )
        return ""

    def refresh(self, route: bytes, message: Any, now: int) -> bool:
        """Return whether a request is pending already; if so, restart its expiry."""
        key = route, message.request
        request = self._all.get(key)
        if request is None:
            return False
        request.last_received_at = now
        self._all[key] = self._all.pop(key)
        return True

    def add(self, request: PendingRequest) -> PendingRequest:
        """Add a request that waits for a position; return it."""
        self._all[request.route, request.message.request] = request
        self.bytes += request.size
        return request

    def remove(self, request: PendingRequest) -> None:
        """Remove a request."""
        if request.is_over:
            return
        request.is_over = True
        message = request.message
        del self._all[request.route, message.request]
        self.bytes -= request.size
        if type(message) is AwaitDecision:
            _drop(self._decision_waiters, (message.session, message.number), request)
        elif type(message) is Watch:
            _drop(self._watches, message.key, request)

    # --- decisions ---

    def wait_for_decision(self, request: PendingRequest) -> None:
        """Make an `AwaitDecision` wait for the decision."""
        message = request.message
        self._decision_waiters.setdefault((message.session, message.number), {})[request] = None

    def decision_waiters(self, session: bytes, number: int) -> Iterable[PendingRequest]:
        """Return the requests that wait for a transaction's decision."""
        return (
            tuple(self._decision_waiters.get((session, number), ()))
            if self._decision_waiters
            else ()
        )

    def all_decision_waiters(self) -> list[PendingRequest]:
        """Return the requests that wait for any decision."""
        return [request for group in self._decision_waiters.values() for request in group]

    # --- changes ---

    def wait_for_change(self, request: PendingRequest) -> None:
        """Make a `Watch` wait for a change of its key."""
        self._watches.setdefault(request.message.key, {})[request] = None

    @property
    def has_watches(self) -> bool:
        """Whether a request waits for a change."""
        return bool(self._watches)

    def mark_changed(self, keys: Iterable[bytes]) -> None:
        """Record that keys changed."""
        self._changed_keys.update(key for key in keys if key in self._watches)

    def mark_all_changed(self) -> None:
        """Record that any key may have changed."""
        self._changed_keys.update(self._watches)

    def pop_changed(self) -> list[PendingRequest]:
        """Return the watches of keys that changed since the last call."""
        if not self._changed_keys:
            return []
        requests = [request for key in self._changed_keys for request in self._watches.get(key, ())]
        self._changed_keys.clear()
        return requests

    # --- time ---

    def expired(self, now: int) -> list[PendingRequest]:
        """Return the expired requests."""
        requests = []
        for request in self._all.values():
            if now - request.last_received_at < EXPIRY_NS:
                break
            requests.append(request)
        return requests

    def check(self) -> None:
        """Assert the invariant."""
        assert len(self._all) <= self._limit
        assert sum(request.size for request in self._all.values()) == self.bytes
        assert self.bytes <= self._limit_bytes
        for index in (self._decision_waiters, self._watches):
            for group in index.values():
                assert group, "an empty group is left"
                for request in group:
                    assert self._all[request.route, request.message.request] is request


def bytes_of(message: Any) -> int:
    """Return the approximate bytes of a request."""
    kind = type(message)
    if kind is Watch:
        return _REQUEST_BYTES + len(message.key)
    if kind is AwaitDecision or kind is TakeSnapshot:
        return _REQUEST_BYTES
    keys = [*(read.key for read in message.reads)]
    for each in (message, *message.ranges) if kind is Scan else message.ranges:
        keys += (each.start, each.stop or b"")
    if kind is Get:
        keys += message.keys
    return _REQUEST_BYTES + sum(map(len, keys)) + _KEY_BYTES * len(keys)


def _drop(index: dict[Any, dict[PendingRequest, None]], key: Any, request: PendingRequest) -> None:
    """Remove a request from an index; it is absent if it still waits for a position."""
    group = index.get(key)
    if group is not None and request in group:
        del group[request]
        if not group:
            del index[key]
