"""One engine for many threads, without a hand-over for a thread that is alone.

A calling thread that finds nobody driving takes the *driver role*, and steps the engine until its
own call is answered; then it gives the role to a thread that waits. A thread that finds the role
taken leaves its call in `_incoming`, wakes the driver, and waits for its answer or for the role.
Futures are driven by a background thread while nobody else drives.

Rules: only the holder of the role touches the engine; users' callbacks of futures never run under
the role; Ctrl-C is held back until the engine is between two steps. Invariant: while a call is
open, somebody drives or was given the role. In a forked child everything raises ClosedError.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading

# `signal.signal` itself: the wrapper's enums cost 2 us a call, on the path of every insert.
from _signal import signal as set_handler  # type: ignore[import-not-found]
from collections import deque
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from ziplog.client.engine import Engine
from ziplog.errors import ClosedError, DeadlineError, OutcomeUnknownError
from ziplog.wire import decode

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from ziplog.client.engine import Core
    from ziplog.client.requests import Request
    from ziplog.wire import Message

_SIGINT: Final = int(signal.SIGINT)
#: Messages stepped before deadlines and other threads' calls are looked at.
_BATCH: Final = 256
#: A waiting thread looks at the role this often, whatever happens.
_LOOK_S: Final = 1.0
#: What may be under way by futures.
_MAX_FUTURES: Final = 1024
_MAX_FUTURE_BYTES: Final = 16 * 1024 * 1024


class Ticket:
    """A thread's call. Written by the driver, read by the thread once `done` is set."""

    __slots__ = ("done", "result", "signal")

    def __init__(self) -> None:
        self.done = False
        self.result: Any = None
        #: Set while its thread does not drive: tells it to look again.
        self.signal: SimpleQueue[None] | None = None

    def is_done(self) -> bool:
        """Whether the call was answered."""
        return self.done


class SharedEngine:
    """The engine behind a blocking client."""

    def __init__(self, core: Core, decode: Callable[[bytes], Message] = decode) -> None:
        self.engine: Final = Engine(core, self._answer, decode=decode)
        self._role: Final = threading.Lock()
        self._numbers: Final = itertools.count(1)
        self._tickets: Final[dict[int, Ticket]] = {}
        #: Calls, and cancellations (None), of threads that do not drive.
        self._incoming: Final[deque[tuple[int, Request | None]]] = deque()
        self._followers: Final[deque[Ticket]] = deque()
        self._is_closed = False
        #: Who has the sockets, and the threads: nothing works in its children.
        self._process: Final = os.getpid()
        self._futures: Final = _Futures(self)
        self._main: Final = threading.main_thread().ident
        self._interrupt: tuple[int, FrameType | None] | None = None
        self._main_signal: SimpleQueue[None] | None = None
        #: Finds out what became of an insert: (its error, time-out in seconds).
        self.resolve: Callable[[OutcomeUnknownError, float | None], Any] | None = None

    # --- calls ---

    def call(self, request: Request) -> Any:
        """Return the answer to a request; raises it if it is an exception."""
        self._check_process()
        if threading.get_ident() != self._main:
            result = self._call(request)
        else:
            result = self._call_shielded(request)
        if isinstance(result, Exception):
            raise result
        return result

    def _call_shielded(self, request: Request) -> Any:
        """Make a call such that Ctrl-C never tears a step apart."""
        former = set_handler(_SIGINT, self._note_interrupt)
        if not callable(former):
            if former is not None:
                set_handler(_SIGINT, former)
            return self._call(request)
        try:
            return self._call(request, former)
        finally:
            set_handler(_SIGINT, former)
            self._raise_interrupt(former)

    def _note_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupt = (number, frame)
        self.engine.transport.wake()
        if self._main_signal is not None:
            self._main_signal.put(None)

    def _call(
        self, request: Request, on_interrupt: Callable[[int, FrameType | None], Any] | None = None
    ) -> Any:
        ticket, number = Ticket(), next(self._numbers)
        self._tickets[number] = ticket
        try:
            if self._role.acquire(blocking=False):
                try:
                    self._check_open()
                    self.engine.submit(number, request)
                    self._drive(ticket, on_interrupt)
                finally:
                    self._role.release()
            else:
                self._follow(ticket, number, request, on_interrupt)
        finally:
            if not ticket.done:
                self._abandon(number)
            if self._followers or self._futures.open:
                self._promote()
        return ticket.result

    def _follow(
        self,
        ticket: Ticket,
        number: int,
        request: Request,
        on_interrupt: Callable[[int, FrameType | None], Any] | None,
    ) -> None:
        """Leave the call to whoever drives; take the role if it becomes free."""
        signals: SimpleQueue[None] = SimpleQueue()
        ticket.signal = signals
        if on_interrupt is not None:
            self._main_signal = signals
        self._followers.append(ticket)
        try:
            self._incoming.append((number, request))
            self.engine.transport.wake()
            while not ticket.done:
                if self._role.acquire(blocking=False):
                    try:
                        self._drive(ticket, on_interrupt)
                    finally:
                        self._role.release()
                    return
                with contextlib.suppress(Empty):
                    signals.get(timeout=_LOOK_S)
                self._raise_interrupt(on_interrupt)
        finally:
            self._main_signal = None if on_interrupt is not None else self._main_signal
            self._followers.remove(ticket)

    def _abandon(self, number: int) -> None:
        """Nobody waits for the call any more."""
        self._tickets.pop(number, None)
        if not self._is_closed:
            self._incoming.append((number, None))
            self.engine.transport.wake()

    # --- the driver role ---

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ClosedError(f"the client of process {self._process}, in its child,")

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError

    def _drive(
        self,
        ticket: Ticket | _Idle,
        on_interrupt: Callable[[int, FrameType | None], Any] | None = None,
    ) -> None:
        """Step the engine until the ticket is done. The caller holds the role."""
        engine, incoming = self.engine, self._incoming
        receive, wait, is_done = engine.receive, engine.transport.wait, ticket.is_done
        while not is_done():
            self._check_open()
            if incoming:
                self._take_incoming()
            for _ in range(_BATCH):
                if not receive():
                    break
                if is_done():
                    return
            engine.turn()
            if self._interrupt is not None:
                self._raise_interrupt(on_interrupt)
            if not incoming and not is_done():
                wait(engine.timeout_ns())

    def _take_incoming(self) -> None:
        while self._incoming:
            number, request = self._incoming.popleft()
            if request is None:
                self.engine.cancel(number)
            elif number in self._tickets:
                self.engine.submit(number, request)

    def _raise_interrupt(self, on_interrupt: Callable[[int, FrameType | None], Any] | None) -> None:
        """Do now what was held back; usually that raises KeyboardInterrupt."""
        if on_interrupt is not None and self._interrupt is not None:
            interrupt, self._interrupt = self._interrupt, None
            on_interrupt(*interrupt)

    def _promote(self) -> None:
        """Give the role, which is free, to a thread that waits."""
        for ticket in tuple(self._followers):
            if not ticket.done and ticket.signal is not None:
                ticket.signal.put(None)
                return
        self._futures.look()

    def _answer(self, number: int, result: Any) -> None:
        ticket = self._tickets.pop(number, None)
        if ticket is None:
            return
        if isinstance(result, OutcomeUnknownError) and self.resolve is not None:
            result.resolver = partial(self.resolve, result)
        ticket.result = result
        ticket.done = True
        if isinstance(ticket, _FutureTicket):
            self._futures.finished(ticket)
        elif ticket.signal is not None:
            ticket.signal.put(None)

    # --- futures ---

    def submit(self, request: Request, size: int, deadline_s: float) -> Future[Any]:
        """Return a future of the answer; blocks while too many are under way.

        Raises:
            DeadlineError: it blocked for `deadline_s`.
            ClosedError: the client is closed.

        """
        self._check_process()
        self._check_open()
        self._futures.wait_for_room(size, deadline_s)
        ticket, number = _FutureTicket(size), next(self._numbers)
        self._tickets[number] = ticket
        self._incoming.append((number, request))
        if self._role.acquire(blocking=False):
            try:
                if not self._is_closed:
                    self._take_incoming()
            finally:
                self._role.release()
                self._promote()
        else:
            self.engine.transport.wake()
        if self._is_closed:
            self._fail_all()
        return ticket.future

    def flush(self, timeout_s: float) -> None:
        """Wait until all futures so far are done; raise the first failure since the last time."""
        self._check_process()
        self._check_open()
        self._futures.flush(timeout_s)

    def drive_futures(self, until: _Idle) -> bool:
        """Let the background thread drive; False if somebody else does."""
        if not self._role.acquire(blocking=False):
            return False
        try:
            self._drive(until)
        except ClosedError:
            return False
        finally:
            self._role.release()
            if self._followers:
                self._promote()
        return True

    @property
    def has_followers(self) -> bool:
        """Whether a thread waits that could drive."""
        return bool(self._followers)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    # --- the end ---

    def close(self) -> None:
        """Fail what is under way, and close. Idempotent; from any thread."""
        self._is_closed = True
        if os.getpid() != self._process:
            return
        self.engine.transport.wake()
        with self._role:
            self._fail_all()
            self.engine.close()
        self._futures.close()

    def _fail_all(self) -> None:
        for number in list(self._tickets):
            self._answer(number, ClosedError())


class _FutureTicket(Ticket):
    __slots__ = ("future", "size")

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size: Final = size
        self.future: Final[Future[Any]] = Future()
        # It cannot be cancelled: what was sent may happen.
        self.future.set_running_or_notify_cancel()


class _Idle:
    """What the background thread drives for: until there is something else for it to do."""

    def __init__(self, shared: SharedEngine, futures: _Futures) -> None:
        self._shared: Final = shared
        self._futures: Final = futures

    def is_done(self) -> bool:
        return self._futures.has_finished or self._shared.has_followers or not self._futures.open


class _Futures:
    """The futures under way, and the background thread, which starts with the first of them."""

    def __init__(self, shared: SharedEngine) -> None:
        self._shared: Final = shared
        self._room: Final = threading.Condition()
        #: How many are not done, and the bytes of their payloads.
        self.open = 0
        self._bytes = 0
        self._finished: Final[deque[_FutureTicket]] = deque()
        self._failure: Exception | None = None
        self._signal: Final[SimpleQueue[None]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._idle: Final = _Idle(shared, self)

    def wait_for_room(self, size: int, deadline_s: float) -> None:
        with self._room:
            if not self._room.wait_for(lambda: self._has_room(size), deadline_s):
                raise DeadlineError(
                    f"{self.open} inserts were under way for {deadline_s:g} s, and no more are"
                    " allowed; nothing was inserted: try again"
                )
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ziplog", daemon=True)
                self._thread.start()
            self.open += 1
            self._bytes += size

    def _has_room(self, size: int) -> bool:
        is_full = self.open >= _MAX_FUTURES or self._bytes + size > _MAX_FUTURE_BYTES
        return not self.open or not is_full or self._shared.is_closed

    @property
    def has_finished(self) -> bool:
        return bool(self._finished)

    def finished(self, ticket: _FutureTicket) -> None:
        """Let the background thread tell the future's owner: under the role nobody may."""
        self._finished.append(ticket)
        self.look()

    def look(self) -> None:
        """Let the background thread see whether there is something to do."""
        if self._thread is not None and self._signal.empty():
            self._signal.put(None)

    def flush(self, timeout_s: float) -> None:
        with self._room:
            is_done = self._room.wait_for(lambda: not self.open, timeout_s)
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if not is_done:
            raise DeadlineError(f"{self.open} inserts were still under way after {timeout_s:g} s")

    def _run(self) -> None:
        while True:
            while self._finished:
                self._tell(self._finished.popleft())
            if self._shared.is_closed and not self.open:
                return
            is_free = self.open and not self._shared.has_followers
            if is_free and self._shared.drive_futures(self._idle):
                continue
            with contextlib.suppress(Empty):
                self._signal.get(timeout=_LOOK_S)

    def _tell(self, ticket: _FutureTicket) -> None:
        result, future = ticket.result, ticket.future
        failed = isinstance(result, Exception)
        # The callbacks of the future run here; they find the count as it is without it.
        with self._room:
            self.open -= 1
            self._bytes -= ticket.size
            if failed and self._failure is None:
                self._failure = result
            self._room.notify_all()
        if failed:
            future.set_exception(result)
        else:
            future.set_result(result[0])

    def close(self) -> None:
        thread = self._thread
        self.look()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
