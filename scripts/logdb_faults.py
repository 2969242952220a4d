"""Let faults come by chance over a database under transactions, and judge what its clients saw.

    python scripts/logdb_faults.py --seed 1 --minutes 5 [--mix bank|keys|all] [--durability disk]

Coordinators are killed and paused, storage servers, membership and failure handler too, and
processes of clients. Prints each fault with its time; then heals everything, reads the whole
database, and checks that the transactions were strictly serializable, and that no money was lost
(docs/history.md). Exit codes: 0 as promised, 1 not, 2 bad usage. What went wrong stays in a folder
that the last line names.
"""

from __future__ import annotations

import argparse
import random
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fault_injection.database import DatabaseShape, DatabaseTrial
from history.transactors import BANK, KEYS

from ziplog.errors import ZiplogError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MIXES: Final = {"bank": BANK, "keys": KEYS, "all": BANK | KEYS}
#: Weights of the faults.
KINDS: Final = {
    "kill-coordinator": 3,
    "pause-coordinator": 3,
    "blink": 12,
    "kill-server": 1,
    "pause-server": 1,
    "kill-service": 1,
    "kill-client": 1,
}
#: From one fault to the next, and how long one lasts, in seconds.
_PAUSE_S: Final = (0.05, 1.5)
_LASTS_S: Final = (0.1, 2.0)
#: Duration of a pause, in seconds; too short for clients to switch to another coordinator.
_BLINK_S: Final = (0.02, 0.28)
_PRINTED: Final = 10


class Faults:
    """Faults by chance. At times nothing answers; never for longer than a fault lasts."""

    def __init__(
        self, trial: DatabaseTrial, seed: int, kinds: dict[str, int], say: Callable[[str], None]
    ) -> None:
        self._trial: Final = trial
        self._random: Final = random.Random(seed)  # noqa: S311 - no secret
        self._kinds: Final = kinds
        self._say: Final = say
        #: Ends of faults: time, and the action.
        self._ends: Final[list[tuple[float, Callable[[], None]]]] = []
        self.injected = 0

    def run(self, seconds: float) -> None:
        """Inject faults for `seconds`; then heal all."""
        began = time.monotonic()
        strike_at = began + self._random.uniform(*_PAUSE_S)
        while (moment := time.monotonic()) < began + seconds:
            for end in [one for one in self._ends if one[0] <= moment]:
                self._ends.remove(end)
                end[1]()
            if moment >= strike_at:
                strike_at = moment + self._random.uniform(*_PAUSE_S)
                kind = self._random.choices(list(self._kinds), list(self._kinds.values()))[0]
                what = getattr(self, f"_{kind.replace('-', '_')}")()
                if what:
                    self.injected += 1
                    self._say(f"{moment - began:7.2f} s {kind} {what}")
            time.sleep(0.02)
        for _, end_now in self._ends:
            end_now()

    def _later(self, end: Callable[[], None], lasts_s: tuple[float, float] = _LASTS_S) -> None:
        self._ends.append((time.monotonic() + self._random.uniform(*lasts_s), end))

    def _kill_coordinator(self) -> str:
        coordinators = self._trial.coordinators
        number = self._random.choice(coordinators.numbers)
        if not coordinators.is_running(number):
            return ""
        coordinators.kill(number)
        self._later(lambda: coordinators.start(number))
        return str(number)

    def _blink(self) -> str:
        """Pause a coordinator for a moment."""
        return self._pause_coordinator(_BLINK_S)

    def _pause_coordinator(self, lasts_s: tuple[float, float] = _LASTS_S) -> str:
        coordinators = self._trial.coordinators
        number = self._random.choice(coordinators.numbers)
        if not coordinators.is_running(number) or number in coordinators.paused:
            return ""
        coordinators.pause(number)

        def resume() -> None:
            if number in coordinators.paused:
                coordinators.resume(number)

        self._later(resume, lasts_s)
        return str(number)

    def _servers(self) -> list[str]:
        """Return one server of each shard at most: f is 1."""
        shards = self._trial.cluster.config.shards
        return [self._random.choice(shard.replicas).name for shard in shards]

    def _kill_server(self) -> str:
        """Kill a storage server; the cluster starts it again, and recovers the shard."""
        cluster = self._trial.cluster
        name = self._random.choice(self._servers())
        if cluster.dead() or not self._is_healthy():
            return ""
        cluster.kill(name)
        return name

    def _pause_server(self) -> str:
        cluster = self._trial.cluster
        name = self._random.choice(self._servers())
        if cluster.dead() or not self._is_healthy():
            return ""
        cluster.pause(name)
        self._later(lambda: cluster.resume(name))
        return name

    def _kill_service(self) -> str:
        """Kill a node of the membership service or of the failure handler that is not alone."""
        config = self._trial.cluster.config
        groups = [group for group in (config.mms, config.failure_handlers) if len(group) > 2]
        if not groups or not self._is_healthy():
            return ""
        name = self._random.choice(self._random.choice(groups)).name
        self._trial.cluster.kill(name)
        return name

    def _is_healthy(self) -> bool:
        """Whether all servers are up: with two dead ones, a shard may lose records in memory."""
        return not self._trial.unhealthy()

    def _kill_client(self) -> str:
        running = self._trial.clients_running()
        if not running:
            return ""
        number = self._random.choice(running)
        self._trial.kill_client(number)
        self._trial.start_client()
        return str(number)


def run_faults(
    folder: Path,
    shape: DatabaseShape,
    seconds: float,
    say: Callable[[str], None],
    kinds: dict[str, int] | None = None,
) -> list[str]:
    """Run the trial; return the violations.

    Args:
        folder: gets the cluster's data and the history.
        shape: the size of the cluster and its workload.
        seconds: the duration of the faults.
        say: called with a line for each event.
        kinds: of faults, with their weights.

    """
    try:
        with DatabaseTrial(folder, shape) as trial:
            trial.wait_commits(10)
            faults = Faults(trial, shape.seed, kinds or KINDS, say)
            faults.run(seconds)
            trial.settle()
            trial.wait_commits(10)
            verdict = trial.judge()
    except (ZiplogError, OSError, TimeoutError) as error:
        return [f"{type(error).__name__}: {error}"]
    say(
        f"{faults.injected} faults; {verdict.transactions} transactions,"
        f" {verdict.committed} committed, {verdict.in_doubt} in doubt"
    )
    return verdict.broken


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments say; return the exit code."""
    parser = argparse.ArgumentParser(description="Faults by chance over a database, and a verdict.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--mix", choices=MIXES, default="all")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--coordinators", type=int, default=2)
    parser.add_argument("--processes", type=int, default=4, help="of clients")
    parser.add_argument("--threads", type=int, default=4, help="of each of them")
    parser.add_argument("--durability", choices=("memory", "disk"), default="memory")
    parser.add_argument("--rate", type=float, default=20.0, help="transactions a second, a thread")
    parser.add_argument("--checkpoint-every", type=int, default=2_000, metavar="RECORDS")
    parser.add_argument("--command", help="command of a coordinator, instead of python -m logdb")
    parser.add_argument("--folder", type=Path, help="keep everything in this (new) directory")
    options = parser.parse_args(arguments)
    shape = DatabaseShape(
        shards=options.shards,
        mms=3,
        failure_handlers=3,
        durability=options.durability,
        coordinators=options.coordinators,
        processes=options.processes,
        threads=options.threads,
        mix=MIXES[options.mix],
        rate_per_s=options.rate,
        seed=options.seed,
        checkpoint_every=options.checkpoint_every,
    )
    if options.command:
        shape = shape._replace(command=shlex.split(options.command))
    folder = options.folder or Path(tempfile.mkdtemp(prefix="ziplog-logdb-"))
    bad = run_faults(folder, shape, options.minutes * 60, lambda line: print(line, flush=True))
    for line in bad[:_PRINTED]:
        print(f"VIOLATION {line}")
    if len(bad) > _PRINTED:
        print(f"... and {len(bad) - _PRINTED} more")
    if bad:
        print(f"NOT as promised; see {folder}")
        return 1
    print("as promised: no rule is broken")
    if options.folder is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
