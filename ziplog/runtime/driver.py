"""The event loop of every server: steps one node with events, and carries out its effects in order.

One iteration (`run_once`) steps waiting messages, posted events and a due `Wakeup`, then
`BatchEnd`, then sleeps. Inserts, and the messages that follow them, go to a server's short path
first (`InsertPath`). While they are all that happens, batches end with the path's own, short end,
until a `BatchEnd` is due; the store gets several of their entries together. Meanwhile a `Persisted`
waits for that `BatchEnd`. An iteration steps at most 256 messages in a row, or for 50 ms, so that
timers are on time. If messages are left, the next iteration reads ahead and handles urgent messages
first (`inbox`).

Group commit: with `flush_before_send`, frames sent after a `Persist` are held until the end of the
iteration, and one flush serves all (docs/protocol.md, section 10). Messages that report only stable
data are sent at once.
Invariant: no held frame is sent before every entry that was appended before it is flushed.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from ziplog import event_log
from ziplog.core.histogram import Histogram
from ziplog.core.node import (
    BatchEnd,
    Broadcast,
    Connect,
    Disconnect,
    Effect,
    Event,
    FailCalls,
    FlushBeforeSend,
    Halt,
    LevelRecorded,
    LogWarning,
    Node,
    Pause,
    Persist,
    Persisted,
    Pressed,
    Propose,
    Publish,
    Received,
    ReceivePublications,
    RecordLevel,
    RecordWire,
    ReportBadMessage,
    Send,
    Stop,
    Wakeup,
    WireRecorded,
)
from ziplog.core.units import NS_PER_S
from ziplog.errors import LocalProtocolError, ProtocolError
from ziplog.runtime.clock import now_ns
from ziplog.runtime.inbox import Inbox
from ziplog.runtime.process_logging import halt
from ziplog.wire import (
    Hello,
    Insert,
    Metrics,
    MetricsQuery,
    NodeInfo,
    NodeInfoQuery,
    decode,
    encode,
)
from ziplog.wire.node_info import VERSIONS, version_of
from ziplog.wire.stable_messages import needs_disk

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.core.message import Message
    from ziplog.runtime.driver_interfaces import EntryStore, InsertPath, ProposeCommand
    from ziplog.runtime.transport import Transport
    from ziplog.types import Durability

#: Maximum number of messages in one iteration, and the time after which it stops stepping them.
_MAX_BATCH: Final = 256
_STEP_BUDGET_NS: Final = 50_000_000
#: Maximum number of entries of the short path that wait until the store gets them together.
_MAX_UNSTORED: Final = 32
#: Maximum number of frames that wait for a flush; further ones are dropped (the protocols repeat).
_MAX_HELD: Final = 10_000
#: Interval between attempts to flush while there is no space.
_FLUSH_RETRY_NS: Final = 50_000_000
_WARNING_INTERVAL_NS: Final = NS_PER_S
#: What begins at a time whose last bits are 0 is timed: about one iteration or insert in 64.
_UNTIMED: Final = 63
#: Number of effects of one step from which on their frames are gathered.
_GATHERED_EFFECTS: Final = 8
_BATCH_END: Final = BatchEnd()
_WAKEUP: Final = Wakeup()


class Driver:
    """Runs one node on a transport until `stop`."""

    #: Number of frames received that were invalid, or not allowed for their sender.
    bad_frames: int
    #: Of these, the messages of a wire version that this release does not know.
    other_versions: int
    #: Durations of iterations without their sleep, and of inserts on the short path until their
    #: acks: samples.
    iterations: Histogram
    short_acks: Histogram

    def __init__(
        self,
        node: Node,
        transport: Transport,
        *,
        store: EntryStore | None = None,
        insert_path: InsertPath | None = None,
        store_delay_ns: int = 0,
        flush_before_send: bool = False,
        propose: ProposeCommand | None = None,
        publish: Callable[[bytes], None] | None = None,
        record_wire: Callable[[int], None] | None = None,
        record_level: Callable[[Durability], None] | None = None,
        receive_publications: Callable[[bytes, str], None] | None = None,
        carry_out: dict[type[Effect], Callable[[Any], object]] | None = None,
        decode: Callable[[bytes], Message] = decode,
        describe: Callable[[int], NodeInfo] | None = None,
        report: Callable[[Driver, int], Metrics] | None = None,
        clock: Callable[[], int] = now_ns,
        on_halt: Callable[[str, str], object] = halt,
    ) -> None:
        """Create a driver; the caller owns, and closes, the objects that it passes.

        Args:
            node: the node to run.
            transport: sends and receives the node's frames.
            store: receives the entries of `Persist` effects.
            insert_path: accepts most inserts, and the messages that follow them, in place of the
                node's `step`.
            store_delay_ns: longest time that the entries of these messages wait for others, so
                that the store gets them together; any step ends it.
            flush_before_send: durability level `disk`.
            propose: receives the commands and terms of `Propose` effects; it must not block.
            publish: sends the frames of `Publish` effects to all that receive them.
            record_wire: stores the version of a `RecordWire` effect durably.
            record_level: stores the level of a `RecordLevel` effect durably.
            receive_publications: called with the name and endpoint of each `ReceivePublications`.
            carry_out: carries out the node's effects of these further kinds; must not block.
            decode: decodes incoming frames.
            describe: returns the description of this node, for a request's number. With it, the
                driver replies to peers of other versions, and to clients of another service.
            report: returns the metrics of this node and of the driver, for a request's number.
            clock: nanoseconds; counts the time while the machine is suspended.
            on_halt: called with a reason and the node's state; should not return.

        """
        self.bad_frames = self.other_versions = 0
        self.iterations, self.short_acks = Histogram(), Histogram()
        self._node, self._transport, self._store = node, transport, store
        self._insert_path, self._describe, self._report = insert_path, describe, report
        self._short: Final = self._short_handlers()
        #: Since the last `BatchEnd`, nothing but messages on the short path happened.
        self._is_on_short_path = False
        #: Effects of messages on the short path may include acks: not all were inserts.
        self._has_other_acks = False
        #: Entries of messages on the short path that the store has not got, and when it gets them.
        self._unstored: Final[list[Any]] = []
        self._store_at = 0
        self._store_delay_ns: Final = store_delay_ns
        self._flush_before_send = flush_before_send
        self._propose, self._record_wire, self._on_halt = propose, record_wire, on_halt
        self._record_level = record_level
        self._publish, self._receive_publications = publish, receive_publications
        self._decode, self._clock = decode, clock
        self._inbox: Final = Inbox(transport.receive)
        self._is_behind = self._is_unread = False
        self._posted: deque[Event] = deque()
        #: A posted event does not wait for the next `BatchEnd`.
        self._has_urgent_event = False
        self._stopping = False
        self._held: list[tuple[bytes, bytes]] = []
        self._is_dirty = False
        self._next_warning_at = 0
        #: Result of `next_wakeup` at the end of the last iteration (one call per iteration).
        self._deadline: int | None = None
        self._handlers: dict[type[Effect], Callable[[Any], object]] = {
            Send: self._send,
            Broadcast: self._broadcast,
            Connect: self._connect,
            Disconnect: self._disconnect,
            Persist: self._persist,
            Propose: self._propose_command,
            Publish: self._publish_message,
            RecordWire: self._record,
            RecordLevel: self._record_new_level,
            FlushBeforeSend: self._set_flush,
            Pause: lambda effect: self._transport.pause(effect.route, effect.until),
            ReceivePublications: self._start_receiving,
            ReportBadMessage: self._report_bad_message,
            LogWarning: self._warn,
            FailCalls: self._warn_of_failure,
            Stop: lambda _: self.stop(),
            Halt: self._halt,
            **(carry_out or {}),
        }

    def _short_handlers(self) -> dict[type[Message], Callable[[bytes, Any, int], bool]]:
        """Return the handlers of messages that need no step, or that take the short path."""
        found: dict[type[Message], Callable[[bytes, Any, int], bool]] = {}
        if self._insert_path is not None:
            found |= dict.fromkeys(self._insert_path.messages, self._receive_short)
            found[Insert] = self._insert
        if self._report is not None:
            found[MetricsQuery] = self._send_metrics
        if self._describe is not None:
            found[NodeInfoQuery] = self._introduce
            if self._describe(0).role != "membership":
                found[Hello] = self._introduce
        return found

    @property
    def overload_drops(self) -> int:
        """Number of frames dropped before they were handled, because too many waited."""
        return self._inbox.dropped

    def run(self) -> None:
        """Run the node until `stop`. An exception of the node ends the process (`on_halt`)."""
        try:
            self._deadline = self._node.next_wakeup()
            while not self._stopping:
                self.run_once()
            self.store_waiting_entries()
        except Exception as error:  # noqa: BLE001 - any exception here is a bug: stop
            event_log.exception("the node failed")
            self._on_halt(f"{type(error).__name__}: {error}", _state(self._node))

    def stop(self) -> None:
        """Let `run` return after the current iteration. For any thread and signal handlers."""
        self._stopping = True
        self._transport.wake()

    def post(self, event: Event) -> None:
        """Queue an event for the node, in order. From any thread.

        The queue has no limit: only events that the node itself caused may be posted.
        """
        self._posted.append(event)
        if not (self._is_on_short_path and isinstance(event, Persisted)):
            self._has_urgent_event = True
            self._transport.wake()

    def post_frame(self, src: bytes, frame: bytes) -> None:
        """Queue a frame that did not come over the transport; drop it if it is bad."""
        try:
            self.post(Received(src, self._decode(frame)))
        except ProtocolError:
            self.bad_frames += 1

    def run_once(self) -> None:
        """Run one iteration: step all events that are due, then wait for input or the timer."""
        began = self._clock()
        self._is_on_short_path = self._insert_path is not None and not self._is_dirty
        if self._is_behind or self._is_unread:
            self._read_ahead()
        is_more = self._is_behind = self._step_messages()
        if self._is_on_short_path:
            if self._run_short_path(began, is_more=is_more):
                return
            began = self._clock()
        is_more = self._is_behind
        self._has_urgent_event = False
        if self._posted:
            self._step_posted()
        now = self._clock()
        if self._deadline is not None and self._deadline <= now:
            self._step(_WAKEUP, now)
        self._step(_BATCH_END, now)
        retry = self._flush_and_send() if self._is_dirty else None
        self._deadline = self._node.next_wakeup()
        if not began & _UNTIMED:
            self.iterations.add(self._clock() - began)
        if not is_more and not self._posted and not self._stopping:
            self._transport.wait(self._sleep_limit(retry))

    def _run_short_path(self, began: int, *, is_more: bool) -> bool:
        """End batches by the short path; return False once a `BatchEnd` or an event is due.

        `began`: when the first batch began, in ns.
        """
        path, transport, clock = self._insert_path, self._transport, self._clock
        assert path is not None
        while self._is_on_short_path and not self._has_urgent_event and not self._stopping:
            now, deadline = clock(), self._deadline
            if deadline is None or now >= deadline:
                return False
            due = min(deadline, path.end_batch(now))
            if path.has_effects:
                self._carry_out_short_path()
            if now >= due:
                return False
            if self._unstored:
                if now >= self._store_at or len(self._unstored) >= _MAX_UNSTORED:
                    self.store_waiting_entries()
                else:
                    due = min(due, self._store_at)
            if is_more:
                return True
            if not began & _UNTIMED:
                self.iterations.add(clock() - began)
            received = transport.wait_and_receive(due - now)
            if received is None:
                return True
            began = self._step_frame(*received)
            is_more = self._is_behind = transport.ready() and self._step_messages()
        return False

    def _read_ahead(self) -> None:
        """Read all waiting frames into the inbox; step `Pressed` when `is_unread` changes."""
        self._transport.poll()
        self._inbox.fill()
        if self._inbox.is_unread is not self._is_unread:
            self._is_unread = self._inbox.is_unread
            self._step(Pressed(self._is_unread), self._clock())

    def _step_messages(self) -> bool:
        """Step waiting messages; return whether there may be more."""
        receive = self._inbox.pop if self._inbox.size else self._transport.receive
        until = 0
        for _ in range(_MAX_BATCH):
            received = receive()
            if received is None:
                return False
            now = self._step_frame(*received)
            until = until or now + _STEP_BUDGET_NS
            if now >= until:
                break
        return True

    def _step_frame(self, src: bytes, frame: bytes) -> int:
        """Step a message, on the short path if it can be; return the time."""
        now = self._clock()
        try:
            message = self._decode(frame)
        except ProtocolError as error:
            version = version_of(frame)
            self.other_versions += version is not None and not VERSIONS.has(version)
            self._drop_bad_frame(src, error)
            self._reply_to_stranger(src, version)
            return now
        accept = self._short.get(type(message))
        if accept is None or not accept(src, message, now):
            self._step(Received(src, message), now)
        return now

    def _insert(self, src: bytes, message: Insert, now: int) -> bool:
        """Pass an insert to the short path, and send its ack; return whether it was accepted."""
        assert self._insert_path is not None
        ack = self._insert_path.insert(src, message, now)
        if ack is None:
            return False
        if self._has_other_acks:  # A client's acks stay in order.
            self._carry_out_short_path()
        self._transport.send(src, encode(ack))
        if not now & _UNTIMED:
            self.short_acks.add(self._clock() - now)
        return True

    def _receive_short(self, src: bytes, message: Message, now: int) -> bool:
        """Pass another message to the short path; return whether it was accepted."""
        assert self._insert_path is not None
        is_accepted = self._insert_path.receive(src, message, now)
        self._has_other_acks |= is_accepted
        return is_accepted

    def _introduce(self, src: bytes, message: NodeInfoQuery | Hello, _now: int) -> bool:
        """Reply with the description of this node."""
        assert self._describe is not None
        self._transport.send(src, encode(self._describe(message.request)))
        return True

    def _send_metrics(self, src: bytes, message: MetricsQuery, _now: int) -> bool:
        """Reply with the metrics of this node."""
        assert self._report is not None
        self._transport.send(src, encode(self._report(self, message.request)))
        return True

    def _reply_to_stranger(self, src: bytes, version: int | None) -> None:
        """Describe this node to a client whose message is of another version or service."""
        is_client = src.startswith(b"\0")  # A route: the peer connected.
        if self._describe is not None and is_client and version is not None:
            self._transport.send(src, encode(self._describe(0)))

    def _carry_out_short_path(self) -> None:
        """Carry out the other effects of messages on the short path; their entries wait.

        Only level `memory` has a short path: its messages wait for no disk.
        """
        self._has_other_acks = False
        assert self._insert_path is not None
        messages: list[Effect] = []
        for effect in self._insert_path.pop_effects():
            if type(effect) is Persist:
                if not self._unstored:
                    self._store_at = self._clock() + self._store_delay_ns
                self._unstored.append(effect.entry)
            else:
                messages.append(effect)
        if messages:
            self._carry_out(messages)

    def store_waiting_entries(self) -> None:
        """Append the entries of messages on the short path to the store."""
        if self._unstored:
            assert self._store is not None, "a node that persists needs a store"
            self._store.append(*self._unstored)
            self._unstored.clear()

    def _step_posted(self) -> None:
        posted = self._posted
        for _ in range(len(posted)):
            self._step(posted.popleft(), self._clock())

    def _step(self, event: Event, now: int) -> None:
        self._is_on_short_path = False
        if self._insert_path is not None and self._insert_path.has_effects:
            self._carry_out_short_path()
        if self._unstored:  # The step may read them.
            self.store_waiting_entries()
        effects = self._node.step(event, now)
        if effects:
            self._carry_out(effects)

    def _carry_out(self, effects: list[Effect]) -> None:
        handlers, transport = self._handlers, self._transport
        transport.gathers = len(effects) >= _GATHERED_EFFECTS
        for effect in effects:
            handlers[type(effect)](effect)
        transport.gathers = False  # `receive` or `wait` follows, and writes the frames.

    def _sleep_limit(self, retry: int | None) -> int | None:
        """Return the maximum time to sleep, in nanoseconds; None: no limit."""
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
        self._is_dirty = self._is_dirty or self._flush_before_send

    def _propose_command(self, effect: Propose) -> None:
        assert self._propose is not None, "a node that proposes needs a Raft group"
        self._propose(effect.command, effect.term, is_urgent=effect.is_urgent)

    def _publish_message(self, effect: Publish) -> None:
        assert self._publish is not None, "a node that publishes needs a publisher"
        frame = self._encode(effect.message)
        if frame is not None:
            self._publish(frame)

    def _record(self, effect: RecordWire) -> None:
        """Store the wire version in use. If the disk refuses it, the node requests it again."""
        assert self._record_wire is not None, "a node that records its version needs a directory"
        try:
            self._record_wire(effect.wire)
        except OSError as error:
            self._warn_rarely("cannot store the wire version", error=str(error), wire=effect.wire)
        else:
            self.post(WireRecorded(effect.wire))

    def _record_new_level(self, effect: RecordLevel) -> None:
        """Store the durability level. If the disk refuses it, the node requests it again."""
        assert self._record_level is not None, "a node that records its level needs a directory"
        try:
            self._record_level(effect.level)
        except OSError as error:
            self._warn_rarely("cannot store the durability level", error=str(error))
        else:
            self.post(LevelRecorded(effect.level))

    def _set_flush(self, effect: FlushBeforeSend) -> None:
        assert self._store is not None, "a node that flushes needs a store"
        self._flush_before_send = effect.is_on
        self._is_dirty = self._is_dirty or effect.is_on
        self._store.flush_in_background(not effect.is_on)

    def _start_receiving(self, effect: ReceivePublications) -> None:
        assert self._receive_publications is not None, "this process receives no publications"
        self._receive_publications(effect.name, effect.endpoint)

    def _report_bad_message(self, effect: ReportBadMessage) -> None:
        self._drop_bad_frame(effect.src, ProtocolError(effect.reason))

    def _warn(self, effect: LogWarning) -> None:
        self._log_warning(effect.text)

    def _warn_of_failure(self, effect: FailCalls) -> None:
        """Log the error: the calls of a server are its node's own, which tries again."""
        self._warn_rarely(str(effect.error))

    def _halt(self, effect: Halt) -> None:
        self._stopping = True
        self._on_halt(effect.reason, _state(self._node))

    # --- the disk, and bad frames ------------------------------------------------------------

    def _flush_and_send(self) -> int | None:
        """Flush, then send the held frames; return the time until a retry, None if none is due."""
        store = self._store
        assert store is not None, "only a node with a store appends entries"
        fseq = store.last_fseq
        self._transport.flush_gathered()  # Backups write what is forwarded at the same time.
        if not store.flush():
            return _FLUSH_RETRY_NS
        held, self._held, self._is_dirty = self._held, [], False
        for dst, frame in held:
            self._transport.send(dst, frame)
        now = self._clock()
        self._step(Persisted(fseq), now)
        self._step(_BATCH_END, now)
        return 0 if self._is_dirty else None

    def _drop_bad_frame(self, src: bytes, error: ProtocolError) -> None:
        """Count a bad frame, and log it."""
        self.bad_frames += 1
        self._warn_rarely(
            "frame dropped", src=src.hex(), error=str(error)[:500], so_far=self.bad_frames
        )

    def _warn_rarely(self, text: str, **fields: object) -> None:
        """Log a warning that peers can cause, at most one per second."""
        now = self._clock()
        if now >= self._next_warning_at:
            self._next_warning_at = now + _WARNING_INTERVAL_NS
            self._log_warning(text, **fields)

    def _log_warning(self, text: str, **fields: object) -> None:
        """Log a warning; a program's log that fails must not end the node."""
        with contextlib.suppress(Exception):
            event_log.warning(text, **fields)


def _state(node: Node) -> str:
    return repr(getattr(node, "__dict__", node))
