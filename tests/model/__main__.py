"""Explore the shard model: `python -m tests.model [--off RULE ...] [bounds]`.

The exit code is 0 if all invariants hold, 1 if one does not, 2 if the search is incomplete or the
usage is bad.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tests.command_line import OneLineParser, at_least
from tests.model.explorer import explore
from tests.model.invariants import INVARIANTS
from tests.model.parts import Bounds
from tests.model.rules import RULES
from tests.model.shard_model import ShardModel
from tests.model.wording import violation_text

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a search and print its result."""
    parser = _parser()
    options = parser.parse_args(arguments)
    bounds = Bounds(
        options.records, options.positions, options.epoch, options.servers, options.views,
        options.crashes, options.merge, options.append, options.alone,
    )  # fmt: skip
    if not 1 <= bounds.epoch <= bounds.positions:
        parser.error("--epoch is from 1 to --positions")
    if bounds.append > bounds.positions:
        parser.error("--append is from 0 to --positions")
    model = ShardModel(
        bounds,
        options.off,
        options.invariant or INVARIANTS,
        symmetry=not options.no_symmetry,
    )
    print(f"{bounds}; off: {', '.join(options.off) or 'no rule'}")
    result = explore(model, options.max_states, _print_progress)
    print(
        f"{result.states:,} states, {result.steps:,} steps, depth {result.depth},"
        f" {result.cpu_s:.1f} s of CPU"
    )
    if result.violation is not None:
        print(f"{result.violation.invariant} is violated, by these states:\n")
        print(violation_text(model, result.violation))
        return 1
    print("all invariants hold" if result.is_complete else "incomplete: there are more states")
    return 0 if result.is_complete else 2


def _parser() -> argparse.ArgumentParser:
    default = Bounds()
    parser = OneLineParser(
        prog="python -m tests.model", description="Explore all states of the shard model."
    )
    parser.add_argument("--records", type=int, default=default.records, choices=range(1, 5))
    parser.add_argument(
        "--positions",
        type=at_least(1),
        default=default.positions,
        help="of the shard, in both epochs",
    )
    parser.add_argument("--epoch", type=at_least(1), default=default.epoch, help="those of epoch 1")
    parser.add_argument("--servers", type=int, default=default.servers, choices=(2, 3))
    parser.add_argument(
        "--views",
        type=at_least(1),
        default=default.views,
        help="number of recovery attempts plus one",
    )
    parser.add_argument("--crashes", type=at_least(0), default=default.crashes, help="of servers")
    parser.add_argument("--merge", action="store_true", help="with another shard")
    parser.add_argument(
        "--append", type=at_least(0), default=default.append, metavar="POSITION",
        help="another shard's append lies after this position; the last record follows it; 0: none",
    )  # fmt: skip
    parser.add_argument(
        "--alone", action="store_true", help="one server may confirm a view: regions are given up"
    )
    parser.add_argument(
        "--off", action="append", default=[], choices=list(RULES), metavar="RULE",
        help=f"a rule to switch off, repeatable: {', '.join(RULES)}",
    )  # fmt: skip
    parser.add_argument(
        "--invariant",
        action="append",
        choices=list(INVARIANTS),
        help="check only this one, repeatable",
    )
    parser.add_argument(
        "--max-states",
        type=at_least(1),
        default=5_000_000,
        help="stop, incomplete, at this number of states",
    )
    parser.add_argument(
        "--no-symmetry", action="store_true", help="distinguish states that differ only in names"
    )
    return parser


def _print_progress(depth: int, states: int, steps: int, cpu_s: float) -> None:
    print(f"depth {depth:3}: {states:12,} states, {steps:12,} steps, {cpu_s:7.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
