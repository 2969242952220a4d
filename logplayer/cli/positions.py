"""Where the tasks of a player are, from the cursors and the log alone: no process need run."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from logplayer.contract import cursor_name
from logplayer.member_mark import MEMBERS, decode_mark
from logplayer.status import state_of
from ziplog.errors import TrimmedError

if TYPE_CHECKING:
    from collections.abc import Collection

    import ziplog
    from logplayer.config import PlayerFile
    from ziplog.types import CursorInfo, RecordId

_US_PER_S: Final = 1_000_000
#: Positions that are read at once: each takes some round trips.
_READERS: Final = 8


def document(log: ziplog.Log, file: PlayerFile) -> dict[str, Any]:
    """Return the processes and tasks of a player, as `ziplog player status --json` prints them."""
    name = file.options.name
    cursors = {cursor.name: cursor for cursor in log.cursors(f"{name}/*")}
    prefix = f"{name}/{MEMBERS}/"
    slots = [cursor for cursor in cursors.values() if cursor.name.startswith(prefix)]
    members = [cursor.owner for cursor in slots if cursor.owner]
    failed = frozenset().union(*(decode_mark(cursor.mark).failed for cursor in slots))
    found = {
        (spec.name, partition): cursors.get(cursor_name(name, spec.name, partition))
        for spec in file.targets
        for partition in range(spec.partitions)
    }
    lags = _lags_s(log, {cursor.position for cursor in found.values() if cursor is not None})
    tasks = [
        _task(target, partition, cursor, failed, lags)
        for (target, partition), cursor in found.items()
    ]
    return {"player": name, "members": sorted(members), "tasks": tasks}


def _task(
    target: str,
    partition: int,
    cursor: CursorInfo | None,
    failed: frozenset[int],
    lags: dict[RecordId, float],
) -> dict[str, Any]:
    head: dict[str, Any] = {"target": target, "partition": partition}
    if cursor is None:
        return head | {"state": "new", "owner": None, "term": 0, "position": None, "lag_s": None}
    return head | {
        "state": state_of(cursor, failed),
        "owner": cursor.owner or None,
        "term": cursor.term,
        "position": str(cursor.position),
        "lag_s": round(lags[cursor.position], 3),
    }


def _lags_s(log: ziplog.Log, positions: Collection[RecordId]) -> dict[RecordId, float]:
    """Return the lags of positions."""
    with ThreadPoolExecutor(_READERS) as readers:
        return dict(zip(positions, readers.map(partial(_lag_s, log), positions), strict=True))


def _lag_s(log: ziplog.Log, position: RecordId) -> float:
    """Return the age of the first record from a position on; 0: there is none."""
    try:
        with log.subscribe(position, follow=False) as subscription:
            found = list(itertools.islice(subscription, 1))
    except TrimmedError as error:
        with log.subscribe(error.first, follow=False) as subscription:
            found = list(itertools.islice(subscription, 1))
    if not found:
        return 0.0
    return max(time.time() - found[0].timestamp_us / _US_PER_S, 0.0)
