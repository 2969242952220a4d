"""The retransmission timeout of a shard, and the budget for copies.

A server reads its connections in order and loses nothing of a live connection. So a unit without an
ack is most often in the server's queue, and another copy makes that queue longer.
`RetransmitTimeout` follows RFC 6298 after the first sample. `Budget` limits a client's copies to a
share of its acks. Rules: a unit with several copies gives a sample only if the acks name the copy
that they answer (Karn's algorithm); a doubled timeout stays doubled until the next sample.

See docs/protocol.md, section 4.1.
"""

from __future__ import annotations

from typing import Final

from ziplog.core.units import NS_PER_MS

#: Timeout before the first sample.
INITIAL_RETRANSMIT_NS: Final = 500 * NS_PER_MS
#: Minimum timeout; a shorter silence may just mean that the server's machine is busy.
MIN_RETRANSMIT_NS: Final = 200 * NS_PER_MS
#: Maximum of a doubled timeout, unless the samples themselves are longer.
MAX_DOUBLED_NS: Final = 4_000 * NS_PER_MS
_MAX_RETRANSMIT_NS: Final = 60_000 * NS_PER_MS
#: Maximum backoff between copies of a unit while a caller waits for it.
MAX_BACKOFF_NS: Final = 2_000 * NS_PER_MS
#: Backoff before a refused unit is retransmitted; it doubles up to `MAX_BACKOFF_NS`.
REFUSED_BACKOFF_NS: Final = 2 * NS_PER_MS
#: Number of acks that pay for one copy, and maximum number of copies that can be saved up.
ACKS_PER_COPY: Final = 10
SAVED_COPIES: Final = 3


class RetransmitTimeout:
    """The retransmission timeout of one shard."""

    __slots__ = ("_smoothed", "_variance", "ns")

    def __init__(self) -> None:
        self.ns = INITIAL_RETRANSMIT_NS
        self._smoothed = self._variance = 0

    @property
    def smoothed_ns(self) -> int:
        """The smoothed latency; 0: nothing was measured."""
        return self._smoothed

    def continue_from(self, former: RetransmitTimeout) -> None:
        """Take over the state of another timeout."""
        self.ns = former.ns
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
        if smoothed + 4 * variance < MIN_RETRANSMIT_NS:  # `_from_samples` without its call.
            self.ns = MIN_RETRANSMIT_NS
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
        """Undo the doubling, because the shard has another view."""
        self.ns = self._from_samples() if self._smoothed else INITIAL_RETRANSMIT_NS

    def _from_samples(self) -> int:
        ns = self._smoothed + 4 * self._variance
        return MIN_RETRANSMIT_NS if ns < MIN_RETRANSMIT_NS else min(ns, _MAX_RETRANSMIT_NS)


class Budget:
    """Limits the copies that a client sends without evidence of a loss."""

    __slots__ = ("_acks",)

    def __init__(self) -> None:
        #: Counted in acks.
        self._acks = SAVED_COPIES * ACKS_PER_COPY

    def earn(self) -> None:
        """Note that acks of a unit agree."""
        if self._acks < SAVED_COPIES * ACKS_PER_COPY:
            self._acks += 1

    def refund(self) -> None:
        """Note that a copy was useful: a server answered it, and an earlier copy was lost."""
        self._acks = min(self._acks + ACKS_PER_COPY, SAVED_COPIES * ACKS_PER_COPY)

    def spend(self) -> bool:
        """Pay for a copy; return False if the budget is empty."""
        if self._acks < ACKS_PER_COPY:
            return False
        self._acks -= ACKS_PER_COPY
        return True
