"""Fail whole regions of a cluster under clients in all of them, and judge what these saw.

    python scripts/region_faults.py --seed 1 --minutes 10

Three regions, 40, 80 and 120 ms apart, behind the router of docs/regions_test_bed.md. A shard has
its primary in one region and its backup in the next. Faults follow one after the other: a region is
killed and started again, cut off, slowed five times, or parted from the next one. Exit codes: 0 as
promised, 1 not, 2: this machine allows no such namespaces. What went wrong stays in a folder that
the last line names. On a machine with too much load, slow recoveries are reported and do not fail.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fault_injection.options import count, positive
from fault_injection.trial import first, in_one_line
from region_trial.schedule import KINDS, faults
from region_trial.trial import REGIONS, RegionTrial, Shape
from wan import layout, namespaces
from wan.network import Network

from tests.history.report import figures_line
from ziplog.errors import ZiplogError

if TYPE_CHECKING:
    from region_trial.trial import Verdict

#: Time without a fault after each.
_CALM_S: Final = 4.0


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def run_faults(trial: RegionTrial, options: argparse.Namespace) -> None:
    """Inject faults for the time, or the number, that the options give."""
    began = time.monotonic()
    planned = faults(REGIONS, options.kinds, options.seed, options.scale)
    for fault in islice(planned, options.faults):
        trial.watch(_CALM_S)
        trial.inject(fault, lambda text: say(f"{time.monotonic() - began:7.2f} s  {text}"))
        if options.faults is None and time.monotonic() - began > 60 * options.minutes:
            return


def print_verdict(verdict: Verdict) -> None:
    """Print the figures of each fault, and everything else."""
    for row in verdict.rows:
        pauses = "; ".join(
            f"{kind[:-2]} "
            + ", ".join(f"{region} {value:g}" for region, value in row[kind].items())
            for kind in ("writers_s", "readers_s")
        )
        say(f"{row['fault']}: pauses in s: {pauses}; whole {row['whole_s']}; load {row['load']}")
    say(figures_line(verdict.figures))
    for text in verdict.slow:
        say(f"SLOW {text}")
    if verdict.not_credible:
        say(f"times are not credible, and do not count: {verdict.not_credible}")


def _kinds(text: str) -> list[str]:
    found = text.split(",")
    if unknown := set(found) - set(KINDS):
        message = f"{', '.join(sorted(unknown))} is none of {', '.join(KINDS)}"
        raise argparse.ArgumentTypeError(message)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=positive, default=10.0)
    parser.add_argument("--faults", type=count, help="their number, instead of --minutes")
    parser.add_argument(
        "--kinds", type=_kinds, default=list(KINDS), help=f"with commas: {', '.join(KINDS)}"
    )
    parser.add_argument("--scale", type=positive, default=1.0, help="of the faults' durations")
    parser.add_argument(
        "--set", action="append", default=[], type=layout.setting, metavar="KEY=NUMBER",
        help="a key of [cluster], as suspicion_ms=3000",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write figures and windows of 100 ms here")
    parser.add_argument(
        "--broken",
        action="store_true",
        help="have both servers of each shard in one region: the verdict must fail",
    )
    return parser


def main() -> int:
    """Run the trial that the arguments describe; return the exit code."""
    options = _parser().parse_args()
    if reason := namespaces.why_not():
        print(f"no regions on this machine: {reason}", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="region-faults-"))
    shape = Shape(options.seed, dict(options.set), is_broken=options.broken)
    found: dict[str, Any] = {}
    with Network([*REGIONS, layout.OPERATOR], options.seed) as network:
        network.enter(layout.OPERATOR)
        try:
            with RegionTrial(network, folder / "trial", shape) as trial:
                run_faults(trial, options)
                verdict = trial.judge()
        except (ZiplogError, RuntimeError, OSError) as error:
            wrong = [in_one_line(error)]
        else:
            print_verdict(verdict)
            found = verdict._asdict()
            wrong = verdict.broken + ([] if verdict.not_credible else verdict.slow)
    if options.json:
        options.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    for text in first(wrong):
        say(f"WRONG {text}")
    if wrong:
        say(f"not as promised; see {folder}")
        return 1
    shutil.rmtree(folder)
    say("as promised: nothing is lost, and a region that is cut off acknowledges nothing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
