"""The frames that a process was sent and has not handled, in the order in which it handles them.

While a process keeps up, a frame goes from the transport straight to the node. When a queue has
formed, `fill` reads everything that waits: what keeps the cluster together (`is_urgent`) is handled
first, everything else in the order of arrival, but for sources that have much waiting already:
what else they sent gets every fourth run_once only. So a server that has more inserts than it can take
still hears its peers, sends its own signs of life, and serves those who ask little. Rule: of what
one source sent, only urgent messages overtake others.

Invariant: `size` counts the frames that wait here, each with its overhead. Above `LIMIT_BYTES`,
what comes from sources that have much waiting is dropped, as by a full queue of the transport;
above twice that, nothing more is read. See docs/protocol.md, section 4.1.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from ziplog.wire.urgency import is_urgent

if TYPE_CHECKING:
    from collections.abc import Callable

    Frame = tuple[bytes, bytes]

#: Bytes that may wait here, of all connections together.
LIMIT_BYTES: Final = 32 * 1024 * 1024
#: What a frame takes besides its bytes: the objects that hold it.
OVERHEAD_BYTES: Final = 160
#: Frames of one source that wait in the order of arrival; it is enough for a batch of a client.
SOURCE_FRAMES: Final = 256
#: One of so many turns is for the rest.
_REST_INTERVAL: Final = 4
#: Frames that one `fill` reads.
_FILL_FRAMES: Final = 4096


class Inbox:
    """What waits for one process. For one thread."""

    #: Bytes that wait, with their overhead.
    size: int
    #: The last `fill` left frames in the transport: some may be urgent.
    is_unread: bool
    #: Frames that were dropped.
    dropped: int

    def __init__(self, receive: Callable[[], Frame | None]) -> None:
        """Take frames from `receive`, which gives None when there are no more."""
        self.size = self.dropped = 0
        self.is_unread = False
        self._receive: Final = receive
        self._urgent: Final[deque[Frame]] = deque()
        self._others: Final[deque[Frame]] = deque()
        #: What is from sources that had `SOURCE_FRAMES` among the others.
        self._rest: Final[deque[Frame]] = deque()
        #: By source: frames among the others, and in the rest.
        self._queued: Final[dict[bytes, int]] = {}
        #: By source: frames in the rest. Nothing of a source overtakes them, but what is urgent.
        self._in_rest: Final[dict[bytes, int]] = {}
        self._turns = 0

    def pop(self) -> Frame | None:
        """Return the next frame to handle; None if there is none."""
        if self._urgent:
            frame = self._urgent.popleft()
        elif self._others or self._rest:
            frame = self._pop_other()
        else:
            return self._receive()
        self.size -= len(frame[1]) + OVERHEAD_BYTES
        return frame

    def _pop_other(self) -> Frame:
        self._turns += 1
        if self._others and not (self._rest and self._is_rest_due):
            frame = self._others.popleft()
        else:
            frame = self._rest.popleft()
            _uncount(self._in_rest, frame[0])
        _uncount(self._queued, frame[0])
        return frame

    @property
    def _is_rest_due(self) -> bool:
        source = self._rest[0][0]
        # What its source sent before is among the others until they are all late.
        return not self._turns % _REST_INTERVAL and self._in_rest[source] == self._queued[source]

    def _queue(self, frame: Frame) -> bool:
        source = frame[0]
        count = self._queued.get(source, 0)
        if count >= SOURCE_FRAMES and self.size >= LIMIT_BYTES:
            self.dropped += 1
            return False
        self._queued[source] = count + 1
        late = self._in_rest.get(source, 0)
        if late or count >= SOURCE_FRAMES:
            self._in_rest[source] = late + 1
            self._rest.append(frame)
        else:
            self._others.append(frame)
        return True

    def fill(self) -> None:
        """Read what waits in the transport, up to the limits."""
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
