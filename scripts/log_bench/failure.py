"""Throughput around the kill of a storage server, in windows of 100 ms (T Fig. 4.7).

Each shard has a client of its own that inserts at a steady pace (an open loop: what cannot be done
now is done later, and counts when it is done). A subscriber follows.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final

from metrics.load import Client, Load
from metrics.picture import BLUE, GREY, OCHRE, axes
from metrics.setup import cluster as new_cluster
from metrics.windows import longest_pause

if TYPE_CHECKING:
    from pathlib import Path

    from metrics.load import Outcome

Figures = dict[str, Any]

WINDOW_S: Final = 0.1
_SHARDS: Final = 6
#: Inserts a second at each shard.
_PER_S: Final = 100
_BEFORE_S: Final = 3.0
#: The first windows before the kill are not looked at.
_SETTLED: Final = 5
_BYTES: Final = 100


def kills(seconds: float) -> Figures:
    """Throughput of 6 shards, f=1, around the kill of a backup and of a primary."""
    return {role: _measure(seconds, victim) for role, victim in (("backup", 1), ("primary", 0))}


def _measure(seconds: float, victim: int) -> Figures:
    """Kill replica `victim` of shard 0 under load; `seconds`: the duration after the kill."""
    spans = ((0.0, _BEFORE_S + seconds),)
    clients = [
        Client(shard, 1 / _PER_S, str(shard), spans, is_steady=True) for shard in range(_SHARDS)
    ]
    with (
        new_cluster(shards=_SHARDS) as cluster,
        Load(cluster.endpoint, clients, seed=1, size=_BYTES) as load,
    ):
        load.begin()
        load.sleep_until(_BEFORE_S)
        cluster.kill(f"shard-0-{victim}")
        outcome = load.finish()
        return _figures(outcome, seconds) | {"detection_s": cluster.config.suspicion_ms / 1000}


def _figures(outcome: Outcome, seconds: float) -> Figures:
    done = [outcome.seconds(insert.done) for insert, _ in outcome.insert_s() if insert.shard == 0]
    followed = [outcome.seconds(at) for at in outcome.seen.values()]
    stop = _BEFORE_S + seconds
    windows = outcome.windows(stop, WINDOW_S)
    first = round(_BEFORE_S / WINDOW_S)
    others = [sum(column) for column in zip(*list(windows.values())[1:], strict=True)]
    return {
        "writes_whole_after_s": longest_pause(done, _BEFORE_S, stop),
        "readers_wait_s": longest_pause(followed, _BEFORE_S, stop),
        "failed_inserts": len(outcome.failed),
        "others_per_window_before": statistics.median(others[:first]),
        "others_per_window_after": statistics.median(others[first:]),
        "others_lowest_window_before": min(others[_SETTLED:first], default=0),
        "others_lowest_window_after": min(others[first:], default=0),
        "killed_in_window": first,
        "windows": {str(shard): row for shard, row in windows.items()},
    }


def draw(results: Figures, path: Path) -> None:
    """Draw the throughput of all shards around each kill."""
    size = (5.5 * len(results), 3.8)
    with axes(path, 1, len(results), size, squeeze=False) as found:
        for axis, (name, result) in zip(found[0], results.items(), strict=True):
            rows = list(result["windows"].values())
            total = [sum(column) / WINDOW_S for column in zip(*rows, strict=True)]
            rest = [sum(column) / WINDOW_S for column in zip(*rows[1:], strict=True)]
            kill = result["killed_in_window"]
            at = [(index - kill) * WINDOW_S for index in range(len(total))]
            axis.plot(at, total, color=BLUE, label="all shards")
            axis.plot(at, rest, color=OCHRE, linewidth=1, label="the other shards")
            axis.axvline(0, color=GREY, linestyle=":")
            axis.set(title=f"the {name} of one shard is killed", ylim=(0, None))
            axis.set(xlabel="seconds after the kill", ylabel="inserts/s")
            axis.legend()
