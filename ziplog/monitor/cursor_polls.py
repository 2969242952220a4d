"""Lists the cursors every two seconds, and finds how far each is behind the log.

How long ago the log passed a position is known from the moments at which the monitor saw its end.
For a cursor that was behind already when the monitor started, it reads the first record from the
cursor's position on, and keeps its time: at most eight records, and for 3 s, in a round. Positions
whose record did not come are read after all others, so a shard that recovers holds up no cursor of
another.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final

from ziplog.core.first_seen import FirstSeen
from ziplog.core.units import NS_PER_US
from ziplog.errors import ZiplogError
from ziplog.monitor.cursors import ListedCursor, Tail, is_member
from ziplog.runtime.clock import now_ns
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ziplog.client.blocking import Log

_INTERVAL_S: Final = 2.0
#: Time limit of a list: a service that is far away, or busy, may take seconds.
_CALL_S: Final = 4.0
#: Age of a list above which it is not served any more.
_MAX_AGE_S: Final = 10.0
#: Maximum number of records that are read in a round, and the time limit of all these reads. The
#: next list comes before the last one is too old.
_MAX_READS: Final = 8
_READS_S: Final = 3.0


class CursorPolls:
    """The last list of the cursors. One thread lists; any thread reads."""

    def __init__(self, log: Log, document: Callable[[], dict[str, Any] | None]) -> None:
        """Prepare to list.

        Args:
            log: a client of the cluster.
            document: returns a recent status document; None: the cluster does not reply.

        """
        self._log: Final = log
        self._document: Final = document
        self._times: Final = FirstSeen()
        #: By position, of those that are older than the observations: when the first record from
        #: there on was inserted, in monotonic ns.
        self._inserted_at: dict[int, int] = {}
        #: By position: when a read of that record last failed, in s.
        self._failed_at: dict[int, float] = {}
        self._listed: tuple[float, Sequence[ListedCursor]] | None = None
        self._stopped: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._run, name="cursor polls", daemon=True)

    def start(self) -> None:
        """Start to list."""
        self._thread.start()

    def stop(self) -> None:
        """Stop to list."""
        self._stopped.set()
        self._thread.join()

    def cursors(self) -> Sequence[ListedCursor] | None:
        """Return the cursors of the last list; None: the cluster has not replied for 10 s."""
        if self._listed is None:
            return None
        listed_at, cursors = self._listed
        return cursors if time.monotonic() - listed_at < _MAX_AGE_S else None

    def _run(self) -> None:
        while not self._stopped.wait(_INTERVAL_S):
            document = self._document()
            if document is None:
                continue
            try:
                self._list(document)
            except ZiplogError:
                continue

    def _list(self, document: dict[str, Any]) -> None:
        """List the cursors. The document is older than the list, so that no lag is too high."""
        last = max((shard["stable_gsn"] for shard in document["shards"]), default=0)
        trim = RecordId.parse(document["trimmed_before"]).gsn
        self._times.observe(last, now_ns())
        infos = self._log.cursors(timeout=_CALL_S)
        tail = Tail(last, trim, self._times, now_ns())
        missing = {tail.first_missing(info) for info in infos if not is_member(info.name)}
        self._read_first({position for position in missing if tail.is_older(position)})
        wall_s = time.time()
        listed = [
            ListedCursor(
                info,
                tail.lag_s(tail.first_missing(info), self._inserted_at),
                None if info.moved_at is None else max(wall_s - info.moved_at.timestamp(), 0.0),
            )
            for info in infos
        ]
        self._listed = (time.monotonic(), listed)

    def _read_first(self, positions: set[int]) -> None:
        """Read the first record from each position on, unless its time is known."""
        known = {one: at for one, at in self._inserted_at.items() if one in positions}
        failed = {one: at for one, at in self._failed_at.items() if one in positions}
        unknown = sorted(positions - known.keys(), key=lambda one: (failed.get(one, 0.0), one))
        deadline = time.monotonic() + _READS_S
        for position in unknown[:_MAX_READS]:
            left_s = deadline - time.monotonic()
            if self._stopped.is_set() or left_s <= 0:
                break
            inserted_at = self._first_record_at(position, left_s)
            if inserted_at is not None:
                known[position] = inserted_at
            else:
                failed[position] = time.monotonic()
        self._inserted_at, self._failed_at = known, failed

    def _first_record_at(self, position: int, limit_s: float) -> int | None:
        """Return when the first record from a position on was inserted; None: unknown."""
        try:
            with self._log.subscribe(RecordId(max(position, 1), 0), follow=False) as subscription:
                found = subscription.fetch(1, limit_s)
        except ZiplogError:  # It is trimmed by now, or a shard recovers.
            return None
        if not found:
            return None
        return now_ns() - (time.time_ns() - found[0].timestamp_us * NS_PER_US)
