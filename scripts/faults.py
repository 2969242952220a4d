"""Break the cluster in a data directory on purpose, and heal it.

    python scripts/faults.py --data-dir D kill|pause|resume|restart NODE ...
    python scripts/faults.py --data-dir D cut NODE OTHER [--one-way]
    python scripts/faults.py --data-dir D cut NODE --from peers|clients|all
    python scripts/faults.py --data-dir D slow NODE [--send-ms N [--to REGION]] [--flush-ms N]
    python scripts/faults.py --data-dir D lose NODE --percent P
    python scripts/faults.py --data-dir D fill-disk NODE [--bytes N]
    python scripts/faults.py --data-dir D torn-tail|bitflip NODE [--seed S]
    python scripts/faults.py --data-dir D heal [NODE ...]
    python scripts/faults.py --data-dir D random --seed S --seconds N [--kinds kill,pause]
    python scripts/faults.py matrix [--f 1] [--only NAME ...] [--pairs]

`cut`, `slow`, `lose` and `fill-disk` need nodes that run with a layer of faults
(scripts/faulty_node.py).
Exit codes: 0 done, 1 it could not be done (or the matrix found something), 2 bad usage.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fault_injection.nodes import Nodes
from fault_injection.options import count_or_zero, not_negative, percent, positive
from fault_injection.schedule import DAMAGE, KINDS, Chaos, kinds_of

from tests.history.probe import Health
from ziplog.errors import ConfigError, ZiplogError

if TYPE_CHECKING:
    from collections.abc import Sequence


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, help="of the cluster (all but matrix)")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in ("kill", "pause", "resume", "restart"):
        verbs.add_parser(verb).add_argument("nodes", nargs="+", metavar="NODE")
    verbs.add_parser("heal").add_argument("nodes", nargs="*", metavar="NODE")
    on_one = {
        verb: verbs.add_parser(verb) for verb in ("cut", "slow", "lose", "fill-disk", *DAMAGE)
    }
    for verb in on_one.values():
        verb.add_argument("node", metavar="NODE")
    cut = on_one["cut"]
    peers = cut.add_mutually_exclusive_group(required=True)
    peers.add_argument("other", nargs="?", metavar="OTHER")
    peers.add_argument("--from", dest="group", choices=("peers", "clients", "all"))
    cut.add_argument("--one-way", action="store_true", help="only from NODE to OTHER")
    on_one["slow"].add_argument("--send-ms", type=not_negative, default=0.0)
    on_one["slow"].add_argument("--flush-ms", type=not_negative, default=0.0)
    on_one["slow"].add_argument("--to", metavar="REGION", help="only messages to nodes there")
    on_one["lose"].add_argument("--percent", type=percent, required=True, help="of its messages")
    on_one["fill-disk"].add_argument(
        "--bytes", type=count_or_zero, default=0, help="that it may still write"
    )
    for verb in DAMAGE:
        on_one[verb].add_argument("--seed", type=int, default=0)
    chance = verbs.add_parser("random")
    chance.add_argument("--seed", type=int, default=1)
    chance.add_argument("--seconds", type=positive, default=60.0)
    chance.add_argument("--kinds", type=kinds_of, default=KINDS, help=f"of {', '.join(KINDS)}")
    chance.add_argument("--beyond", action="store_true", help="strike whole groups too")
    matrix = verbs.add_parser("matrix")
    matrix.add_argument("--f", type=count_or_zero, default=1)
    matrix.add_argument("--only", nargs="*", default=[], metavar="NAME")
    matrix.add_argument(
        "--rate", type=not_negative, default=60.0, help="operations a second, each client"
    )
    matrix.add_argument("--seed", type=int, default=1)
    matrix.add_argument("--pairs", action="store_true", help="also every pair of faults together")
    matrix.add_argument("--durability", choices=("memory", "disk"), default="memory")
    matrix.add_argument("--keep", type=Path, help="keep histories and logs in this directory")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say; return the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.verb == "matrix":
            from fault_injection.matrix import run_matrix  # noqa: PLC0415 - only here

            return run_matrix(options)
        if options.data_dir is None:
            parser.error("--data-dir is missing")
        _do(Nodes(options.data_dir), options)
    except ConfigError as error:
        print(f"faults: {error}", file=sys.stderr)
        return 2
    except ZiplogError as error:
        print(f"faults: {error}", file=sys.stderr)
        return 1
    return 0


def _do(nodes: Nodes, options: argparse.Namespace) -> None:
    match options.verb:
        case "kill" | "pause" | "resume" | "restart":
            for name in options.nodes:
                getattr(nodes, options.verb)(name)
        case "heal":
            for name in options.nodes or nodes.names:
                nodes.heal(name)
        case "cut":
            _cut(nodes, options)
        case "slow":
            to = nodes.in_region(options.to) if options.to else ()
            nodes.slow(options.node, send_ms=options.send_ms, flush_ms=options.flush_ms, to=to)
        case "lose":
            nodes.lose(options.node, options.percent)
        case "fill-disk":
            print(nodes.fill_disk(options.node, options.bytes))
        case "torn-tail" | "bitflip":
            damage = getattr(nodes, options.verb.replace("-", "_"))
            print(damage(options.node, options.seed))
        case "random":
            _random(nodes, options)


def _cut(nodes: Nodes, options: argparse.Namespace) -> None:
    match options.group:
        case "peers":
            nodes.cut_from_peers(options.node)
        case "clients":
            nodes.cut_from_clients(options.node)
        case "all":
            nodes.isolate(options.node)
        case _:
            nodes.config.node(options.other)
            nodes.cut(options.node, [options.other], one_way=options.one_way)


def _random(nodes: Nodes, options: argparse.Namespace) -> None:
    began = time.monotonic()
    with Health(nodes.config.bootstrap) as health:
        chaos = Chaos(
            nodes,
            options.seed,
            options.kinds,
            health.unhealthy,
            lambda text: print(f"{time.monotonic() - began:7.2f} s  {text}", flush=True),
            beyond=options.beyond,
        )
        chaos.run(options.seconds)


if __name__ == "__main__":
    sys.exit(main())
