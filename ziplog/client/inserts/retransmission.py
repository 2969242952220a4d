"""The retransmission timeout of a shard, and the budget for copies.

A server reads its connections in order and loses nothing of a live connection. So a unit without an
ack is most often in the server's queue, and another copy makes that queue longer.
`RetransmitTimeout` follows RFC 6298 after the first sample. `Budget` limits a client's copies to a
share of its units. Rules: a unit with several copies gives a sample only if the acks name the copy
that they answer (Karn's algorithm); a doubled timeout stays doubled until
the next sample, another view, or an ack that answers a further copy.

See docs/protocol.md, section 4.1.
"""

from __future__ import annotations

from typing import Final

from ziplog.core.distance import initial_retransmit_ns, min_retransmit_ns
from ziplog.core.units import NS_PER_MS

#: Maximum of a doubled timeout, unless the samples themselves are longer.
MAX_DOUBLED_NS: Final = 4_000 * NS_PER_MS
_MAX_RETRANSMIT_NS: Final = 60_000 * NS_PER_MS
#: Maximum backoff between copies of a unit while a caller waits for it.
MAX_BACKOFF_NS: Final = 2_000 * NS_PER_MS
#: Backoff before a refused unit is retransmitted; it doubles up to `MAX_BACKOFF_NS`.
REFUSED_BACKOFF_NS: Final = 2 * NS_PER_MS
#: Number of acked units that pay for one copy, and maximum number of copies that can be saved up.
UNITS_PER_COPY: Final = 10
SAVED_COPIES: Final = 3


class RetransmitTimeout:
    """The retransmission timeout of one shard."""

    __slots__ = ("_initial_ns", "_min_ns", "_smoothed", "_variance", "ns")

    def __init__(self, rtt_ms: int = 0) -> None:
        """`rtt_ms`: the longest round trip to a server, as in the cluster file."""
        #: The timeout before the first sample.
        self.ns = self._initial_ns = initial_retransmit_ns(rtt_ms)
        #: A shorter silence may just mean that the server's machine is busy.
        self._min_ns = min_retransmit_ns(rtt_ms)
        self._smoothed = self._variance = 0

    @property
    def smoothed_ns(self) -> int:
        """The smoothed latency; 0: nothing was measured."""
        return self._smoothed

    def continue_from(self, former: RetransmitTimeout) -> None:
        """Take over the state of another timeout."""
        self.ns = former.ns
        self._initial_ns, self._min_ns = former._initial_ns, former._min_ns
        self._smoothed, self._variance = former._smoothed, former._variance

    def observe_latency(self, sample: int) -> None:
        """Update the timeout from the latency of an insert that was sent once."""
        smoothed, variance = self._smoothed, self._variance
        if smoothed:
            error = sample - smoothed
            smoothed += error // 8
            variance += ((error if error > 0 else -error) - variance) // 4
        else:
            smoothed, variance = sample, sample // 2
        self._smoothed, self._variance = smoothed, variance
        if smoothed + 4 * variance < self._min_ns:  # `_from_samples` without its call.
            self.ns = self._min_ns
        else:
            self.ns = self._from_samples()

    def back_off(self) -> None:
        """Double the timeout, because nothing arrived within it."""
        self.ns = max(self.ns, min(2 * self.ns, MAX_DOUBLED_NS))

    @property
    def is_longest(self) -> bool:
        """Whether the timeout is at its maximum."""
        return self.ns >= MAX_DOUBLED_NS

    def reset(self) -> None:
        """Undo the doubling: the shard has another view, or answered a further copy."""
        self.ns = self.undoubled_ns

    @property
    def undoubled_ns(self) -> int:
        """The timeout without its doubling."""
        return self._from_samples() if self._smoothed else self._initial_ns

    def _from_samples(self) -> int:
        ns = self._smoothed + 4 * self._variance
        return self._min_ns if ns < self._min_ns else min(ns, _MAX_RETRANSMIT_NS)


class Budget:
    """Limits the copies that a client sends without evidence of a loss."""

    __slots__ = ("_units",)

    def __init__(self) -> None:
        #: Counted in units whose acks agree.
        self._units = SAVED_COPIES * UNITS_PER_COPY

    def earn(self) -> None:
        """Note that acks of a unit agree."""
        if self._units < SAVED_COPIES * UNITS_PER_COPY:
            self._units += 1

    def refund(self) -> None:
        """Note that a copy was useful: a server answered it, and an earlier copy was lost."""
        self._units = min(self._units + UNITS_PER_COPY, SAVED_COPIES * UNITS_PER_COPY)

    def spend(self) -> bool:
        """Pay for a copy; return False if the budget is empty."""
        if self._units < UNITS_PER_COPY:
            return False
        self._units -= UNITS_PER_COPY
        return True
