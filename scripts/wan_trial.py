"""Regions on one machine: a router between network namespaces, and a cluster across them.

    python scripts/wan_trial.py floor --rtt A-B=40 --rtt B-C=80 --rtt C-A=120
    python scripts/wan_trial.py cluster --rtt A-B=40 --rtt B-C=80 --rtt C-A=120

It prints its own floor first. Exit code 2: this machine allows no such namespaces.
"""

from __future__ import annotations

import argparse
import sys

from wan import floor, namespaces
from wan.network import Network


def _round_trip(text: str) -> tuple[tuple[str, str], float]:
    pair, _, value = text.partition("=")
    one, _, other = pair.partition("-")
    return (one, other), float(value)


def main() -> int:
    """Run what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("floor",))
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
    options = parser.parse_args()
    if reason := namespaces.why_not():
        print(f"no regions on this machine: {reason}", file=sys.stderr)
        return 2
    round_trips = dict(options.rtt)
    regions = sorted({region for pair in round_trips for region in pair})
    with Network(regions) as network:
        network.set_round_trips(round_trips, options.jitter)
        floor.print_table(floor.measure(network, round_trips, count=options.count, mib=options.mib))
    return 0


if __name__ == "__main__":
    sys.exit(main())
