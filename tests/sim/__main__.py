"""Runs seeds: `python -m tests.sim --seed N` one of them, `--hours H` as many as there is time for.

Exit codes: 0 no promise was broken; 1 one was, and the last line reproduces it; 2 bad usage.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.sim.plan import draw, parse_fault
from tests.sim.run import run
from tests.sim.seeds import attempt_all, command, fails
from tests.sim.shrink import shrink

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sim.plan import Plan
    from tests.sim.seeds import Result

_REPORT_S: Final = 10.0
#: Seeds that a worker takes at once.
_CHUNK: Final = 8


def main() -> int:
    """Run what the command line says; return the exit code."""
    options = _options()
    if options.hours or options.count:
        return _run_many(options)
    return _run_one(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the (first) seed")
    parser.add_argument("--hours", type=float, default=0.0, help="run seeds for so long")
    parser.add_argument("--count", type=int, default=0, help="run so many seeds")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--steps", type=int, help="calls that each writer makes")
    parser.add_argument("--writers", type=int, help="clients that insert")
    parser.add_argument("--readers", type=int, help="clients that follow the log")
    parser.add_argument(
        "--faults", help='the faults, "TIME_MS KIND TARGET...; ..."; none: ""', default=None
    )
    parser.add_argument(
        "--raft", action=argparse.BooleanOptionalAction, help="consensus is the real library"
    )
    parser.add_argument("--quiet", action="store_true", help="do not print the trace")
    parser.add_argument("--history", type=Path, help="write the history's files there")
    return parser.parse_args()


def plan_of(options: argparse.Namespace, seed: int) -> Plan:
    """Return a seed's plan, with what the command line says instead."""
    plan = draw(seed, is_raft_real=options.raft)
    if options.faults is not None:
        texts = [text for text in options.faults.split(";") if text.strip()]
        plan = plan._replace(faults=tuple(map(parse_fault, texts)))
    given = {"calls": options.steps, "writers": options.writers, "readers": options.readers}
    return plan._replace(**{key: value for key, value in given.items() if value is not None})


def _run_one(options: argparse.Namespace) -> int:
    plan = plan_of(options, options.seed)
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
    """Run seeds until the time is over or the count is reached; shrink the first that fails."""
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
    plan = plan_of(options, min(failed).seed)
    print(f"shrinking {command(plan)}", flush=True)
    print(command(shrink(plan, fails)))
    return 1


def _results(options: argparse.Namespace, end: float) -> Iterator[Result]:
    """Yield the results of seed after seed, as they come."""
    seeds: Iterator[int] = itertools.count(options.seed)
    if options.count:
        seeds = iter(range(options.seed, options.seed + options.count))
    with ProcessPoolExecutor(options.workers, max_tasks_per_child=50) as pool:
        pending = set()
        is_over = False
        while pending or not is_over:
            while not is_over and len(pending) < 2 * options.workers:
                chunk = [plan_of(options, seed) for seed in itertools.islice(seeds, _CHUNK)]
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
    )


if __name__ == "__main__":
    sys.exit(main())
