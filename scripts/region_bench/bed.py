"""The network, the cluster and the client processes of a measurement.

The control is the same cluster with round trips of 0, in turns with the round trips measured.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from metrics.windows import percentile
from metrics.workers import Workers
from region_trial.trial import JITTER_MS, REGIONS, ROUND_TRIPS_MS
from wan import floor, layout, namespaces
from wan.network import Network

from region_bench import worker
from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Self

Figures = dict[str, Any]

#: A place beside a region, for a client whose packets the router counts.
READER: Final = "reader"
_START_S: Final = 120.0
#: Time after a change of the round trips in which nothing counts.
_SETTLE_S: Final = 1.0
_LONGEST_MS: Final = 120
#: Datagrams that measure a round trip.
_PINGS: Final = 50
#: A server may be frozen for a while without a recovery.
_SETTINGS: Final = {"rtt_ms": _LONGEST_MS, "suspicion_ms": 3000, "epoch_ms": 20}


@contextlib.contextmanager
def open_network() -> Iterator[Network]:
    """Run a network of the three regions; this process is in the operator's from then on.

    Raises:
        SystemExit: this machine allows no such namespaces; with 2.

    """
    if reason := namespaces.why_not():
        print(f"no regions on this machine: {reason}", flush=True)
        raise SystemExit(2)
    with Network([*REGIONS, layout.OPERATOR, READER]) as network:
        network.enter(layout.OPERATOR)
        yield network


def set_far(network: Network, *, is_far: bool) -> None:
    """Set the round trips of the measurement, or those of the control."""
    trips = ROUND_TRIPS_MS if is_far else dict.fromkeys(ROUND_TRIPS_MS, 0.0)
    network.set_round_trips(trips, JITTER_MS if is_far else 0.0)


def alternate(network: Network, act: Callable[[], Any], rounds: int) -> dict[str, list[Any]]:
    """Return what an action returned with the round trips and without, in turns."""
    found: dict[str, list[Any]] = {"far": [], "control": []}
    for _ in range(rounds):
        for name, results in found.items():
            set_far(network, is_far=name == "far")
            time.sleep(_SETTLE_S)
            results.append(act())
    return found


def latency(values_ms: Sequence[float]) -> Figures:
    """Return p50 and p99 in ms, and the count."""
    return {
        "p50_ms": round(statistics.median(values_ms), 2) if values_ms else None,
        "p99_ms": percentile(values_ms, 99),
        "count": len(values_ms),
    }


def latencies(found: Mapping[str, Sequence[Sequence[float]]]) -> Figures:
    """Return the latencies of `alternate`, all rounds together."""
    return {name: latency([v for one in rounds for v in one]) for name, rounds in found.items()}


def with_goal(row: Figures, round_trip_ms: float) -> Figures:
    """Add the goal, 1.05 round trips and the control's median, and the median divided by it."""
    control = row["control"]["p50_ms"]
    goal = round(1.05 * round_trip_ms + control, 2)
    return {
        **row,
        "round_trip_ms": round(round_trip_ms, 2),
        "goal_p50_ms": goal,
        "of_goal": round(row["far"]["p50_ms"] / goal, 3),
    }


def round_trips_ms(network: Network) -> dict[str, float]:
    """Return the round trips between regions as they are: those asked for, and the jitter."""
    set_far(network, is_far=True)
    return floor.round_trips(network, REGIONS, _PINGS)


def load() -> Figures:
    """Return the load average of the last minute, and the number of cores."""
    average = os.getloadavg()[0]
    return {"load_average": round(average, 1), "cores": os.cpu_count()}


class Bed:
    """A cluster across regions with a client process in each, from `with` on."""

    def __init__(
        self, network: Network, shards: Sequence[Sequence[str]] | None = None, **settings: Any
    ) -> None:
        """Prepare.

        Args:
            network: has `REGIONS`; the calling process is in the operator's region.
            shards: the regions of their servers; None: the triangle.
            settings: keys of `[cluster]`.

        """
        self.network: Final = network
        self._shards: Final = shards or layout.triangle(REGIONS)
        self._settings: Final = _SETTINGS | settings
        self._stack: Final = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Start everything."""
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="regions-")))
            set_far(self.network, is_far=True)
            data = folder / "log"
            layout.write_file(data, self.network, REGIONS, self._shards, self._settings)
            self.cluster: Cluster = stack.enter_context(
                Cluster(data, launcher=self.network.launcher(), timeout=_START_S, supervise=False)
            )
            arguments = [
                (self.network.pid, index, region, self.cluster.endpoint)
                for index, region in enumerate(REGIONS)
            ]
            self._workers = stack.enter_context(Workers(worker.run, arguments))
            self._workers.receive()
            self._stack.push(stack.pop_all())
        return self

    def __exit__(self, *_: object) -> None:
        """Stop everything."""
        self._stack.close()

    def start(self, region: str, method: str, **options: Any) -> None:
        """Have a region's clients start a method of `worker._Clients`."""
        self._workers.pipes[REGIONS.index(region)].send((method, options))

    def finish(self, region: str) -> Any:
        """Wait for its end; return the result."""
        return self._workers.pipes[REGIONS.index(region)].recv()

    def call(self, region: str, method: str, **options: Any) -> Any:
        """Have a region's clients run a method; return the result."""
        self.start(region, method, **options)
        return self.finish(region)

    def call_all(self, method: str, **options: Any) -> dict[str, Any]:
        """Have the clients of all regions run a method at the same time; return the results."""
        for region in REGIONS:
            self.start(region, method, **options)
        return {region: self.finish(region) for region in REGIONS}

    def carried(self) -> dict[str, dict[str, int]]:
        """Return packets and bytes that each path between two regions has carried so far."""
        paths = self.network.report()["paths"]
        return {
            f"{one}-{other}": paths[i][j]
            for i, one in enumerate(REGIONS)
            for j, other in enumerate(REGIONS)
            if i != j
        }
