"""The blocking engine: many threads drive one client node (the Leader/Followers pattern).

A calling thread without a driver takes the *driver role*, and steps the engine until its own call
is completed; then it hands the role to a waiting thread. Other threads put their calls in
`_incoming`, wake the driver, and wait for a result or for the role. A background thread drives
futures when no caller does; another one steps the engine while the client owns cursors.

Rules: only the driver touches the engine. Callbacks of futures never run in the driver role. Signal
handlers run between two steps (`signals`). The main thread leaves its futures to other threads, so
they need no shield. In a forked child every call raises ClosedError.

Invariant: while a call is pending, a thread drives or was handed the role.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import weakref
from collections import deque
from copy import copy
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ziplog.client.engines.driver_role import DriverRole
from ziplog.client.engines.engine import Engine, pending_error
from ziplog.client.engines.insert_future import InsertFuture
from ziplog.client.engines.owners import Owners
from ziplog.client.engines.signals import SHIELD
from ziplog.client.engines.timer_thread import TimerThread
from ziplog.core.units import NS_PER_S
from ziplog.errors import ClosedError, DeadlineError, OutcomeUnknownError
from ziplog.runtime.clock import now_ns
from ziplog.runtime.descriptors import start_thread
from ziplog.wire import decode

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from ziplog.client.common.requests import InsertRequest, Request
    from ziplog.client.engines.engine import Core
    from ziplog.core.message import Message
    from ziplog.types import RecordId

T = TypeVar("T")

#: Number of messages between two checks of deadlines and of other threads' calls.
_BATCH: Final = 256
#: Interval at which a waiting thread checks the role, whatever happens.
_POLL_S: Final = 1.0
#: Maximum number of pending futures, and of their bytes.
_MAX_FUTURES: Final = 1024
_MAX_FUTURE_BYTES: Final = 16 * 1024 * 1024


class Ticket:
    """A thread's call. The driver writes it; the thread reads it once `done` is set."""

    __slots__ = ("done", "result", "signal")

    def __init__(self) -> None:
        self.done = False
        self.result: Any = None
        #: Set while its thread does not drive; wakes the thread.
        self.signal: SimpleQueue[None] | None = None


class BlockingEngine:
    """Drives one client node for many threads."""

    def __init__(self, core: Core, decode: Callable[[bytes], Message] = decode) -> None:
        self.engine: Final = Engine(core, self._on_complete, self._fail_calls, decode=decode)
        self._role: Final = DriverRole()
        self._numbers: Final = itertools.count(1)
        self._tickets: Final[dict[int, Ticket]] = {}
        #: Calls, and cancellations (None), of threads that do not drive; with a future's ticket.
        self._incoming: Final[deque[_Incoming]] = deque()
        #: Subscriptions and scans to close once they are garbage-collected.
        self.owners: Final = Owners()
        self._waiting_threads: Final[deque[Ticket]] = deque()
        self._is_closed = False
        #: The process of the sockets and threads; they do not work in its children.
        self._process: Final = os.getpid()
        self._futures: Final = _Futures(self, self._incoming)
        self._timers: Final = TimerThread(self)
        self._main: Final = threading.main_thread().ident
        #: The queue that the main thread waits on while it does not drive.
        self._main_signal: SimpleQueue[None] | None = None
        #: The driver thread while it runs signal handlers between two steps; 0: none.
        self._paused = 0
        #: Resolves the unknown outcome of an insert: (its error, time-out in seconds).
        self.resolve: Callable[[OutcomeUnknownError, float | None], Any] | None = None
        #: Called with the result of a call that a signal handler ended before it was cancelled.
        self.on_lost_result: Callable[[Any], None] | None = None

    # --- calls ---

    def call(self, request: Request, number: int = 0) -> Any:
        """Return the result of a request; raise it if it is an exception.

        Args:
            request: the request.
            number: a result of `next_number`, if the caller must know it; 0: a new one.

        """
        if self.owners.is_in_child:
            self._check_process()
        if threading.get_ident() != self._main or not SHIELD.enter(self):
            result = self._call(request, number)
        else:
            try:
                result = self._call(request, number)
            finally:
                SHIELD.leave(self)
        if isinstance(result, Exception):
            try:
                raise result
            finally:
                # The exception knows this frame, which would keep the caller's objects alive.
                del result
        return result

    #: The same; the asyncio engine's returns at once.
    call_now = call

    def shielded(self, function: Callable[..., T], *args: Any) -> T:
        """Return `function(*args)`; signal handlers run only where a call in it waits."""
        if threading.get_ident() != self._main or not SHIELD.enter(self):
            return function(*args)
        try:
            return function(*args)
        finally:
            SHIELD.leave(self)

    def next_number(self) -> int:
        """Return the number of a future call."""
        return next(self._numbers)

    def interrupted(self) -> None:
        """Wake the main thread's call, because a signal arrived."""
        self.engine.transport.wake()
        if self._main_signal is not None:
            self._main_signal.put(None)

    def _call(self, request: Request, number: int = 0) -> Any:
        ticket = Ticket()
        number = number or next(self._numbers)
        self._tickets[number] = ticket
        try:
            if self._role.acquire():
                try:
                    if self._is_closed:
                        raise ClosedError
                    self.engine.submit(number, request)
                    self._drive(ticket)
                finally:
                    self._role.release()
            elif self._paused == threading.get_ident():
                self._drive_in_handler(ticket, number, request)
            else:
                self._role.refuse_holder()
                self._wait_or_drive(ticket, number, request)
        finally:
            if not ticket.done:
                self._abandon(number)
            if self._waiting_threads or self._futures.open:
                self._hand_over_role()
        return ticket.result

    def _drive_in_handler(self, ticket: Ticket, number: int, request: Request) -> None:
        """Drive below the call that has the role and runs a signal handler between two steps."""
        self.check_open()
        paused, self._paused = self._paused, 0
        try:
            self.engine.submit(number, request)
            self._drive(ticket)
        finally:
            self._paused = paused

    def _wait_or_drive(self, ticket: Ticket, number: int, request: Request) -> None:
        """Wait for the driver to complete the call; take the role if it becomes free."""
        signals: SimpleQueue[None] = SimpleQueue()
        ticket.signal = signals
        is_main, former = threading.get_ident() == self._main, self._main_signal
        if is_main:
            self._main_signal = signals
        self._waiting_threads.append(ticket)
        try:
            self._incoming.append((number, request, None))
            self.engine.transport.wake()
            while not ticket.done:
                if self._role.acquire():
                    try:
                        self._drive(ticket)
                    finally:
                        self._role.release()
                    return
                with contextlib.suppress(Empty):
                    signals.get(timeout=_POLL_S)
                if SHIELD.noted and not ticket.done:
                    SHIELD.run(self)
        finally:
            self._main_signal = former if is_main else self._main_signal
            self._waiting_threads.remove(ticket)

    def _abandon(self, number: int) -> None:
        """Cancel a call."""
        self._tickets.pop(number, None)
        if not self._is_closed:
            self._incoming.append((number, None, None))
            self.engine.transport.wake()

    def post(self, request: Request) -> None:
        """Make a call without waiting for its result; ignore it if the client is closed."""
        if not (self._is_closed or self.owners.is_in_child):
            # From here on the call is made, whatever a signal handler raises.
            self._incoming.append((0, request, None))
            self.engine.transport.wake()
            self.shielded(self._run_incoming)

    def _run_incoming(self) -> None:
        if self._role.acquire():
            try:
                if not self._is_closed:
                    self._submit_incoming()
            finally:
                self._role.release()
                self._hand_over_role()

    # --- the driver role ---

    def _check_process(self) -> None:
        if self.owners.is_in_child:
            raise ClosedError(f"the client of process {self._process}, in its child,")

    def check_open(self) -> None:
        """Raise ClosedError if the client is closed, or this is a forked child of its process."""
        self._check_process()
        if self._is_closed:
            raise ClosedError

    def _drive(self, ticket: Ticket | _Idle) -> None:
        """Step the engine until the ticket is done. The caller has the role."""
        engine, incoming, noted = self.engine, self._incoming, SHIELD.noted
        collected = self.owners.collected
        handle, receive = engine.handle, engine.transport.receive
        wait_and_receive = engine.transport.wait_and_receive
        if not (ticket.done or self._is_closed):
            engine.catch_up()
        while not ticket.done:
            if self._is_closed:
                raise ClosedError
            if incoming or collected:
                self._submit_incoming()
            timeout_ns = engine.end_batch()
            if noted and not ticket.done:
                self._run_handlers()
                timeout_ns = 0
            received = None if ticket.done else wait_and_receive(0 if incoming else timeout_ns)
            left = _BATCH
            while received is not None:
                handle(*received)
                left -= 1
                received = receive() if left and not ticket.done else None
        if engine.core.is_batch_open:
            # The next driver may be late: a callback of this thread runs, and inserts wait.
            engine.end_batch()

    def _run_handlers(self) -> None:
        """Run signal handlers, which may call this client, or close it."""
        former, self._paused = self._paused, threading.get_ident()
        try:
            SHIELD.run(self)
        finally:
            self._paused = former

    def _submit_incoming(self) -> None:
        while self._incoming:
            number, request, future = self._incoming.popleft()
            if future is not None:
                self._tickets[number] = future
            if request is None:
                self.engine.cancel(number)
            elif not number or number in self._tickets:
                self.engine.submit(number, request)
        for request in self.owners.endings():
            self.engine.submit(0, request)

    def _hand_over_role(self) -> None:
        """Hand the free role to a waiting thread."""
        for ticket in tuple(self._waiting_threads):
            if not ticket.done and ticket.signal is not None:
                ticket.signal.put(None)
                return
        self._futures.wake_thread()

    def _on_complete(self, number: int, result: Any) -> None:
        ticket = self._tickets.pop(number, None)
        if ticket is None:
            if number and self.on_lost_result is not None:
                self.on_lost_result(result)
            return
        if isinstance(result, OutcomeUnknownError) and self.resolve is not None:
            result.resolver = partial(self.resolve, result)
        ticket.result = result
        ticket.done = True
        if isinstance(ticket, _FutureTicket):
            self._futures.on_finished(ticket)
        elif ticket.signal is not None:
            ticket.signal.put(None)

    # --- between calls ---

    def drive_timers(self) -> None:
        """Run the node's timers also between calls, as long as it owns cursors."""
        self.shielded(self._timers.start)

    def step_between_calls(self) -> bool:
        """Step the engine, unless a thread drives; return whether its timers must run further."""
        if self._is_closed:
            return False
        if self._role.acquire():
            try:
                if not self._is_closed:
                    self._submit_incoming()
                    self.engine.step()
            finally:
                self._role.release()
                self._hand_over_role()
        return self.engine.core.has_claims

    # --- futures ---

    def submit_insert(self, request: InsertRequest) -> Future[RecordId]:
        """Insert one record; return a future of its rid. Block while too many are pending.

        Raises:
            DeadlineError: it blocked until the deadline.
            ClosedError: the client is closed.

        """
        self.check_open()
        ticket, number = _FutureTicket(len(request.payloads[0])), next(self._numbers)
        self._futures.wait_for_room(request.deadline, (number, request, ticket))
        if threading.get_ident() != self._main and self._role.acquire():
            try:
                if not self._is_closed:
                    self._submit_incoming()
            finally:
                self._role.release()
                self._hand_over_role()
        else:
            self.engine.transport.wake()
            self._futures.wake_thread()
        if self._is_closed:
            self._fail_all()
        return ticket.future

    def flush(self, timeout_s: float) -> None:
        """Wait until all futures so far are done; raise the first failure since the last call."""
        self.check_open()
        self._futures.flush(timeout_s)

    def drive_futures(self, until: _Idle) -> bool:
        """Drive in the background thread; return False if another thread drives."""
        if not self._role.acquire():
            return False
        try:
            self._drive(until)
        except ClosedError:
            return False
        finally:
            self._role.release()
            if self._waiting_threads:
                self._hand_over_role()
        return True

    @property
    def has_waiting_threads(self) -> bool:
        """Whether a thread waits that could drive."""
        return bool(self._waiting_threads)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    # --- the end ---

    def close(self) -> None:
        """Fail the pending calls and close the engine. Idempotent; from any thread."""
        if self._paused != threading.get_ident():
            self._role.refuse_holder()
        self._is_closed = True
        if not self.owners.is_in_child:
            self.shielded(self._close)
            self._futures.close()
            self._timers.stop()

    def _close(self) -> None:
        self.engine.transport.wake()
        in_handler = self._paused == threading.get_ident()
        with contextlib.nullcontext() if in_handler else self._role:
            self._fail_all()
            self.engine.close()

    def _fail_calls(self, error: Exception) -> None:
        for number in list(self._tickets):
            # In this order: a stream that is cancelled while it opens completes its call.
            self._on_complete(number, copy(error))
            self.engine.cancel(number)

    def _fail_all(self) -> None:
        # Two threads may end a closed client's calls at once.
        with contextlib.suppress(IndexError):
            while True:
                number, _, future = self._incoming.popleft()
                if future is not None:
                    self._tickets[number] = future
        for number in list(self._tickets):
            self._on_complete(number, ClosedError())


class _FutureTicket(Ticket):
    __slots__ = ("future", "size")

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size: Final = size
        self.future: Final = InsertFuture()
        # It cannot be cancelled: a sent insert may happen.
        self.future.set_running_or_notify_cancel()


#: A call with its number and perhaps its future's ticket; or a cancellation.
_Incoming = tuple[int, "Request | None", _FutureTicket | None]
_Future = tuple[int, "Request | None", _FutureTicket]


class _Idle:
    """The ticket of the background thread: done when it has other work, or none."""

    def __init__(self, shared: BlockingEngine, futures: _Futures) -> None:
        self._shared: Final = shared
        self._futures: Final = futures

    @property
    def done(self) -> bool:
        return (
            self._futures.has_finished or self._shared.has_waiting_threads or not self._futures.open
        )


class _Futures:
    """The pending futures, and the background thread, which starts with the first of them."""

    def __init__(self, shared: BlockingEngine, incoming: deque[_Incoming]) -> None:
        self._shared: Final = shared
        self._incoming: Final = incoming
        self._lock: Final = threading.Lock()
        #: Threads that wait for room or for the end; each is woken once.
        self._waiters: Final[deque[SimpleQueue[None]]] = deque()
        #: Number of pending futures, and the bytes of their payloads.
        self.open = 0
        self._bytes = 0
        self._finished: Final[deque[_FutureTicket]] = deque()
        self._failure: Exception | None = None
        self._signal: Final[SimpleQueue[_Futures | None]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._idle: Final = _Idle(shared, self)

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
        size, incoming, new = call[2].size, self._incoming, (call,)
        is_closed = self._shared.is_closed
        with self._lock:
            # Without a call: CPython would run signal handlers after it. They may use this client,
            # and the background thread needs the lock.
            is_full = self.open >= _MAX_FUTURES or self._bytes + size > _MAX_FUTURE_BYTES
            if is_full and self.open and not is_closed:
                return False
            self.open += 1
            self._bytes += size
            incoming += new
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
        return bool(self._finished)

    def on_finished(self, ticket: _FutureTicket) -> None:
        """Let the background thread complete a future: callbacks never run in the driver role."""
        self._finished.append(ticket)
        self.wake_thread()

    def wake_thread(self) -> None:
        """Wake the background thread."""
        if self._thread is not None and self._signal.empty():
            # The thread must find this object, even if the client is dropped meanwhile.
            self._signal.put(self)

    def flush(self, timeout_s: float) -> None:
        is_done = not self.open or self._wait(lambda: not self.open, timeout_s)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if not is_done:
            raise pending_error(self.open, timeout_s)

    def work(self) -> bool:
        """Drive, unless other threads do, until no future is pending; return False at the end."""
        while True:
            while self._finished:
                self._resolve_future(self._finished.popleft())
            if not self.open:
                return not self._shared.is_closed
            if self._shared.has_waiting_threads or not self._shared.drive_futures(self._idle):
                with contextlib.suppress(Empty):
                    self._signal.get(timeout=_POLL_S)

    def _resolve_future(self, ticket: _FutureTicket) -> None:
        result, future = ticket.result, ticket.future
        failed = isinstance(result, Exception)
        # The future's callbacks run here; they must see the count without it.
        with self._lock:
            self.open -= 1
            self._bytes -= ticket.size
            if failed and self._failure is None:
                self._failure = result
        while self._waiters:
            self._waiters.popleft().put(None)
        if failed:
            future.set_exception(result)
        else:
            future.set_result(result[0])

    def close(self) -> None:
        thread = self._thread
        self.wake_thread()
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def _serve(ref: weakref.ref[_Futures], signals: SimpleQueue[_Futures | None]) -> None:
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
