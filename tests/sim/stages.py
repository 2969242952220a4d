"""The stages of a run: a cluster is disturbed while clients work, heals, and is judged.

What clients do and what is judged is for those who fill the stages in: tests/sim/run (clients of
the log) and tests/sim/database (LogDB). Rule: whatever raises, raises out of `outcome`.
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

#: Between two looks at the servers' state.
_LOOK_NS: Final = 50 * MS
#: More than any run needs: something goes round and round.
_MAX_STEPS: Final = 20_000_000


@dataclass(frozen=True)
class Counts:
    """What became of a database."""

    commits: int
    aborts: int
    #: Transactions of which nobody knows.
    in_doubt: int
    #: Checkpoints in the log, and how often it was trimmed.
    checkpoints: int
    trims: int


@dataclass(frozen=True)
class Outcome:
    """What a run that broke no promise was."""

    #: The same for the same plan, always.
    trace_hash: str
    #: Virtual time that passed, in seconds.
    virtual_s: float
    #: Things that happened in the kernel, calls that clients made, faults carried out.
    steps: int
    operations: int
    faults: int
    #: Records in the log at the end.
    records: int
    #: The history was small enough to search it for an order of all calls.
    was_searched: bool
    #: What became of the database, if there was one.
    database: Counts | None = None


class Run(ABC):
    """The stages of a run, whatever its clients do."""

    def __init__(self, kernel: Kernel, plan: Plan) -> None:
        self.kernel: Final = kernel
        self.plan: Final = plan
        self.cluster: Final = SimCluster(kernel, plan)
        self.history: Final = History(seed=plan.seed)
        self.operator: Final = Operator(self.cluster, self.history)
        self.shared: Final = Shared(self.cluster, self.history)
        #: Those who work, until it is over; each of their calls must end.
        self.workers: Final[list[Client]] = []
        #: Those who look on.
        self.onlookers: Final[list[Client]] = []
        self.monitor: Final = verdict.Monitor(self.cluster)

    def outcome(self) -> Outcome:
        """Live through it all."""
        self._trace_frames()
        clients = [*self.workers, *self.onlookers]
        faults = self.faults = Faults(self.cluster, clients, self.operator)
        self.cluster.begin()
        # A lease can be over, trimmed and forgotten before the first look of a run under way.
        self.monitor.look()
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
        """Start what is neither server nor client."""

    @abstractmethod
    def _open(self) -> list[object]:
        """Return the calls under way, but for onlookers' and those of clients that died."""

    @abstractmethod
    def _audit(self) -> int:
        """Read all that there is, once everything has settled; return the number of records."""

    @abstractmethod
    def _judge(self, healed: int, records: int) -> Outcome:
        """Hold it all against what was promised.

        Args:
            healed: since when nothing disturbs anything, in virtual nanoseconds.
            records: what `_audit` returned.

        """

    def _end_of_faults(self, began: int) -> int:
        """Return when to heal: the last fault had some time, and the writers theirs."""
        ends = [fault.at_ms + fault.for_ms for fault in self.plan.faults]
        least = self.plan.span_ms if self.plan.naps else 0
        return began + max([least, *ends]) * MS + 2 * S

    def _check_excuses(self) -> None:
        """Check that nobody stopped itself, and that nothing may be lost, without a reason."""
        unopened = self.faults.unopened
        found = {
            name: [halt for halt in node.halts if name not in unopened or not is_no_start(halt)]
            for name, node in self.cluster.nodes.items()
            if name not in self.faults.excused
        }
        halts = {name: those for name, those in found.items() if those}
        assert not halts, f"stopped themselves: {halts}"
        losses = self.cluster.state.losses
        assert self.faults.has_cut_power or not losses, f"nobody failed, and yet: {losses}"

    def _pass_until(self, condition: Callable[[], object], within_ns: int) -> bool:
        """Let time pass, and look at the servers all the while; whether the condition came."""
        end = self.kernel.now + within_ns
        while not condition():
            if self.kernel.now >= end:
                return False
            self.kernel.run(_LOOK_NS)
            self.look()
            assert self.kernel.steps < _MAX_STEPS, "something goes round and round"
        return True

    def look(self) -> None:
        """Look at all that can be looked at."""
        self.monitor.look()

    def _settle(self) -> None:
        """Wait until the cluster is whole and every call of writers and operator has ended."""

        def is_settled() -> bool:
            return self.cluster.is_whole() and not self._open()

        if not self._pass_until(is_settled, verdict.HEALED_NS):
            calls = "; ".join(map(str, self._open()[:5]))
            raise AssertionError(
                f"not whole {verdict.HEALED_NS / S:.0f} s after the last fault:"
                f" {self.cluster.states()}; calls under way: {calls or 'none'}"
            )

    def _trace_frames(self) -> None:
        if self.kernel.is_traced:
            self.cluster.network.on_frame = verdict.teller(self.kernel)


def is_no_start(halt: str) -> bool:
    """Whether a process stopped because it could not start; it had done nothing by then."""
    return halt.startswith("it cannot start")
