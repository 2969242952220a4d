"""What a failure handler counts for the monitor, since the process started.

Only the leader counts recoveries, so the sum over all nodes is right (docs/monitoring.md).
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar

from failure_handler.candidate_selection import is_any_in_limbo
from ziplog.core.histogram import Histogram
from ziplog.wire import Durations, Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from failure_handler.members import Member

_Key = TypeVar("_Key")

#: Maximum number of shards that begin at 0, and of series of one metric: of later shards, none.
_MAX_SHARDS: Final = 16
_MAX_SERIES: Final = 40
#: Of a recovery: a server of the shard has restarted, or all that is known is its silence.
_CAUSES: Final = ("restart", "silence")
#: Time without a report of a suspicion after which the next report is a new one.
_NEW_SUSPICION_NS: Final = 2_000_000_000


class Counters:
    """The counters of one failure handler."""

    def __init__(self) -> None:
        """Start at 0."""
        #: By shard; by shard and cause.
        self._suspicions: Final[dict[int, int]] = {}
        self._recoveries: Final[dict[tuple[int, str], int]] = {}
        self._durations: Final = Histogram()
        #: By shard: the first and the last report of a suspicion.
        self._suspected: Final[dict[int, tuple[int, int]]] = {}
        #: By shard: when the suspicion began that led to the present recovery.
        self._began_at: Final[dict[int, int]] = {}

    def on_suspicion(self, shard: int, now: int) -> None:
        """Count a suspicion; servers repeat their reports while it lasts."""
        first, last = self._suspected.get(shard, (now, now - _NEW_SUSPICION_NS))
        if now - last >= _NEW_SUSPICION_NS:
            first = now
            _count(self._suspicions, shard)
        self._suspected[shard] = (first, now)

    def on_begin(self, shard: int, members: Sequence[Member], now: int) -> None:
        """Count an attempt to recover a shard; of several in a row, the first."""
        if shard in self._began_at:
            return
        first, last = self._suspected.get(shard, (now, now))
        self._began_at[shard] = first if now - last < _NEW_SUSPICION_NS else now
        cause = _CAUSES[0] if is_any_in_limbo(members, now) else _CAUSES[1]
        _count(self._recoveries, (shard, cause))

    def on_finish(self, shard: int, now: int) -> None:
        """Count the duration of a recovery that ended."""
        began_at = self._began_at.pop(shard, None)
        if began_at is not None:
            self._durations.add(now - began_at)

    def stop_leading(self) -> None:
        """Forget the recoveries under way: another node ends them."""
        self._began_at.clear()

    def metrics(self, shards: Iterable[int]) -> tuple[list[Value], list[Durations]]:
        """Return all counters; those of these shards begin at 0."""
        for shard in islice(shards, _MAX_SHARDS):
            _count(self._suspicions, shard, 0)
            for cause in _CAUSES:
                _count(self._recoveries, (shard, cause), 0)
        return [
            *(
                Value("ziplog_suspicions_total", count, {"shard": str(shard)})
                for shard, count in self._suspicions.items()
            ),
            *(
                Value("ziplog_recoveries_total", count, {"shard": str(shard), "cause": cause})
                for (shard, cause), count in self._recoveries.items()
            ),
        ], [Durations.of("ziplog_recovery_duration_seconds", self._durations, {})]


def _count(counts: dict[_Key, int], key: _Key, more: int = 1) -> None:
    if key in counts or len(counts) < _MAX_SERIES:
        counts[key] = counts.get(key, 0) + more
