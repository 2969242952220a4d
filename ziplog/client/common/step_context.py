"""State that the client's state machines share during one step.

It holds the current time, the effects of the step, the next timer, counters and request numbers.

Invariant: `next_timer` is never later than the earliest deadline or retry of any machine. It may be
earlier, which costs one wasted wakeup; so the hot path needs no heap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ziplog.client.common.requests import Counters
from ziplog.core.distance import min_request_retry_ns
from ziplog.core.node import AskArchive, Complete, Connect, Disconnect, Send
from ziplog.core.units import NEVER, NS_PER_S

if TYPE_CHECKING:
    from ziplog.core.message import Message
    from ziplog.core.node import Effect

#: Request numbers start here, so that a `Refused` distinguishes them from seqs of inserts.
FIRST_REQUEST: Final = 2**40


class StepContext:
    """The shared state of one client."""

    __slots__ = (
        "_last_request", "client", "counters", "effects", "expects_more", "has_losses",
        "highest_gsn", "next_timer", "now", "rtt_ms", "session_expiry_ns",
    )  # fmt: skip

    def __init__(self, client: bytes) -> None:
        self.client: Final = client
        self.counters: Final = Counters()
        #: Monotonic time in nanoseconds.
        self.now = 0
        self.next_timer = NEVER
        self.effects: list[Effect] = []
        self._last_request = FIRST_REQUEST
        #: The highest gsn of this client's records, as far as it is known.
        self.highest_gsn = 0
        #: Several single inserts were completed in this batch, so others may follow in it.
        self.expects_more = False
        #: A `sync` has reported a record as lost.
        self.has_losses = False
        #: Time without a step after which servers may have expired this client's session, in
        #: nanoseconds: two thirds of the servers' session timeout.
        self.session_expiry_ns = 600 * NS_PER_S
        #: Longest round trip to a server, as in the cluster file.
        self.rtt_ms = 0

    def request(self) -> int:
        """Return a request number that was never used."""
        self._last_request += 1
        return self._last_request

    def retry_at(self, interval: int) -> int:
        """Return when to repeat a request that is sent now, in ns.

        Args:
            interval: time for the answer in a local network, in ns.

        """
        return self.now + max(interval, min_request_retry_ns(self.rtt_ms))

    def set_timer(self, at: int) -> None:
        """Request a `Wakeup` at `at` or before."""
        self.next_timer = min(self.next_timer, at)

    def pop_effects(self) -> list[Effect]:
        """Return the effects of the current step, and begin the next one."""
        effects = self.effects
        if effects:
            self.effects = []
        return effects

    def send(self, dst: bytes, message: Message) -> None:
        """Add an effect: send a message."""
        self.effects.append(Send(dst, message))

    def complete(self, call: int, result: Any) -> None:
        """Add an effect: complete a call with its result."""
        self.effects.append(Complete(call, result))

    def ask_archive(self, host: str, port: int, cluster: int, shard: int, gsn: int) -> int:
        """Add an effect: request a writer table from an archive; return the request's number."""
        number = self.request()
        self.effects.append(AskArchive(number, host, port, cluster, shard, gsn))
        return number

    def connect(self, endpoint: str) -> bytes:
        """Add an effect: connect to an endpoint; return the connection's name."""
        name = endpoint.encode()
        self.effects.append(Connect(name, endpoint))
        return name

    def disconnect(self, name: bytes) -> None:
        """Add an effect: close a connection."""
        self.effects.append(Disconnect(name))
