"""The transport: one stream connection per peer, for all frames in both directions.

Sending never blocks: a frame that cannot be queued is dropped and counted; the protocols repeat
what matters. The transport reads a connection only when the process takes frames, so TCP holds back
a peer that sends too much. While frames of one read wait, or `gathers` is set, sent frames are
gathered: each connection gets one system call for all of them.

Invariant: `src` is a connected peer's name only if the frame arrived over our own connection to it.
Peers that connect get routes, which begin with a zero byte; names do not.
(docs/protocol.md, section 4: rules of every server.)
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import weakref
from collections import deque
from operator import attrgetter
from typing import Final

from ziplog.core.node import SHORTAGE
from ziplog.core.units import NS_PER_MS, NS_PER_S
from ziplog.errors import ClosedError, ConfigError, ProtocolError
from ziplog.runtime import local_socket
from ziplog.runtime.clock import now_ns
from ziplog.runtime.connection import (
    INPUT,
    LENGTH_BYTES,
    Connection,
    close_all,
    pack_length,
    unpack_length,
)
from ziplog.runtime.descriptors import NODE_TOS, require, shortage_error
from ziplog.runtime.listener import Listener, open_socket, parse_endpoint
from ziplog.runtime.paused import PausedConnections
from ziplog.runtime.resolver import Resolver
from ziplog.runtime.transport_counters import TransportCounters

#: Two units of 256 KiB fit: a frame that a read cuts off is copied twice more.
_READ_BYTES: Final = 576 * 1024
_MAX_READS: Final = 2  # of one connection in a row
#: Events of a connection whose input ends.
_ENDING: Final = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
#: Frames up to this size are sent with one copy; longer ones are queued without.
_COPY_BYTES: Final = 64 * 1024
#: Memory of all incomplete frames together. Above it, the largest are dropped.
_MAX_HELD_BYTES: Final = 128 * 1024 * 1024
#: Output of all connections together. Above it, connections with more than `_COPY_BYTES` get none.
_MAX_QUEUED_BYTES: Final = 256 * 1024 * 1024
#: Output of a connection that is not established: above it, it gets none.
_MAX_WAITING_BYTES: Final = 4 * 1024 * 1024
_LINGER_NS: Final = 100 * NS_PER_MS
#: Longest pause between two attempts to connect; of a node: its shard may wait for the peer.
_MAX_RETRY_NS: Final = 500 * NS_PER_MS
_MAX_NODE_RETRY_NS: Final = 100 * NS_PER_MS
#: An attempt that the peer does not answer ends then; the kernel alone would try ever more rarely.
_CONNECT_TIMEOUT_NS: Final = 1_500 * NS_PER_MS
_MAX_WAIT_S: Final = 3600.0
#: Descriptors that a transport needs for itself and for its first connections.
_OWN_DESCRIPTORS: Final = 16
_ENDED: Final = "the peer closed the connection"
_GARBAGE: Final = "the peer does not speak Ziplog's protocol"
_WHAT: Final = "cannot open a connection to the log"


class Transport:
    """Sends and receives frames. For one thread at a time; `wake` may be called from any."""

    #: Number of frames not sent: there is no such peer, its queue is full, or its connection ended.
    dropped: int
    #: Number of connections closed because the peer did not speak the protocol.
    garbage: int
    #: The other counters.
    counters: TransportCounters
    #: Connections of this process that changed, by name: why an attempt failed, or "" if one
    #: succeeded. The driver of a client takes them (`ConnectionChanged`).
    changes: dict[bytes, str]

    def __init__(self, bind: str | None = None) -> None:
        """Listen at `bind` ("host:port"; port 0: any free one), or only connect if it is None.

        Raises:
            UnavailableError: the port is in use, or the system refuses descriptors or memory.
            ConfigError: `bind` is not an address of this machine.

        """
        require(_OWN_DESCRIPTORS, _WHAT)
        self.dropped = self.garbage = 0
        self.counters = TransportCounters()
        self.changes = {}
        self._closed = self._is_woken = False
        self._listener: Listener | None = None
        with contextlib.ExitStack() as opened:
            try:
                self._epoll = opened.enter_context(contextlib.closing(select.epoll()))
                self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
                opened.callback(os.close, self._wake_read)
                opened.callback(os.close, self._wake_write)
                self._epoll.register(self._wake_read, select.EPOLLIN)
                if bind is not None:
                    self._listener = Listener(bind, self._epoll)
                    opened.callback(self._listener.close)
            except OSError as error:
                raise shortage_error(_WHAT, error) from error
            resources = opened.pop_all()
        #: Held while `wake` writes, so that `close` waits. Reentrant, because handlers of signals
        #: call `wake`, too.
        self._waking: Final = threading.RLock()
        self._resolver: Final = Resolver()
        #: By name or route: every connection, also those that are closed until the next attempt.
        self._connections: Final[dict[bytes, Connection]] = {}
        #: By descriptor: those that are open, established or not.
        self._open: Final[dict[int, Connection]] = {}
        self._end: Final = weakref.finalize(self, close_all, resources, self._open)
        self._end.atexit = False
        #: Connections of this process that are not established: the time to try, or to give up.
        self._attempts: Final[dict[Connection, int]] = {}
        self._max_retry_ns: Final = _MAX_RETRY_NS if bind is None else _MAX_NODE_RETRY_NS
        self._routes = 0
        self._pauses: Final = PausedConnections()
        self._paused: Final = self._pauses.until
        #: Connections with unread input, as of the last poll.
        self._readable: Final[deque[Connection]] = deque()
        #: Frames of the last read, and their source.
        self._frames: Final[deque[bytes]] = deque()
        self._source = b""
        self._buffer: Final = bytearray(_READ_BYTES)
        self._view: Final = memoryview(self._buffer)
        #: Connections with frames to send at the next `flush_gathered`, `receive` or `wait`.
        self._gathering: Final[list[Connection]] = []
        self.gathers = False
        self._held_bytes = self._queued_bytes = self._checks = 0

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def endpoint(self) -> str | None:
        """The endpoint where it listens, "host:port" with the actual port; None if it does not."""
        return None if self._listener is None else self._listener.endpoint

    @property
    def wake_fd(self) -> int:
        """For `signal.set_wakeup_fd`: a byte written here ends `wait`."""
        return self._wake_write

    # --- connections of this process ---

    def connect(self, name: bytes, endpoint: str) -> None:
        """Connect `name` to the peer that listens at `endpoint` ("host:port"), until `disconnect`.

        The peer need not be up: frames are queued, and a lost connection is opened again.
        From another endpoint, `name` moves. If it waits for an attempt, one starts at once.

        Raises:
            ConfigError: `endpoint` is not "host:port", or the name is empty or starts with a zero.

        """
        if not name or name[0] == 0:
            raise ConfigError("name", name, "non-empty, with a first byte other than 0")
        known = self._connections.get(name)
        if known is not None and known.endpoint == endpoint:
            if known in self._attempts and known.fd < 0:
                self._try(known)
            return
        parse_endpoint("endpoint", endpoint)
        self.disconnect(name)
        connection = self._connections[name] = Connection(name, endpoint)
        self._try(connection)

    def disconnect(self, name: bytes) -> None:
        """Disconnect `name`; frames to it are dropped from now on. Idempotent."""
        connection = self._connections.pop(name, None)
        if connection is None:
            return
        queued = connection.queued_bytes
        if connection.fd >= 0 and connection not in self._attempts:
            with contextlib.suppress(OSError):
                connection.flush()
        self._queued_bytes -= queued
        self.counters.sent_bytes += queued - connection.queued_bytes
        self._attempts.pop(connection, None)
        self.changes.pop(name, None)
        self._close(connection)
        connection.drop_output()
        if self._source == name:
            self._frames.clear()

    def _try(self, connection: Connection) -> None:
        """Start an attempt to connect, or a lookup of the host, or wait to try again."""
        assert connection.endpoint is not None
        host, port = parse_endpoint("endpoint", connection.endpoint)
        address = self._resolver.address_of(host)
        now = now_ns()
        if address is None:
            self._attempts[connection] = now + connection.next_retry(self._max_retry_ns)
            if problem := self._resolver.problem(host):
                self.changes[connection.name] = problem
            return
        opened = local_socket.connect(address, port)
        if opened is not None:
            self._watch_attempt(connection, opened, now)
            self._establish(connection)
            return
        try:
            opened = open_socket()
        except OSError as refusal:  # No descriptor is left.
            self._attempts[connection] = now + connection.next_retry(self._max_retry_ns)
            self.changes[connection.name] = f"{SHORTAGE}{os.strerror(refusal.errno or 0).lower()}"
            return
        if self._listener is not None:
            opened.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, NODE_TOS)
        self._watch_attempt(connection, opened, now)
        error = opened.connect_ex((address, port))
        if error not in {0, errno.EINPROGRESS}:
            self._lose(connection, os.strerror(error).lower())
        elif connection.is_connected():  # On one machine, mostly at once.
            self._establish(connection)

    def _watch_attempt(self, connection: Connection, opened: socket.socket, now: int) -> None:
        connection.open(opened, select.EPOLLOUT, self._epoll)
        self._open[connection.fd] = connection
        self._attempts[connection] = now + _CONNECT_TIMEOUT_NS

    def _try_again(self, now: int) -> None:
        for connection in [one for one, due in self._attempts.items() if due <= now]:
            if connection.fd >= 0:
                self._lose(connection, "no reply to the attempt to connect")
            else:
                self._try(connection)

    def _establish(self, connection: Connection) -> None:
        """Use a connection that is established now."""
        del self._attempts[connection]
        connection.retry_ns = 0
        self.changes[connection.name] = ""
        self._start(connection)

    def _start(self, connection: Connection) -> None:
        """Send the greeting, and the frames that wait."""
        connection.last_active = self._checks
        self._queued_bytes += connection.greet()
        self._flush(connection)

    def _lose(self, connection: Connection, problem: str = _ENDED) -> None:
        """Close a connection that ended, or could not be established; try again later."""
        is_attempt = connection in self._attempts
        if not is_attempt and not connection.is_greeted:
            self.counters.handshakes["malformed" if problem is _GARBAGE else "ended"] += 1
        self._close(connection)
        if connection.endpoint is None:
            del self._connections[connection.name]
        else:
            self._attempts[connection] = now_ns() + connection.next_retry(self._max_retry_ns)
            self.changes[connection.name] = problem
        if not is_attempt:
            self._queued_bytes -= connection.queued_bytes
            self.dropped += connection.drop_output()

    def _lose_failed(self, connection: Connection, error: OSError) -> None:
        """Close a connection after a system call on its socket failed."""
        self.counters.silent += error.errno == errno.ETIMEDOUT
        self._lose(connection)

    def _close(self, connection: Connection) -> None:
        if connection.fd >= 0:
            del self._open[connection.fd]
            self._held_bytes -= connection.held_bytes
            connection.close(self._epoll)

    # --- connections of peers ---

    def _accept(self, listener: Listener) -> None:
        for accepted in listener.accept():
            self._routes += 1
            route = b"\0" + self._routes.to_bytes(8, "big")
            connection = self._connections[route] = Connection(route)
            connection.open(accepted, INPUT, self._epoll)
            self._open[connection.fd] = connection
            self._start(connection)

    def _check_descriptors(self, listener: Listener, now: int) -> None:
        peers = (one for one in self._connections.values() if one.endpoint is None)
        for connection in listener.check(peers, now):
            self._lose(connection)
        self._checks = listener.checks

    def pause(self, route: bytes, until: int) -> None:
        """Read no more from a peer that connected, until a time (`now_ns`)."""
        connection = self._connections.get(route)
        if connection is not None:
            if connection.is_readable and connection not in self._paused:
                self._readable.remove(connection)
            self._pauses.add(connection, until)

    # --- frames ---

    def send(self, dst: bytes, frame: bytes) -> bool:
        """Send a frame to a connected name, or along a route that `receive` returned.

        Returns False, and counts, if the frame was dropped: there is no such peer, or its queue is
        full.
        """
        connection = self._connections.get(dst)
        if connection is None:
            self.counters.unroutable += 1
            return self._drop()
        if self._frames or self.gathers or connection.queued_bytes or connection in self._attempts:
            return self._queue(connection, frame)
        size = len(frame)
        if size > _COPY_BYTES:
            return self._queue(connection, frame) and self._flush(connection)
        try:
            written = connection.write(pack_length(size) + frame)
        except BlockingIOError:
            written = 0
        except OSError as error:
            self._lose_failed(connection, error)
            return self._drop()
        counters = self.counters
        counters.sent_frames += 1
        counters.sent_bytes += written
        if written < LENGTH_BYTES + size:
            connection.queue_rest(memoryview(pack_length(size) + frame)[written:])
            self._queued_bytes += connection.queued_bytes
            connection.watch(self._epoll)
        return True

    def _drop(self) -> bool:
        if self._closed:
            raise ClosedError("this transport")
        self.dropped += 1
        return False

    def _queue(self, connection: Connection, frame: bytes) -> bool:
        """Queue a frame until `flush_gathered`, or until the peer accepts it."""
        before, is_attempt = connection.queued_bytes, connection in self._attempts
        is_full = self._queued_bytes > _MAX_QUEUED_BYTES and before > _COPY_BYTES
        if is_full or (is_attempt and before > _MAX_WAITING_BYTES) or not connection.queue(frame):
            return self._drop()
        self.counters.sent_frames += 1
        self._queued_bytes += connection.queued_bytes - before
        if not (before or is_attempt):
            self._gathering.append(connection)
        return True

    def _flush(self, connection: Connection) -> bool:
        """Write queued output; return False if the connection has ended."""
        before, problem = connection.queued_bytes, None
        try:
            connection.flush()
        except OSError as error:
            problem = error
        written = before - connection.queued_bytes
        self._queued_bytes -= written
        self.counters.sent_bytes += written
        if problem is not None:
            self._lose_failed(connection, problem)
            return False
        connection.watch(self._epoll)
        return True

    def flush_gathered(self) -> None:
        """Write the gathered frames."""
        for connection in self._gathering:
            if connection.fd >= 0 and connection not in self._attempts:
                self._flush(connection)
        self._gathering.clear()

    def receive(self) -> tuple[bytes, bytes] | None:
        """Return the next frame: (name or route of its sender, frame). Never blocks.

        None: every connection with input was read, as of the last `wait` or `poll`.
        """
        frames, readable = self._frames, self._readable
        if not frames:
            if self._closed:
                raise ClosedError("this transport")
            if self._gathering:
                self.flush_gathered()
            while readable:
                connection = readable.popleft()
                connection.is_readable = False
                if connection.fd < 0 or connection in self._attempts:
                    continue
                frame = self._read(connection)
                if frame is not None:
                    return connection.name, frame
                if frames:
                    break
            else:
                return None
        return self._source, frames.popleft()

    def wait_and_receive(self, timeout_ns: int | None) -> tuple[bytes, bytes] | None:
        """Do `wait`, then `receive`: quick for a single frame. `wait` also checks a listener."""
        if (
            self._readable or self._frames or self._gathering or self._attempts or self._paused
            or timeout_ns is None
        ):  # fmt: skip
            self.wait(timeout_ns)
            return self.receive()
        events = self._epoll.poll(timeout_ns / NS_PER_S if timeout_ns > 0 else 0)
        if len(events) == 1:
            fd, mask = events[0]
            connection = self._open.get(fd)
            if connection is not None and mask == select.EPOLLIN:
                frame = self._read(connection)
                if frame is not None:
                    return connection.name, frame
                return self.receive()
        self._on_events(events)
        return self.receive()

    def _read(self, connection: Connection) -> bytes | None:
        """Read what one connection has received, up to a limit, into `_frames`.

        If it is exactly one frame, return the frame instead.
        """
        counters = self.counters
        for _ in range(_MAX_READS):
            try:
                count = connection.read_into(self._buffer)
            except BlockingIOError:
                return None
            except OSError as error:
                self._lose_failed(connection, error)
                return None
            if not count:
                self._lose(connection)
                return None
            counters.received_bytes += count
            connection.last_active = self._checks
            self._source = connection.name
            if connection.is_between_frames and LENGTH_BYTES <= count < _READ_BYTES:
                (size,) = unpack_length(self._buffer)
                if size == count - LENGTH_BYTES and not self._frames:
                    counters.received_frames += 1
                    return bytes(self._view[LENGTH_BYTES:count])
            self._parse(connection, self._view[:count])
            if count < _READ_BYTES or connection.fd < 0:
                return None
        connection.report_again(self._epoll)
        return None

    def _parse(self, connection: Connection, data: memoryview) -> None:
        held, waiting, was_greeted = connection.held_bytes, len(self._frames), connection.is_greeted
        is_valid = True
        try:
            connection.parse(data, self._frames)
        except ProtocolError:
            is_valid = False
        self.counters.received_frames += len(self._frames) - waiting
        self._held_bytes += connection.held_bytes - held
        if connection.is_greeted and not was_greeted:
            self.counters.handshakes["ok"] += 1
        if not is_valid:
            self.garbage += 1
            self._lose(connection, _GARBAGE)
            return
        if self._held_bytes > _MAX_HELD_BYTES:
            self.counters.flooded += 1
            self._lose(max(self._open.values(), key=attrgetter("held_bytes")))

    def ready(self) -> bool:
        """Whether `receive` may return a frame now, without `wait` or `poll`."""
        return bool(self._frames or self._readable)

    # --- waiting ---

    def wait(self, timeout_ns: int | None) -> None:
        """Sleep until input, `wake` or the time-out (None: none); may return early. Write output.

        The time-out is rounded up to milliseconds.
        """
        if self._gathering:
            self.flush_gathered()
        if self._frames or self._readable:
            self.poll()
            return
        timeout_s = _MAX_WAIT_S if timeout_ns is None else timeout_ns / NS_PER_S
        listener = self._listener
        is_due = self._attempts or self._paused or (listener is not None and listener.retry_at)
        if is_due and (timer := self.next_timer()) is not None:
            timeout_s = min(timeout_s, (timer - now_ns()) / NS_PER_S)
        self._on_events(self._epoll.poll(max(timeout_s, 0.0)))

    def poll(self) -> None:
        """Find the connections that have input now, and write output. Never blocks."""
        self._on_events(self._epoll.poll(0))

    def _on_events(self, events: list[tuple[int, int]]) -> None:
        for fd, mask in events:
            connection = self._open.get(fd)
            if connection is None:
                self._on_other_event(fd)
            elif connection in self._attempts:
                if connection.is_connected():
                    self._establish(connection)
                else:
                    self._lose(connection, connection.problem())
            else:
                if mask & _ENDING and connection not in self._paused:
                    connection.report_again(self._epoll)  # A read that finds input misses its end.
                if mask & ~select.EPOLLOUT and not connection.is_readable:
                    connection.is_readable = True
                    self._readable.append(connection)
                if mask & select.EPOLLOUT:
                    self._flush(connection)
        listener, is_due = self._listener, self._attempts or self._paused
        if is_due or (listener is not None and now_ns() >= listener.check_at):
            self._run_timers()

    def _on_other_event(self, fd: int) -> None:
        if fd == self._wake_read:
            self._clear_wake()
        elif self._listener is not None:
            self._accept(self._listener)

    def _run_timers(self) -> None:
        now = now_ns()
        if self._attempts:
            self._try_again(now)
        if self._paused:
            self._pauses.resume(now, self._epoll)
        if self._listener is not None and now >= self._listener.check_at:
            self._check_descriptors(self._listener, now)

    def next_timer(self) -> int | None:
        """Time of the next attempt to connect, or the like (`now_ns`); None: none is due."""
        retry_at = None if self._listener is None else self._listener.retry_at
        if not (self._attempts or self._paused):
            return retry_at
        times = [*self._attempts.values(), *self._paused.values()]
        return min(times if retry_at is None else [*times, retry_at])

    def wake(self) -> None:
        """End the current `wait`, or else the next. From any thread, and from signal handlers."""
        if self._is_woken:
            return
        with self._waking:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):  # The pipe is full of wake-ups.
                    self._is_woken = True  # No call, hence no signal handler, before the byte.
                    os.write(self._wake_write, b"\0")

    def _clear_wake(self) -> None:
        self._is_woken = False
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        if self._is_woken:  # By a `wake` in between, whose byte may have been read.
            os.write(self._wake_write, b"\0")

    @property
    def connection_counts(self) -> tuple[int, int]:
        """Numbers of connections that peers opened, and that this process opened."""
        opened = sum(one.endpoint is not None for one in self._open.values())
        return len(self._open) - opened, opened

    @property
    def shed(self) -> int:
        """Number of connections closed because too few descriptors were free."""
        return 0 if self._listener is None else self._listener.shed

    def fileno(self) -> int:
        """Return a descriptor for an event loop: readable means `poll`, then `receive` to None."""
        return self._epoll.fileno()

    def close(self) -> None:
        """Close all connections; queued frames get 100 ms. Idempotent."""
        if self._closed:
            return
        self._frames.clear()
        self._linger()
        with self._waking:  # No later `wake` writes to the descriptor, which may be reused.
            self._closed = True
        self._connections.clear()
        self._readable.clear()
        if self._listener is not None:
            self._listener.shut_down()
        self._end()

    def _linger(self) -> None:
        """Send what is queued for established connections, for a limited time."""
        until = now_ns() + _LINGER_NS
        self.flush_gathered()
        while any(one.has_output for one in self._open.values() if one not in self._attempts):
            left = until - now_ns()
            if left <= 0:
                return
            self._readable.clear()
            self._on_events(self._epoll.poll(left / NS_PER_S))
