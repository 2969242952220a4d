"""The asyncio engine: drives the client node in an event loop.

The loop watches the transport's file descriptor. When it is readable, the engine polls the
transport and receives all frames. One timer stands for the next one of the node and the transport.
Rules: everything runs in the loop's thread. The loop holds a weak reference, so a dropped client is
closed, unless it has pending calls. In a forked child every call raises ClosedError.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import weakref
from collections import deque
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ziplog.client.common.requests import InsertRequest
from ziplog.client.engines.engine import Engine, internal_error, pending_error
from ziplog.client.engines.owners import Owners
from ziplog.client.engines.signals import SHIELD
from ziplog.core.units import NEVER
from ziplog.errors import ClosedError, OutcomeUnknownError, UnavailableError
from ziplog.runtime.clock import now_ns
from ziplog.wire import decode

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.client.common.requests import Request
    from ziplog.client.engines.engine import Core
    from ziplog.core.message import Message
    from ziplog.runtime.transport import Transport
    from ziplog.types import RecordId

T = TypeVar("T")

#: Number of messages per iteration of the loop.
_BATCH: Final = 256
#: Fewer inserts are not sent before the other tasks run.
_LEAST_HALF: Final = 16
#: Maximum number of pending futures, and of their bytes.
_MAX_FUTURES: Final = 65_536
_MAX_FUTURE_BYTES: Final = 64 * 1024 * 1024


class AsyncioEngine:
    """Drives one client node in an event loop."""

    def __init__(self, core: Core, decode: Callable[[bytes], Message] = decode) -> None:
        _forget_ended()
        self.engine: Final = Engine(core, self._on_complete, self._fail_calls, decode=decode)
        self._loop: Final = asyncio.get_running_loop()
        self._is_main: Final = threading.current_thread() is threading.main_thread()
        #: The process of the sockets; a forked child must not touch them or the loop's selector.
        self._process: Final = os.getpid()
        #: Subscriptions and scans to close once they are garbage-collected.
        self.owners: Final = Owners()
        self._numbers: Final = itertools.count(1)
        self._futures: Final[dict[int, asyncio.Future[Any]]] = {}
        #: Inserts that the poll submits together: their step may wait for the end of the batch.
        self._gathered: Final[deque[tuple[int, InsertRequest]]] = deque()
        #: The pending inserts of futures, and the bytes of their payloads. The caller may cancel a
        #: future; its insert goes on.
        self._inserts: Final[set[asyncio.Future[list[RecordId]]]] = set()
        self._insert_bytes = 0
        self._failure: BaseException | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = NEVER
        self._is_poll_due = False
        #: Number of results in this step, and whether the last step did not end its batch.
        self._completed = 0
        self._is_end_late = False
        #: If so many inserts are gathered while the end is late, they are sent.
        self._half = NEVER
        self._is_closed = False
        #: Resolves the unknown outcome of an insert: (its error, time-out in seconds).
        self.resolve: Callable[[OutcomeUnknownError, float | None], Any] | None = None
        #: Called with the result of a call that was cancelled as it completed.
        self.on_lost_result: Callable[[Any], None] | None = None
        self._fd: Final = self.engine.transport.fileno()
        # The loop must not keep a dropped client alive; a client with pending calls keeps itself
        # alive.
        self._self: Final = weakref.ref(self)
        self._loop.add_reader(self._fd, _call, self._self, AsyncioEngine._readable)
        weakref.finalize(
            self, _close_later, self._loop, self._fd, self.engine.transport, self._process
        ).atexit = False

    @property
    def is_closed(self) -> bool:
        """Whether the client was closed, or this is a forked child of its process."""
        return self._is_closed or self.owners.is_in_child

    @property
    def has_ended(self) -> bool:
        """Whether its event loop is closed."""
        return self._loop.is_closed()

    def check_open(self) -> None:
        """Check that a call may begin here.

        Raises:
            ClosedError: the client is closed, or this is a forked child of its process.
            RuntimeError: the client's event loop runs in another thread, or another one in this.

        """
        if self._is_closed:
            raise ClosedError
        if self.owners.is_in_child:
            raise ClosedError(f"the client of process {self._process}, in its child,")
        try:
            is_other = asyncio.get_running_loop() is not self._loop
        except RuntimeError:
            if self._loop.is_running():
                raise RuntimeError(
                    "an asyncio client belongs to the thread of its event loop, and another thread"
                    " called it: use `asyncio.run_coroutine_threadsafe`, or a blocking client"
                ) from None
            return  # No loop runs: the result is awaited later.
        if is_other:
            raise RuntimeError(
                "an asyncio client belongs to the event loop in which it was connected, and another"
                " one runs here: connect in this one"
            )

    def submit(self, request: Request) -> tuple[int, asyncio.Future[Any]]:
        """Submit a request; return its number and a future of the result."""
        self.check_open()
        number, future = next(self._numbers), self._loop.create_future()
        if self._is_poll_due and type(request) is InsertRequest:
            # In this order: a signal handler may raise in between.
            self._gathered.append((number, request))
            self._futures[number] = future
            _BUSY.add(self)
            if len(self._gathered) >= self._half:
                self.shielded(self._send_half)
            return number, future
        is_shielded = self._is_main and SHIELD.enter(self)
        try:
            self._futures[number] = future
            _BUSY.add(self)
            self._submit_gathered()
            self.engine.submit(number, request)
            if self.engine.has_batch:
                self._poll_soon()
            else:
                self._set_timer()
        finally:
            if is_shielded:
                SHIELD.leave(self)
        return number, future

    def _send_half(self) -> None:
        """Send the gathered inserts: the servers place them while the other tasks run."""
        self._half = NEVER
        self._submit_gathered()
        self.engine.end_batch()

    def _submit_gathered(self) -> None:
        """Submit the gathered inserts in the order of their calls, without the cancelled ones."""
        gathered = self._gathered
        while gathered:
            # In this order: no insert is submitted twice, whatever is raised.
            number, request = gathered.popleft()
            future = self._futures.get(number)
            if future is None or future.done():
                continue
            try:
                self.engine.submit(number, request)
            except Exception as error:  # noqa: BLE001 - its caller gets it, as of other calls
                self._on_complete(number, error)

    def interrupted(self) -> None:
        """Do nothing: no step of the loop waits."""

    async def call(self, request: Request) -> Any:
        """Return the result of a request, or raise it; a cancellation also cancels the call."""
        number, future = self.submit(request)
        try:
            return await future
        except asyncio.CancelledError:
            if self._futures.pop(number, None) is not None and not self.is_closed:
                if not self._futures:
                    _BUSY.discard(self)
                self.shielded(self.engine.cancel, number)
                self._poll_soon()
            elif self.on_lost_result is not None and _has_result(future):
                self.on_lost_result(future.result())
            raise

    def call_now(self, request: Request) -> Any:
        """Return the result of a request that is completed at once."""
        _, future = self.submit(request)
        return future.result()

    def post(self, request: Request) -> None:
        """Make a call that is completed at once; ignore it if the client is closed."""
        if not self.is_closed:
            self.call_now(request)

    def _fail_calls(self, error: Exception) -> None:
        self._gathered.clear()
        for number in list(self._futures):
            # In this order: a stream that is cancelled while it opens completes its call.
            self._on_complete(number, copy(error))
            self.engine.cancel(number)

    def _on_complete(self, number: int, result: Any) -> None:
        future = self._futures.pop(number, None)
        if not self._futures:
            _BUSY.discard(self)
        if future is None or future.done():
            return
        if isinstance(result, OutcomeUnknownError) and self.resolve is not None:
            result.resolver = partial(self.resolve, result)
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
            self._completed += 1

    # --- futures ---

    def submit_insert(self, request: InsertRequest) -> asyncio.Future[RecordId]:
        """Insert one record; return a future of its rid.

        Raises:
            UnavailableError: too many are pending.
            ClosedError: the client is closed.

        """
        size = len(request.payloads[0])
        if len(self._inserts) >= _MAX_FUTURES or self._insert_bytes + size > _MAX_FUTURE_BYTES:
            raise UnavailableError(
                f"{len(self._inserts)} inserts are pending, and no more are allowed;"
                " await flush() and try again"
            )
        _, answer = self.submit(request)
        future: asyncio.Future[RecordId] = self._loop.create_future()
        self._inserts.add(answer)
        self._insert_bytes += size
        answer.add_done_callback(partial(self._on_inserted, future, size))
        return future

    def _on_inserted(
        self, future: asyncio.Future[RecordId], size: int, answer: asyncio.Future[list[RecordId]]
    ) -> None:
        self._inserts.discard(answer)
        self._insert_bytes -= size
        error = answer.exception()
        if error is not None and self._failure is None:
            self._failure = error
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
            # `flush` raises it if the caller never looks at the future.
            future.exception()
        else:
            future.set_result(answer.result()[0])

    async def flush(self, timeout_s: float) -> None:
        """Wait until all their inserts so far are done; raise the first failure since the last."""
        self.check_open()
        late: set[asyncio.Future[list[RecordId]]] = set()
        if self._inserts:
            _, late = await asyncio.wait(set(self._inserts), timeout=timeout_s)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if late:
            raise pending_error(len(late), timeout_s)

    # --- driving ---

    def drive_timers(self) -> None:
        """Do nothing: the loop runs the node's timers."""

    def shielded(self, function: Callable[..., T], *args: Any) -> T:
        """Return `function(*args)`; signal handlers run before it and after it."""
        if not self._is_main or not SHIELD.enter(self):
            return function(*args)
        try:
            return function(*args)
        finally:
            SHIELD.leave(self)

    def _run(self, function: Callable[[], None]) -> None:
        """Call a function of the loop's; if it fails, the pending calls may never be completed."""
        try:
            self.shielded(function)
        except Exception as error:
            for number in list(self._futures):
                self._on_complete(number, internal_error(error))
            raise  # The loop logs it.

    def _readable(self) -> None:
        if not self.is_closed:
            self._run(self._receive)

    def _poll_soon(self) -> None:
        """Step the engine in the next iteration."""
        if not self._is_poll_due:
            self._is_poll_due = True
            self._loop.call_soon(_call, self._self, AsyncioEngine._poll)

    def _poll(self) -> None:
        self._is_poll_due = False
        if not self.is_closed:
            self._run(self._step)

    def _receive(self) -> None:
        """Process frames that have arrived; it is quick for acks of an insert on the short path."""
        engine, collected = self.engine, self.owners.collected
        transport = engine.transport
        self._completed = 0
        received = transport.wait_and_receive(0)
        while received is not None:
            engine.handle(*received)
            if engine.has_batch or collected:
                break
            if not transport.ready():
                return
            received = transport.receive()
        self._step()

    def close_collected(self) -> None:
        """Close the streams that were garbage-collected."""
        if not self.is_closed:
            self.shielded(self._submit_endings)

    def _submit_endings(self) -> None:
        for request in self.owners.endings():
            self.engine.submit(0, request)

    def _step(self) -> None:
        engine = self.engine
        self._submit_endings()
        self._submit_gathered()
        for _ in range(_BATCH):
            received = engine.transport.receive()
            if received is None:
                break
            engine.handle(*received)
        # The tasks of several results run next: the batch ends after their inserts.
        self._is_end_late = self._completed > 1 and not self._is_end_late
        if self._is_end_late:
            self._half = max((self._completed + len(self._futures)) // 2, _LEAST_HALF)
        else:
            self._half = NEVER
            engine.end_batch()
        self._completed = 0
        if self._is_end_late or engine.transport.ready():
            self._poll_soon()
        self._set_timer()

    def _set_timer(self) -> None:
        due = self.engine.next_wakeup()
        if due is not None and due < self._timer_due:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_due = due
            delay_s = max(due - now_ns(), 0) / 1e9
            self._timer = self._loop.call_later(
                delay_s, _call, self._self, AsyncioEngine._timed_out
            )

    def _timed_out(self) -> None:
        self._timer, self._timer_due = None, NEVER
        if not self.is_closed:
            self._run(self._poll_and_step)

    def _poll_and_step(self) -> None:
        self.engine.transport.poll()
        self._step()

    def close(self) -> None:
        """Fail the pending calls and close the engine. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self.owners.is_in_child:
            self.shielded(self._close)

    def _close(self) -> None:
        self._loop.remove_reader(self._fd)
        if self._timer is not None:
            self._timer.cancel()
        self._gathered.clear()
        if not self.has_ended:  # Otherwise the callbacks of futures cannot run.
            for number in list(self._futures):
                self._on_complete(number, ClosedError())
        self._futures.clear()
        self.engine.close()
        _BUSY.discard(self)


#: Engines with pending calls; their futures may be the only references to the client.
_BUSY: Final[set[AsyncioEngine]] = set()


def _forget_ended() -> None:
    """Drop the engines with pending calls whose loops have ended: no call will be completed."""
    for engine in list(_BUSY):  # Loops of other threads may change the set.
        if engine.has_ended:
            _BUSY.discard(engine)


def _has_result(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _call(ref: weakref.ref[AsyncioEngine], method: Callable[[AsyncioEngine], object]) -> None:
    engine = ref()
    if engine is not None:
        method(engine)


def _close_later(
    loop: asyncio.AbstractEventLoop, fd: int, transport: Transport, process: int
) -> None:
    """Close a dropped client's sockets, after the loop stops watching them."""
    if os.getpid() != process:
        return
    try:
        loop.call_soon_threadsafe(_remove_and_close, loop, fd, transport)
    except RuntimeError:  # The loop is closed.
        transport.close()


def _remove_and_close(loop: asyncio.AbstractEventLoop, fd: int, transport: Transport) -> None:
    if not transport.is_closed:
        loop.remove_reader(fd)
        transport.close()
