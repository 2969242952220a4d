"""Runs seeds: `python -m tests.sim --seed N` runs one, `--hours H` as many as possible in a time.

`--mutants` lists the rules that `test_mutants.py` breaks.

Exit codes: 0 no violation; 1 a violation, and the last line reproduces it; 2 bad usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.command_line import OneLineParser, at_least
from tests.sim.database import draws as database_draws
from tests.sim.fault_text import parse_faults, unknown_targets
from tests.sim.mutants import MUTANTS
from tests.sim.plan import draw
from tests.sim.run import run
from tests.sim.seeds import attempt_all, command, fails
from tests.sim.shrink import shrink

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.sim.plan import Fault, Plan
    from tests.sim.seeds import Result
    from tests.sim.stages import Counts

_REPORT_S: Final = 10.0
#: Seeds per task of a worker.
_CHUNK: Final = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.mutants:
        for mutant in MUTANTS.values():
            print(f"{mutant.name}: {mutant.rule}\n    runs: {mutant.focus}")
        return 0
    if options.logdb and options.regions is not None:
        parser.error("--logdb and --regions are exclusive: use one of them")
    if options.count and options.hours:
        parser.error("--count and --hours are exclusive: use one of them")
    if options.count or options.hours:
        if options.history:
            parser.error("--history is for one seed, not for --count or --hours")
        return _run_many(options)
    plan = plan_of(options, options.seed)
    for fault in plan.faults:
        if unknown := unknown_targets(fault, plan):
            known = ", ".join(plan.nodes)
            parser.error(f'"{fault}": seed {plan.seed} has no {unknown[0]}, only {known}')
    return _run_one(options, plan)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=at_least(0), default=1, help="the (first) seed")
    parser.add_argument("--hours", type=_hours, default=0.0, help="run seeds for this time")
    parser.add_argument("--count", type=at_least(0), default=0, help="run this number of seeds")
    parser.add_argument(
        "--workers", type=at_least(1), default=os.cpu_count() or 1,
        help="processes, for more than one seed",
    )  # fmt: skip
    parser.add_argument("--steps", type=at_least(0), help="calls of each writer")
    parser.add_argument(
        "--writers", type=at_least(0), help="clients that insert, or do transactions"
    )
    parser.add_argument(
        "--readers", type=at_least(0), help="clients that follow the log, or watch a key"
    )
    parser.add_argument(
        "--faults",
        type=_faults,
        help='the faults, "TIME_MS KIND TARGET... [DURATIONms] [*AMOUNT]; ..."; none: "";'
        " each seed has the faults with targets in its cluster",
    )
    parser.add_argument(
        "--raft", action=argparse.BooleanOptionalAction, help="consensus is the real library"
    )
    parser.add_argument(
        "--logdb", action="store_true", help="clients use a database in the log, not the log itself"
    )
    parser.add_argument(
        "--regions", action=argparse.BooleanOptionalAction, help="processes are in three regions"
    )
    parser.add_argument("--quiet", action="store_true", help="do not print the trace")
    parser.add_argument("--mutants", action="store_true", help="list the mutants, and run nothing")
    parser.add_argument("--history", type=Path, help="write the history's files there")
    return parser


def _hours(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hours")
    return float(text)


def _faults(text: str) -> tuple[Fault, ...]:
    try:
        return parse_faults(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def plan_of(options: argparse.Namespace, seed: int) -> Plan:
    """Return a seed's plan, with the overrides of the command line."""
    if options.logdb:
        plan = database_draws.draw(seed, is_raft_real=options.raft)
    else:
        plan = draw(seed, is_raft_real=options.raft, has_regions=options.regions)
    given = {
        "calls": options.steps,
        "writers": options.writers,
        "readers": options.readers,
        "faults": options.faults,
    }
    return plan._replace(**{key: value for key, value in given.items() if value is not None})


def _run_one(options: argparse.Namespace, plan: Plan) -> int:
    print(plan._replace(faults=()))
    for fault in plan.faults:
        print(f"  {fault}")
    began = time.monotonic()
    try:
        outcome = run(plan, None if options.quiet else print, options.history)
    except Exception:  # noqa: BLE001 - whatever a run raises is its failure
        traceback.print_exc()
        print(f"shrinking {command(plan)}", flush=True)
        print(command(shrink(plan, fails)))
        return 1
    wall_s = time.monotonic() - began
    print(f"{outcome}; {outcome.virtual_s / wall_s:.0f} virtual seconds a second")
    return 0


def _run_many(options: argparse.Namespace) -> int:
    """Run seeds until the time is over or the count is reached; shrink the first failure."""
    began = time.monotonic()
    results: list[Result] = []
    failed: list[Result] = []
    report_at = began + _REPORT_S
    for result in _results(options, began + options.hours * 3600):
        results.append(result)
        if result.failure:
            failed.append(result)
            print(f"seed {result.seed} failed: {result.failure}", flush=True)
        if time.monotonic() >= report_at:
            report_at = time.monotonic() + _REPORT_S
            print(_summary(results, failed, time.monotonic() - began), flush=True)
    print(_summary(results, failed, time.monotonic() - began))
    if not failed:
        return 0
    plan = _fitting(options, min(failed).seed)
    print(f"shrinking {command(plan)}", flush=True)
    print(command(shrink(plan, fails)))
    return 1


def _fitting(options: argparse.Namespace, seed: int) -> Plan:
    """Return a seed's plan without faults of processes outside its cluster."""
    plan = plan_of(options, seed)
    return plan._replace(faults=tuple(f for f in plan.faults if not unknown_targets(f, plan)))


def _results(options: argparse.Namespace, end: float) -> Iterator[Result]:
    """Yield the results of seeds as they complete."""
    seeds: Iterator[int] = itertools.count(options.seed)
    if options.count:
        seeds = iter(range(options.seed, options.seed + options.count))
    with ProcessPoolExecutor(options.workers, max_tasks_per_child=50) as pool:
        pending = set()
        is_over = False
        while pending or not is_over:
            while not is_over and len(pending) < 2 * options.workers:
                chunk = [_fitting(options, seed) for seed in itertools.islice(seeds, _CHUNK)]
                is_over = not chunk or (not options.count and time.monotonic() >= end)
                if not is_over:
                    pending.add(pool.submit(attempt_all, chunk))
            for future in as_completed(list(pending)):
                pending.discard(future)
                yield from future.result()
                break


def _summary(results: list[Result], failed: list[Result], wall_s: float) -> str:
    outcomes = [result.outcome for result in results if result.outcome is not None]
    virtual_s = sum(outcome.virtual_s for outcome in outcomes)
    return (
        f"{len(results)} seeds, {len(failed)} failed; {virtual_s / 3600:.2f} virtual hours in"
        f" {wall_s:.0f} s ({virtual_s / 3600 / wall_s:.3f} virtual hours a second);"
        f" {sum(o.operations for o in outcomes)} calls,"
        f" {sum(o.faults for o in outcomes)} faults, {sum(o.steps for o in outcomes)} steps"
        + _of_databases([outcome.database for outcome in outcomes if outcome.database is not None])
    )


def _of_databases(counts: list[Counts]) -> str:
    if not counts:
        return ""
    commits, aborts, in_doubt, checkpoints, trims = map(
        sum, zip(*map(dataclasses.astuple, counts), strict=True)
    )
    return (
        f"; {commits} commits, {aborts} aborts, {in_doubt} unknown, {checkpoints} checkpoints,"
        f" {trims} trims"
    )


if __name__ == "__main__":
    sys.exit(main())
