"""One run: a cluster is disturbed while clients work, heals, and is held against what it promised.

Rule: whatever raises, raises out of `run`; the seed and its faults say the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.sim import verdict
from tests.sim.cluster import SimCluster
from tests.sim.faults import Faults
from tests.sim.history import History
from tests.sim.simulated import simulated
from tests.sim.workload import Reader, Shared, Writer
from ziplog.sim.kernel import MS, Kernel, S
from ziplog.sim.network import Conditions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.sim.plan import Plan

#: Between two looks at the servers' state.
_LOOK_NS: Final = 50 * MS
#: More than any run needs: something goes round and round.
_MAX_STEPS: Final = 20_000_000


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


def run(
    plan: Plan,
    on_trace: Callable[[str], object] | None = None,
    directory: Path | None = None,
) -> Outcome:
    """Carry a plan out.

    Args:
        plan: what happens.
        on_trace: given every line of the trace.
        directory: where the history's files are written, however it ends.

    Raises:
        AssertionError: a promise was broken; or whatever a server or client raised.

    """
    kernel = Kernel(plan.seed, on_trace)
    with simulated(kernel, is_raft_real=plan.is_raft_real):
        live = Run(kernel, plan)
        try:
            return live.outcome()
        finally:
            if directory is not None:
                live.history.write(directory)


class Run:
    """The stages of a run."""

    def __init__(self, kernel: Kernel, plan: Plan) -> None:
        self.kernel: Final = kernel
        self.plan: Final = plan
        self.cluster: Final = SimCluster(kernel, plan)
        self.history: Final = History(seed=plan.seed)
        self.shared: Final = Shared(self.cluster, self.history)
        self.writers: Final = [
            Writer(self.shared, f"writer-{i}", plan) for i in range(plan.writers)
        ]
        self.readers: Final = [Reader(self.shared, f"reader-{i}") for i in range(plan.readers)]
        self.auditor: Final = Reader(self.shared, "auditor", follow=False)
        self.faults: Final = Faults(self.cluster, [*self.writers, *self.readers])
        self.monitor: Final = verdict.Monitor(self.cluster)

    def outcome(self) -> Outcome:
        """Live through it all."""
        self._trace_frames()
        self.cluster.begin()
        began = self.kernel.now
        for client in (*self.writers, *self.readers):
            client.start()
        self.faults.schedule(self.plan.faults)
        self._pass_until(lambda: self.kernel.now >= self._end_of_faults(began), 600 * S)
        healed = self.kernel.now
        self.faults.heal()
        self.cluster.network.conditions = Conditions()
        self.shared.is_over = True
        self._settle()
        records = self._audit()
        self._check_excuses()
        alive = {client.name for client in (*self.writers, *self.readers, self.auditor)}
        was_searched = verdict.final(
            self.cluster, self.history, self.monitor, healed=healed, alive=alive
        )
        return Outcome(
            self.kernel.trace_hash() + self.history.digest(),
            self.kernel.now / S, self.kernel.steps, len(self.history.operations),
            self.faults.done, records, was_searched,
        )  # fmt: skip

    def _end_of_faults(self, began: int) -> int:
        """Return when to heal: the last fault had some time, and the writers theirs."""
        ends = [fault.at_ms + fault.for_ms for fault in self.plan.faults]
        least = self.plan.span_ms if self.plan.naps else 0
        return began + max([least, *ends]) * MS + 2 * S

    def _check_excuses(self) -> None:
        """Check that nobody stopped itself, and that nothing may be lost, without a reason."""
        halts = {
            name: node.halts
            for name, node in self.cluster.nodes.items()
            if node.halts and name not in self.faults.excused
        }
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
            self.monitor.look()
            assert self.kernel.steps < _MAX_STEPS, "something goes round and round"
        return True

    def _settle(self) -> None:
        """Wait until the cluster is whole and every call of writers has ended."""

        def is_settled() -> bool:
            return self.cluster.is_whole() and not self._open()

        if not self._pass_until(is_settled, verdict.HEALED_NS):
            calls = "; ".join(map(str, self._open()[:5]))
            raise AssertionError(
                f"not whole {verdict.HEALED_NS / S:.0f} s after the last fault:"
                f" {self.cluster.states()}; calls under way: {calls or 'none'}"
            )

    def _open(self) -> list[object]:
        """Return the calls under way, but for readers' and those of clients that died."""
        alive = {writer.name for writer in self.writers}
        return [o for o in self.history.open.values() if o.client in alive]

    def _audit(self) -> int:
        """Read the whole log anew, let the readers catch up with it, and count its records."""
        auditor = self.auditor
        auditor.start()
        done = self._pass_until(lambda: auditor.is_done, verdict.HEALED_NS)
        assert done, f"the log cannot be read to its end: {self.cluster.states()}"
        caught_up = self._pass_until(
            lambda: all(reader.delivered >= auditor.delivered for reader in self.readers),
            verdict.HEALED_NS,
        )
        assert caught_up, [(r.name, r.delivered, auditor.delivered) for r in self.readers]
        return auditor.records

    def _trace_frames(self) -> None:
        if self.kernel.is_traced:
            self.cluster.network.on_frame = verdict.teller(self.kernel)
