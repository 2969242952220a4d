"""PySyncObj's connections, hardened against untrusted peers.

The original library unpickles messages of any peer (which runs code), reads from a peer without
end, buffers any announced length, obeys any peer, and closes its port if the process lacks a file
descriptor. Rule: a connection accepts plain values of limited length, a limited number per tick,
and only from nodes of the group, with one connection each. A node is identified by its name only; a
password authenticates it (docs/protocol.md, section 12).
"""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import struct
import time
from _socket import inet_ntop
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pysyncobj.pickle
import pysyncobj.poller
import pysyncobj.tcp_connection
import pysyncobj.tcp_server
import pysyncobj.transport

from ziplog.raft import codec

if TYPE_CHECKING:
    from collections.abc import Callable

# The import of the library replaces this function by one for Windows.
socket.inet_ntop = inet_ntop

log = logging.getLogger(__name__)

#: Maximum number of connections that wait to be accepted.
_BACKLOG: Final = 256
#: Maximum number of connections without an identified node; beyond, some are closed. At most one
#: part in `_UNIDENTIFIED_PART` of this process's descriptors: clients need the others.
_MAX_UNIDENTIFIED: Final = 64
_UNIDENTIFIED_PART: Final = 8
#: Maximum size of a frame on such a connection, in bytes.
_MAX_UNIDENTIFIED_FRAME: Final = 4096
#: Maximum number of reads from one connection per tick, so that a busy peer does not stop others.
_READS_A_TICK: Final = 64
#: Time for which the port accepts no connection after the system refused one.
_PAUSE_S: Final = 0.2
#: Interval between log lines about dropped messages.
_LOG_INTERVAL_S: Final = 1.0
#: Time after which the kernel closes a connection whose bytes, or request to connect, the peer does
#: not acknowledge. It repeats these ever more seldom: otherwise, a cut of 30 s lasts 10 s longer.
_UNACKNOWLEDGED_MS: Final = 3_000
_FRAME_LENGTH: Final = struct.Struct("i")
_READ: Final = pysyncobj.poller.POLL_EVENT_TYPE.READ
_WRITE: Final = pysyncobj.poller.POLL_EVENT_TYPE.WRITE
_ERROR: Final = pysyncobj.poller.POLL_EVENT_TYPE.ERROR


class Introduction(NamedTuple):
    """The reply to a client of the log that connects to a consensus port."""

    #: The first bytes that such a client sends.
    greeting: bytes
    #: Returns all bytes of the reply, which say what the port is.
    reply: Callable[[], bytes]


class Connection(pysyncobj.tcp_connection.TcpConnection):  # type: ignore[misc] # it has no types
    """A connection that accepts plain values of limited length, with limited reads per tick."""

    #: Maximum size of a frame at present, in bytes.
    longest = codec.MAX_FRAME
    #: Until the peer's first message: the reply if it is a client of the log.
    introduction: Introduction | None = None

    def setSockoptKeepalive(self) -> None:  # noqa: N802 - the library's name
        """Set the options of a socket that connects, or was accepted."""
        super().setSockoptKeepalive()
        if self._TcpConnection__socket is not None:
            self._TcpConnection__socket.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS
            )

    def send(self, message: Any) -> None:
        """Send a message; the rest is sent later if the socket does not accept all of it."""
        super().send(message)
        if self.getSendBufferSize() > 0 and self.fileno() is not None:
            self._TcpConnection__poller.subscribe(
                self.fileno(), self._TcpConnection__processConnection, _READ | _WRITE | _ERROR
            )

    def _TcpConnection__tryReadBuffer(self) -> None:  # noqa: N802 - the library's name
        for _ in range(_READS_A_TICK):
            if not self._TcpConnection__processRead():
                break
        self._TcpConnection__lastReadTime = pysyncobj.tcp_connection.monotonicTime()

    def _TcpConnection__processParseMessage(self) -> Any:  # noqa: N802 - the library's name
        buffer = self._TcpConnection__readBuffer
        if self.introduction is not None and len(buffer) >= _FRAME_LENGTH.size:
            greeting, reply = self.introduction
            if greeting.startswith(buffer[: len(greeting)]):
                if len(buffer) >= len(greeting):
                    self._reply_to_client(reply())
                return None
        if len(buffer) >= _FRAME_LENGTH.size:
            (length,) = _FRAME_LENGTH.unpack_from(buffer)
            if not 0 < length <= self.longest:
                _log_dropped(f"a frame of {length} bytes; 1 to {self.longest} are allowed")
                self.disconnect()
                return None
        before = self.state
        message = super()._TcpConnection__processParseMessage()
        if message is None and self.state != before:
            _log_dropped("a frame that is not a message")
        return message

    def _reply_to_client(self, reply: bytes) -> None:
        with contextlib.suppress(OSError):  # it has disconnected
            self._TcpConnection__socket.send(reply)
            self._TcpConnection__socket.shutdown(socket.SHUT_WR)
        self.disconnect()


class Server(pysyncobj.tcp_server.TcpServer):  # type: ignore[misc] # it has no types
    """A listening port that stays open if it cannot accept a connection, and retries later."""

    _is_paused_until = 0.0

    def _TcpServer__onNewConnection(self, descriptor: int, _event: int) -> None:  # noqa: N802
        try:
            connected, _ = self._TcpServer__socket.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return  # the peer has disconnected
        except OSError as error:
            # The peer stays in the queue: without a pause it would keep this thread busy.
            _log_dropped(f"a connection, because the system refuses it ({error.strerror})")
            self._TcpServer__poller.unsubscribe(descriptor)
            self._is_paused_until = time.monotonic() + _PAUSE_S
            return
        try:
            connection = self._connection(connected)
        except OSError:  # the peer has disconnected
            connected.close()
            return
        self._TcpServer__onNewConnectionCallback(connection)

    def _connection(self, connected: socket.socket) -> Connection:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._TcpServer__sendBufferSize)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._TcpServer__recvBufferSize)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setblocking(False)
        return Connection(
            poller=self._TcpServer__poller,
            socket=connected,
            timeout=self._TcpServer__connectionTimeout,
            sendBufferSize=self._TcpServer__sendBufferSize,
            recvBufferSize=self._TcpServer__recvBufferSize,
        )

    def resume(self) -> None:
        """Accept connections again, if a pause is over."""
        if self._is_paused_until and time.monotonic() >= self._is_paused_until:
            self._is_paused_until = 0.0
            self._TcpServer__poller.subscribe(
                self._TcpServer__fileno, self._TcpServer__onNewConnection, _READ | _ERROR
            )


class Transport(pysyncobj.transport.TCPTransport):  # type: ignore[misc] # it has no types
    """The library's transport, restricted to the nodes of the group."""

    def _maybeBind(self) -> None:  # noqa: N802
        was_ready = self.ready
        super()._maybeBind()
        if self.ready and not was_ready:
            # The library's queue of 5 would reject nodes while unknown peers connect.
            self._server._TcpServer__socket.listen(_BACKLOG)  # noqa: SLF001

    def _onTick(self) -> None:  # noqa: N802
        super()._onTick()
        self._server.resume()

    def _connectIfNecessarySingle(self, node: Any) -> bool:  # noqa: N802
        try:
            return bool(super()._connectIfNecessarySingle(node))
        except OSError as error:  # it must not end the tick: the next one tries again
            _log_dropped(f"the connection to {node}: the system refuses it ({error.strerror})")
            return False

    def send(self, node: Any, message: Any) -> bool:
        """Send a message to a node; return whether it was sent.

        With a password, both ends exchange keys first. A message before its end would break the
        handshake, which takes a round trip: longer than the interval between messages, if the
        nodes are far from each other.
        """
        connection = self._connections.get(node)
        if connection is not None and self._syncObj.encryptor and not connection.sendRandKey:
            return False
        return bool(super().send(node, message))

    def _onNewIncomingConnection(self, conn: Any) -> None:  # noqa: N802
        if len(self._unknownConnections) >= _max_unidentified():
            self._unknownConnections.pop().disconnect()
        conn.longest = _MAX_UNIDENTIFIED_FRAME
        conn.introduction = self._syncObj.introduction
        super()._onNewIncomingConnection(conn)

    def _onIncomingMessageReceived(self, conn: Any, message: Any) -> None:  # noqa: N802
        is_handshake = self._syncObj.encryptor and not conn.sendRandKey
        if not is_handshake and not (isinstance(message, str) and message in self._nodeAddrToNode):
            _log_dropped("the first message of a peer that is not a node of the group")
            conn.disconnect()
            return
        conn.longest, conn.introduction = Connection.longest, None
        if not is_handshake and (former := self._connections.get(self._nodeAddrToNode[message])):
            former.disconnect()  # the rest of its messages are from the node's former process
        super()._onIncomingMessageReceived(conn, message)

    def _onMessageReceived(self, node: Any, message: Any) -> None:  # noqa: N802
        try:
            super()._onMessageReceived(node, message)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            _log_dropped(f"an invalid message of node {node}: {error!r}")


def _max_unidentified() -> int:
    """Return the maximum number of connections without an identified node."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MAX_UNIDENTIFIED
    return min(_MAX_UNIDENTIFIED, limit // _UNIDENTIFIED_PART)


_last_logged_at = -_LOG_INTERVAL_S


def _log_dropped(what: str) -> None:
    """Log dropped input of a peer, at most one line per second."""
    global _last_logged_at  # noqa: PLW0603 - a process has one Raft port
    now = time.monotonic()
    if now >= _last_logged_at + _LOG_INTERVAL_S:
        _last_logged_at = now
        log.warning("consensus port: dropped %s", what)


pysyncobj.pickle.dumps, pysyncobj.pickle.loads = codec.dumps, codec.loads
pysyncobj.tcp_connection.zlib = codec
pysyncobj.transport.TcpServer, pysyncobj.transport.TcpConnection = Server, Connection
