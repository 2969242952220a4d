"""The pending futures of a blocking client, and the background thread that completes them.

The thread starts with the first future, and drives the client while no call does. It ends after
`close` once no future is pending, or when the client is dropped.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, Protocol

from ziplog.client.engines.engine import pending_error
from ziplog.core.units import NS_PER_S
from ziplog.errors import ClosedError, DeadlineError
from ziplog.runtime.clock import now_ns
from ziplog.runtime.descriptors import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.client.common.requests import Request
    from ziplog.client.engines.tickets import FutureTicket, Incoming

    _Future = tuple[int, Request | None, FutureTicket]

#: Maximum number of pending futures, and of their bytes.
_MAX_FUTURES: Final = 1024
_MAX_FUTURE_BYTES: Final = 16 * 1024 * 1024
#: Interval at which the thread checks the role and the client, whatever happens.
_POLL_S: Final = 1.0


class Driven(Protocol):
    """A blocking engine."""

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        ...

    @property
    def has_waiting_threads(self) -> bool:
        """Whether a thread waits that could drive."""
        ...

    def shielded(self, function: Callable[[], None], /) -> None:
        """Call a function; signal handlers run before it and after it."""
        ...

    def drive_futures(self, until: Idle) -> bool:
        """Drive in the background thread; return False if another thread drives."""
        ...


class Idle:
    """The ticket of the background thread: done when it has other work, or none."""

    def __init__(self, shared: Driven, futures: PendingFutures) -> None:
        self._shared: Final = shared
        self._futures: Final = futures

    @property
    def done(self) -> bool:
        """Whether the thread stops driving."""
        return (
            self._futures.has_finished or self._shared.has_waiting_threads or not self._futures.open
        )


class PendingFutures:
    """The pending futures, and the background thread, which starts with the first of them."""

    def __init__(self, shared: Driven, incoming: deque[Incoming]) -> None:
        self._shared: Final = shared
        self._incoming: Final = incoming
        self._lock: Final = threading.Lock()
        #: Threads that wait for room or for the end; each is woken once.
        self._waiters: Final[deque[SimpleQueue[None]]] = deque()
        #: Number of pending futures, and the bytes of their payloads.
        self.open = 0
        self._bytes = 0
        #: Number of futures so far; those that are pending, by that number; the lowest of these.
        self._submitted = 0
        self._pending: Final[dict[int, FutureTicket]] = {}
        self._oldest = 1
        self._finished: Final[deque[FutureTicket]] = deque()
        self._failure: Exception | None = None
        self._signal: Final[SimpleQueue[PendingFutures | None]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        #: The thread has ended, so it would complete no further future.
        self._has_ended = False
        self._idle: Final = Idle(shared, self)

    def wait_for_room(self, deadline: int, call: _Future) -> None:
        """Wait until one more future may be pending; then count it, and submit its call.

        Both happen or neither, whatever a signal handler raises.
        """
        if self._thread is None:
            self._shared.shielded(self._start)
        if self._try_submit(call):
            return
        timeout_s = max(deadline - now_ns(), 0) / NS_PER_S
        if not self._wait(lambda: self._try_submit(call), timeout_s):
            raise DeadlineError(
                f"{self.open} inserts were pending for {timeout_s:.3g} s, and no more are"
                " allowed; nothing was inserted: try again"
            )

    def _try_submit(self, call: _Future) -> bool:
        ticket, incoming, new = call[2], self._incoming, (call,)
        size = ticket.size
        with self._lock:
            # Without a call: CPython would run signal handlers after it. They may use this client,
            # and the background thread needs the lock.
            has_ended = self._has_ended
            is_full = self.open >= _MAX_FUTURES or self._bytes + size > _MAX_FUTURE_BYTES
            if not has_ended and is_full and self.open:
                return False
            if not has_ended:
                self.open += 1
                self._bytes += size
                self._submitted += 1
                ticket.order = self._submitted
                self._pending[ticket.order] = ticket
                incoming += new
        if has_ended:
            raise ClosedError
        return True

    def _wait(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        until, signals = time.monotonic() + timeout_s, SimpleQueue[None]()
        while True:
            self._waiters.append(signals)
            if is_over():
                return True
            left = until - time.monotonic()
            if left <= 0:
                return False
            with contextlib.suppress(Empty):
                signals.get(timeout=min(left, threading.TIMEOUT_MAX))

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                # The thread must not keep a dropped client alive.
                signals = self._signal
                ref = weakref.ref(self, lambda _: signals.put(None))
                thread = threading.Thread(
                    target=_serve, args=(ref, signals), name="ziplog", daemon=True
                )
                self._thread = start_thread(thread, "cannot insert in the background")

    @property
    def has_finished(self) -> bool:
        """Whether the thread has futures to complete."""
        return bool(self._finished)

    def on_finished(self, ticket: FutureTicket) -> None:
        """Let the background thread complete a future: callbacks never run in the driver role."""
        self._finished.append(ticket)
        self.wake_thread()

    def wake_thread(self) -> None:
        """Wake the background thread."""
        if self._thread is not None and self._signal.empty():
            # The thread must find this object, even if the client is dropped meanwhile.
            self._signal.put(self)

    def flush(self, timeout_s: float) -> None:
        """Wait until all futures so far are done; raise the first failure since the last call."""
        last = self._submitted
        is_done = self._oldest > last or self._wait(lambda: self._oldest > last, timeout_s)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if not is_done:
            raise pending_error(sum(order <= last for order in list(self._pending)), timeout_s)

    def work(self) -> bool:
        """Drive, unless other threads do, until no future is pending; return False at the end."""
        while True:
            while self._finished:
                self._resolve_future(self._finished.popleft())
            if not self.open:
                return not self._ends()
            if self._shared.has_waiting_threads or not self._shared.drive_futures(self._idle):
                with contextlib.suppress(Empty):
                    self._signal.get(timeout=_POLL_S)

    def _ends(self) -> bool:
        """Whether the thread ends: the client is closed, and no future is pending from now on."""
        with self._lock:
            self._has_ended = self._shared.is_closed and not self.open
        return self._has_ended

    def _resolve_future(self, ticket: FutureTicket) -> None:
        result, future = ticket.result, ticket.future
        failed = isinstance(result, Exception)
        # The future's callbacks run here; they must see the count without it.
        with self._lock:
            self.open -= 1
            self._bytes -= ticket.size
            del self._pending[ticket.order]
            self._oldest = next(iter(self._pending), self._submitted + 1)
            if failed and self._failure is None:
                self._failure = result
        while self._waiters:
            self._waiters.popleft().put(None)
        if failed:
            future.set_exception(result)
        else:
            future.set_result(result[0])

    def close(self) -> None:
        """Wait for the end of the thread, after the client was closed and its calls failed."""
        thread = self._thread
        self.wake_thread()
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def _serve(ref: weakref.ref[PendingFutures], signals: SimpleQueue[PendingFutures | None]) -> None:
    """Run the background thread for the futures of a live client."""
    while True:
        futures = ref()
        if futures is None or not futures.work():
            return
        del futures
        with contextlib.suppress(Empty):
            # The item keeps the client alive until it was processed.
            futures = signals.get(timeout=_POLL_S)
            if futures is not None and not futures.work():
                return
            del futures
