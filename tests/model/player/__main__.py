"""Explore the model of a player's task: `python -m tests.model.player [--off RULE ...] [bounds]`.

The exit code is 0 if all invariants hold, 1 if one does not, 2 if the search is incomplete or the
usage is bad.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tests.command_line import OneLineParser, at_least
from tests.model.explorer import explore
from tests.model.player.player_model import Bounds, PlayerModel
from tests.model.player.rules import RULES
from tests.model.player.wording import violation_text

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a search and print its result."""
    parser = OneLineParser(
        prog="python -m tests.model.player", description="Explore all states of a player's task."
    )
    for name, default in Bounds()._asdict().items():
        least = 0 if name in {"seeks", "losses"} else 1
        parser.add_argument(f"--{name}", type=at_least(least), default=default)
    parser.add_argument(
        "--off", action="append", default=[], choices=list(RULES), metavar="RULE",
        help=f"a rule to switch off, repeatable: {', '.join(RULES)}",
    )  # fmt: skip
    parser.add_argument(
        "--max-states",
        type=at_least(1),
        default=5_000_000,
        help="stop, incomplete, at this number of states",
    )
    options = parser.parse_args(arguments)
    bounds = Bounds(*(getattr(options, name) for name in Bounds._fields))
    print(f"{bounds}; off: {', '.join(options.off) or 'no rule'}")
    result = explore(PlayerModel(bounds, options.off), options.max_states)
    print(
        f"{result.states:,} states, {result.steps:,} steps, depth {result.depth},"
        f" {result.cpu_s:.1f} s of CPU"
    )
    if result.violation is not None:
        print(f"{result.violation.invariant} is violated, by these states:\n")
        print(violation_text(result.violation))
        return 1
    print("all invariants hold" if result.is_complete else "incomplete: there are more states")
    return 0 if result.is_complete else 2


if __name__ == "__main__":
    sys.exit(main())
