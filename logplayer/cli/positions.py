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
from ziplog.errors import ConfigError, TrimmedError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    import ziplog
    from logplayer.config import PlayerFile
    from ziplog.types import CursorInfo, RecordId

_US_PER_S: Final = 1_000_000
#: Positions that are read at once: each takes some round trips.
_READERS: Final = 8


def tasks_of(file: PlayerFile) -> list[tuple[str, int]]:
    """Return the target and partition of each task of a player."""
    return [(spec.name, number) for spec in file.targets for number in range(spec.partitions)]


def document(log: ziplog.Log, name: str, tasks: Sequence[tuple[str, int]] | None) -> dict[str, Any]:
    """Return the processes and tasks of a player, as `ziplog player status --json` prints them.

    Args:
        log: the player's.
        name: the player's name.
        tasks: the target and partition of each; None: those that have cursors.

    Raises:
        ConfigError: the tasks are not given, and there is no cursor.

    """
    cursors = {cursor.name: cursor for cursor in log.cursors(f"{name}/*")}
    prefix = f"{name}/{MEMBERS}/"
    slots = [cursor for cursor in cursors.values() if cursor.name.startswith(prefix)]
    members = [cursor.owner for cursor in slots if cursor.owner]
    failed = frozenset().union(*(decode_mark(cursor.mark).failed for cursor in slots))
    if tasks is None:
        tasks = _tasks_with_cursors(name, cursors)
    found = {
        (target, partition): cursors.get(cursor_name(name, target, partition))
        for target, partition in tasks
    }
    lags = _lags_s(log, {cursor.position for cursor in found.values() if cursor is not None})
    shown = [
        _task(target, partition, cursor, failed, lags)
        for (target, partition), cursor in found.items()
    ]
    return {"player": name, "members": sorted(members), "tasks": shown}


def _tasks_with_cursors(name: str, cursors: Iterable[str]) -> list[tuple[str, int]]:
    """Return the tasks of a player, by target and partition."""
    found = []
    for cursor in cursors:
        target, _, partition = cursor.removeprefix(f"{name}/").rpartition("/")
        if target not in {"", MEMBERS} and partition.isdecimal():
            found.append((target, int(partition)))
    if not found:
        sentence = f"there is no player {name!r}: the log has no cursors {name}/TARGET/PARTITION"
        raise ConfigError("NAME", name, "the name of a player or its file", message=sentence)
    return sorted(found)


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
