"""A cluster across regions: real processes, a client in each region, and what they measure."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from metrics.windows import percentile

from wan import layout
from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wan.network import Network

_WORKER: Final = str(Path(__file__).with_name("worker.py"))
_START_S: Final = 120.0
#: Time after the last insert in which a subscriber still waits.
_DRAIN_S: Final = 5.0


def run(
    network: Network,
    regions: Sequence[str],
    directory: Path,
    seconds: float,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Start a cluster, insert in each region at its own shard, and subscribe in each.

    The calling process must be in a region without delays of its own.

    Returns:
        Per region its inserts and deliveries; the states and views of the shards over the time,
        the number of events, what the paths have carried, and the seconds until the cluster was
        live.

    """
    layout.write_file(directory, network, regions, layout.triangle(regions), settings)
    started = time.monotonic()
    with Cluster(directory, launcher=network.launcher(), timeout=_START_S) as cluster:
        live = time.monotonic() - started
        carried = _carried(network)
        inserts = [
            _start(network, region, "insert", cluster.endpoint, str(shard), str(seconds))
            for shard, region in enumerate(regions)
        ]
        follows = [
            _start(network, region, "follow", cluster.endpoint, str(seconds + _DRAIN_S))
            for region in regions
        ]
        states = _watch(cluster, inserts)
        result = {
            region: _result(insert) | _result(follow)
            for region, insert, follow in zip(regions, inserts, follows, strict=True)
        }
        with cluster.connect(timeout=_START_S) as log:
            status = log.cluster()
        packets, size = (
            after - before for before, after in zip(carried, _carried(network), strict=True)
        )
        return {
            "packets": packets,
            "bytes": size,
            "live_s": live,
            "regions": result,
            "states": states,
            "views": {shard["id"]: shard["view"] for shard in status["shards"]},
            "logs": _warnings(directory),
        }


def report(result: Mapping[str, Any], regions: Sequence[str]) -> None:
    """Print what `run` has returned."""
    print(f"live after {result['live_s']:.1f} s; views {result['views']}; {result['states']}")
    count = sum(len(found["latencies_ms"]) for found in result["regions"].values())
    if count:
        print(
            f"{result['packets'] / count:.1f} packets and {result['bytes'] / count:.0f} bytes for"
            " each record, everything between regions included"
        )
    for region, found in result["regions"].items():
        latencies = found["latencies_ms"]
        line = f"{region}: {len(latencies)} inserts"
        if latencies:
            p50, p99 = statistics.median(latencies), percentile(latencies, 99)
            line += f", p50 {p50:.1f} ms, p99 {p99:.1f} ms"
        print(f"{line}, errors {found['errors']}")
        print(f"   client: { {k: v for k, v in found['stats'].items() if v} }")
        for shard, times in sorted(found["delivered_ms"].items()):
            print(
                f"   from {regions[int(shard)]}: {len(times)} delivered,"
                f" p50 {statistics.median(times):.1f} ms"
            )
    for warning, count in result["logs"].items():
        print(f"   {count} x {warning}")


def _carried(network: Network) -> tuple[int, int]:
    """Return the packets and bytes that all paths have carried."""
    paths = [path for row in network.report()["paths"] for path in row]
    return sum(path["packets"] for path in paths), sum(path["bytes"] for path in paths)


def _start(network: Network, region: str, *arguments: str) -> subprocess.Popen[str]:
    command = network.command(region, sys.executable, _WORKER, *arguments)
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _result(process: subprocess.Popen[str]) -> dict[str, Any]:
    text, _ = process.communicate()
    found: dict[str, Any] = json.loads(text)
    return found


def _watch(cluster: Cluster, until: Sequence[subprocess.Popen[str]]) -> dict[str, int]:
    """Return how often each shard state was seen, asked four times a second."""
    states: Counter[str] = Counter()
    with cluster.connect(timeout=_START_S) as log:
        while any(process.poll() is None for process in until):
            states.update(shard["state"] for shard in log.cluster()["shards"])
            time.sleep(0.25)
    return dict(states)


def _warnings(directory: Path) -> dict[str, int]:
    """Count the events of the nodes' logs, by node's kind and event."""
    found: Counter[str] = Counter()
    for path in (directory / "logs").glob("*.log"):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            found[f"{path.stem.split('-')[0]} {event.get('event')}"] += 1
    return dict(found.most_common())
