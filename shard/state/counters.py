"""What a replica counts for the monitor: plain integers, since the process started.

Durations are sampled: of the inserts beside the short path one in 64 is timed, and of the decisions
one at a time. So counting costs the data path next to nothing (docs/monitoring.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, get_args

from ziplog.core.histogram import Histogram
from ziplog.wire import Answer, RefusalCode

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Protocol

    from shard.state.ack_level import AckLevel
    from shard.state.decision_log import DecisionLog
    from shard.state.sessions import HeldUnit

    class Reader(Protocol):
        """A subscription."""

        #: Everything before this gsn was sent.
        sent: int


#: One of this many admitted inserts is timed; a power of 2.
SAMPLE_INTERVAL: Final = 64
#: Time after which a timed insert counts as given up: it may have been refused.
_GIVEN_UP_NS: Final = 17_000_000_000


class Counters:
    """The counters of one replica."""

    def __init__(self, level: AckLevel) -> None:
        """Start at 0; `level` says whether an ack waits for this server's disk."""
        #: By code: requests refused. By result: single reads, and repairs.
        self.refused: Final[dict[str, int]] = dict.fromkeys(get_args(RefusalCode), 0)
        self.reads: Final[dict[str, int]] = dict.fromkeys(get_args(Answer), 0)
        self.repairs: Final = {"repaired": 0, "impossible": 0}
        #: Records and bytes sent to subscriptions; a record counts once for each of them.
        self.delivered_records = self.delivered_bytes = 0
        #: Number of open subscriptions.
        self.subscriptions = 0
        #: The subscriptions to which not all stable records were sent.
        self.lagging: Mapping[tuple[bytes, int], Reader] = {}
        #: Records that this backup acked after the primary's decision: its guess was wrong.
        self.waited_records = 0
        #: At a primary: the last entry that each backup holds, by its index.
        self.replicated: Mapping[int, int] = {}
        #: From arrival to ack, without the short path; from the decision to stable.
        self.acks: Final = Histogram()
        self.order_waits: Final = Histogram()
        self._level: Final = level
        self._admitted = 0
        #: The insert that is timed, and when it came. Once it is placed: the last entry then.
        self._insert: HeldUnit | None = None
        self._insert_at = self._insert_fseq = 0
        #: The entry that is timed (0: none), and when it was decided.
        self._decision = self._decided_at = 0

    def on_admitted(self, unit: HeldUnit, now: int) -> None:
        """Count a new insert, and perhaps time it."""
        self._admitted += 1
        if not self._admitted % SAMPLE_INTERVAL and self._insert is None:
            self._insert, self._insert_at, self._insert_fseq = unit, now, 0

    def on_batch_end(self, stream: DecisionLog, persisted: int, now: int) -> None:
        """End the timing of an insert that is acked, and of a decision that is stable.

        Args:
            stream: the decisions.
            persisted: the last entry on this server's disk.
            now: in ns.

        """
        if self._insert is not None:
            self._check_insert(self._insert, stream.last, persisted, now)
        if not self._decision:
            if stream.last > stream.stable:
                self._decision, self._decided_at = stream.last, now
        elif stream.stable >= self._decision:
            self.order_waits.add(now - self._decided_at)
            self._decision = 0

    def _check_insert(self, unit: HeldUnit, last: int, persisted: int, now: int) -> None:
        took = now - self._insert_at
        if unit.has_slots and not self._insert_fseq:
            self._insert_fseq = last
        if self._insert_fseq and (self._level.is_memory or persisted >= self._insert_fseq):
            self.acks.add(took)
        elif took < _GIVEN_UP_NS:
            return
        self._insert = None
