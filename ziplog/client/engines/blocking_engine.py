"""The blocking engine: many threads drive one client node (the Leader/Followers pattern).

A calling thread without a driver takes the *driver role*, and steps the engine until its own call
is completed; then it hands the role to a waiting thread. Other threads put their calls in
`_incoming`, wake the driver, and wait for a result or for the role. A background thread drives
futures when no caller does; another one steps the engine while the client owns cursors.

Rules: only the driver touches the engine. Neither callbacks of futures nor signal handlers run in
the driver role; handlers run between two steps (`signals`), while other threads may drive. The main
thread leaves its futures to other threads, so they need no shield. In a forked child every call
raises ClosedError.

Invariant: while a call is pending, a thread drives or was handed the role.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections import deque
from copy import copy
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ziplog.client.engines.driver_role import DriverRole
from ziplog.client.engines.engine import Engine, internal_error
from ziplog.client.engines.owners import Owners
from ziplog.client.engines.pending_futures import PendingFutures
from ziplog.client.engines.signals import SHIELD
from ziplog.client.engines.tickets import FutureTicket, Ticket
from ziplog.client.engines.timer_thread import TimerThread
from ziplog.errors import ClosedError, OutcomeUnknownError
from ziplog.wire import decode

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from ziplog.client.common.requests import InsertRequest, Request
    from ziplog.client.engines.engine import Core
    from ziplog.client.engines.pending_futures import Idle
    from ziplog.client.engines.tickets import Incoming
    from ziplog.core.message import Message
    from ziplog.types import RecordId

T = TypeVar("T")
_log: Final = logging.getLogger("ziplog.client")

#: Number of messages between two checks of deadlines and of other threads' calls.
_BATCH: Final = 256
#: Interval at which a waiting thread checks the role, whatever happens.
_POLL_S: Final = 1.0


class BlockingEngine:
    """Drives one client node for many threads."""

    def __init__(self, core: Core, decode: Callable[[bytes], Message] = decode) -> None:
        self.engine: Final = Engine(core, self._on_complete, self._fail_calls, decode=decode)
        self._role: Final = DriverRole()
        self._numbers: Final = itertools.count(1)
        self._tickets: Final[dict[int, Ticket]] = {}
        #: Calls, and cancellations (None), of threads that do not drive; with a future's ticket.
        self._incoming: Final[deque[Incoming]] = deque()
        #: Subscriptions and scans to close once they are garbage-collected.
        self.owners: Final = Owners()
        self._waiting_threads: Final[deque[Ticket]] = deque()
        self._is_closed = False
        #: The process of the sockets and threads; they do not work in its children.
        self._process: Final = os.getpid()
        self._futures: Final = PendingFutures(self, self._incoming)
        self._timers: Final = TimerThread(self)
        self._main: Final = threading.main_thread().ident
        #: The queue that the main thread waits on while it does not drive.
        self._main_signal: SimpleQueue[None] | None = None
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
            else:
                self._role.refuse_holder()
                self._incoming.append((number, request, None))
                self.engine.transport.wake()
            if not ticket.done:
                self._wait_or_drive(ticket)
        finally:
            if not ticket.done:
                self._abandon(number)
            if self._waiting_threads or self._futures.open:
                self._hand_over_role()
        return ticket.result

    def _wait_or_drive(self, ticket: Ticket) -> None:
        """Wait for the driver to complete the call; take the role if it becomes free."""
        signals: SimpleQueue[None] = SimpleQueue()
        ticket.signal = signals
        is_main, former = threading.get_ident() == self._main, self._main_signal
        if is_main:
            self._main_signal = signals
        self._waiting_threads.append(ticket)
        try:
            while not ticket.done:
                if is_main and SHIELD.noted:
                    self._run_handlers(ticket)
                if self._role.acquire():
                    try:
                        self._drive(ticket)
                    finally:
                        self._role.release()
                else:
                    with contextlib.suppress(Empty):
                        signals.get(timeout=_POLL_S)
        finally:
            self._main_signal = former if is_main else self._main_signal
            self._waiting_threads.remove(ticket)

    def _run_handlers(self, ticket: Ticket) -> None:
        """Run signal handlers, which may use this client; other threads drive meanwhile."""
        self._waiting_threads.remove(ticket)
        self._hand_over_role()
        try:
            SHIELD.run(self)
        finally:
            self._waiting_threads.append(ticket)

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

    def _drive(self, ticket: Ticket | Idle) -> None:
        """Step the engine until the ticket is done, or signal handlers are due.

        The caller has the role.
        """
        engine, incoming, noted = self.engine, self._incoming, SHIELD.noted
        collected = self.owners.collected
        handle, receive = engine.handle, engine.transport.receive
        wait_and_receive = engine.transport.wait_and_receive
        if not (ticket.done or self._is_closed) and engine.catch_up():
            # If the ticket is done by now, as at each call of a slow caller, nothing else does it.
            self._submit_incoming()
            engine.end_batch()
        while not ticket.done:
            if self._is_closed:
                raise ClosedError
            if incoming or collected:
                self._submit_incoming()
            timeout_ns = engine.end_batch()
            is_interrupted = noted and threading.get_ident() == self._main
            if incoming or is_interrupted:
                timeout_ns = 0
            received = None if ticket.done else wait_and_receive(timeout_ns)
            left = _BATCH
            while received is not None:
                handle(*received)
                left -= 1
                received = receive() if left and not ticket.done else None
            if is_interrupted:
                break  # The handlers run without the role.
        if engine.core.is_batch_open:
            # The next driver may be late: a callback of this thread runs, and inserts wait.
            engine.end_batch()

    def _submit_incoming(self) -> None:
        while self._incoming:
            number, request, future = self._incoming.popleft()
            if future is not None:
                self._tickets[number] = future
            if request is None:
                self.engine.cancel(number)
            elif not number or number in self._tickets:
                self._submit(number, request)
        for request in self.owners.endings():
            self.engine.submit(0, request)

    def _submit(self, number: int, request: Request) -> None:
        """Submit a call of another thread, which gets the error if the node refuses the call."""
        try:
            self.engine.submit(number, request)
        except Exception as error:
            if number not in self._tickets:
                raise
            self._on_complete(number, error)

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
        if isinstance(ticket, FutureTicket):
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
        ticket, number = FutureTicket(len(request.payloads[0])), next(self._numbers)
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

    def drive_futures(self, until: Idle) -> bool:
        """Drive in the background thread; return False if another thread drives."""
        if not self._role.acquire():
            return False
        try:
            self._drive(until)
        except ClosedError:
            self._fail_all()  # A signal handler may have ended the call that submitted a future.
            return False
        except Exception as error:  # noqa: BLE001 - the futures get it
            _log.exception("a step of the client failed")
            self._fail_futures(error)
        finally:
            self._role.release()
            if self._waiting_threads:
                self._hand_over_role()
        return True

    def _fail_futures(self, error: Exception) -> None:
        """Fail the submitted futures after an internal error: none of them may ever be completed.

        No call got the error, because the background thread drove.
        """
        for number, ticket in list(self._tickets.items()):
            if isinstance(ticket, FutureTicket):
                self._on_complete(number, internal_error(error))

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
        self._role.refuse_holder()
        self._is_closed = True
        if not self.owners.is_in_child:
            self.shielded(self._close)
            self._futures.close()
            self._timers.stop()

    def _close(self) -> None:
        self.engine.transport.wake()
        with self._role:
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
