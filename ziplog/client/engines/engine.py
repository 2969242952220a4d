"""The engine: steps a client node on a transport, without threads or an event loop.

Rule: one caller at a time. The driver takes frames from the transport and passes them to `handle`
until none is left, then calls `end_batch`, then sleeps for `timeout_ns`. Malformed frames, and
messages without a frame, are dropped, counted and logged at a limited rate.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

from ziplog.client.engines.archive_requests import ArchiveRequests
from ziplog.core.node import (
    AskArchive,
    BatchEnd,
    Broadcast,
    Cancelled,
    Closing,
    Complete,
    Connect,
    ConnectionChanged,
    Disconnect,
    FailCalls,
    Node,
    Received,
    Send,
    Wakeup,
)
from ziplog.core.units import NS_PER_S
from ziplog.errors import ConfigError, DeadlineError, LocalProtocolError, ProtocolError
from ziplog.runtime.clock import now_ns
from ziplog.runtime.transport import Transport
from ziplog.wire import InsertAck, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.client.common.requests import Counters, Request
    from ziplog.core.message import Message
    from ziplog.core.node import Effect

_log: Final = logging.getLogger("ziplog.client")
_BATCH_END: Final = BatchEnd()
_WAKEUP: Final = Wakeup()
_CLOSING: Final = Closing()
_WARNING_INTERVAL_NS: Final = NS_PER_S
#: Number of effects of one step from which on their frames are gathered.
_GATHERED_EFFECTS: Final = 8


def pending_error(count: int, timeout_s: float) -> DeadlineError:
    """Return the error of a `flush` that ended before the inserts that it waited for."""
    return DeadlineError(
        f"{count} inserts were still pending after {timeout_s:g} s, and may still happen: call"
        " flush again or wait for their futures, and do not insert their records again"
    )


def internal_error(error: Exception) -> LocalProtocolError:
    """Return the error of a call that ends because a step of its client failed."""
    return LocalProtocolError(
        f"an internal error of the client ended this call ({type(error).__name__}: {error}); what"
        " it inserts or changes may have happened"
    )


class Core(Node, Protocol):
    """A node that completes calls: a log's `ClientCore`, or a node around one."""

    @property
    def is_batch_open(self) -> bool:
        """Whether `step` of a `BatchEnd` would do anything."""
        ...

    @property
    def has_claims(self) -> bool:
        """Whether timers must run also between calls."""
        ...

    def step_call(self, number: int, request: Any, now: int, /) -> list[Effect]:
        """Do the same as `step(Call(number, request), now)`."""
        ...

    def step_ack(self, src: bytes, ack: InsertAck, now: int, /) -> list[Effect]:
        """Do the same as `step(Received(src, ack), now)`."""
        ...

    @property
    def counters(self) -> Counters:
        """The counters of this client."""
        ...


class Engine:
    """A client node and its transport."""

    def __init__(
        self,
        core: Core,
        on_complete: Callable[[int, Any], None],
        on_failure: Callable[[Exception], None],
        *,
        decode: Callable[[bytes], Message] = decode,
        transport: Transport | None = None,
        clock: Callable[[], int] = now_ns,
    ) -> None:
        """Create an engine.

        Args:
            core: the node to step.
            on_complete: called with each call's number and result.
            on_failure: called with an error of which every open call gets a copy.
            decode: decodes received frames.
            transport: the transport; None: a new one.
            clock: nanoseconds; includes the time while the machine is suspended.

        """
        self.core: Final = core
        self.transport: Final = transport if transport is not None else Transport()
        self._step: Final = core.step
        self._step_ack: Final = core.step_ack
        self._next_wakeup: Final = core.next_wakeup
        self._decode: Final = decode
        self._clock: Final = clock
        self._on_complete: Final = on_complete
        self._on_failure: Final = on_failure
        self._next_warning_at = 0
        #: The error of the last message without a frame, since the last call was submitted.
        self._bad_messages: Final = deque[LocalProtocolError](maxlen=1)
        self._is_closed = False
        self._archives: Final = ArchiveRequests(self._wake)
        self._archive_replies: Final = self._archives.replies

    def _wake(self) -> None:
        self.transport.wake()

    def submit(self, call: int, request: Request) -> None:
        """Submit a call to the node; it fails if one of its first messages has no frame."""
        bad_messages = self._bad_messages
        bad_messages.clear()
        effects = self.core.step_call(call, request, self._clock())
        if effects:
            self._execute(effects)
        if bad_messages:
            # In this order: a stream that is cancelled while it opens completes its call.
            self._on_complete(call, bad_messages[0])
            self.cancel(call)

    def cancel(self, call: int) -> None:
        """Cancel a call at the node."""
        self._execute(self._step(Cancelled(call), self._clock()))

    def handle(self, src: bytes, frame: bytes) -> None:
        """Process a frame that the transport received."""
        try:
            message = self._decode(frame)
        except ProtocolError as error:
            self.core.counters.protocol_errors += 1
            self._log_warning("dropped a frame: %s", error)
            return
        if type(message) is InsertAck:
            effects = self._step_ack(src, message, self._clock())
        else:
            effects = self._step(Received(src, message), self._clock())
        if effects:
            self._execute(effects)

    @property
    def has_batch(self) -> bool:
        """Whether `end_batch` would do anything besides due timers."""
        transport = self.transport
        return self.core.is_batch_open or bool(transport.changes or self._archive_replies)

    def end_batch(self) -> int | None:
        """End a batch of frames: let the node act on all of them, and on due timers.

        Returns the nanoseconds until the node's next timer; None: no timer.
        """
        now = self._clock()
        if self.transport.changes:
            self._pass_changes(now)
        while self._archive_replies:
            self._execute(self.core.step_call(0, self._archive_replies.popleft(), now))
        if self.core.is_batch_open:
            self._execute(self._step(_BATCH_END, now))
        due = self._next_wakeup()
        if due is not None and now >= due:
            self._execute(self._step(_WAKEUP, now))
            due = self._next_wakeup()
        return None if due is None else max(due - now, 0)

    def catch_up(self) -> bool:
        """Handle the frames that arrived during a pause of the driver, if a timer is due.

        The timer may stand for a reply that is among them. Returns whether it is due.
        """
        due = self._next_wakeup()
        is_due = due is not None and self._clock() >= due
        if is_due:
            self._receive_all()
        return is_due

    def step(self) -> None:
        """Handle the frames that have arrived, and due timers, without waiting."""
        self._receive_all()
        self.end_batch()

    def _receive_all(self) -> None:
        received = self.transport.wait_and_receive(0)
        while received is not None:
            self.handle(*received)
            received = self.transport.receive()

    def _pass_changes(self, now: int) -> None:
        """Pass the transport's changed connections to the node."""
        changes, self.transport.changes = self.transport.changes, {}
        for name, problem in changes.items():
            self._execute(self._step(ConnectionChanged(name, problem), now))

    def next_wakeup(self) -> int | None:
        """Return the time of the next timer, of the node or the transport; None: no timer."""
        due, other = self._next_wakeup(), self.transport.next_timer()
        return due if other is None else other if due is None else min(due, other)

    def _execute(self, effects: list[Effect]) -> None:
        if len(effects) < _GATHERED_EFFECTS:
            self._carry_out(effects)
            return
        self.transport.gathers = True
        try:
            self._carry_out(effects)
        finally:
            self.transport.gathers = False
            self.transport.flush_gathered()

    def _carry_out(self, effects: list[Effect]) -> None:
        send = self.transport.send
        for effect in effects:
            if type(effect) is Broadcast:
                frame = self._encode(effect.message)
                if frame is not None:
                    for dst in effect.dsts:
                        send(dst, frame)
            elif type(effect) is Complete:
                self._on_complete(effect.id, effect.result)
            elif type(effect) is Send:
                frame = self._encode(effect.message)
                if frame is not None:
                    send(effect.dst, frame)
            elif type(effect) is Connect:
                self._connect(effect)
            elif type(effect) is FailCalls:
                self._on_failure(effect.error)
            elif type(effect) is AskArchive:
                self._archives.start(effect)
            else:
                assert isinstance(effect, Disconnect), f"no client orders {effect}"
                self.transport.disconnect(effect.name)

    def _encode(self, message: Message) -> bytes | None:
        """Return a message's frame; None: there is none. That must not affect other calls."""
        try:
            return encode(message)
        except LocalProtocolError as error:
            self._bad_messages.append(error)
            self.core.counters.protocol_errors += 1
            self._log_warning("dropped a message: %s", error)
            return None

    def _connect(self, effect: Connect) -> None:
        try:
            self.transport.connect(effect.name, effect.endpoint)
        except ConfigError as error:
            # The membership service named the endpoint, not the caller.
            self._log_warning("cannot connect: %s", error)

    def _log_warning(self, text: str, error: Exception) -> None:
        now = self._clock()
        if now >= self._next_warning_at:
            self._next_warning_at = now + _WARNING_INTERVAL_NS
            _log.warning(text, error)

    def close(self) -> None:
        """Send the node's last messages and close the sockets. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._execute(self._step(_CLOSING, self._clock()))
        self.transport.close()
