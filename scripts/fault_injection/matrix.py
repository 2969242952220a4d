"""Each fault alone, and each two of them together, on a cluster of its own under load.

After each trial everything must be up again, take inserts at every shard, and the history must
break no rule.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fault_injection.log import LogShape, LogTrial
from fault_injection.scenarios import FAULTS
from fault_injection.trial import first, in_one_line
from ziplog.errors import ZiplogError

if TYPE_CHECKING:
    import argparse

    from fault_injection.trial import Verdict

#: Duration of the workload before the fault, and after the recovery, in seconds.
_BEFORE_S, _AFTER_S = 1.0, 1.0
_POLL_S = 0.01


class Row(NamedTuple):
    """Result of one trial."""

    name: str
    #: From the first strike until everything was whole, in seconds; and from the end of the faults.
    since_strike: float
    since_heal: float
    verdict: Verdict | None
    #: Violations.
    wrong: str


def run_trial(names: tuple[str, ...], shape: LogShape, folder: Path) -> Row:
    """Run one cluster through these faults at once."""
    name = " + ".join(names)
    verdict = None
    struck = healed = whole = math.nan
    try:
        with LogTrial(folder, shape) as trial:
            _run(trial, _BEFORE_S)
            struck = time.monotonic()
            running = [FAULTS[name](trial) for name in names]
            lasts = [next(one) for one in running]
            for seconds, one in sorted(zip(lasts, running, strict=True), key=lambda row: row[0]):
                _run(trial, struck + seconds - time.monotonic())
                next(one, None)
            healed = time.monotonic()
            trial.settle()
            whole = time.monotonic()
            _run(trial, _AFTER_S)
            verdict = trial.judge()
    except (ZiplogError, RuntimeError, OSError) as error:
        return Row(name, whole - struck, whole - healed, verdict, in_one_line(error))
    bad = "; ".join(first(verdict.broken, 3))
    return Row(name, whole - struck, whole - healed, verdict, bad)


def _run(trial: LogTrial, seconds: float) -> None:
    """Run the workload for a while."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        trial.look()
        time.sleep(_POLL_S)


def run_matrix(options: argparse.Namespace) -> int:
    """Run the trials that the arguments name, print a row for each, return the exit code."""
    chosen = options.only or list(FAULTS)
    unknown = set(chosen) - set(FAULTS)
    if unknown:
        print(f"faults: no fault {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
        return 2
    trials: list[tuple[str, ...]] = [(name,) for name in chosen]
    trials += combinations(chosen, 2) if options.pairs else []
    shape = LogShape(
        f=options.f, durability=options.durability, seed=options.seed, rate_per_s=options.rate
    )
    print(f"{'fault':64} {'whole after':>11} {'healed':>7} {'acked':>6} {'lost':>5}  verdict")
    bad = 0
    for names in trials:
        row = _in_folder(names, shape, options.keep)
        bad += bool(row.wrong)
        figures = row.verdict.figures if row.verdict else {}
        acked, lost = (figures.get(name, "-") for name in ("acknowledged", "lost_as_reported"))
        print(
            f"{row.name:64} {row.since_strike:9.2f} s {row.since_heal:5.2f} s {acked:>6} {lost:>5}"
            f"  {row.wrong or 'clean'}",
            flush=True,
        )
    print(f"{len(trials)} trials, {bad} of them not as promised")
    return 1 if bad else 0


def _in_folder(names: tuple[str, ...], shape: LogShape, keep: Path | None) -> Row:
    """Run a trial in a folder that stays if it is asked for, or if something was wrong."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="+".join(names)[:80] + "-", dir=keep))
    row = run_trial(names, shape, folder)
    if row.wrong:
        return row._replace(wrong=f"{row.wrong} (see {folder})")
    if keep is None:
        shutil.rmtree(folder)
    return row
