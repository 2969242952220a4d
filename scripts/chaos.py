"""Inject random faults into a cluster of its own under load, and judge what its clients saw.

    python scripts/chaos.py --seed 1 --minutes 10 [--f 2] [--durability disk]
    python scripts/chaos.py --workload logdb [--mix bank|keys|all]

The workload is clients and subscribers of the log, or transactions of a LogDB database, of which
the coordinators fail too. Prints each fault with its time; then heals everything, waits until the
cluster is whole, reads all of it with a new client, and checks the history (docs/history.md). Exit
codes: 0 as promised, 1 not, or nothing was tried, 2 bad usage. What went wrong stays in a folder
that the last line names.
"""

from __future__ import annotations

import argparse
import random
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fault_injection.database import DatabaseShape, DatabaseTrial
from fault_injection.log import LogShape, LogTrial
from fault_injection.options import count, count_or_zero, not_negative, positive, share
from fault_injection.schedule import KINDS, Chaos, kinds_of
from fault_injection.trial import first, in_one_line, untried

from tests.history.report import figures_line
from tests.history.transactors import BANK, KEYS
from ziplog.errors import ZiplogError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fault_injection.trial import Trial

MIXES: Final = {"bank": BANK, "keys": KEYS, "all": BANK | KEYS}


def run_chaos(
    trial: Trial,
    seconds: float,
    say: Callable[[str], None],
    *,
    kinds: Sequence[str] = KINDS,
    beyond: bool = False,
) -> list[str]:
    """Run a trial under random faults; return the violations.

    Args:
        trial: not yet entered.
        seconds: the duration of the faults.
        say: called with a line for each event.
        kinds: of faults of the cluster's nodes.
        beyond: fail whole groups too.

    """
    try:
        with trial:
            began = time.monotonic()

            def note(text: str) -> None:
                line = f"{time.monotonic() - began:7.2f} s  {text}"
                say(line)
                trial.note(line)

            seed = trial.shape.seed
            chaos = Chaos(trial.nodes, seed, kinds, trial.health.unhealthy, note, beyond=beyond)
            chance = random.Random(seed)  # noqa: S311 - no secret
            disturbances = list(trial.disturbances(chance, note))

            def each() -> None:
                trial.look()
                for disturb in disturbances:
                    disturb()

            chaos.run(seconds, each)
            say(f"whole {trial.settle():.2f} s after everything was healed")
            say(_outages(chaos.injected, trial.outages.of_shards()))
            verdict = trial.judge()
            figures = verdict.figures
            done = figures["acknowledged"] + figures.get("committed", 0)
            shows_nothing = untried(chaos.injected, done)
    except (ZiplogError, RuntimeError, OSError) as error:
        return [in_one_line(error)]
    say(figures_line(figures))
    return verdict.broken + shows_nothing


def _outages(faults: int, seconds: list[float]) -> str:
    """Return the number of faults of nodes, and the outages that these caused."""
    if not seconds:
        return f"{faults} faults of nodes, no outage of a shard"
    return (
        f"{faults} faults of nodes, {len(seconds)} outages of shards:"
        f" median {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Random faults under load, and a verdict.")
    parser.add_argument("--workload", choices=("log", "logdb"), default="log")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=positive, default=10.0)
    parser.add_argument("--shards", type=count, default=2)
    parser.add_argument("--f", type=count_or_zero, default=1)
    parser.add_argument("--durability", choices=("memory", "disk"), default="memory")
    parser.add_argument(
        "--levels", action="store_true", help="change the durability level every few seconds"
    )
    parser.add_argument(
        "--clients", "--processes", type=count, help="client processes (3; LogDB: 4)"
    )
    parser.add_argument(
        "--rate",
        type=not_negative,
        help="operations a second of a client (60; of a LogDB thread: 20)",
    )
    parser.add_argument(
        "--appends", type=share, default=LogShape.appends, metavar="SHARE",
        help=f"of the log's inserts: 0.0 to 1.0 ({LogShape.appends})",
    )  # fmt: skip
    parser.add_argument(
        "--kinds", type=kinds_of, default=KINDS, help=f"of faults, with commas: {', '.join(KINDS)}"
    )
    parser.add_argument("--beyond", action="store_true", help="let whole groups fail too")
    parser.add_argument("--folder", type=Path, help="keep everything in this (new) directory")
    logdb = parser.add_argument_group("of the workload logdb")
    logdb.add_argument("--mix", choices=MIXES, default="all")
    logdb.add_argument("--coordinators", type=count, default=2)
    logdb.add_argument("--threads", type=count, default=4, help="of each client process")
    logdb.add_argument("--checkpoint-every", type=count, default=2_000, metavar="RECORDS")
    logdb.add_argument("--command", help="command of a coordinator, instead of python -m logdb")
    return parser


def _trial(options: argparse.Namespace, folder: Path) -> Trial:
    common: dict[str, Any] = {
        "shards": options.shards,
        "f": options.f,
        "durability": options.durability,
        "seed": options.seed,
        "changes_level": options.levels,
    }
    if options.clients is not None:
        common["clients"] = options.clients
    if options.rate is not None:
        common["rate_per_s"] = options.rate
    if options.workload == "log":
        return LogTrial(folder, LogShape(**common, appends=options.appends))
    if options.command:
        common["command"] = shlex.split(options.command)
    shape = DatabaseShape(
        **common,
        coordinators=options.coordinators,
        threads=options.threads,
        mix=MIXES[options.mix],
        checkpoint_every=options.checkpoint_every,
    )
    return DatabaseTrial(folder, shape)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments say; return the exit code."""
    options = _parser().parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="ziplog-chaos-"))
    broken = run_chaos(
        _trial(options, folder),
        options.minutes * 60,
        lambda line: print(line, flush=True),
        kinds=options.kinds,
        beyond=options.beyond,
    )
    for line in first(broken):
        print(line)
    if broken:
        print(f"NOT as promised; see {folder}")
        return 1
    print("as promised: no rule is broken")
    if options.folder is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
