"""The delay that a player adds, over targets and sizes, and while a target is down.

A record has ten keys of 1 KB, and each of them goes to one target; 100 records a second. The delay
is the time from the receipt of the record by the player to its receipt by the target. The floor is
the delay of the same bytes from one loop to the same processes, in turns with the player.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final

from metrics.rounds import ratio
from metrics.setup import cluster as new_cluster

from player_bench import receivers
from player_bench.receivers import PushTargets
from player_bench.records import delays_ms, delays_of, over, p99_windows, worst
from ziplog.core.units import NS_PER_S
from ziplog.runtime.clock import now_ns

if TYPE_CHECKING:
    from ziplog.local import Cluster
    from ziplog.types import RecordId

Figures = dict[str, Any]

_TARGETS: Final = (2, 5, 10, 15, 20)
_KEYS: Final = (1, 2, 5, 10)
_MANY: Final = 20
_PER_S: Final = 100
_ROUNDS: Final = 2
_SECONDS: Final = 4.0
_MEAN_GOAL_MS: Final = 0.32
_P99_GOAL_MS: Final = 0.78
_FLOOR_GOAL: Final = 2.0
_GROWTH_GOAL: Final = 1.2
_BEFORE_S: Final = 12.0
_DOWN_S: Final = 30.0
_OTHERS_GOAL: Final = 1.2


def over_targets(scale: float) -> Figures:
    """Return the delay over the number of targets, and that from the insert to the target."""
    rows = {}
    with new_cluster() as cluster:
        for count in _TARGETS:
            with PushTargets(cluster, f"targets-{count}", count) as targets:
                rows[f"{count} targets"] = _compare(cluster, targets, _KEYS[-1], scale)
    first, *_, last = (row["apply_mean_ms"] for row in rows.values())
    apply = {name: {"apply_mean_ms": row.pop("apply_mean_ms")} for name, row in rows.items()}
    return {
        "L1": rows | _goals(),
        "L3": apply | {"growth": over(last, first), "goal_growth": _GROWTH_GOAL},
    }


def over_sizes(scale: float) -> Figures:
    """Return the delay over the number of keys of a record, with 20 targets."""
    rows = {}
    with new_cluster() as cluster, PushTargets(cluster, "sizes", _MANY) as targets:
        for keys in _KEYS:
            rows[f"{keys} KB"] = _compare(cluster, targets, keys, scale)
    for row in rows.values():
        del row["apply_mean_ms"]
    return {"L2": rows | _goals()}


def _goals() -> Figures:
    return {
        "goal_mean_ms": _MEAN_GOAL_MS,
        "goal_p99_ms": _P99_GOAL_MS,
        "goal_over_floor": _FLOOR_GOAL,
    }


def _compare(cluster: Cluster, targets: PushTargets, keys: int, scale: float) -> Figures:
    """Compare the player with the floor, in turns; the first turn of each does not count."""
    count, number = max(50, int(_PER_S * _SECONDS * scale)), 0
    ours: list[list[int]] = []
    floor: list[list[int]] = []
    applied: list[int] = []
    for turn in range(_ROUNDS + 1):
        size = count if turn else _PER_S // 2
        found = targets.floor(number, size, keys, _PER_S)
        last = receivers.insert(cluster, number, size, keys, _PER_S, targets.count)
        dispatched, noted = targets.take(last)
        number += size
        if turn:
            delivered = [one for target in noted for one in target]
            floor.append([one.at - one.inserted_at for one in found])
            ours.append([delay for _, delay in delays_of(dispatched, delivered)])
            applied += [one.at - one.inserted_at for one in delivered]
    mine = [delays_ms(values) for values in ours]
    theirs = [delays_ms(values) for values in floor]
    return {
        "player": delays_ms(value for values in ours for value in values),
        "floor": delays_ms(value for values in floor for value in values),
        **{
            f"{key}_over_floor": ratio([one[f"{key}_ms"] for one in mine],
                                       [one[f"{key}_ms"] for one in theirs])
            for key in ("mean", "p99")
        },
        "apply_mean_ms": delays_ms(applied)["mean_ms"],
    }  # fmt: skip


# --- a target is down --------------------------------------------------------------------------


class _Load:
    """Inserts in a thread, until it is stopped."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster: Final = cluster
        self._stopped: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._run, daemon=True)
        self._last: RecordId
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stopped.is_set():
            self._last = receivers.insert(self._cluster, number, _PER_S, _KEYS[-1], _PER_S, _MANY)
            number += _PER_S

    def stop(self) -> RecordId:
        """Stop; return the last rid."""
        self._stopped.set()
        self._thread.join()
        return self._last


def one_down(scale: float) -> Figures:
    """Return the delays of 19 targets while the first one of 20 is down, and its way back."""
    before_s, down_s = max(3.0, _BEFORE_S * scale), max(4.0, _DOWN_S * scale)
    with (
        new_cluster() as cluster,
        PushTargets(cluster, "down", _MANY, memory_bytes=8 * 1024 * 1024) as targets,
    ):
        load = _Load(cluster)
        time.sleep(before_s)
        start = now_ns()
        time.sleep(before_s)
        killed = now_ns()
        targets.kill(0)
        time.sleep(down_s)
        targets.restart(0)
        restarted = now_ns()
        time.sleep(before_s)
        stop = now_ns()
        dispatched, (first, *others) = targets.take(load.stop())
    delays = delays_of(dispatched, (one for target in others for one in target))

    def phase(begin: int, end: int) -> Figures:
        return delays_ms(delay for at, delay in delays if begin <= at < end)

    phases = {
        "before": phase(start, killed),
        "down": phase(killed, restarted),
        "after": phase(restarted, stop),
    }
    waited = [one.at for one in first if killed <= one.inserted_at < restarted]
    windows = p99_windows(delays, start, stop, NS_PER_S)
    split = (killed - start) // NS_PER_S
    return {
        "L8": {
            **phases,
            "p99_down_over_before": over(phases["down"]["p99_ms"], phases["before"]["p99_ms"]),
            "p99_after_over_before": over(phases["after"]["p99_ms"], phases["before"]["p99_ms"]),
            "worst_window_over_worst_before": over(worst(windows[split:]), worst(windows[:split])),
            "goal_over_before": _OTHERS_GOAL,
            "down_s": (restarted - killed) / NS_PER_S,
            "caught_up_s": (max(waited) - restarted) / NS_PER_S if waited else None,
            "killed_in_window": split,
            "restarted_in_window": (restarted - start) // NS_PER_S,
            "windows": windows,
        }
    }
