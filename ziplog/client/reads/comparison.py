"""The comparison of a speculation's guess with the truth, and the events that come of it.

    early delivery --the truth has the same record--> confirmed
                   --the truth has another one, or passes it--> withdrawn, with all later ones

Rule: only a record of the truth is final. Invariants: the pending deliveries rise in gsn and are at
or behind the truth's position (J1); each early delivery is pending, confirmed or withdrawn (J2).
See docs/protocol.md, section 18.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from ziplog.types import Confirmed, Delivery, Failed, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ziplog.client.common.requests import Counters
    from ziplog.types import Event, Record


class Ledger:
    """What the caller's events say: where to continue, and which deliveries are open."""

    def __init__(self, position: int) -> None:
        #: The position behind what was confirmed.
        self.position = position
        #: The gsns of deliveries that are neither confirmed nor void, in order.
        self.pending: Final[deque[int]] = deque()

    def add(self, events: Sequence[Event]) -> None:
        """Add the caller's next events."""
        pending = self.pending
        for event in events:
            if type(event) is Delivery:
                if event.speculative:
                    pending.append(event.record.rid.gsn)
            elif type(event) is Confirmed:
                self.position = event.upto.gsn + 1
                while pending and pending[0] < self.position:
                    pending.popleft()
            else:
                pending.clear()


class Comparison:
    """The deliveries of one speculation that are not confirmed."""

    def __init__(self, position: int, counters: Counters, owner: Callable[[int], int]) -> None:
        """Begin at a position; `owner` returns the shard of a position, 0 if it is unknown."""
        self._counters: Final = counters
        self._owner: Final = owner
        #: Early deliveries that are neither confirmed nor withdrawn, in order.
        self.pending: Final[deque[Record]] = deque()
        #: The truth's position.
        self._position = position
        #: Numbers of early deliveries, in all and by their ends.
        self._delivered = self._confirmed = self._withdrawn = 0

    @property
    def next_gsn(self) -> int:
        """The first position that the guess may deliver next."""
        return self.pending[-1].rid.gsn + 1 if self.pending else self._position

    def on_truth(self, records: Sequence[Record], position: int) -> list[Event]:
        """Return the events of the truth's next records, all below its new position."""
        pending, counters = self.pending, self._counters
        events: list[Event] = []
        confirmed = 0
        for record in records:
            if pending and pending[0] == record:
                pending.popleft()
                confirmed += 1
                continue
            if pending:
                events.append(self._fail(min(pending[0].rid.gsn, record.rid.gsn)))
            events.append(Delivery(record, speculative=False))
        if pending and pending[0].rid.gsn < position:
            events.append(self._fail(pending[0].rid.gsn))
        if records:
            events.append(Confirmed(records[-1].rid))
        self._position = position
        self._confirmed += confirmed
        counters.confirmed += confirmed
        counters.delivered += len(records)
        return events

    def _fail(self, gsn: int) -> Failed:
        """Withdraw all pending deliveries; what they say is wrong from `gsn` on."""
        self._counters.failures += 1
        self._counters.withdrawn += len(self.pending)
        self._withdrawn += len(self.pending)
        self.pending.clear()
        return Failed(RecordId(gsn - 1, self._owner(gsn - 1)))

    def on_guess(self, records: Sequence[Record]) -> list[Event]:
        """Return the events of the guess's next records."""
        self.pending.extend(records)
        self._delivered += len(records)
        self._counters.speculated += len(records)
        return [Delivery(record, speculative=True) for record in records]

    def check(self) -> None:
        """Assert the invariants."""
        gsns = [record.rid.gsn for record in self.pending]
        assert gsns == sorted(set(gsns)), "early deliveries are out of order"
        assert not gsns or gsns[0] >= self._position, "the truth passed an early delivery"
        ended = self._confirmed + self._withdrawn
        assert self._delivered - ended == len(gsns), "an early delivery is lost"
