"""A cluster under a workload, which is hurt, becomes whole again, and is judged.

    with LogTrial(folder, LogShape()) as trial:
        trial.nodes.kill("shard-0-0")
        trial.settle()
        verdict = trial.judge()

A workload is a subclass: clients of the log (`log`), or of a database in it (`database`). Rule: the
cluster lives until the last reader has read everything. Invariant: when a trial is left, none of
its processes runs any more.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from fault_injection.nodes import LAUNCHER, Nodes
from tests.history import events, report
from tests.history.observed import gather
from tests.history.rules import check
from ziplog.config import load
from ziplog.deploy import config_reload
from ziplog.deploy.supervisor import CLUSTER_FILE
from ziplog.errors import ZiplogError
from ziplog.local import Cluster

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Self

    from tests.history.events import Recorder
    from tests.history.probe import Health
    from tests.history.processes import ClientProcesses

#: Interval between status requests, in seconds.
_LOOK_S: Final = 0.1
_HEALTHY_S: Final = 60.0
#: Interval between changes of the durability level, and time for the nodes to follow, in seconds.
_CHANGE_LEVEL_S: Final = (2.0, 10.0)
_APPLY_S: Final = 1.0
#: Interval between kills of a client, in seconds; each is replaced by a new one.
_KILL_CLIENT_S: Final = (7.5, 22.5)


@dataclass(frozen=True)
class Shape:
    """Size of the cluster, and what all workloads have."""

    shards: int = 2
    f: int = 1
    mms: int = 3
    failure_handlers: int = 3
    durability: Literal["memory", "disk"] = "memory"
    #: Whether the durability level changes meanwhile.
    changes_level: bool = False
    #: Client processes.
    clients: int = 3
    #: Operations a second of one client; 0: no limit.
    rate_per_s: float = 60.0
    seed: int = 1


class Verdict(NamedTuple):
    """Result of a trial."""

    #: Numbers of checked operations (`tests.history.report.summary`).
    figures: dict[str, Any]
    #: Violations, and processes that ended by an error; a line each.
    broken: list[str]


class Trial(ABC):
    """A cluster with a layer of faults, and a workload that records its history."""

    shape: Shape
    cluster: Cluster
    nodes: Nodes
    clients: ClientProcesses
    health: Health

    def __init__(self, folder: Path, shape: Shape) -> None:
        """Prepare; `folder` gets the cluster's data and the history."""
        self.folder: Final = folder
        self.shape = shape
        self.history: Final = folder / "history"
        self.outages: Final = Outages()
        self._stack: Final = contextlib.ExitStack()
        self._recorder: Recorder
        self._look_at = 0.0

    def __enter__(self) -> Self:
        """Start everything; returns when the clients work."""
        shape = self.shape
        with contextlib.ExitStack() as stack:
            self.cluster = stack.enter_context(
                Cluster(
                    self.folder / "data",
                    shards=shape.shards,
                    f=shape.f,
                    mms=shape.mms,
                    failure_handlers=shape.failure_handlers,
                    durability=shape.durability,
                    launcher=[LAUNCHER],
                    timeout=60.0,
                )
            )
            self.nodes = Nodes(self.folder / "data")
            self.history.mkdir()
            path = self.history / f"trial{events.SUFFIX}"
            self._recorder = stack.enter_context(events.Recorder(path, "trial"))
            self._start(stack)
            self._stack.push(stack.pop_all())
        return self

    def __exit__(self, *_: object) -> None:
        """Stop everything."""
        self._stack.close()

    # --- of a workload ---

    @abstractmethod
    def _start(self, stack: contextlib.ExitStack) -> None:
        """Start the workload and the health check; return when the clients work."""

    def _heal(self) -> None:  # noqa: B027 - the log has nothing else
        """Heal what is not a node of the cluster."""

    def _look(self) -> None:  # noqa: B027 - a database has nothing more
        """Look at what only this workload has."""

    @abstractmethod
    def _finish(self) -> list[str]:
        """Stop the clients, and read everything; return what ended by an error.

        Raises:
            ZiplogError: it cannot be read.

        """

    def disturbances(self, chance: random.Random, say: Callable[[str], None]) -> Iterator[Occasion]:
        """Yield the random faults that hit other processes than the nodes of the cluster.

        Args:
            chance: of all random choices.
            say: called with a line for each fault.

        """

        def replace_client() -> None:
            running = self.clients.running()
            if running:
                number = chance.choice(running)
                self.clients.kill(number)
                self.clients.start()
                say(f"kill client {number}")

        yield Occasion(chance, _KILL_CLIENT_S, replace_client)
        if self.shape.changes_level:
            yield Occasion(chance, _CHANGE_LEVEL_S, lambda: self._change_level(say))

    def _change_level(self, say: Callable[[str], None]) -> None:
        """Change the durability level in the cluster file, and signal the nodes that run."""
        path = self.folder / "data" / CLUSTER_FILE
        before = load(path).durability
        level = "disk" if before == "memory" else "memory"
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(f'durability = "{before}"', f'durability = "{level}"'))
        with contextlib.suppress(ZiplogError):  # dead and paused nodes follow later
            config_reload.apply(config_reload.plan(path), _APPLY_S)
        say(f"durability {level}")

    # --- of all workloads ---

    def note(self, text: str) -> None:
        """Write a fault into the history."""
        self._recorder.call(events.Fault(events.now(), text))

    def look(self) -> None:
        """Look at the status, not too often: what fails since when, what may be lost."""
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_S
            self.outages.note(self.health.unhealthy())
            self._look()

    def settle(self) -> float:
        """Heal everything; return after how many seconds the cluster is whole.

        Raises:
            TimeoutError: it is not whole in time.
            UnavailableError: a process does not come up.

        """
        began = time.monotonic()
        self.nodes.heal_all()
        self._heal()
        try:
            self.health.wait_healthy(_HEALTHY_S)
        finally:
            self.outages.note(self.health.unhealthy())
        return time.monotonic() - began

    def judge(self) -> Verdict:
        """Stop the workload, read everything, and check the history.

        At level `disk` no record may be lost; at level `memory`, or if the level changes, only
        reported records.
        """
        try:
            ended = self._finish()
        except ZiplogError as error:
            ended = [f"it cannot be read at the end: {error}"]
        self._recorder.close()
        observed = gather(events.files_of([self.history]))
        may_lose = self.shape.durability == "memory" or self.shape.changes_level
        judgement = check(observed, allow_loss=may_lose)
        return Verdict(report.summary(judgement), [*ended, *report.violation_lines(judgement)])


class Occasion:
    """Acts at random intervals, whenever it is called and an action is due."""

    def __init__(
        self, chance: random.Random, interval_s: tuple[float, float], act: Callable[[], None]
    ) -> None:
        """Prepare; the first action is due after an interval."""
        self._chance, self._interval_s, self._act = chance, interval_s, act
        self._due = self._next()

    def _next(self) -> float:
        return time.monotonic() + self._chance.uniform(*self._interval_s)

    def __call__(self) -> None:
        """Act if it is time."""
        if time.monotonic() >= self._due:
            self._due = self._next()
            self._act()


class Outages:
    """Start and duration of outages of nodes and shards."""

    def __init__(self) -> None:
        self._since: Final[dict[str, float]] = {}
        #: Ended outages, with their seconds, in the order of their ends.
        self.ended: Final[list[tuple[str, float]]] = []

    def note(self, unhealthy: dict[str, str]) -> None:
        """Record which nodes and shards are unhealthy now."""
        now = time.monotonic()
        for name in [name for name in self._since if name not in unhealthy]:
            self.ended.append((name, now - self._since.pop(name)))
        for name in unhealthy:
            self._since.setdefault(name, now)

    def of_shards(self) -> list[float]:
        """Return the outages of shards, in seconds."""
        return [seconds for name, seconds in self.ended if name.startswith("shard ")]


def untried(faults: int, operations: int) -> list[str]:
    """Return why a trial shows nothing: no fault was injected, or no operation was done."""
    found = []
    if not faults:
        found.append("no fault was injected: the trial shows nothing")
    if not operations:
        found.append("no operation was done: the trial shows nothing")
    return found


def first(lines: list[str], limit: int = 10) -> list[str]:
    """Return the first lines, and the number of the others."""
    more = len(lines) - limit
    return [*lines[:limit], f"... and {more} more"] if more > 0 else lines


def in_one_line(error: BaseException) -> str:
    """Return what went wrong, as one line."""
    kind = "" if isinstance(error, ZiplogError | TimeoutError) else f"{type(error).__name__}: "
    return f"{kind}{error}"
