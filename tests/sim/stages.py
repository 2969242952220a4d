"""Stages of a run: faults while clients work, healing, checks.

Subclasses define the clients and the checks: tests/sim/run (clients of the log) and
tests/sim/database (LogDB). Rule: every error propagates out of `outcome`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.sim import verdict
from tests.sim.cluster import SimCluster
from tests.sim.faults import Faults
from tests.sim.history import History
from tests.sim.operator import Operator
from tests.sim.workload import Shared
from tests.simulator.kernel import MS, S
from tests.simulator.network import Conditions

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.plan import Plan
    from tests.sim.workload import Client
    from tests.simulator.kernel import Kernel

#: Interval between checks of the servers' state.
_LOOK_NS: Final = 50 * MS
#: Maximum number of kernel steps: more mean an endless loop.
_MAX_STEPS: Final = 20_000_000


@dataclass(frozen=True)
class Counts:
    """Counts of a database's run."""

    commits: int
    aborts: int
    #: Transactions with an unknown outcome.
    in_doubt: int
    #: Numbers of checkpoints and trims.
    checkpoints: int
    trims: int


@dataclass(frozen=True)
class Outcome:
    """The facts of a run that violated no guarantee."""

    #: The trace hash: equal for equal plans.
    trace_hash: str
    #: Duration in virtual seconds.
    virtual_s: float
    #: Numbers of kernel steps, client calls and injected faults.
    steps: int
    operations: int
    faults: int
    #: Records in the log at the end.
    records: int
    #: The history was small enough for the linearizability check.
    was_searched: bool
    #: The counts of the database, if there was one.
    database: Counts | None = None


class Run(ABC):
    """The stages of a run with any clients."""

    def __init__(self, kernel: Kernel, plan: Plan) -> None:
        self.kernel: Final = kernel
        self.plan: Final = plan
        self.cluster: Final = SimCluster(kernel, plan)
        self.history: Final = History(seed=plan.seed)
        self.operator: Final = Operator(self.cluster, self.history)
        self.shared: Final = Shared(self.cluster, self.history)
        #: Clients that work until the end; each of their calls must end.
        self.workers: Final[list[Client]] = []
        #: Clients that only read.
        self.onlookers: Final[list[Client]] = []
        self.monitor: Final = verdict.Monitor(self.cluster)

    def outcome(self) -> Outcome:
        """Run all stages; return the outcome."""
        self._trace_frames()
        clients = [*self.workers, *self.onlookers]
        faults = self.faults = Faults(self.cluster, clients, self.operator)
        self.cluster.begin()
        # A lease may be over, trimmed and dropped before the first periodic check.
        self.monitor.check()
        self._prepare()
        began = self.kernel.now
        for client in clients:
            client.start()
        faults.schedule(self.plan.faults)
        self._pass_until(lambda: self.kernel.now >= self._end_of_faults(began), 600 * S)
        healed = self.kernel.now
        faults.heal()
        self.cluster.network.conditions = Conditions()
        self.shared.is_over = True
        self._settle()
        self.operator.check_end()
        records = self._audit()
        self._check_excuses()
        return self._judge(healed, records)

    @abstractmethod
    def _prepare(self) -> None:
        """Start the processes that are neither server nor client."""

    @abstractmethod
    def _open(self) -> list[object]:
        """Return the open calls, except those of readers and of dead clients."""

    @abstractmethod
    def _audit(self) -> int:
        """Read all records after the run has settled; return their number."""

    @abstractmethod
    def _judge(self, healed: int, records: int) -> Outcome:
        """Check all guarantees.

        Args:
            healed: the end of the last fault, in virtual nanoseconds.
            records: the result of `_audit`.

        """

    def _end_of_faults(self, began: int) -> int:
        """Return when to heal: after the last fault and the writers' time."""
        ends = [fault.at_ms + fault.for_ms for fault in self.plan.faults]
        least = self.plan.span_ms if self.plan.naps else 0
        return began + max([least, *ends]) * MS + 2 * S

    def _check_excuses(self) -> None:
        """Check that every self-stop and every reported loss has a fault as its reason."""
        unopened = self.faults.unopened
        found = {
            name: [halt for halt in node.halts if name not in unopened or not is_no_start(halt)]
            for name, node in self.cluster.nodes.items()
            if name not in self.faults.excused
        }
        halts = {name: those for name, those in found.items() if those}
        assert not halts, f"stopped themselves: {halts}"
        losses = self.cluster.state.losses
        assert self.faults.may_lose or not losses, f"losses without a failure: {losses}"

    def _pass_until(self, condition: Callable[[], object], within_ns: int) -> bool:
        """Run with periodic checks until a condition holds; return whether it holds."""
        end = self.kernel.now + within_ns
        while not condition():
            if self.kernel.now >= end:
                return False
            self.kernel.run(_LOOK_NS)
            self.check_servers()
            assert self.kernel.steps < _MAX_STEPS, "endless loop: too many steps"
        return True

    def check_servers(self) -> None:
        """Check the servers' state."""
        self.monitor.check()

    def _settle(self) -> None:
        """Run until the cluster is whole and every call of writers and operator has ended."""

        def is_settled() -> bool:
            given_up = set(self.cluster.state.lost_regions) - self.cluster.lost_regions
            return self.cluster.is_whole() and not self._open() and not given_up

        if not self._pass_until(is_settled, verdict.HEALED_NS):
            calls = "; ".join(map(str, self._open()[:5]))
            raise AssertionError(
                f"not whole {verdict.HEALED_NS / S:.0f} s after the last fault:"
                f" {self.cluster.states()}; open calls: {calls or 'none'}"
            )

    def _trace_frames(self) -> None:
        if self.kernel.is_traced:
            self.cluster.network.on_frame = verdict.frame_tracer(self.kernel)


def is_no_start(halt: str) -> bool:
    """Whether a process stopped because it could not start; it had no effect."""
    return halt.startswith("it cannot start")
