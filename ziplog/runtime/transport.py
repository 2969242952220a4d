"""The transport: one ZeroMQ ROUTER socket per process, for all frames in both directions.

Sending never blocks: a frame that cannot be queued at once is dropped and counted; the protocols
repeat what matters. A message has two parts, route and frame; anything else is garbage.

Invariant: `src` is a connected peer's name only if the frame arrived over our own connection to it.
An inbound peer may choose its ROUTER identity, and libzmq aborts the process if an outbound
connection gets an identity that is in use. So outbound connections get random routes, and inbound
ones are accepted only with a route that libzmq generated.
libzmq must never stop reading a connection, nor send ZMTP heartbeats: see `receive_limits`.
(docs/protocol.md, section 4: rules of every server.)
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import weakref
from typing import TYPE_CHECKING, Any, Final

import zmq

from ziplog.core.fields import MAX_FRAME
from ziplog.core.units import NS_PER_MS
from ziplog.errors import ClosedError, ConfigError, UnavailableError
from ziplog.runtime.descriptors import NODE_TOS, require, shortage_error
from ziplog.runtime.receive_limits import Peer, ReceiveLimiter
from ziplog.segments.entry import SCARCE

if TYPE_CHECKING:
    from collections.abc import Callable

#: Frames queued for one peer; the protocols limit their bytes (credit, windows).
_SEND_QUEUE: Final = 10_000
#: No limit: a connection that libzmq stops reading can end the process. See `receive_limits`.
_RECEIVE_QUEUE: Final = 0
_LINGER_MS: Final = 100
_RECONNECT_MS: Final = 20
_RECONNECT_MAX_MS: Final = 500
#: An attempt that the peer does not answer ends then; the kernel alone would try ever more rarely.
_CONNECT_TIMEOUT_MS: Final = 1_500
#: TCP keepalive for silent peers; a peer that acknowledges no data is disconnected.
_SILENT_S: Final = 1
_ASK_EVERY_S: Final = 1
_ASK_TIMES: Final = 3
_TAKES_NOTHING_MS: Final = 3_000
#: Number of frames in a row after which `receive` calls `ready` before it tries to read.
_ASK_FIRST: Final = 2
#: Frames between checks of the receive limits, besides those in `wait`: a busy process never waits.
_CHECK_EVERY_FRAMES: Final = 256
#: On the wire, a frame of up to this size has a short header.
_SMALL_FRAME: Final = 255
_SMALL_HEAD: Final = 2
_HEAD: Final = 9
#: Maximum number of garbage messages that one `receive` skips.
_GARBAGE_LIMIT: Final = 64
#: `select` supports file descriptors below this number only.
_SELECT_LIMIT: Final = 1024
#: Waits up to this are timed in microseconds, longer ones in milliseconds (rounded up).
_EXACT_WAIT_NS: Final = 10_000_000
_MAX_WAIT_NS: Final = 3_600_000_000_000
_MAX_PORT: Final = 65_535

#: Descriptors that a transport needs for itself and for its first connections.
_OWN_DESCRIPTORS: Final = 16
_WHAT: Final = "cannot open a connection to the log"

_NOBLOCK: Final = int(zmq.NOBLOCK)
_NOBLOCK_MORE: Final = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
_POLLIN: Final = int(zmq.POLLIN)


class Transport:
    """Sends and receives frames. For one thread at a time; `wake` may be called from any."""

    #: Number of frames not sent: there is no such peer, or its queue is full.
    dropped: int
    #: Number of messages received that were not a valid frame.
    garbage: int

    def __init__(self, bind: str | None = None) -> None:
        """Listen at `bind` ("host:port"; port 0: any free one), or only connect if it is None.

        Raises:
            UnavailableError: the port is in use, or the system refuses descriptors or memory.
            ConfigError: `bind` is not an address of this machine.

        """
        self.dropped = self.garbage = 0
        self._closed = False
        self._context, self._socket = _open()
        try:
            if bind is not None:
                self._socket.set(zmq.TOS, NODE_TOS)
            self._endpoint = None if bind is None else _bind(self._socket, bind)
            self._open_wake()
        except BaseException as error:
            self._socket.close(0)
            self._context.term()
            if isinstance(error, OSError):
                raise shortage_error(_WHAT, error) from error
            raise
        self._secret = b"\x01" + os.urandom(8)
        self._connections = 0
        self._endpoints: dict[bytes, str] = {}
        self._routes: dict[bytes, bytes] = {}
        #: By route.
        self._peers: dict[bytes, Peer] = {}
        self._limiter = None if self._endpoint is None else ReceiveLimiter(_port(self._endpoint))
        self._closed_peers: list[Peer] = []
        # Bound methods below pyzmq's own Python layer, which costs 1-2 us per call.
        backend: Any = super(zmq.Socket, self._socket)
        self._send: Callable[[bytes, int], object] = backend.send
        self._recv: Callable[[int], bytes] = backend.recv
        self._recv_frame: Callable[[int, bool], zmq.Frame] = backend.recv
        self._get: Callable[[int], int] = backend.get
        self._taken = 0
        self._is_quiet = False
        # Without this, garbage collection of an unclosed transport would block for ever: pyzmq
        # terminates a context without its sockets there, and libzmq waits for the sockets.
        self._end: Final = weakref.finalize(
            self,
            _release,
            self._context,
            self._socket,
            self._epoll,
            self._wake_read,
            self._wake_write,
        )
        self._end.atexit = False

    def _open_wake(self) -> None:
        self._is_woken = False
        self._epoll = select.epoll()
        try:
            self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            self._epoll.close()
            raise
        queue = self._socket.get(zmq.FD)
        assert isinstance(queue, int)
        self._fds = (queue, self._wake_read)
        self._poll = select.poll()
        for fd in self._fds:
            self._epoll.register(fd, select.EPOLLIN)
            self._poll.register(fd, select.POLLIN)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def endpoint(self) -> str | None:
        """The endpoint where it listens, "host:port" with the actual port; None if it does not."""
        return self._endpoint

    @property
    def cut(self) -> int:
        """Number of inbound connections that were closed for exceeding the receive limits."""
        return 0 if self._limiter is None else self._limiter.cut

    @property
    def wake_fd(self) -> int:
        """For `signal.set_wakeup_fd`: a byte written here ends `wait`."""
        return self._wake_write

    def connect(self, name: bytes, endpoint: str) -> None:
        """Connect `name` to the peer that listens at `endpoint` ("host:port"), until `disconnect`.

        The peer need not be up: frames are queued, and a lost connection is opened again.
        Nothing happens if `name` is connected to this endpoint; from another endpoint, it moves.

        Raises:
            ConfigError: `endpoint` is not "host:port", or the name is empty or starts with a zero.

        """
        if not name or name[0] == 0:
            raise ConfigError("name", name, "non-empty, with a first byte other than 0")
        if self._endpoints.get(name) == endpoint:
            return
        _check("endpoint", endpoint)
        self.disconnect(name)
        self._connect(name, endpoint)

    def _connect(self, name: bytes, endpoint: str) -> None:
        # A route serves one connection: frames over an earlier one no longer have a name.
        self._connections += 1
        route = self._secret + self._connections.to_bytes(8, "big")
        self._socket.set(zmq.CONNECT_ROUTING_ID, route)
        try:
            self._socket.connect(f"tcp://{endpoint}")
        except zmq.ZMQError as error:
            raise ConfigError("endpoint", endpoint, f"'host:port' ({error.strerror})") from error
        self._endpoints[name] = endpoint
        self._routes[name] = route
        self._peers[route] = Peer(name)
        self._is_quiet = False

    def disconnect(self, name: bytes) -> None:
        """Disconnect `name`; frames to it are dropped from now on. Idempotent."""
        endpoint = self._endpoints.pop(name, None)
        if endpoint is None:
            return
        del self._peers[self._routes.pop(name)]
        self._socket.disconnect(f"tcp://{endpoint}")
        # libzmq has closed every connection to this endpoint.
        for other in [key for key, value in self._endpoints.items() if value == endpoint]:
            del self._peers[self._routes.pop(other)]
            self._connect(other, endpoint)

    def send(self, dst: bytes, frame: bytes) -> bool:
        """Queue a frame for a connected name, or for a route that `receive` returned.

        Returns False, and counts, if the frame was dropped: there is no such peer, or its queue is
        full.
        """
        try:
            self._is_quiet = False
            self._send(self._routes.get(dst, dst), _NOBLOCK_MORE)
            self._send(frame, _NOBLOCK)
        except zmq.ZMQError as error:
            if self._closed:
                raise ClosedError("this transport") from None
            if error.errno not in {errno.EAGAIN, errno.EHOSTUNREACH}:
                raise
            self.dropped += 1
            return False
        return True

    def receive(self) -> tuple[bytes, bytes] | None:
        """Return the next received frame: (name or route of its sender, frame). Never blocks."""
        for _ in range(_GARBAGE_LIMIT):
            # A failed read costs 4 us, a call of `ready` 2 us. A single frame is mostly the last
            # one; after a few there are usually more.
            if 0 < self._taken <= _ASK_FIRST and not self.ready():
                break
            try:
                route = self._recv(_NOBLOCK)
            except zmq.Again:
                break
            except zmq.ZMQError:
                if self._closed:
                    raise ClosedError("this transport") from None
                raise
            peer = self._peers.get(route)
            if peer is None:
                frame, peer = self._receive_first(route)
            else:
                frame = self._recv(_NOBLOCK)
            self._taken += 1
            if not self._taken % _CHECK_EVERY_FRAMES:
                self._enforce_limits()
            if self._get(zmq.RCVMORE):
                self._drop_rest()
                continue
            if peer is None:
                self.garbage += 1
                continue
            size = len(frame)
            peer.frames += 1
            peer.taken += size + (_SMALL_HEAD if size <= _SMALL_FRAME else _HEAD)
            return peer.name, frame
        else:
            return None
        self._taken = 0
        self._is_quiet = True
        self._forget_closed()
        return None

    def _receive_first(self, route: bytes) -> tuple[bytes, Peer | None]:
        """Read the frame of a new route; register the route if frames can be sent to it."""
        frame = self._recv_frame(_NOBLOCK, False)
        if self._limiter is None or route[0] != 0:
            return frame.bytes, None
        peer = Peer(route)
        with contextlib.suppress(zmq.ZMQError):  # The connection has ended.
            if self._limiter.add(peer, int(frame.get(zmq.SRCFD))):
                self._peers[route] = peer
        return frame.bytes, peer

    def _enforce_limits(self) -> None:
        if self._limiter is not None:
            self._closed_peers += self._limiter.enforce()

    def _forget_closed(self) -> None:
        # Only now: their last frames may have waited until here.
        for peer in self._closed_peers:
            self._peers.pop(peer.name, None)
        self._closed_peers.clear()
        if self._limiter is not None:
            self._limiter.on_drained()

    def _drop_rest(self) -> None:
        while self._get(zmq.RCVMORE):
            self._recv(_NOBLOCK)
        self.garbage += 1

    def ready(self) -> bool:
        """Whether `receive` would return a frame now."""
        return bool(self._get(zmq.EVENTS) & _POLLIN)

    def wait(self, timeout_ns: int | None) -> None:
        """Sleep until input, `wake` or the time-out (None: none); may return early.

        Up to 10 ms it is exact to about 0.1 ms; longer times are rounded up to milliseconds.
        """
        self._enforce_limits()
        if self._is_woken:
            self._clear_wake()
        elif timeout_ns is not None and timeout_ns <= 0:
            if self._is_quiet or not self.ready():
                self._clear_wake()
        elif self._is_quiet or not self.ready():
            self._sleep(timeout_ns)

    def _sleep(self, timeout_ns: int | None) -> None:
        # libzmq's file descriptor is edge-triggered. That is enough here: since `ready` returned
        # False, or `receive` None, no call of ours has consumed an edge.
        if timeout_ns is None:
            found = [fd for fd, _ in self._poll.poll()]
        elif timeout_ns <= _EXACT_WAIT_NS and max(self._fds) < _SELECT_LIMIT:
            found = select.select(self._fds, (), (), timeout_ns / 1e9)[0]
        else:
            waited_ms = -(-min(timeout_ns, _MAX_WAIT_NS) // NS_PER_MS)
            found = [fd for fd, _ in self._poll.poll(waited_ms)]
        if self._wake_read in found:
            self._clear_wake()

    def wake(self) -> None:
        """End the current `wait`, or else the next. From any thread, and from signal handlers."""
        if not self._is_woken:
            self._is_woken = True
            try:
                os.write(self._wake_write, b"\0")
            except BlockingIOError:  # The pipe is full of wake-ups.
                return

    def _clear_wake(self) -> None:
        # In this order: a `wake` in between leaves its flag, and the next `wait` returns at once.
        self._is_woken = False
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            return

    def fileno(self) -> int:
        """A file descriptor for an event loop: readable means `wait(0)`, then `receive` to None.

        It is edge-triggered, so call `ready` again after the last `send`.
        """
        return self._epoll.fileno()

    def close(self) -> None:
        """Close all connections; queued frames get 100 ms. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._is_woken = True  # So that no late `wake` writes to a reused descriptor.
        self._end()


def _release(
    context: zmq.Context[zmq.Socket[bytes]],
    socket: zmq.Socket[bytes],
    epoll: select.epoll,
    wake_read: int,
    wake_write: int,
) -> None:
    epoll.close()
    socket.close(_LINGER_MS)
    context.term()
    os.close(wake_read)
    os.close(wake_write)


def _open() -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    require(_OWN_DESCRIPTORS, _WHAT)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    try:
        return context, _router(context)
    except zmq.ZMQError as error:
        context.term()
        raise shortage_error(_WHAT, OSError(error.errno or 0, error.strerror)) from error


def _router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.ROUTER)
    for option, value in (
        # Without it, libzmq silently drops frames for unknown peers and beyond the high-water mark.
        (zmq.ROUTER_MANDATORY, 1),
        (zmq.SNDHWM, _SEND_QUEUE),
        (zmq.RCVHWM, _RECEIVE_QUEUE),
        (zmq.MAXMSGSIZE, MAX_FRAME + 1024),
        (zmq.LINGER, _LINGER_MS),
        (zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS),
        (zmq.RECONNECT_IVL, _RECONNECT_MS),
        (zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS),
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, _SILENT_S),
        (zmq.TCP_KEEPALIVE_INTVL, _ASK_EVERY_S),
        (zmq.TCP_KEEPALIVE_CNT, _ASK_TIMES),
        (zmq.TCP_MAXRT, _TAKES_NOTHING_MS),
    ):
        socket.set(option, value)
    return socket


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def _check(option: str, endpoint: str) -> None:
    """Reject endpoints that libzmq would misread (it truncates port 99999 to 16 bits)."""
    host, _, port = endpoint.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > _MAX_PORT:
        raise ConfigError(option, endpoint, f"'host:port', with a port up to {_MAX_PORT}")


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    _check("bind", endpoint)
    try:
        socket.bind(f"tcp://{endpoint}")
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            advice = "stop the process that listens there, or choose another port"
            raise UnavailableError(
                f"cannot listen at {endpoint}: it is in use; {advice}"
            ) from error
        if error.errno in SCARCE:
            raise shortage_error(_WHAT, OSError(error.errno, error.strerror)) from error
        allowed = f"'host:port' of this machine ({error.strerror})"
        raise ConfigError("bind", endpoint, allowed) from error
    bound = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.rstrip(b"\0").decode().removeprefix("tcp://")
