"""When a unit that was sent and not acknowledged is sent again, and how often that may be.

A server reads its connections in order and loses nothing of a connection that lives. So a unit
without an ack is most often still in the server's queue, and another copy of it only makes that
queue longer. `RetransmitTimeout` is the retransmission timeout of RFC 6298, from the first sample on;
`Budget` bounds the copies of a whole client by a share of its acks. Rules: what was
sent more than once gives a sample only if the acks say which copy they answer (Karn); a timeout
that expired is doubled, and stays so until there is a sample. See docs/protocol.md, section 4.1.
"""

from __future__ import annotations

from typing import Final

_MS: Final = 1_000_000
#: The timeout before there is a sample.
INITIAL_RETRANSMIT_NS: Final = 500 * _MS
#: A shorter pause than this says nothing about a server: its machine may just be busy.
MIN_RETRANSMIT_NS: Final = 200 * _MS
#: Doubling ends here, unless the samples themselves are longer.
MAX_DOUBLED_NS: Final = 4_000 * _MS
_MAX_RETRANSMIT_NS: Final = 60_000 * _MS
#: One copy is paid for by so many acks; so many copies can be saved up.
ACKS_PER_COPY: Final = 10
SAVED_COPIES: Final = 3


class RetransmitTimeout:
    """The retransmission timeout of one shard."""

    __slots__ = ("_smoothed", "_variance", "ns")

    def __init__(self) -> None:
        self.ns = INITIAL_RETRANSMIT_NS
        self._smoothed = self._variance = 0

    def observe_latency(self, sample: int) -> None:
        """Learn how long an insert took that was sent once."""
        smoothed = self._smoothed
        if smoothed:
            error = sample - smoothed
            self._smoothed = smoothed + error // 8
            self._variance += (abs(error) - self._variance) // 4
        else:
            self._smoothed = sample
            self._variance = sample // 2
        self.ns = self._from_samples()

    def back_off(self) -> None:
        """Double it: nothing came within its time."""
        self.ns = max(self.ns, min(2 * self.ns, MAX_DOUBLED_NS))

    @property
    def is_longest(self) -> bool:
        """Whether it was doubled as often as may be."""
        return self.ns >= MAX_DOUBLED_NS

    def reset(self) -> None:
        """Forget how often it was doubled, as the shard has another view."""
        self.ns = self._from_samples() if self._smoothed else INITIAL_RETRANSMIT_NS

    def _from_samples(self) -> int:
        ns = self._smoothed + 4 * self._variance
        return MIN_RETRANSMIT_NS if ns < MIN_RETRANSMIT_NS else min(ns, _MAX_RETRANSMIT_NS)


class Budget:
    """How many copies a client may send without evidence that anything was lost."""

    __slots__ = ("_acks",)

    def __init__(self) -> None:
        #: In acks.
        self._acks = SAVED_COPIES * ACKS_PER_COPY

    def earn(self) -> None:
        """Note that a unit is settled."""
        if self._acks < SAVED_COPIES * ACKS_PER_COPY:
            self._acks += 1

    def refund(self) -> None:
        """Note that a copy was of use: it was answered, and what was sent before was lost."""
        self._acks = min(self._acks + ACKS_PER_COPY, SAVED_COPIES * ACKS_PER_COPY)

    def spend(self) -> bool:
        """Pay for a copy, if there is enough."""
        if self._acks < ACKS_PER_COPY:
            return False
        self._acks -= ACKS_PER_COPY
        return True
