"""Let faults come by chance over a cluster under load, and judge what its clients saw.

    python scripts/chaos.py --seed 1 --minutes 10 [--f 2] [--durability disk]

Prints each fault with its time; then heals everything, waits until the cluster is whole, lets a
fresh subscriber read the whole log, and checks the history. Exit codes: 0 as promised, 1 not, 2 bad
usage. What went wrong stays in a folder that the last line names.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fault_injection.schedule import DAMAGE, KILL_GROUP, KINDS, Chaos
from fault_injection.trial import Shape, Trial, explain, wrong

from ziplog.errors import ZiplogError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Mean interval between kills of a client, in seconds; each is replaced by a new one.
_KILL_CLIENT_S: Final = 15.0


def run_chaos(
    folder: Path,
    shape: Shape,
    seconds: float,
    say: Callable[[str], None],
    *,
    kinds: Sequence[str] = KINDS,
    beyond: bool = False,
) -> list[str]:
    """Run the trial; return the violations.

    Args:
        folder: gets the cluster's data and the history.
        shape: of the cluster and its workload.
        seconds: the duration of the faults.
        say: called with a line for each event.
        kinds: of faults.
        beyond: fail whole groups too.

    """
    try:
        with Trial(folder, shape) as trial:

            def note(line: str) -> None:
                say(line)
                trial.workload.note(line)

            chaos = Chaos(
                trial.nodes,
                shape.seed,
                kinds,
                trial.probe.unhealthy,
                note,
                beyond=beyond,
            )
            chaos.run(seconds, _Each(trial))
            say(f"whole {trial.settle():.2f} s after everything was healed")
            outages = trial.outages.of_shards()
            if outages:
                median, longest = statistics.median(outages), max(outages)
                say(
                    f"{chaos.injected} faults, {len(outages)} outages of shards:"
                    f" median {median:.2f} s, longest {longest:.2f} s"
                )
            verdict = trial.judge()
    except (ZiplogError, RuntimeError, OSError) as error:
        return [wrong(error)]
    say(f"{verdict.acknowledged} records acknowledged, {verdict.lost} lost as reported")
    return explain(verdict)


class _Each:
    """Run the workload between faults."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._random = random.Random(trial.shape.seed)  # noqa: S311 - no secret
        self._kill_at = self._next()

    def _next(self) -> float:
        return time.monotonic() + self._random.uniform(0.5, 1.5) * _KILL_CLIENT_S

    def __call__(self) -> None:
        self._trial.look()
        if time.monotonic() >= self._kill_at:
            self._kill_at = self._next()
            workload = self._trial.workload
            workload.kill_client(self._random.choice(workload.clients_running()))
            workload.start_client()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments say; return the exit code."""
    parser = argparse.ArgumentParser(description="Faults by chance, under load, and a verdict.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--f", type=int, default=1)
    parser.add_argument("--durability", choices=("memory", "disk"), default="memory")
    parser.add_argument("--rate", type=float, default=60.0, help="operations a second, each client")
    parser.add_argument(
        "--kinds",
        default=",".join(KINDS),
        help=f"of faults, with commas; also {KILL_GROUP}, {', '.join(DAMAGE)}",
    )
    parser.add_argument("--beyond", action="store_true", help="let whole groups fail too")
    parser.add_argument("--folder", type=Path, help="keep everything in this (new) directory")
    options = parser.parse_args(arguments)
    kinds = options.kinds.split(",")
    unknown = set(kinds) - {*KINDS, *DAMAGE, KILL_GROUP}
    if unknown:
        parser.error(f"--kinds: {', '.join(sorted(unknown))}: no kind of fault")
    shape = Shape(
        shards=options.shards,
        f=options.f,
        durability=options.durability,
        seed=options.seed,
        rate_per_s=options.rate,
    )
    folder = options.folder or Path(tempfile.mkdtemp(prefix="ziplog-chaos-"))
    bad = run_chaos(
        folder,
        shape,
        options.minutes * 60,
        lambda line: print(line, flush=True),
        kinds=kinds,
        beyond=options.beyond,
    )
    for line in bad:
        print(line)
    if bad:
        print(f"NOT as promised; see {folder}")
        return 1
    print("as promised: no rule is broken")
    if options.folder is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
