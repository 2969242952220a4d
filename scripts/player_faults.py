"""Inject random faults into processes of a player, its targets and its log, and judge the targets.

    python scripts/player_faults.py --seed 1 --minutes 5

Three processes of one player copy a log under load into SQLite, PostgreSQL (if a server is
installed), an HTTP endpoint that stores positions, a receiver of a push target, and a function.
Prints each fault with its time; then waits until everything is delivered. Exit codes: 0 as promised
(docs/player.md), 1 not. What went wrong stays in a folder that the last line names.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from fault_injection.options import count, positive
from fault_injection.trial import first, in_one_line
from player_trial.trial import Trial

from ziplog.errors import ZiplogError


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def main() -> int:
    """Run the trial that the arguments describe; return the exit code."""
    parser = argparse.ArgumentParser(description="Random faults around a player, and a verdict.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=positive, default=5.0)
    parser.add_argument("--processes", type=count, default=3, help="processes of the player")
    parser.add_argument("--partitions", type=count, default=2, help="of each target")
    parser.add_argument(
        "--broken", action="store_true", help="break a rule of SQL targets: the verdict must fail"
    )
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="player-faults-"))
    try:
        with Trial(
            folder, options.seed, options.processes, options.partitions, is_broken=options.broken
        ) as trial:
            trial.run(60 * options.minutes, say)
            say(f"everything was delivered {trial.settle():.2f} s after the last fault")
            wrong, figures = trial.judge()
            say(figures)
    except (ZiplogError, RuntimeError, OSError) as error:
        wrong = [in_one_line(error)]
    for text in first(wrong):
        say(f"WRONG {text}")
    if wrong:
        say(f"not as promised; see {folder}")
        return 1
    shutil.rmtree(folder)
    say("as promised: each record once, in order, where the target stores positions")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
