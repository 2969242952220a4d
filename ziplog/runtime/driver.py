"""The loop under every server: feeds one node with events, carries its effects out in order.

A run_once: step what is waiting (at most 256 messages, or 50 ms, so that deadlines are kept; if that
was not all, the next run_once reads ahead and steps urgent messages first: `inbox`), what other threads
posted, and `Wakeup` if it is due; then `BatchEnd`; then sleep. Where entries must be on disk before
anything is said (`flush_before_send`), what is sent after a `Persist` is held until the run_once's end,
and one flush serves all (docs/protocol.md, section 10); only what is stable may be told meanwhile.
Invariant: no held frame leaves before every entry that was appended before it is flushed.
"""

from __future__ import annotations

import gc
import signal
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from ziplog.core.node import (
    BatchEnd,
    Broadcast,
    Connect,
    Disconnect,
    Effect,
    Event,
    Halt,
    LogWarning,
    Node,
    Persist,
    Persisted,
    Pressed,
    Propose,
    Received,
    ReportBadMessage,
    Send,
    Wakeup,
)
from ziplog.errors import LocalProtocolError, ProtocolError
from ziplog.runtime.clock import now_ns
from ziplog.runtime.inbox import Inbox
from ziplog.runtime.process_logging import halt
from ziplog.wire import (
    Ahead,
    Beat,
    Deliver,
    Frontier,
    Heartbeat,
    Leaving,
    Located,
    Rate,
    ReadReply,
    Refused,
    Suspect,
    Synced,
    TailReply,
    Trimmed,
    decode,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.core.message import Message
    from ziplog.runtime.transport import Transport

#: Messages that a run_once steps, and the time that it takes, before it looks at the deadline again.
_MAX_BATCH: Final = 256
_STEP_BUDGET_NS: Final = 50_000_000
#: Frames that wait for a flush; beyond, they are dropped (and repeated by the protocols).
_MAX_HELD: Final = 10_000
#: How long a flush that failed for lack of space is left alone.
_FLUSH_RETRY_NS: Final = 50_000_000
_BAD_FRAME_LOG_INTERVAL_NS: Final = 1_000_000_000
#: Says nothing about what is stored, or only about what is stable, which is on every disk.
_NEEDS_NO_DISK: Final = (
    Refused, Heartbeat, Rate, Deliver, Trimmed, TailReply, Frontier, Synced, Located, Beat, Suspect,
    Leaving, Ahead,
)  # fmt: skip

_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_BATCH_END: Final = BatchEnd()
_WAKEUP: Final = Wakeup()


class EntryStore(Protocol):
    """What the driver asks of a store."""

    #: Stream position of the last entry appended.
    last_fseq: int

    def append(self, entry: Any) -> None:
        """Take the next entry."""
        ...

    def flush(self) -> bool:
        """Put everything on stable storage; False if there is no space for it now."""
        ...


class Driver:
    """Runs one node on a transport until `stop`."""

    #: Frames received that were no message, or one that their sender may not send.
    bad_frames: int

    def __init__(
        self,
        node: Node,
        transport: Transport,
        *,
        store: EntryStore | None = None,
        flush_before_send: bool = False,
        propose: Callable[[bytes], None] | None = None,
        decode: Callable[[bytes], Message] = decode,
        clock: Callable[[], int] = now_ns,
        on_halt: Callable[[str, str], object] = halt,
    ) -> None:
        """Make a driver; the caller keeps, and closes, what it passes.

        Args:
            node: what to run.
            transport: its frames.
            store: where `Persist` goes.
            flush_before_send: durability level `disk`.
            propose: where `Propose` goes; it must not block.
            decode: makes messages of the frames that come in.
            clock: nanoseconds; counts the time while the machine is suspended.
            on_halt: gets a reason and the node's state; should not return.

        """
        self.bad_frames = 0
        self._node, self._transport, self._store = node, transport, store
        self._flush_before_send = flush_before_send
        self._propose, self._clock, self._on_halt = propose, clock, on_halt
        self._decode = decode
        self._inbox: Final = Inbox(transport.receive)
        self._is_behind = False
        self._is_unread = False
        self._posted: deque[Event] = deque()
        self._stopping = False
        self._held: list[tuple[bytes, bytes]] = []
        self._is_dirty = False
        self._next_bad_frame_log = 0
        #: What the node said at the end of the last run_once (asked once a run_once: it costs a call).
        self._deadline: int | None = None
        self._log = structlog.get_logger()
        self._handlers: dict[type[Effect], Callable[[Any], None]] = {
            Send: self._send,
            Broadcast: self._broadcast,
            Connect: self._connect,
            Disconnect: self._disconnect,
            Persist: self._persist,
            Propose: self._propose_command,
            ReportBadMessage: self._report_bad_message,
            LogWarning: self._warn,
            Halt: self._halt,
        }

    def run(self) -> None:
        """Drive the node until `stop`. Our own errors in it end the process (`on_halt`)."""
        try:
            self._deadline = self._node.next_wakeup()
            while not self._stopping:
                self.run_once()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is our error: stop
            self._log.exception("the node failed")
            self._on_halt(f"{type(error).__name__}: {error}", _state(self._node))

    def stop(self) -> None:
        """Let `run` return after the current run_once. From any thread, and from signal handlers."""
        self._stopping = True
        self._transport.wake()

    def post(self, event: Event) -> None:
        """Hand the node an event, in order. From any thread.

        Nothing bounds the queue here: only what the node itself ordered may be posted.
        """
        self._posted.append(event)
        self._transport.wake()

    def run_once(self) -> None:
        """Do everything that there is to do now, then let the transport wait."""
        if self._is_behind or self._is_unread:
            self._read_ahead()
        is_more = self._is_behind = self._step_messages()
        self._step_posted()
        now = self._clock()
        if self._deadline is not None and self._deadline <= now:
            self._step(_WAKEUP, now)
        self._step(_BATCH_END, now)
        retry = self._flush_and_send() if self._is_dirty else None
        self._deadline = self._node.next_wakeup()
        if not is_more and not self._posted and not self._stopping:
            self._transport.wait(self._sleep_limit(retry))

    def _read_ahead(self) -> None:
        """Look at everything that waits, and report whether that was possible."""
        self._inbox.fill()
        if self._inbox.is_unread is not self._is_unread:
            self._is_unread = self._inbox.is_unread
            self._step(Pressed(self._is_unread), self._clock())

    def _step_messages(self) -> bool:
        """Step what is waiting; return whether there may be more."""
        receive, decode, step, carry_out, clock = (
            self._inbox.pop,
            self._decode,
            self._node.step,
            self._carry_out,
            self._clock,
        )
        until = clock() + _STEP_BUDGET_NS
        for _ in range(_MAX_BATCH):
            received = receive()
            if received is None:
                return False
            src, frame = received
            try:
                message = decode(frame)
            except ProtocolError as error:
                self._drop_bad_frame(src, error)
                continue
            now = clock()
            effects = step(Received(src, message), now)
            if effects:
                carry_out(effects)
            if now >= until:
                break
        return True

    def _step_posted(self) -> None:
        posted = self._posted
        for _ in range(len(posted)):
            self._step(posted.popleft(), self._clock())

    def _step(self, event: Event, now: int) -> None:
        self._carry_out(self._node.step(event, now))

    def _carry_out(self, effects: list[Effect]) -> None:
        handlers = self._handlers
        for effect in effects:
            handlers[type(effect)](effect)

    def _sleep_limit(self, retry: int | None) -> int | None:
        """Return how long to sleep at most, in nanoseconds."""
        deadline = self._deadline
        pause = None if deadline is None else max(deadline - self._clock(), 0)
        if retry is None:
            return pause
        return retry if pause is None else min(pause, retry)

    # --- effects -----------------------------------------------------------------------------

    def _send(self, effect: Send) -> None:
        frame = self._encode(effect.message)
        if frame is None:
            return
        if self._is_dirty and needs_disk(effect.message):
            self._hold_until_flushed(effect.dst, frame)
        else:
            self._transport.send(effect.dst, frame)

    def _broadcast(self, effect: Broadcast) -> None:
        frame = self._encode(effect.message)
        if frame is None:
            return
        is_held = self._is_dirty and needs_disk(effect.message)
        put = self._hold_until_flushed if is_held else self._transport.send
        for dst in effect.dsts:
            put(dst, frame)

    def _encode(self, message: Message) -> bytes | None:
        try:
            return encode(message)
        except LocalProtocolError as error:
            self._drop_bad_frame(b"", error)
            return None

    def _hold_until_flushed(self, dst: bytes, frame: bytes) -> None:
        if len(self._held) < _MAX_HELD:
            self._held.append((dst, frame))
        else:
            self._transport.dropped += 1

    def _connect(self, effect: Connect) -> None:
        self._transport.connect(effect.name, effect.endpoint)

    def _disconnect(self, effect: Disconnect) -> None:
        self._transport.disconnect(effect.name)

    def _persist(self, effect: Persist) -> None:
        assert self._store is not None, "a node that persists needs a store"
        self._store.append(effect.entry)
        self._is_dirty = self._flush_before_send

    def _propose_command(self, effect: Propose) -> None:
        assert self._propose is not None, "a node that proposes needs consensus"
        self._propose(effect.command)

    def _report_bad_message(self, effect: ReportBadMessage) -> None:
        self._drop_bad_frame(effect.src, ProtocolError(effect.reason))

    def _warn(self, effect: LogWarning) -> None:
        self._log.warning(effect.text)

    def _halt(self, effect: Halt) -> None:
        self._stopping = True
        self._on_halt(effect.reason, _state(self._node))

    # --- the disk, and complaints ------------------------------------------------------------

    def _flush_and_send(self) -> int | None:
        """Flush and let go of what was held; return after how long to try again, if at all."""
        store = self._store
        assert store is not None, "only a store makes a run_once dirty"
        fseq = store.last_fseq
        if not store.flush():
            return _FLUSH_RETRY_NS
        held, self._held, self._is_dirty = self._held, [], False
        for dst, frame in held:
            self._transport.send(dst, frame)
        self._step(Persisted(fseq), self._clock())
        return 0 if self._is_dirty else None

    def _drop_bad_frame(self, src: bytes, error: ProtocolError) -> None:
        """Count a bad frame; log at most one a second: whoever sends them may send many."""
        self.bad_frames += 1
        now = self._clock()
        if now >= self._next_bad_frame_log:
            self._next_bad_frame_log = now + _BAD_FRAME_LOG_INTERVAL_NS
            self._log.warning(
                "frame dropped", src=src.hex(), error=str(error)[:500], so_far=self.bad_frames
            )


def needs_disk(message: Message) -> bool:
    """Whether a message may only be sent once everything before it is on stable storage."""
    if isinstance(message, ReadReply):
        return not message.stable
    return not isinstance(message, _NEEDS_NO_DISK)


def run_process(driver: Driver, transport: Transport) -> None:
    """Run a driver as its process's main loop, until SIGTERM or SIGINT; from the main thread."""
    # A signal that comes just before the poll would not interrupt it; the byte does.
    signal.set_wakeup_fd(transport.wake_fd, warn_on_full_buffer=False)
    for number in _STOP_SIGNALS:
        signal.signal(number, lambda *_: driver.stop())
    # A process may hold them back while it starts.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    # Keep the collector away from what lives for ever: a full pass costs milliseconds.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    try:
        driver.run()
    finally:
        signal.set_wakeup_fd(-1)


def _state(node: Node) -> str:
    return repr(getattr(node, "__dict__", node))
