"""Lease history: selections of lease runs that fit a message.

Pure functions of runs of leases in order, without a gap. See docs/protocol.md, section 3.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import islice
from typing import TYPE_CHECKING

from ziplog.core.view import KEPT_RUNS, fitting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.core.view import LeaseRun


def following(runs: Sequence[LeaseRun], number: int, digest: bytes) -> list[LeaseRun]:
    """Return the leases after lease `number`, which has this digest: the oldest that fit."""
    found = fitting(islice(runs, index_of(runs, number + 1), None))
    if found and found[0].first.number <= number:
        found[0] = found[0].after(number, digest)
    return found


def until(runs: Sequence[LeaseRun], gsn: int, leases: int) -> list[LeaseRun]:
    """Return whole runs with the last `leases` leases before `gsn`, the newest that fit."""
    stop = bisect_left(runs, gsn, key=_base)
    found: list[LeaseRun] = []
    for run in fitting(runs[index] for index in range(stop - 1, -1, -1)):
        found.append(run)
        leases -= run.count
        if leases <= 0:
            break
    return found[::-1]


def first_needed(runs: Sequence[LeaseRun], number: int, gsn: int) -> LeaseRun | None:
    """Return the first run that a server needs; None if it is the next one.

    The server holds leases up to `number`, and keeps the newest `KEPT_RUNS` runs. A server without
    leases (0) needs none that ends at `gsn` or before, where its log is stable. So the needed runs
    fit a message, however long the history is.
    """
    newest = fitting(islice(reversed(runs), KEPT_RUNS))
    first = newest[-1]
    if not number:
        first = next((run for run in reversed(newest) if run.last.stop > gsn), newest[0])
    return first if first.first.number > number + 1 else None


def index_of(runs: Sequence[LeaseRun], number: int) -> int:
    """Return the index of the run that holds lease `number`, or of the first one after it."""
    return bisect_left(runs, number, key=_last_number)


def index_after(runs: Sequence[LeaseRun], gsn: int) -> int:
    """Return the index of the first run that ends after `gsn`."""
    return bisect_right(runs, gsn, key=_stop)


def _last_number(run: LeaseRun) -> int:
    return run.last.number


def _base(run: LeaseRun) -> int:
    return run.first.base


def _stop(run: LeaseRun) -> int:
    return run.last.stop
