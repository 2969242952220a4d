"""Publications: frames for every process that receives them, over ZeroMQ's PUB and SUB sockets.

ZeroMQ's thread sends a frame to thousands of receivers while the publisher goes on. A publication
may be lost: a slow or new receiver gets none, and the publisher is not told. So publications only
carry what a receiver can also request over its own connection (ADR 24).

The port of a publisher is open to nodes only (`descriptors.accept_only_nodes`).
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any, Final

import zmq

from ziplog.core.fields import MAX_FRAME
from ziplog.errors import UnavailableError
from ziplog.runtime import descriptors

if TYPE_CHECKING:
    from collections.abc import Callable

#: Publications that wait for one receiver, and in a receiver; further ones are lost.
_MAX_QUEUED: Final = 64
#: Subscriptions are the only input of a publisher.
_MAX_SUBSCRIPTION_BYTES: Final = 64
_BACKLOG: Final = 4096
#: Interval of the heartbeats of receivers, and the silence after which a connection ends.
_HEARTBEAT_MS: Final = 1_000
_SILENT_MS: Final = 3_000
_RETRY_MS: Final = 20
_MAX_RETRY_MS: Final = 500
#: Descriptors of a context with its first sockets, and its threads. If the system refuses one of
#: these threads, ZeroMQ ends the process.
_OWN_DESCRIPTORS: Final = 16
_OWN_THREADS: Final = 2


class Publisher:
    """Publishes frames at a port of its own. Of one thread."""

    #: Where to receive them, "host:port".
    endpoint: Final[str]

    def __init__(self, host: str, advertise_host: str | None = None) -> None:
        """Listen at any free port.

        Args:
            host: an address of this machine.
            advertise_host: the host in `endpoint`; None: `host`.

        Raises:
            UnavailableError: the system refuses a port, descriptors or a thread.

        """
        what = f"cannot open a port for publications at {host}"
        self._context, self._socket = _open(zmq.PUB, _OWN_THREADS, what)
        try:
            address, listening = _listen(host)
        except OSError as error:
            self._context.destroy(linger=0)
            raise descriptors.shortage_error(what, error) from error
        for option, value in (
            (zmq.USE_FD, listening),
            (zmq.SNDHWM, _MAX_QUEUED),
            (zmq.MAXMSGSIZE, _MAX_SUBSCRIPTION_BYTES),
            (zmq.HANDSHAKE_IVL, _SILENT_MS),
            # Not ZeroMQ's own heartbeats: each would cost time in proportion to the receivers.
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, _SILENT_MS // 1000),
            (zmq.TCP_KEEPALIVE_INTVL, 1),
            (zmq.TCP_KEEPALIVE_CNT, 3),
            (zmq.TCP_MAXRT, _SILENT_MS),
            (zmq.LINGER, 0),
        ):
            self._socket.setsockopt(option, value)
        self._socket.bind(f"tcp://{address}")
        self.endpoint = f"{advertise_host or host}:{address.rpartition(':')[2]}"

    def publish(self, frame: bytes) -> None:
        """Send a frame to all receivers. Never blocks."""
        with contextlib.suppress(zmq.ZMQError):  # Lost for all receivers, at worst.
            self._socket.send(frame, zmq.NOBLOCK)

    def close(self) -> None:
        """Close all connections; publications that wait are lost."""
        self._context.destroy(linger=0)


def _open(kind: int, threads: int, what: str) -> tuple[zmq.Context[Any], zmq.Socket[Any]]:
    """Return a new context with a socket, if the system has that many threads.

    Raises:
        UnavailableError: the system refuses descriptors or a thread.

    """
    descriptors.require(_OWN_DESCRIPTORS, what)
    descriptors.require_threads(threads, what)
    try:
        context: zmq.Context[Any] = zmq.Context()
        try:
            return context, context.socket(kind)
        except zmq.ZMQError:
            context.term()
            raise
    except zmq.ZMQError as error:
        raise descriptors.shortage_error(what, error) from error


def _listen(host: str) -> tuple[str, int]:
    """Return the address and the descriptor of a socket that accepts connections of nodes."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
        descriptors.accept_only_nodes(listening)
        listening.bind((host, 0))
        listening.listen(_BACKLOG)
        listening.setblocking(False)
        address = "{}:{}".format(*listening.getsockname())
        return address, listening.detach()


class Subscription:
    """A connection to one publisher, and the thread that reads it."""

    def __init__(
        self, name: bytes, endpoint: str, on_frame: Callable[[bytes, bytes], object]
    ) -> None:
        """Receive what a process publishes at `endpoint` ("host:port"), now or later.

        `on_frame` is called with `name` and each frame, on the thread.

        Raises:
            UnavailableError: the system refuses descriptors or a thread.

        """
        what = f"cannot receive publications of {endpoint}"
        self._name, self._on_frame = name, on_frame
        self._context, self._socket = _open(zmq.SUB, _OWN_THREADS + 1, what)
        for option, value in (
            (zmq.TOS, descriptors.NODE_TOS),
            (zmq.RCVHWM, _MAX_QUEUED),
            (zmq.MAXMSGSIZE, MAX_FRAME),
            (zmq.HANDSHAKE_IVL, _SILENT_MS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _SILENT_MS),
            (zmq.RECONNECT_IVL, _RETRY_MS),
            (zmq.RECONNECT_IVL_MAX, _MAX_RETRY_MS),
            (zmq.LINGER, 0),
            (zmq.SUBSCRIBE, b""),
        ):
            self._socket.setsockopt(option, value)
        self._socket.connect(f"tcp://{endpoint}")
        thread = threading.Thread(target=self._read, name=f"publications {endpoint}", daemon=True)
        try:
            self._thread: Final = descriptors.start_thread(thread, what)
        except UnavailableError:
            self._context.destroy(linger=0)
            raise

    def _read(self) -> None:
        with self._socket, contextlib.suppress(zmq.ContextTerminated):
            while True:
                self._on_frame(self._name, self._socket.recv())

    def close(self) -> None:
        """Close the connection, and end the thread."""
        self._context.term()
        self._thread.join()
