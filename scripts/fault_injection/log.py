"""A trial of the log: clients and subscribers of the log itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fault_injection.trial import Shape, Trial
from tests.history.clients import LogPlan
from tests.history.probe import Probe
from tests.history.workload import Workload, read_all

if TYPE_CHECKING:
    import contextlib

#: Weights of a client's operations.
MIX: Final = {
    "insert": 50, "nowait": 10, "batch": 10, "read": 15, "scan": 1, "tail": 3, "seal": 1, "sync": 3,
}  # fmt: skip


@dataclass(frozen=True)
class LogShape(Shape):
    """Size of the cluster and its workload."""

    subscribers: int = 2
    #: Whether clients call `sync` too.
    syncs: bool = True
    #: Share of the inserts that are appends.
    appends: float = 0.3


class LogTrial(Trial):
    """A cluster under clients and subscribers."""

    shape: LogShape
    health: Probe

    def _start(self, stack: contextlib.ExitStack) -> None:
        shape = self.shape
        self._plan = LogPlan(
            bootstrap=self.cluster.endpoint,
            directory=str(self.history),
            mix=MIX if shape.syncs else {name: n for name, n in MIX.items() if name != "sync"},
            seed=shape.seed,
            rate_per_s=shape.rate_per_s,
            timeout_s=3.0,
            appends=shape.appends,
        )
        self._workload = stack.enter_context(Workload(self._plan, shape.clients, shape.subscribers))
        self.clients = self._workload.clients
        self.health = stack.enter_context(Probe(self._plan))
        self._workload.wait_working()

    def _look(self) -> None:
        self._workload.note_losses()

    def _finish(self) -> list[str]:
        self._workload.stop()
        self.health.close()
        if not self._workload.crashed:
            read_all(self._plan)
        return [f"ended by an error: {name}" for name in self._workload.crashed]
