"""The floor of a network of regions: what it does without a log."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from metrics.windows import percentile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from wan.network import Network

_PROBE: Final = str(Path(__file__).with_name("probe.py"))
_STOP_S: Final = 10.0
#: A router that needs a larger share of a core falsifies what is measured.
MAX_CORE_SHARE: Final = 0.5


@dataclass(frozen=True)
class Floor:
    """The floor of one pair of regions.

    Attributes:
        asked_ms: the round trip that was asked for.
        p50_ms: median round trip of a datagram.
        p99_ms: its 99th percentile.
        received: share of the datagrams that came back.
        mb_per_s: rate of one TCP stream, its slow start included.
        core_share: processor time of the router during that stream, divided by its duration.

    """

    asked_ms: float
    p50_ms: float
    p99_ms: float
    received: float
    mb_per_s: float
    core_share: float


def measure(
    network: Network,
    round_trips_ms: Mapping[tuple[str, str], float],
    regions: Sequence[str],
    *,
    count: int = 100,
    mib: int = 64,
) -> dict[tuple[str, str], Floor]:
    """Measure every pair of some regions.

    Args:
        network: has the paths already.
        round_trips_ms: what was asked for; a pair that is not in it has no delay.
        regions: those whose pairs are measured.
        count: datagrams of each pair.
        mib: size of each pair's TCP stream.

    """
    found = {}
    with servers(network):
        for pair in combinations(regions, 2):
            asked = round_trips_ms.get(pair, round_trips_ms.get(pair[::-1], 0.0))
            host = network.address(pair[1])
            times = _probe(network, pair[0], "ping", host, str(count))
            started, before = time.monotonic(), network.report()["cpu_s"]
            rate = _probe(network, pair[0], "stream", host, str(mib))
            used = network.report()["cpu_s"] - before
            found[pair] = Floor(
                asked,
                statistics.median(times) if times else float("nan"),
                percentile(times, 99) if times else float("nan"),
                len(times) / count,
                rate,
                used / (time.monotonic() - started),
            )
    return found


def round_trips(network: Network, regions: Sequence[str], count: int) -> dict[str, float]:
    """Return the median of so many round trips of datagrams, in ms, by pairs as "A-B"."""
    with servers(network):
        return {
            f"{one}-{other}": statistics.median(
                _probe(network, one, "ping", network.address(other), str(count))
            )
            for one, other in combinations(regions, 2)
        }


def print_table(floors: Mapping[tuple[str, str], Floor]) -> None:
    """Print one line for each pair of regions."""
    print("pair        asked ms  p50 ms  p99 ms  received  MB/s  router's share of a core")
    for (one, other), floor in floors.items():
        print(
            f"{one + '-' + other:10} {floor.asked_ms:9.1f} {floor.p50_ms:7.2f} {floor.p99_ms:7.2f}"
            f" {floor.received:9.0%} {floor.mb_per_s:5.0f}  {floor.core_share:.0%}"
        )


@contextlib.contextmanager
def servers(network: Network) -> Iterator[None]:
    """Run a probe's server in every region."""
    with contextlib.ExitStack() as stack:
        for region in network.regions:
            server = subprocess.Popen(
                network.command(region, sys.executable, _PROBE, "serve"), stdin=subprocess.PIPE
            )
            stack.callback(server.wait, _STOP_S)
            stack.callback(server.stdin.close)  # type: ignore[union-attr]
        for region in network.regions:
            _await_server(network, region)
        yield


def _await_server(network: Network, region: str) -> None:
    """Wait until the region's server has its stream port, asked from inside the region."""
    deadline = time.monotonic() + _STOP_S
    command = network.command(
        region, sys.executable, _PROBE, "stream", network.address(region), "0"
    )
    while subprocess.run(command, capture_output=True, check=False).returncode:
        if time.monotonic() > deadline:
            message = f"the probe's server in region {region} does not answer"
            raise RuntimeError(message)


def _probe(network: Network, region: str, *arguments: str) -> Any:
    command = network.command(region, sys.executable, _PROBE, *arguments)
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
