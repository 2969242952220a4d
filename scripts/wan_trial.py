"""Regions on one machine: a router between network namespaces, and a cluster across them.

    python scripts/wan_trial.py floor --rtt A-B=40 --rtt B-C=80 --rtt C-A=120
    python scripts/wan_trial.py cluster --rtt A-B=40 --rtt B-C=80 --rtt C-A=120

It prints its own floor first. Exit code 2: this machine allows no such namespaces.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from wan import cluster_trial, floor, layout, namespaces
from wan.network import Network


def _round_trip(text: str) -> tuple[tuple[str, str], float]:
    pair, _, value = text.partition("=")
    one, _, other = pair.partition("-")
    return (one, other), float(value)


def main() -> int:
    """Run what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("floor", "cluster"))
    parser.add_argument(
        "--rtt",
        action="append",
        type=_round_trip,
        required=True,
        metavar="A-B=MS",
        help="round trip of a pair of regions, in ms",
    )
    parser.add_argument("--jitter", type=float, default=2.0, help="largest jitter each way, in ms")
    parser.add_argument("--count", type=int, default=100, help="datagrams of each pair")
    parser.add_argument("--mib", type=int, default=64, help="size of each pair's TCP stream")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of the inserts")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=layout.setting,
        metavar="KEY=NUMBER",
        help="a key of [cluster], as rtt_ms=120",
    )
    options = parser.parse_args()
    if reason := namespaces.why_not():
        print(f"no regions on this machine: {reason}", file=sys.stderr)
        return 2
    round_trips = dict(options.rtt)
    regions = sorted({region for pair in round_trips for region in pair})
    with Network([*regions, layout.OPERATOR]) as network:
        network.set_round_trips(round_trips, options.jitter)
        network.enter(layout.OPERATOR)
        floor.print_table(
            floor.measure(network, round_trips, regions, count=options.count, mib=options.mib)
        )
        if options.what == "cluster":
            _run_cluster(network, regions, options)
    return 0


def _run_cluster(network: Network, regions: list[str], options: argparse.Namespace) -> None:
    used, started = network.report()["cpu_s"], time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        result = cluster_trial.run(
            network, regions, Path(directory) / "log", options.seconds, dict(options.set)
        )
    share = (network.report()["cpu_s"] - used) / (time.monotonic() - started)
    cluster_trial.report(result, regions)
    verdict = "" if share <= floor.MAX_CORE_SHARE else "; too much: the figures are not credible"
    print(f"router: {share:.0%} of a core{verdict}")


if __name__ == "__main__":
    sys.exit(main())
