"""A cluster under a workload, which is hurt, becomes whole again, and is judged.

    with Trial(folder) as trial:
        trial.nodes.kill("shard-0-0")
        trial.settle()
    verdict = trial.judge()

Rule: the cluster lives until the last reader has read everything. Invariant: when a `Trial` is
left, none of its processes runs any more.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from history import events
from history.clients import Plan
from history.observed import ACKED, gather
from history.probe import Probe
from history.rules import check
from history.workload import Workload, read_all

from fault_injection.nodes import LAUNCHER, Nodes
from ziplog.errors import ZiplogError
from ziplog.local import Cluster

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from history.observed import Observed, Violation

#: Weights of what clients do.
MIX: Final = {"insert": 50, "nowait": 10, "batch": 10, "read": 15, "scan": 1, "tail": 3, "sync": 3}
#: Interval between status requests, in seconds.
_LOOK_S: Final = 0.1
HEALTHY_S: Final = 60.0


class Shape(NamedTuple):
    """Size of the cluster and its workload."""

    shards: int = 2
    f: int = 1
    mms: int = 3
    failure_handlers: int = 3
    durability: Literal["memory", "disk"] = "memory"
    clients: int = 3
    subscribers: int = 2
    #: Operations a second of one client.
    rate_per_s: float = 60.0
    seed: int = 1
    #: Whether clients call `sync` too.
    syncs: bool = True


class Verdict(NamedTuple):
    """Result of a trial: what clients observed, and violations."""

    acknowledged: int
    #: Acknowledged records that the cluster reported as lost.
    lost: int
    violations: list[Violation]
    observed: Observed


class Trial:
    """A cluster with a layer of faults, and a workload on it."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        """Prepare; `folder` gets the cluster's data and the history."""
        self.folder: Final = folder
        self.shape: Final = shape
        self.history: Final = folder / "history"
        self.outages: Final = Outages()
        self._stack: Final = contextlib.ExitStack()
        self._look_at = 0.0

    def __enter__(self) -> Self:
        """Start everything."""
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
            self.plan = Plan(
                self.cluster.endpoint,
                str(self.history),
                MIX if shape.syncs else {name: n for name, n in MIX.items() if name != "sync"},
                seed=shape.seed,
                rate_per_s=shape.rate_per_s,
                timeout_s=3.0,
            )
            self.workload = stack.enter_context(
                Workload(self.plan, shape.clients, shape.subscribers)
            )
            self.probe = stack.enter_context(Probe(self.plan))
            self.workload.wait_working()
            self._stack.push(stack.pop_all())
        return self

    def __exit__(self, *_: object) -> None:
        """Stop everything."""
        self._stack.close()

    def look(self) -> None:
        """Look at the status, not too often: what fails since when, what may be lost."""
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_S
            self.outages.note(self.probe.unhealthy())
            self.workload.note_losses()

    def settle(self, timeout_s: float = HEALTHY_S) -> float:
        """Heal everything; return after how many seconds the cluster is whole.

        Raises:
            TimeoutError: it is not whole by then.

        """
        self.nodes.heal_all()
        try:
            return self.probe.wait_healthy(timeout_s)
        finally:
            self.outages.note(self.probe.unhealthy())

    def judge(self) -> Verdict:
        """Stop the workload, read the whole log, and check the history.

        At level `disk` no record may be lost; at level `memory`, only reported records.

        Raises:
            ZiplogError: the log cannot be read.
            RuntimeError: a client or a subscriber ended by an error.

        """
        self.workload.stop()
        self.probe.close()
        if self.workload.crashed:
            raise RuntimeError(f"ended by an error: {', '.join(self.workload.crashed)}")
        try:
            read_all(self.plan)
        finally:
            observed = gather(events.files_of([self.history]))
        judgement = check(observed, allow_loss=self.shape.durability == "memory")
        acknowledged = sum(state == ACKED for state in observed.records.state)
        return Verdict(acknowledged, len(judgement.lost), judgement.violations, observed)


class Outages:
    """Start and duration of outages of nodes and shards."""

    def __init__(self) -> None:
        self._since: Final[dict[str, float]] = {}
        #: Ended outages, with their seconds, in the order of their ends.
        self.ended: Final[list[tuple[str, float]]] = []

    def note(self, unhealthy: dict[str, str]) -> None:
        """Take what ails now."""
        now = time.monotonic()
        for name in [name for name in self._since if name not in unhealthy]:
            self.ended.append((name, now - self._since.pop(name)))
        for name in unhealthy:
            self._since.setdefault(name, now)

    def of_shards(self) -> list[float]:
        """Return the outages of shards, in seconds."""
        return [seconds for name, seconds in self.ended if name.startswith("shard ")]


def explain(verdict: Verdict, limit: int = 10) -> list[str]:
    """Return the violations as lines."""
    lines = [
        f"VIOLATION {v.rule}: {v.text} [{verdict.observed.where(v.source)}]"
        for v in verdict.violations[:limit]
    ]
    more = len(verdict.violations) - limit
    return [*lines, f"... and {more} more"] if more > 0 else lines


def wrong(error: BaseException) -> str:
    """Return what went wrong, as one line."""
    kind = "" if isinstance(error, ZiplogError | TimeoutError) else f"{type(error).__name__}: "
    return f"{kind}{error}"
