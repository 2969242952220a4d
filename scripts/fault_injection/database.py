"""A trial of LogDB: coordinators on the cluster, and clients that run transactions.

Coordinators are killed and paused more often than nodes. At times none answers, but never for
longer than a fault lasts.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from fault_injection.coordinators import Coordinators
from fault_injection.trial import Occasion, Shape, Trial
from tests.history import events
from tests.history.probe import Health
from tests.history.processes import ClientProcesses
from tests.history.transactors import (
    BANK,
    KEYS,
    TransactPlan,
    open_accounts,
    read_database,
    run_transactors,
)

if TYPE_CHECKING:
    import contextlib
    import random
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_POLL_S: Final = 0.05
#: Commits after which the clients work.
_WORKING: Final = 10
#: Time limit of a wait for commits, in seconds.
_COMMITS_S: Final = 60.0
#: Weights of the faults of coordinators.
_KILL, _PAUSE, _BLINK = "kill", "pause", "blink"
_WEIGHTS: Final = {_KILL: 3, _PAUSE: 3, _BLINK: 12}
#: From one fault to the next, and how long one lasts, in seconds.
_INTERVAL_S: Final = (0.05, 1.5)
_LASTS_S: Final = (0.1, 2.0)
#: Duration of a blink, in seconds; too short for clients to switch to another coordinator.
_BLINK_S: Final = (0.02, 0.28)


@dataclass(frozen=True)
class DatabaseShape(Shape):
    """Size of the cluster, its database and its workload."""

    clients: int = 4
    rate_per_s: float = 20.0
    coordinators: int = 2
    #: Of each client process.
    threads: int = 4
    mix: dict[str, int] = field(default_factory=lambda: BANK | KEYS)
    checkpoint_every: int = 2_000
    #: The command of a coordinator.
    command: Sequence[str] = (sys.executable, "-m", "logdb")


class DatabaseTrial(Trial):
    """A database under transactions."""

    shape: DatabaseShape
    coordinators: Coordinators

    def _start(self, stack: contextlib.ExitStack) -> None:
        shape = self.shape
        #: By file: the bytes read so far, and the commits in them.
        self._read: dict[Path, int] = {}
        self._commits = 0
        self.coordinators = stack.enter_context(
            Coordinators(
                self.folder / "coordinators",
                self.cluster.endpoint,
                shape.coordinators,
                command=shape.command,
                options=["--checkpoint-every", str(shape.checkpoint_every)],
            )
        )
        self._plan = TransactPlan(
            coordinators=self.coordinators.endpoints,
            directory=str(self.history),
            mix=shape.mix,
            seed=shape.seed,
            threads=shape.threads,
            rate_per_s=shape.rate_per_s,
        )
        open_accounts(self._plan)
        self.health = stack.enter_context(Health(self.cluster.endpoint))
        self.clients = ClientProcesses("process of clients", run_transactors, self._plan)
        stack.callback(self.clients.stop)
        for _ in range(shape.clients):
            self.clients.start()
        self.wait_commits(_WORKING)

    def _heal(self) -> None:
        self.coordinators.heal()

    def settle(self) -> float:
        """Heal everything; return after how many seconds the database is whole.

        Raises:
            TimeoutError: it is not whole in time, or commits nothing.
            UnavailableError: a coordinator does not come up.

        """
        took = super().settle()
        self.wait_commits(_WORKING)
        return took

    def _finish(self) -> list[str]:
        ended = self.clients.stop()
        read_database(self._plan)
        return ended + self.coordinators.crashed()

    def disturbances(self, chance: random.Random, say: Callable[[str], None]) -> Iterator[Occasion]:
        """Yield the kills of clients, and the faults of coordinators."""
        yield from super().disturbances(chance, say)
        faults = _CoordinatorFaults(self.coordinators, chance, say)
        yield Occasion(chance, _INTERVAL_S, faults.inject)
        yield Occasion(chance, (0.0, 0.0), faults.end_due)

    def wait_commits(self, count: int) -> None:
        """Wait for `count` more commits.

        Raises:
            TimeoutError: the deadline passed.

        """
        target = self.commits() + count
        deadline = time.monotonic() + _COMMITS_S
        while self.commits() < target:
            if time.monotonic() > deadline:
                raise TimeoutError(f"fewer than {count} commits in {_COMMITS_S:g} s")
            time.sleep(_POLL_S)

    def commits(self) -> int:
        """Return the number of commits in the history files so far."""
        for path in self.history.glob(f"*{events.SUFFIX}"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                lines = file.read()
            # Half a line at the end is read again.
            whole = lines.rfind(b"\n") + 1
            self._read[path] = self._read.get(path, 0) + whole
            self._commits += lines[:whole].count(b'["ok"')
        return self._commits


class _CoordinatorFaults:
    """Kills and pauses coordinators at random; each for a while."""

    def __init__(
        self, coordinators: Coordinators, chance: random.Random, say: Callable[[str], None]
    ) -> None:
        self._coordinators: Final = coordinators
        self._chance: Final = chance
        self._say: Final = say
        #: Coordinators that are down, with the time of the end.
        self._down: Final[dict[int, float]] = {}

    def inject(self) -> None:
        """Strike one coordinator, unless it is down."""
        coordinators, chance = self._coordinators, self._chance
        number = chance.choice(coordinators.numbers)
        kind = chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        if number in self._down or not coordinators.is_running(number):
            return
        (coordinators.kill if kind == _KILL else coordinators.pause)(number)
        lasts = chance.uniform(*(_BLINK_S if kind == _BLINK else _LASTS_S))
        self._down[number] = time.monotonic() + lasts
        self._say(f"{kind} coordinator {number} for {lasts:.2f} s")

    def end_due(self) -> None:
        """End the faults that have lasted long enough."""
        for number in [n for n, end in self._down.items() if end <= time.monotonic()]:
            del self._down[number]
            if number in self._coordinators.paused:
                self._coordinators.resume(number)
            self._coordinators.start(number)
