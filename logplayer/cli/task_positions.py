"""Where the tasks of a player are, from the cursors and the log alone: no process need run."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logplayer.contract import cursor_name
from logplayer.member_mark import MEMBERS, decode_mark
from logplayer.status import state_of
from ziplog.errors import ConfigError, DeadlineError, TrimmedError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    import ziplog
    from logplayer.config import PlayerFile
    from ziplog.types import CursorInfo, Record, RecordId

_US_PER_S: Final = 1_000_000
#: Positions that are read at once: each takes some round trips.
_READERS: Final = 8


class _Lag(NamedTuple):
    """How far a position is behind the end of the log; None: a shard did not reply in time."""

    #: Age of the first record from the position on, in seconds.
    seconds: float | None
    #: What one replica of each shard stores from there on, in bytes: whole blocks of its files.
    size: int | None


class _Limit:
    """The time limit of all reads of a document."""

    def __init__(self, timeout_s: float) -> None:
        self._deadline_s: Final = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Return the time limit of the next call, in seconds.

        Raises:
            DeadlineError: no time is left.

        """
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineError("the time limit passed before the log was read")
        return left_s


def tasks_of(file: PlayerFile) -> list[tuple[str, int]]:
    """Return the target and partition of each task of a player."""
    return [(spec.name, number) for spec in file.targets for number in range(spec.partitions)]


def document(
    log: ziplog.Log,
    name: str,
    tasks: Sequence[tuple[str, int]] | None,
    timeout_s: float,
    warn: Callable[[str], object],
) -> dict[str, Any]:
    """Return the processes and tasks of a player, as `ziplog player status --json` prints them.

    Args:
        log: the player's.
        name: the player's name.
        tasks: the target and partition of each; None: those that have cursors.
        timeout_s: the time limit. A lag that is unknown then is None.
        warn: gets a sentence that says why a lag is unknown.

    Raises:
        ConfigError: the tasks are not given, and there is no cursor.

    """
    limit = _Limit(timeout_s)
    cursors = {cursor.name: cursor for cursor in log.cursors(f"{name}/*", timeout=timeout_s)}
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
    positions = {cursor.position for cursor in found.values() if cursor is not None}
    lags = _lags(log, positions, limit, warn)
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
    lags: dict[RecordId, _Lag],
) -> dict[str, Any]:
    head: dict[str, Any] = {"target": target, "partition": partition}
    if cursor is None:
        return head | {
            "state": "new",
            "owner": None,
            "term": 0,
            "position": None,
            "lag_s": None,
            "lag_bytes": None,
        }
    lag = lags[cursor.position]
    return head | {
        "state": state_of(cursor, failed),
        "owner": cursor.owner or None,
        "term": cursor.term,
        "position": str(cursor.position),
        "lag_s": lag.seconds,
        "lag_bytes": lag.size,
    }


def _lags(
    log: ziplog.Log,
    positions: Collection[RecordId],
    limit: _Limit,
    warn: Callable[[str], object],
) -> dict[RecordId, _Lag]:
    """Return the lags of positions, and warn once if some are unknown."""
    errors: list[UnavailableError] = []
    with ThreadPoolExecutor(_READERS) as readers:
        lags = readers.map(partial(_lag_in_time, log, limit, errors), positions)
        found = dict(zip(positions, lags, strict=True))
    if errors:
        warn(f"the lag is not known: {errors[0]}")
    return found


def _lag_in_time(
    log: ziplog.Log, limit: _Limit, errors: list[UnavailableError], position: RecordId
) -> _Lag:
    """Return the lag of a position; add the error to `errors` if a shard does not reply in time."""
    try:
        return _lag(log, limit, position)
    except UnavailableError as error:
        errors.append(error)
        return _Lag(None, None)


def _lag(log: ziplog.Log, limit: _Limit, position: RecordId) -> _Lag:
    """Return how far a position is behind the end of the log."""
    first = _first_record(log, limit, position)
    if first is None:
        return _Lag(0.0, 0)
    age_s = max(time.time() - first.timestamp_us / _US_PER_S, 0.0)
    tail = log.check_tail(timeout=limit.left_s())
    known = log.extents(first.rid.gsn, tail.gsn + 1, timeout=limit.left_s())
    outlines = (
        log.outline(one.shard, one.start, one.stop, timeout=limit.left_s()) for one in known.shards
    )
    return _Lag(round(age_s, 3), sum(size for one in outlines for _, size in one.steps))


def _first_record(log: ziplog.Log, limit: _Limit, position: RecordId) -> Record | None:
    """Return the first record from a position on that was not trimmed; None: there is none."""
    while True:
        left_s = limit.left_s()
        try:
            with log.subscribe(position, follow=False, timeout=left_s) as subscription:
                return next(iter(subscription), None)
        except TrimmedError as error:
            position = error.first
