"""One stream socket that carries frames in both directions. Reads and writes never block.

Both ends first send a greeting of 8 bytes, `GREETING`. Then each frame follows its length, 4 bytes
in little-endian order. A peer that sends anything else is disconnected (`ProtocolError`).

Output that the socket does not accept waits, up to `MAX_QUEUED_FRAMES` and `MAX_QUEUED_BYTES`.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, Final

from ziplog.core.fields import MAX_FRAME
from ziplog.core.units import NS_PER_MS
from ziplog.errors import ProtocolError

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

#: The name of the protocol and its version. A later version keeps this layout.
GREETING: Final = b"ziplog" + (1).to_bytes(2, "little")
_LENGTH: Final = struct.Struct("<I")
LENGTH_BYTES: Final = _LENGTH.size
pack_length: Final = _LENGTH.pack
unpack_length: Final = _LENGTH.unpack_from
#: Pause before the second attempt to connect.
_RETRY_NS: Final = 20 * NS_PER_MS
#: Output that waits for one peer; the protocols limit it further (credit, windows).
MAX_QUEUED_FRAMES: Final = 10_000
MAX_QUEUED_BYTES: Final = 4 * MAX_FRAME
#: Frames up to this size are copied behind their length, longer ones are queued as they are.
_COPY_BYTES: Final = 64 * 1024
#: Pieces and bytes that one system call writes.
_MAX_PIECES: Final = 512
_MAX_WRITE_BYTES: Final = 1024 * 1024

#: What an established connection is watched for. The kernel reports input once, when it arrives, so
#: that it reports connections in the order of their input.
INPUT: Final = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
_BOTH: Final = INPUT | select.EPOLLOUT


class Connection:
    """A connection to one peer. Of the transport's thread."""

    __slots__ = (
        "_input",
        "_is_greeted",
        "_needed",
        "_output",
        "_socket",
        "endpoint",
        "events",
        "fd",
        "is_between_frames",
        "is_readable",
        "last_active",
        "name",
        "queued_bytes",
        "read_into",
        "retry_ns",
        "write",
    )

    def __init__(self, name: bytes, endpoint: str | None = None) -> None:
        """Create a closed connection; `endpoint` is where this process connects to, if it does."""
        #: The peer's name, or the route to a peer that connected.
        self.name: Final = name
        self.endpoint: Final = endpoint
        #: The descriptor; -1: the connection is closed.
        self.fd = -1
        #: What the socket is watched for.
        self.events = 0
        #: Number of the check before the last input; see `descriptors.Reserve`.
        self.last_active = 0
        #: Whether the transport knows of unread input.
        self.is_readable = False
        #: The last pause between two attempts to connect; 0: none since it was established.
        self.retry_ns = 0
        self._output: Final[deque[bytes | memoryview]] = deque()
        #: Bytes that wait for the socket.
        self.queued_bytes = 0
        self._expect_greeting()

    def open(self, opened: socket.socket, events: int, epoll: select.epoll) -> None:
        """Use a non-blocking socket, which may still be connecting, and watch it for `events`."""
        self._socket = opened
        self.fd = opened.fileno()
        self.events = events
        epoll.register(self.fd, events)
        self.read_into: Callable[[bytearray], int] = opened.recv_into
        self.write: Callable[[bytes | memoryview], int] = opened.send

    def next_retry(self, max_ns: int) -> int:
        """Return the pause before the next attempt to connect; it doubles, up to `max_ns`."""
        self.retry_ns = min(max(2 * self.retry_ns, _RETRY_NS), max_ns)
        return self.retry_ns

    def close(self, epoll: select.epoll | None = None) -> None:
        """Close the socket; queued output stays. Idempotent.

        With `epoll`, stop watching it first: a forked child may keep the socket open. A finalizer
        gives none, because it may run in such a child, which has the same epoll.
        """
        if self.fd < 0:
            return
        if epoll is not None:
            epoll.unregister(self.fd)
        self.fd = -1
        self._socket.close()
        self._expect_greeting()

    @property
    def is_greeted(self) -> bool:
        """Whether the peer sent its greeting."""
        return self._is_greeted

    # --- input ---

    def _expect_greeting(self) -> None:
        self._input = bytearray()
        self._needed = len(GREETING)
        self._is_greeted = False
        #: Whether the next input begins with a frame: not with the greeting, nor within a frame.
        self.is_between_frames = False

    @property
    def held_bytes(self) -> int:
        """Memory that an incomplete frame uses."""
        return len(self._input)

    def parse(self, data: memoryview, frames: deque[bytes]) -> None:
        """Append the frames that `data` completes to `frames`; keep the rest.

        Raises:
            ProtocolError: the peer does not speak this protocol, or a frame is too long.

        """
        if self._input:
            self._input += data
            if self._is_greeted and len(self._input) < self._needed:
                return
            data, self._input = memoryview(self._input), bytearray()
        at = 0 if self._is_greeted else self._check_greeting(data)
        end, needed = len(data), LENGTH_BYTES if self._is_greeted else len(GREETING)
        while self._is_greeted and at + LENGTH_BYTES <= end:
            (size,) = unpack_length(data, at)
            if size > MAX_FRAME:
                raise ProtocolError(f"frame of {size} bytes; at most {MAX_FRAME} are allowed")
            needed = LENGTH_BYTES + size
            if at + needed > end:
                break
            frames.append(bytes(data[at + LENGTH_BYTES : at + needed]))
            at += needed
            needed = LENGTH_BYTES
        self.is_between_frames = self._is_greeted and at == end
        if at < end:
            self._input = bytearray(data[at:])
            self._needed = needed

    def _check_greeting(self, data: memoryview) -> int:
        """Return the length of the greeting at the start of `data`; 0 if it is incomplete."""
        received = bytes(data[: len(GREETING)])
        if not GREETING.startswith(received):
            raise ProtocolError("the peer does not speak this protocol, or not this version")
        self._is_greeted = len(received) == len(GREETING)
        return len(GREETING) if self._is_greeted else 0

    # --- output ---

    @property
    def has_output(self) -> bool:
        """Whether output waits for the socket."""
        return bool(self._output)

    def greet(self) -> int:
        """Queue the greeting, as the first output; return its size."""
        self._output.appendleft(GREETING)
        self.queued_bytes += len(GREETING)
        return len(GREETING)

    def drop_output(self) -> int:
        """Drop queued output; return the number of pieces."""
        lost = len(self._output)
        self._output.clear()
        self.queued_bytes = 0
        return lost

    def queue(self, frame: bytes) -> bool:
        """Queue a frame; return False if the queue is full."""
        size = len(frame)
        if len(self._output) >= MAX_QUEUED_FRAMES or self.queued_bytes > MAX_QUEUED_BYTES:
            return False
        self.queued_bytes += LENGTH_BYTES + size
        if size <= _COPY_BYTES:
            self._output.append(pack_length(size) + frame)
        else:
            self._output.append(pack_length(size))
            self._output.append(frame)
        return True

    def queue_rest(self, data: memoryview) -> None:
        """Queue what the socket did not accept of the first output."""
        self._output.append(data)
        self.queued_bytes += len(data)

    def flush(self) -> None:
        """Write queued output until the socket accepts no more.

        Raises:
            OSError: the connection has ended.

        """
        output = self._output
        while output:
            pieces, size = self._next_pieces()
            try:
                written = (
                    self.write(pieces[0]) if len(pieces) == 1 else self._socket.sendmsg(pieces)
                )
            except BlockingIOError:
                return
            self.queued_bytes -= written
            if written < size:
                self._keep_rest(pieces, written)
                return
            for _ in pieces:
                output.popleft()

    def _next_pieces(self) -> tuple[list[bytes | memoryview], int]:
        pieces: list[bytes | memoryview] = []
        size = 0
        for piece in self._output:
            pieces.append(piece)
            size += len(piece)
            if size >= _MAX_WRITE_BYTES or len(pieces) == _MAX_PIECES:
                break
        return pieces, size

    def _keep_rest(self, pieces: list[bytes | memoryview], written: int) -> None:
        for piece in pieces:
            if written < len(piece):
                self._output[0] = memoryview(piece)[written:]
                return
            written -= len(piece)
            self._output.popleft()

    # --- readiness ---

    def watch(self, epoll: select.epoll) -> None:
        """Watch the socket for input, and for writability exactly while output waits."""
        events = _BOTH if self._output else INPUT
        if events != self.events:
            self.events = events
            epoll.modify(self.fd, events)

    def report_again(self, epoll: select.epoll) -> None:
        """Have the kernel report input that it has reported, if there is some when it is asked."""
        epoll.modify(self.fd, self.events)

    def problem(self) -> str:
        """Return why an attempt to connect has failed: "connection refused"."""
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return os.strerror(error or errno.ECONNREFUSED).lower()

    def is_connected(self) -> bool:
        """Whether an attempt to connect has succeeded."""
        try:
            # A socket that connects to a free port of its own machine may meet itself.
            return bool(self._socket.getpeername() != self._socket.getsockname())
        except OSError:
            return False


def close_all(opened: contextlib.ExitStack, connections: dict[int, Connection]) -> None:
    """Close a transport's connections, and its other resources."""
    for connection in connections.values():
        connection.close()
    opened.close()
