"""The consensus library's connections, so that anybody may call at the port and nothing happens.

The library would unpickle what it is sent (which is to run it), read from a caller for as long as
he sends, keep what he announces, and do what any caller asks. Rule: a connection takes plain
values, of limited length, so much at a time, and only from nodes of the group. Who they are is
known by name only; a password makes sure of it (docs/protocol.md, section 3).
"""

from __future__ import annotations

import logging
import socket
import struct
import time
from _socket import inet_ntop
from typing import Any, Final

import pysyncobj.pickle
import pysyncobj.tcp_connection
import pysyncobj.tcp_server
import pysyncobj.transport

from ziplog.runtime import plain

# Importing the library has replaced it by one for Windows.
socket.inet_ntop = inet_ntop

log = logging.getLogger(__name__)

#: Connections that wait to be accepted.
_BACKLOG: Final = 256
#: Connections of which nobody knows yet whose they are; above, some are closed.
_MAX_STRANGERS: Final = 64
#: The longest frame of such a connection, in bytes.
_STRANGER_FRAME: Final = 4096
#: How often a tick reads from one connection: who sends without end must not stop the others.
_READS_A_TICK: Final = 64
_COMPLAINT_INTERVAL_S: Final = 1.0
_FRAME_LENGTH: Final = struct.Struct("i")


class Connection(pysyncobj.tcp_connection.TcpConnection):  # type: ignore[misc] # it has no types
    """A connection that takes plain values of limited length, and only so much at a time."""

    #: The longest frame that it takes now, in bytes.
    longest = plain.MAX_FRAME

    def _TcpConnection__tryReadBuffer(self) -> None:  # noqa: N802 - the library's name
        for _ in range(_READS_A_TICK):
            if not self._TcpConnection__processRead():
                break
        self._TcpConnection__lastReadTime = pysyncobj.tcp_connection.monotonicTime()

    def _TcpConnection__processParseMessage(self) -> Any:  # noqa: N802 - the library's name
        buffer = self._TcpConnection__readBuffer
        if len(buffer) >= _FRAME_LENGTH.size:
            (length,) = _FRAME_LENGTH.unpack_from(buffer)
            if not 0 < length <= self.longest:
                _complain(f"a frame of {length} bytes; 1 to {self.longest} are allowed")
                self.disconnect()
                return None
        before = self.state
        message = super()._TcpConnection__processParseMessage()
        if message is None and self.state != before:
            _complain("a frame that is no message")
        return message


class Transport(pysyncobj.transport.TCPTransport):  # type: ignore[misc] # it has no types
    """The library's connections, for the nodes of the group only."""

    def _maybeBind(self) -> None:  # noqa: N802
        was_ready = self.ready
        super()._maybeBind()
        if self.ready and not was_ready:
            # The library's queue of 5 turns nodes away while strangers call.
            self._server._TcpServer__socket.listen(_BACKLOG)  # noqa: SLF001

    def _onNewIncomingConnection(self, conn: Any) -> None:  # noqa: N802
        if len(self._unknownConnections) >= _MAX_STRANGERS:
            self._unknownConnections.pop().disconnect()
        conn.longest = _STRANGER_FRAME
        super()._onNewIncomingConnection(conn)

    def _onIncomingMessageReceived(self, conn: Any, message: Any) -> None:  # noqa: N802
        is_handshake = self._syncObj.encryptor and not conn.sendRandKey
        if not is_handshake and not (isinstance(message, str) and message in self._nodeAddrToNode):
            _complain("the first message of a peer that is no node of the group")
            conn.disconnect()
            return
        conn.longest = Connection.longest
        super()._onIncomingMessageReceived(conn, message)

    def _onMessageReceived(self, node: Any, message: Any) -> None:  # noqa: N802
        try:
            super()._onMessageReceived(node, message)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            _complain(f"a message of node {node} that is none: {error!r}")


_complained_at = -_COMPLAINT_INTERVAL_S


def _complain(what: str) -> None:
    """Log what a peer sent; at most one a second, for whoever sends that may send much."""
    global _complained_at  # noqa: PLW0603 - one consensus port a process
    now = time.monotonic()
    if now >= _complained_at + _COMPLAINT_INTERVAL_S:
        _complained_at = now
        log.warning("consensus port: dropped %s", what)


pysyncobj.pickle.dumps, pysyncobj.pickle.loads = plain.dumps, plain.loads
pysyncobj.tcp_connection.zlib = plain
pysyncobj.tcp_server.TcpConnection = pysyncobj.transport.TcpConnection = Connection
