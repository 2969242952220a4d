"""A database on a cluster, under transactions, which is hurt and then judged.

    with DatabaseTrial(folder, DatabaseShape()) as trial:
        trial.coordinators.kill(0)
        trial.settle()
        verdict = trial.judge()

Rule: everything runs until the last reader has read everything. Invariant: when a trial is left,
none of its processes runs any more.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import time
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from history import events
from history.observed import gather
from history.probe import unhealthy_in
from history.rules import check
from history.transactions import COMMITTED, IN_DOUBT
from history.transactors import BANK, KEYS, TransactPlan, open_accounts, read_database
from history.transactors import run_transactors as run

from fault_injection.coordinators import Coordinators
from ziplog.errors import ZiplogError
from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.context import SpawnProcess
    from pathlib import Path
    from typing import Self

    import ziplog

_SPAWN: Final = multiprocessing.get_context("spawn")
_POLL_S: Final = 0.05
_HEALTHY_S: Final = 60.0
#: Timeout for the last transactions of the threads, in seconds; a resolve takes at most 20 s.
_STOP_S: Final = 40.0


class DatabaseShape(NamedTuple):
    """Size of the cluster and its workload."""

    shards: int = 2
    f: int = 1
    mms: int = 1
    failure_handlers: int = 1
    durability: Literal["memory", "disk"] = "memory"
    coordinators: int = 2
    #: Client processes, and the threads of each.
    processes: int = 4
    threads: int = 4
    mix: dict[str, int] = BANK | KEYS
    rate_per_s: float = 0.0
    seed: int = 1
    checkpoint_every: int = 2_000
    #: The command of a coordinator.
    command: Sequence[str] = (sys.executable, "-m", "logdb")


class DatabaseVerdict(NamedTuple):
    """Result of a trial: counts of transactions, and violations."""

    transactions: int
    committed: int
    in_doubt: int
    #: Descriptions of the violations.
    broken: list[str]
    #: The rules that were broken.
    rules: set[str]


class DatabaseTrial:
    """A cluster, coordinators, and clients that record histories."""

    def __init__(self, folder: Path, shape: DatabaseShape) -> None:
        """Prepare; `folder` gets the cluster's data and the history."""
        self.shape: Final = shape
        self._folder: Final = folder
        self._stack: Final = contextlib.ExitStack()
        self._clients: Final[dict[int, SpawnProcess]] = {}
        self._killed: Final[set[int]] = set()
        self._history: Final = folder / "history"
        #: By file: the bytes read so far, and the commits in them.
        self._read: Final[dict[Path, int]] = {}
        self._commits = 0
        self._log: ziplog.Log | None = None
        self.cluster: Cluster
        self.coordinators: Coordinators
        self.plan: TransactPlan

    def __enter__(self) -> Self:
        """Start everything."""
        shape = self.shape
        with contextlib.ExitStack() as stack:
            self.cluster = stack.enter_context(
                Cluster(
                    self._folder / "data",
                    shards=shape.shards,
                    f=shape.f,
                    mms=shape.mms,
                    failure_handlers=shape.failure_handlers,
                    durability=shape.durability,
                    timeout=60.0,
                )
            )
            self.coordinators = stack.enter_context(
                Coordinators(
                    self._folder / "coordinators",
                    self.cluster.endpoint,
                    shape.coordinators,
                    command=shape.command,
                    options=["--checkpoint-every", str(shape.checkpoint_every)],
                )
            )
            self._history.mkdir()
            self.plan = TransactPlan(
                self.coordinators.endpoints,
                str(self._history),
                shape.mix,
                seed=shape.seed,
                threads=shape.threads,
                rate_per_s=shape.rate_per_s,
            )
            open_accounts(self.plan)
            stack.callback(self._stop_clients)
            for _ in range(shape.processes):
                self.start_client()
            self._stack.push(stack.pop_all())
        return self

    def __exit__(self, *_: object) -> None:
        """Stop everything."""
        self._stack.close()

    # --- clients ---

    def start_client(self) -> None:
        """Start one more process of clients."""
        number = len(self._clients) + 1
        self._clients[number] = _SPAWN.Process(target=run, args=(self.plan, number), daemon=True)
        self._clients[number].start()

    def clients_running(self) -> list[int]:
        """Return the numbers of the processes of clients that run."""
        return [number for number, process in self._clients.items() if process.is_alive()]

    def kill_client(self, number: int) -> None:
        """Kill a process of clients, whatever it is doing."""
        self._killed.add(number)
        self._clients[number].kill()
        self._clients[number].join()

    def _stop_clients(self) -> list[str]:
        """End all clients; return those that ended by an error of their own."""
        for process in self._clients.values():
            if process.is_alive():
                process.terminate()
        deadline = time.monotonic() + _STOP_S
        crashed = []
        for number, process in self._clients.items():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            if number not in self._killed and process.exitcode not in {0, -signal.SIGTERM}:
                crashed.append(f"process {number} of clients ended (exit code {process.exitcode})")
        return crashed

    def wait_commits(self, count: int, timeout_s: float = 60.0) -> None:
        """Wait for `count` more commits.

        Raises:
            TimeoutError: the deadline passed.

        """
        target = self.commits() + count
        deadline = time.monotonic() + timeout_s
        while self.commits() < target:
            if time.monotonic() > deadline:
                raise TimeoutError(f"fewer than {count} commits in {timeout_s:g} s")
            time.sleep(_POLL_S)

    def commits(self) -> int:
        """Return the number of commits in the history files so far."""
        for path in self._history.glob(f"*{events.SUFFIX}"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                lines = file.read()
            # Half a line at the end is read again.
            whole = lines.rfind(b"\n") + 1
            self._read[path] = self._read.get(path, 0) + whole
            self._commits += lines[:whole].count(b'["ok"')
        return self._commits

    # --- at the end ---

    def settle(self) -> None:
        """Let the coordinators run again, and wait until the cluster is whole.

        Raises:
            TimeoutError: it is not whole by then.
            UnavailableError: a coordinator does not come up.

        """
        self.coordinators.heal()
        deadline = time.monotonic() + _HEALTHY_S
        while unhealthy := self.unhealthy():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not whole after {_HEALTHY_S:g} s: {unhealthy}")
            time.sleep(_POLL_S)

    def unhealthy(self) -> dict[str, str]:
        """Return the nodes and shards of the cluster that are not as they should be."""
        try:
            if self._log is None:
                self._log = self._stack.enter_context(self.cluster.connect(timeout=1.0))
            return unhealthy_in(self._log.cluster())
        except ZiplogError as error:
            return {"the membership service": str(error)}

    def judge(self) -> DatabaseVerdict:
        """End the clients, read everything, and hold the history against the rules."""
        broken = self._stop_clients()
        try:
            read_database(self.plan)
        except ZiplogError as error:
            broken.append(f"the database cannot be read at the end: {error}")
        broken += self.coordinators.crashed()
        observed = gather(events.files_of([self._history]))
        violations = check(observed).violations
        done = observed.transactions.all
        return DatabaseVerdict(
            len(done),
            sum(one.state == COMMITTED for one in done),
            sum(one.state == IN_DOUBT for one in done),
            broken + [f"{v.rule}: {v.text} [{observed.where(v.source)}]" for v in violations],
            {v.rule for v in violations},
        )
