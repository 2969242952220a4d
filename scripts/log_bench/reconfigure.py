"""Throughput and latency while a shard is added and another removed (T 4.4.5).

48 open-loop clients of three policies on six shards, f=1. Three kinds of runs alternate, with the
same inserts at the same times. `change` adds a shard and later removes one; `control` does nothing;
`starts` starts two Python processes that import a storage server's modules when `change` adds the
shard: their cost is due to this machine and not to the protocol.

Epochs have 50 ms: at the default of 10, twelve servers with readers use most of two cores.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from metrics.load import Client, Load, Outcome
from metrics.picture import BLUE, GREEN, GREY, LIGHT_GREY, OCHRE, RED, axes
from metrics.setup import cluster as new_cluster
from metrics.windows import latency_ms, percentile_ms, sorted_in

if TYPE_CHECKING:
    from pathlib import Path

    from ziplog.local import Cluster

WINDOW_S: Final = 0.1
KINDS: Final = ("control", "starts", "change")
_SHARDS: Final = 6
_CLIENTS: Final = 48
#: As many of each as stand here.
_POLICIES: Final = ("random", "random", "sticky", "by-key")
_REMOVED: Final = 2
_EPOCH_MS: Final = 50
#: Shares of a run: the first one is not looked at, then come the two changes.
_SETTLED: Final = 0.1
_ADD_AT: Final = 0.35
_REMOVE_AT: Final = 0.65
#: Of the latency that is drawn and written down.
_SLICE_S: Final = 1.0


def measure(seconds: float, per_s: float = 120, rounds: int = 3) -> dict[str, Any]:
    """Run each kind `rounds` times, for `seconds` each at `per_s` inserts in all."""
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind in KINDS:
            runs[kind].append(_run(kind, seconds, per_s, seed=number + 1))
    lowest = {kind: [run["lowest_window"] for run in runs[kind]] for kind in KINDS}
    return {
        "shards": _SHARDS,
        "clients": _CLIENTS,
        "epoch_ms": _EPOCH_MS,
        "target_per_s": per_s,
        "seconds": seconds,
        "window_s": WINDOW_S,
        "lowest_windows": {kind: f"{lowest[kind]}" for kind in KINDS},
        "lowest_window_to_control": _ratio(lowest["change"], lowest["control"]),
        "lowest_window_to_starts": _ratio(lowest["change"], lowest["starts"]),
        "failed_inserts": sum(run["failed_inserts"] for kind in KINDS for run in runs[kind]),
        "runs": {
            f"{kind} {number}": run for kind in KINDS for number, run in enumerate(runs[kind], 1)
        },
    }


def _ratio(ours: list[int], theirs: list[int]) -> float | None:
    """Return the ratio of medians; None: the others had windows without any insert."""
    below = statistics.median(theirs)
    return statistics.median(ours) / below if below else None


def _run(kind: str, seconds: float, per_s: float, seed: int) -> dict[str, Any]:
    clients = [
        Client(number, _CLIENTS / per_s, _POLICIES[number % len(_POLICIES)], ((0.0, seconds),))
        for number in range(_CLIENTS)
    ]
    events: dict[str, tuple[float, float]] = {}
    with (
        new_cluster(shards=_SHARDS, epoch_ms=_EPOCH_MS) as cluster,
        Load(cluster.endpoint, clients, seed=seed) as load,
    ):
        begin = load.begin()
        for at, name, change in ((_ADD_AT, "add", _add), (_REMOVE_AT, "remove", _remove)):
            load.sleep_until(at * seconds)
            called = time.monotonic_ns()
            change(kind, cluster)
            if kind == "change":
                done = time.monotonic_ns()
                events[name] = ((called - begin) / 1e9, (done - begin) / 1e9)
        return _figures(load.finish(), events, seconds)


def _add(kind: str, cluster: Cluster) -> None:
    if kind == "change":
        cluster.add_shard()
    elif kind == "starts":
        # Imported, and then refused for want of arguments.
        command, null = [sys.executable, "-m", "shard"], subprocess.DEVNULL
        for process in [subprocess.Popen(command, stdout=null, stderr=null) for _ in range(2)]:
            process.wait()


def _remove(kind: str, cluster: Cluster) -> None:
    if kind == "change":
        cluster.remove_shard(_REMOVED)


def _figures(
    outcome: Outcome, events: dict[str, tuple[float, float]], seconds: float
) -> dict[str, Any]:
    begins = [(outcome.seconds(i.called), took) for i, took in outcome.insert_s()]
    delivered = [(outcome.seconds(i.called), took) for i, took in outcome.delivery_s()]
    by_shard = outcome.windows(seconds, WINDOW_S)
    windows = [sum(column) for column in zip(*by_shard.values(), strict=True)]
    looked_at = windows[int(_SETTLED * seconds / WINDOW_S) :]
    return {
        "per_s": sum(looked_at) / (len(looked_at) * WINDOW_S),
        "lowest_window": min(looked_at),
        "lowest_window_after_add": _lowest(windows, events, "add"),
        "lowest_window_after_remove": _lowest(windows, events, "remove"),
        **outcome.health(),
        "errors": ", ".join(sorted(set(outcome.failed))[:3]),
        "follower_saw_twice": outcome.repeated,
        "add_s": _length(events, "add"),
        "remove_s": _length(events, "remove"),
        "insert": _latency(begins, seconds),
        "delivery": _latency(delivered, seconds),
        "events": {name: list(when) for name, when in events.items()},
        "windows": {"all": windows} | {str(shard): row for shard, row in by_shard.items()},
    }


def _lowest(windows: list[int], events: dict[str, tuple[float, float]], name: str) -> int | None:
    """Return the lowest window from the begin of a change to a second after its end."""
    if name not in events:
        return None
    start, stop = events[name]
    return min(windows[int(start / WINDOW_S) : int((stop + 1) / WINDOW_S) + 1], default=None)


def _length(events: dict[str, tuple[float, float]], name: str) -> float | None:
    return events[name][1] - events[name][0] if name in events else None


def _latency(pairs: list[tuple[float, float]], seconds: float) -> dict[str, Any]:
    """Return p50 and p99 in ms: over all, and a second at a time (by when the call began)."""
    slices = sorted_in(pairs, 0, seconds, _SLICE_S)
    return latency_ms(took for at, took in pairs if at >= _SETTLED * seconds) | {
        "windows": {f"p{p}_ms": [percentile_ms(values, p) for values in slices] for p in (50, 99)},
    }


# --- the picture ---------------------------------------------------------------------------------

_COLOURS: Final = {"control": GREY, "starts": OCHRE, "change": BLUE}
_EVENT_COLOURS: Final = {"add": GREEN, "remove": RED}


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the first round: throughput of all and of single shards, and latency."""
    with axes(path, 3, 1, (9, 8.5), sharex=True) as (top, middle, bottom):
        for kind, colour in _COLOURS.items():
            run = result["runs"][f"{kind} 1"]
            windows = run["windows"]["all"]
            at = [index * WINDOW_S for index in range(len(windows))]
            top.step(
                at, [count / WINDOW_S for count in windows], where="post", color=colour, label=kind
            )
            p50, p99 = (run["insert"]["windows"][f"p{p}_ms"] for p in (50, 99))
            at = [(index + 0.5) * _SLICE_S for index in range(len(p50))]
            bottom.plot(at, p50, color=colour, label=f"{kind}, p50")
            bottom.plot(at, p99, color=colour, linestyle="--", label=f"{kind}, p99")
        change = result["runs"]["change 1"]
        shards = [name for name in change["windows"] if name != "all"]
        for name in shards:
            row = _smooth(change["windows"][name], 5)
            at = [(index + 0.5) * 5 * WINDOW_S for index in range(len(row))]
            event, label = {
                str(_REMOVED): ("remove", "removed"),
                str(_SHARDS): ("add", "added"),
            }.get(name, ("", ""))
            colour = _EVENT_COLOURS.get(event, LIGHT_GREY)
            middle.plot(at, [c / WINDOW_S for c in row], color=colour, label=label or None)
        for axis in (top, middle, bottom):
            for name, (start, stop) in change["events"].items():
                axis.axvspan(start, stop, color=_EVENT_COLOURS[name], alpha=0.2)
            axis.legend(loc="lower left", fontsize="small", ncols=3)
        top.set(ylabel="inserts/s, all shards (100 ms)", ylim=(0, None))
        middle.set(ylabel="inserts/s, each shard", ylim=(0, None))
        bottom.set(ylabel="ms until the insert is done", yscale="log", xlim=(0, result["seconds"]))
        bottom.set_xlabel("seconds (shaded: a shard is being added, then one removed)")


def _smooth(row: list[int], width: int) -> list[float]:
    """Return the means of `width` values at a time."""
    edges = range(0, len(row) + 1, width)
    return [statistics.mean(row[start:stop]) for start, stop in pairwise(edges)]
