"""What the core's machines share in one step: the time, the orders given, the alarm, numbers.

Invariant: the alarm is never later than the earliest thing that any machine waits for; it may be
earlier, which costs one idle look (so that the hot path need not keep a heap).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ziplog.client.common.requests import NEVER, Counters
from ziplog.core.node import Complete, Connect, Disconnect, Send

if TYPE_CHECKING:
    from ziplog.core.message import Message
    from ziplog.core.node import Effect

#: Request numbers start here, so that a `Refused` tells them from the seqs of inserts.
FIRST_REQUEST: Final = 2**40


class Turn:
    """One client's scratch pad."""

    __slots__ = (
        "_last_request", "alarm", "client", "counters", "effects", "forgotten_ns", "now",
    )  # fmt: skip

    def __init__(self, client: bytes) -> None:
        self.client: Final = client
        self.counters: Final = Counters()
        #: Monotonic nanoseconds.
        self.now = 0
        self.alarm = NEVER
        self.effects: list[Effect] = []
        self._last_request = FIRST_REQUEST
        #: Servers forget a client that is silent; one that did not run for so long (nobody called
        #: it) must not count on what they knew. Two thirds of their patience.
        self.forgotten_ns = 600 * 1_000_000_000

    def request(self) -> int:
        """Return a request number that was never used."""
        self._last_request += 1
        return self._last_request

    def wake_at(self, at: int) -> None:
        """Ask for a `Wakeup` at `at` or before."""
        self.alarm = min(self.alarm, at)

    def send(self, dst: bytes, message: Message) -> None:
        """Order a message to be sent."""
        self.effects.append(Send(dst, message))

    def complete(self, call: int, result: Any) -> None:
        """Answer a call."""
        self.effects.append(Complete(call, result))

    def connect(self, endpoint: str) -> bytes:
        """Order a connection; its name is its endpoint."""
        name = endpoint.encode()
        self.effects.append(Connect(name, endpoint))
        return name

    def disconnect(self, name: bytes) -> None:
        """Order a connection to be forgotten."""
        self.effects.append(Disconnect(name))
