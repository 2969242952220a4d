"""Kill Raft nodes repeatedly under load, and count the acknowledged commands that are lost.

    python -m tests.raft.torture --kills 250 --commands 60000 --seed 1

With the library's own receive path, which loses commands in about every other run:

    python -m tests.raft.torture --shipped --kills 150 --seed 3 --cuts 0.3 --interval 0.4 \\
        --away 1.5 --window 20

There are three processes, and clients with 60 pending commands each. A random node is killed every
200 ms and restarted at once. Sometimes all three are killed, and one of them stays down longer.
Each journal is 1.2 ms slower than the disk, and is compacted every second. Exit code 1: a command
is lost, or the nodes differ.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.raft.group import Group, Verdict
from tests.raft.node import Settings

if TYPE_CHECKING:
    from collections.abc import Callable


class Plan(NamedTuple):
    """The plan of a run. Times are in seconds."""

    #: Minimum numbers of kills and of acknowledged commands.
    kills: int
    commands: int = 0
    seed: int = 1
    #: Time between kills.
    interval: float = 0.2
    #: Probability of a power failure: all are killed at once; one stays down for up to `away`.
    cuts: float = 0.1
    away: float = 0.8
    #: Pending commands per client.
    window: int = 60
    #: Factor by which all time-outs are shorter.
    haste: float = 4.0
    #: Use the library's own code for entries, snapshots and acknowledgements.
    shipped: bool = False


def torture(
    directory: Path, plan: Plan, report: Callable[[int, Group], object] = lambda *_: None
) -> tuple[int, Verdict]:
    """Kill nodes as planned; return the number of kills and the verdict."""
    chance = random.Random(plan.seed)
    settings = Settings(sync_s=0.0012, compact_s=1.0, haste=plan.haste, shipped=plan.shipped)
    group = Group(directory, settings, window=plan.window)
    away: dict[str, float] = {}
    kills = 0
    try:
        group.start_all()
        group.leader()
        group.load(True)
        while kills < plan.kills or len(group.acknowledged) < plan.commands:
            group.run_for(plan.interval)
            for name in [name for name, back in away.items() if time.monotonic() >= back]:
                del away[name]
                group.start(name)
            is_cut = not away and chance.random() < plan.cuts
            victims = chance.sample(sorted(group.running), 3 if is_cut else 1)
            for victim in victims:
                group.kill(victim)
                kills += 1
            if is_cut:
                away[victims.pop()] = time.monotonic() + chance.uniform(0.0, plan.away)
            for victim in victims:
                group.start(victim)
            report(kills, group)
        return kills, group.verdict()
    finally:
        group.close()


def main() -> int:
    """Run the plan of the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.raft.torture", description=__doc__)
    parser.add_argument("--shipped", action="store_true", help="the library's receive path")
    for name in Plan._fields[:-1]:
        default = Plan._field_defaults.get(name, 250)
        parser.add_argument(f"--{name}", type=type(default), default=default)
    plan = Plan(**vars(parser.parse_args()))
    started = time.monotonic()

    def report(kills: int, group: Group) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{kills} kills, {len(group.acknowledged)} acknowledged")

    with tempfile.TemporaryDirectory(prefix="torture-") as directory:
        kills, verdict = torture(Path(directory), plan, report)
    summary = (
        f"{'shipped' if plan.shipped else 'ours'}, seed {plan.seed}: {verdict.acknowledged}"
        f" acknowledged, {kills} kills, {len(verdict.lost)} lost,"
        f" nodes {'agree' if verdict.agree else 'DIFFER'}, {len(verdict.silent)} silent,"
        f" {len(verdict.fatal)} stopped themselves, {time.monotonic() - started:.0f} s"
    )
    sys.stdout.write("\n".join([summary, *verdict.fatal[:3], ""]))
    return 0 if verdict.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
