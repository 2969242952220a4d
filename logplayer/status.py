"""The status of a player, as a dict that JSON can hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ziplog.core.histogram import BOUNDS_US
from ziplog.core.units import NS_PER_S, NS_PER_US

if TYPE_CHECKING:
    from logplayer.context import PlayerContext
    from logplayer.members import Members
    from logplayer.task import PlayerTask
    from ziplog.core.histogram import Histogram
    from ziplog.types import CursorInfo

#: A task whose delays are above the last bound of the histogram.
_ABOVE_US: Final = 2 * BOUNDS_US[-1]


def percentile_us(delays: Histogram, percent: int) -> int | None:
    """Return an upper bound of a percentile in µs; None: nothing was counted."""
    total = sum(delays.counts)
    if not total:
        return None
    rank, seen = -(-total * percent // 100), 0
    for index, count in enumerate(delays.counts):
        seen += count
        if seen >= rank:
            return BOUNDS_US[index] if index < len(BOUNDS_US) else _ABOVE_US
    return _ABOVE_US


def document(
    context: PlayerContext,
    members: Members,
    tasks: list[PlayerTask],
    *,
    failure: str,
    wall_ns: int,
) -> dict[str, Any]:
    """Return the status.

    Args:
        context: what the tasks share.
        members: the processes.
        tasks: all tasks of the player.
        failure: what ended the node; "": it runs.
        wall_ns: Unix time in ns; 0: unknown.

    """
    feed, failed = context.feed, members.failed
    return {
        "player": context.settings.name,
        "owner": context.owner,
        "members": members.names,
        "failure": failure,
        "service_error": members.error,
        "is_cut_off": context.is_cut_off,
        "waiting_for": feed.blocked_on,
        "ring": {
            "start": feed.ring.start,
            "stop": feed.ring.stop,
            "records": len(feed.ring),
            "bytes": feed.ring.size,
        },
        "tasks": [
            _task(one, members.cursors.get(one.name), context, wall_ns, failed) for one in tasks
        ],
    }  # fmt: skip


def _task(
    task: PlayerTask,
    info: CursorInfo | None,
    context: PlayerContext,
    wall_ns: int,
    failed: frozenset[int],
) -> dict[str, Any]:
    """Return the status of a task: this process's, or what the list of cursors says of it."""
    claim = task.claim
    base: dict[str, Any] = {"target": task.spec.name, "partition": task.partition}
    counts = {
        "delivered": task.delivered,
        "retries": task.retries,
        "rejected": task.rejected,
        "last_error": task.error,
        "delay_us": {
            "p50": percentile_us(task.delays, 50),
            "p99": percentile_us(task.delays, 99),
        },
    }
    if claim.state is not None:
        own = {
            "state": task.state,
            "owner": context.owner,
            "term": claim.state.term,
            "position": claim.committed,
            "lag_s": _lag_s(task, context, wall_ns),
            "source": _source(task, context),
        }
        return {**base, **own, **counts}
    other = {
        "state": task.state,
        "owner": "",
        "term": 0,
        "position": 0,
        "lag_s": None,
        "source": "",
    }
    if info is not None:
        state = state_of(info, failed) if task.state == "free" else task.state
        other |= {
            "state": state, "owner": info.owner, "term": info.term, "position": info.position.gsn,
        }  # fmt: skip
    return {**base, **other, **counts}


def state_of(info: CursorInfo, failed: frozenset[int]) -> str:
    """Return the state of a task by its cursor: owned, free, paused or failed.

    Args:
        info: the cursor.
        failed: the terms of the claims of failed tasks.

    """
    return "failed" if info.owner and info.term in failed else info.state


def _source(task: PlayerTask, context: PlayerContext) -> str:
    """Return where the records of a task come from: feed, own, or "" while it reads none."""
    if task.reader.source is not None:
        return "own"
    is_with_feed = (
        task.is_reading and task.reader.uses_feed and context.feed.covers(task.delivery.looked)
    )
    return "feed" if is_with_feed else ""


def _lag_s(task: PlayerTask, context: PlayerContext, wall_ns: int) -> float | None:
    """Return the age of the first record that is not delivered; None: it is not known."""
    delivery, feed = task.delivery, context.feed
    first = None
    if delivery.cut is not None:
        first = delivery.cut.records[0] if delivery.cut.records else None
    else:
        own = task.reader.source
        ring = own.ring if own is not None else feed.ring
        is_covered = ring.covers(delivery.looked) and (own is not None or feed.is_open)
        if not is_covered:
            return None
        index = ring.index(delivery.looked)
        if index < len(ring.records):
            first = ring.records[index]
        elif own is not None and task.reader.uses_feed:
            return None
        else:
            return 0.0
    if first is None or not wall_ns:
        return None
    return max(wall_ns - first.timestamp_us * NS_PER_US, 0) / NS_PER_S
