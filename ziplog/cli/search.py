"""Searches for positions: the last records, and the first record since a time.

Positions have no times, and are not counts. So both searches read a few records at some positions:
they go back from the end of the log in growing steps, and then halve the range. Records have the
times of their clients' clocks, which need not increase along the log; among records out of order,
any border is a correct result.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from ziplog.types import RecordId

if TYPE_CHECKING:
    from ziplog.client.blocking import Log

#: Records that one step may read beyond those it needs.
_SPARE: Final = 64
#: Positions of the first step back, and the factor of each next one.
_FIRST_STEP: Final = 1 << 24
_GROWTH: Final = 8


def first_of_last(log: Log, count: int) -> RecordId:
    """Return the position of the first of the last `count` records; of the first, if fewer."""
    low, high = _bounds(log)
    first, missing, step = low, count, _FIRST_STEP
    while low < high:
        middle = max((low + high) // 2, high - step)
        step *= _GROWTH
        limit = 2 * missing + _SPARE
        found = _read(log, middle, high, limit)
        if len(found) == limit:
            # There are more records between here and the end than needed: search after here.
            low = found[0][0].gsn
        elif len(found) >= missing:
            return found[-missing][0]
        else:
            high, missing = middle, missing - len(found)
    return RecordId(first, 0)


def first_since(log: Log, timestamp_us: int) -> RecordId:
    """Return the position of the first record since a time; after the last one if there is none."""
    low, high = _bounds(log)
    step = _FIRST_STEP
    while low < high:
        middle = max((low + high) // 2, high - step)
        step *= _GROWTH
        found = _read(log, middle, high, 1)
        if found and found[0][1] < timestamp_us:
            low = found[0][0].gsn + 1
        else:
            high = middle
    return RecordId(low, 0)


def _bounds(log: Log) -> tuple[int, int]:
    """Return the first stored position, and the position after the last record.

    They are equal if no record is left: also if the log is trimmed beyond its last record.
    """
    stop = log.check_tail().gsn + 1
    first = max(log.extents(1).trim, 1)
    return first, max(first, stop)


def _read(log: Log, start: int, stop: int, limit: int) -> list[tuple[RecordId, int]]:
    """Return rid and time of the first records of [start, stop), at most `limit`."""
    with log.subscribe(RecordId(start, 0), follow=False) as subscription:
        found = itertools.takewhile(lambda record: record.rid.gsn < stop, subscription)
        return [(record.rid, record.timestamp_us) for record in itertools.islice(found, limit)]
