"""Priority queue of received frames: urgent ones first, then fair between sources.

While a process keeps up, frames go from the transport straight to the node. When a queue has
formed, `fill` reads all waiting frames: urgent ones (`is_urgent`) are handled first, the others in
the order of arrival. Frames of a source beyond its first `SOURCE_FRAMES` get every fourth slot
only. An overloaded server thus still receives heartbeats, sends its own, and serves small clients.
Rule: among the frames of one source, only urgent ones overtake others.

Invariant: `size` counts the waiting frames, each with its overhead. Above `LIMIT_BYTES`, frames of
sources with `SOURCE_FRAMES` waiting are dropped; above twice that, no more frames are read.
See docs/protocol.md, section 4.1.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from ziplog.wire.urgency import is_urgent

if TYPE_CHECKING:
    from collections.abc import Callable

    Frame = tuple[bytes, bytes]

#: Size from which on frames of busy sources are dropped, over all connections.
LIMIT_BYTES: Final = 32 * 1024 * 1024
#: Memory of a queued frame besides its bytes: the objects that hold it.
OVERHEAD_BYTES: Final = 160
#: Frames of one source that wait in the order of arrival; enough for one batch of a client.
SOURCE_FRAMES: Final = 256
#: One of this many frames is taken from the overflow.
_OVERFLOW_INTERVAL: Final = 4
#: Maximum number of frames that one `fill` reads.
_FILL_FRAMES: Final = 4096


class Inbox:
    """The received frames of one process, by priority. For one thread."""

    #: Size of the waiting frames in bytes, with their overhead.
    size: int
    #: The last `fill` left frames in the transport, which may be urgent.
    is_unread: bool
    #: Number of frames dropped.
    dropped: int

    def __init__(self, receive: Callable[[], Frame | None]) -> None:
        """Read frames from `receive`, which returns None when there are no more."""
        self.size = self.dropped = 0
        self.is_unread = False
        self._receive: Final = receive
        self._urgent: Final[deque[Frame]] = deque()
        self._others: Final[deque[Frame]] = deque()
        #: Frames of sources that had `SOURCE_FRAMES` waiting when they arrived.
        self._overflow: Final[deque[Frame]] = deque()
        #: By source: number of frames in `_others` and `_overflow`.
        self._queued: Final[dict[bytes, int]] = {}
        #: By source: number of frames in `_overflow`. Only urgent ones of the source overtake them.
        self._in_overflow: Final[dict[bytes, int]] = {}
        self._turns = 0

    def pop(self) -> Frame | None:
        """Return the next frame to handle; None if there is none."""
        if self._urgent:
            frame = self._urgent.popleft()
        elif self._others or self._overflow:
            frame = self._pop_other()
        else:
            return self._receive()
        self.size -= len(frame[1]) + OVERHEAD_BYTES
        return frame

    def _pop_other(self) -> Frame:
        self._turns += 1
        if self._others and not (self._overflow and self._is_overflow_due):
            frame = self._others.popleft()
        else:
            frame = self._overflow.popleft()
            _uncount(self._in_overflow, frame[0])
        _uncount(self._queued, frame[0])
        return frame

    @property
    def _is_overflow_due(self) -> bool:
        source = self._overflow[0][0]
        # Earlier frames of the source are in `_others`, unless all its frames are there.
        return (
            not self._turns % _OVERFLOW_INTERVAL
            and self._in_overflow[source] == self._queued[source]
        )

    def _queue(self, frame: Frame) -> bool:
        source = frame[0]
        count = self._queued.get(source, 0)
        if count >= SOURCE_FRAMES and self.size >= LIMIT_BYTES:
            self.dropped += 1
            return False
        self._queued[source] = count + 1
        late = self._in_overflow.get(source, 0)
        if late or count >= SOURCE_FRAMES:
            self._in_overflow[source] = late + 1
            self._overflow.append(frame)
        else:
            self._others.append(frame)
        return True

    def fill(self) -> None:
        """Read the frames that wait in the transport, up to the limits."""
        receive, left = self._receive, _FILL_FRAMES
        self.is_unread = True
        while self.size < 2 * LIMIT_BYTES and left:
            left -= 1
            frame = receive()
            if frame is None:
                self.is_unread = False
                return
            if is_urgent(frame[1]):
                self._urgent.append(frame)
            elif not self._queue(frame):
                continue
            self.size += len(frame[1]) + OVERHEAD_BYTES


def _uncount(counts: dict[bytes, int], source: bytes) -> None:
    count = counts[source] - 1
    if count:
        counts[source] = count
    else:
        del counts[source]
