"""A run with players: inserts, faults, healing, and the oracle's checks.

python -m tests.sim.player.run 1 100            # seeds
python -m tests.sim.player.run 1 100 --pushed   # with all targets behind receivers
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Final
from unittest.mock import patch

from msgspec import structs

import logplayer.source
import ziplog.client.cursors.claims
from logplayer.contract import TargetSpec
from logplayer.settings import PlayerSettings
from tests.sim import verdict
from tests.sim.player.clients import Admin, Auditor, Inserter
from tests.sim.player.disturbances import Disturbances
from tests.sim.player.files import MODULES, ROLL_S, SharedFiles
from tests.sim.player.oracle import Oracle
from tests.sim.player.plan import LEASE_MS, PlayerPlan, TargetPlan, draw_player, draw_pushed
from tests.sim.player.process import ObservedSink, ObservedStore, Outside, PlayerProgram, node_of
from tests.sim.player.targets import is_odd
from tests.sim.simulated import simulated
from tests.sim.stages import Outcome, Run
from tests.simulator.disk import installed
from tests.simulator.kernel import MS, Kernel, S

if TYPE_CHECKING:
    from collections.abc import Callable

    from logplayer.contract import Target
    from logplayer.node import PlayerNode
    from logplayer.task import PlayerTask

PLAYER: Final = "orders"


def no_connection() -> Target:
    raise AssertionError("the model of the targets connects")


class PlayerRun(Run):
    """The stages of such a run."""

    def __init__(self, kernel: Kernel, plan: PlayerPlan) -> None:
        super().__init__(kernel, plan.cluster)
        self.players_plan: Final = plan
        self.outside: Final = Outside(self.cluster, plan)
        #: The targets of receivers, with the receivers' endpoints.
        self._behind: Final[list[TargetSpec]] = []
        specs = [self._add_target(number, one) for number, one in enumerate(plan.targets)]
        state = self.cluster
        self.oracle: Final = Oracle(
            PLAYER,
            specs,
            self.outside.targets,
            lambda name: state.state.cursors.get(name),  # noqa: PLW0108 - the state is replaced
            lambda: state.state.trim,
        )
        self.outside.oracle = self.oracle
        self.oracle.late = self.outside.late
        for target in self.outside.targets.values():
            if isinstance(target, ObservedStore | ObservedSink):
                target.oracle = self.oracle
        self.settings: Final = PlayerSettings(
            name=PLAYER, targets=tuple(specs), lease_ms=LEASE_MS, memory_bytes=plan.memory_bytes,
            commit_ms=plan.commit_ms, idle_ms=300,
        )  # fmt: skip
        self.inserter: Final = Inserter(self.shared, "inserter", plan)
        self.workers.append(self.inserter)
        self.auditor: Final = Auditor(self.shared, "auditor")
        self.disturbances: Final = Disturbances(
            self.outside, self.settings, Admin(self.shared, "admin"), self.auditor
        )

    def _add_target(self, number: int, plan: TargetPlan) -> TargetSpec:
        """Make a target; return its settings."""
        name = f"target-{number}"
        target: ObservedStore | ObservedSink | SharedFiles
        if plan.kind == "files":
            target = SharedFiles(name, self.outside.disk, plan.roll_bytes)
        else:
            target = (ObservedStore if plan.kind == "store" else ObservedSink)(name)
        self.outside.targets[name] = target
        spec = TargetSpec(
            name=name, connect=no_connection, stores_position=target.stores_position,
            partitions=plan.partitions, batch_records=plan.batch_records,
            linger_ms=plan.linger_ms, retry_first_ms=20,
            retry_last_ms=200, rejected=plan.rejected or "stop", keeps_rejected=True,
            roll_s=ROLL_S if plan.kind == "files" else 0,
        )  # fmt: skip
        if not isinstance(target, SharedFiles):
            target.spec = spec
            target.names_rejected = plan.names_rejected
            if plan.rejected:
                target.rejects = lambda record: "it is odd" if is_odd(record) else ""
        if plan.is_pushed:
            receiver = f"10.9.0.{number}:7600"
            self._behind.append(structs.replace(spec, receiver=receiver))
            return structs.replace(spec, connect=None, receiver=receiver, roll_s=0)
        return spec

    def _prepare(self) -> None:
        self.disturbances.start()
        self.auditor.start()
        for spec in self._behind:
            self.disturbances.add_receiver(spec)
        for _ in range(self.players_plan.players):
            self.disturbances.add_player()
        for fault in self.players_plan.faults:
            self.kernel.after(fault.at_ms * MS, partial(self.disturbances.begin, fault))

    def check_servers(self) -> None:
        super().check_servers()
        self.oracle.check()
        self.oracle.check_pauses(self.kernel.now)
        for name in self.disturbances.names:
            self.outside.history.on_cursor(name, self.cluster.state.cursors.get(name))
        for node in self._nodes():
            self.oracle.check_trims(node.tasks.values())
        if self.players_plan.is_calm:
            programs = [process.program for process in self.disturbances.processes]
            taken = sum(one.taken for one in programs if isinstance(one, PlayerProgram))
            assert not taken, f"D6: {taken} claims were taken without a fault"

    def _end_of_faults(self, began: int) -> int:
        plan = self.players_plan
        return began + max([plan.span_ms, *(one.at_ms + one.for_ms for one in plan.faults)]) * MS

    def _settle(self) -> None:
        """End the faults of players and targets, too."""
        self.disturbances.end()
        super()._settle()

    def _open(self) -> list[object]:
        return [*self.operator.open, *["inserts"] * bool(self.inserter.open)]

    # --- the end ---

    def _audit(self) -> int:
        """Wait until the targets have all of the log."""
        done = self._pass_until(lambda: self.auditor.is_done, verdict.HEALED_NS)
        assert done, f"the log cannot be read: {self.cluster.states()}"
        asked_at = 0

        def is_played() -> bool:
            nonlocal asked_at
            if self._is_played():
                return True
            if self.kernel.now >= asked_at:
                asked_at = self.kernel.now + 3 * LEASE_MS * MS
                self.disturbances.help_tasks()
            return False

        assert self._pass_until(is_played, verdict.HEALED_NS), f"liveness: {self._states()}"
        are_kept = self._pass_until(self._are_shares_kept, verdict.HEALED_NS)
        assert are_kept, f"shares: {self._states()}"
        return len(self.auditor.records)

    def _is_played(self) -> bool:
        last = self.auditor.records[-1].rid.gsn if self.auditor.records else 0
        if any(self.oracle.is_behind(*_task_of(name), last) for name in self.disturbances.names):
            return False
        cursors = [self.cluster.state.cursors.get(name) for name in self.disturbances.names]
        return all(
            one is not None and one.owner and not one.is_paused and one.position > last
            for one in cursors
        )

    def _nodes(self) -> list[PlayerNode]:
        """Return the nodes of the living processes."""
        found = map(node_of, self.disturbances.processes)
        return [node for node in found if node is not None]

    def _owned(self) -> list[list[PlayerTask]]:
        """Return the tasks that each living process holds."""
        return [
            [task for task in node.tasks.values() if task.claim.is_held] for node in self._nodes()
        ]

    def _are_shares_kept(self) -> bool:
        counts = sorted(map(len, self._owned()))
        return sum(counts) == len(self.disturbances.names) and counts[-1] - counts[0] <= 1

    def _states(self) -> str:
        rows = [self.cluster.states()]
        for process in self.disturbances.processes:
            node = node_of(process)
            if node is not None:
                rows += [
                    f"{process.name} {task.name}: {task.state} at {task.delivery.position},"
                    f" looked {task.delivery.looked}, committed {task.claim.committed},"
                    f" {task.error}"
                    for task in node.tasks.values()
                ]
        return "; ".join(rows)

    def _judge(self, healed: int, records: int) -> Outcome:  # noqa: ARG002 - as of every run
        plan = self.players_plan
        self.monitor.check_end()
        self.oracle.check_end(self.auditor.records)
        self.outside.history.check()
        repeated = self.oracle.repetitions
        assert not plan.is_calm or not repeated, (
            f"at-least-once: {repeated} repetitions without a fault"
        )
        return Outcome(
            self.kernel.trace_hash(), self.kernel.now / S, self.kernel.steps, plan.records,
            self.disturbances.count, records, was_searched=False,
        )  # fmt: skip


def _task_of(name: str) -> tuple[str, int]:
    """Return the target and the partition of a cursor."""
    _, target, partition = name.split("/")
    return target, int(partition)


def run_player(plan: PlayerPlan, on_trace: Callable[[str], object] | None = None) -> Outcome:
    """Execute a plan.

    Raises:
        AssertionError: a guarantee was violated; errors of processes propagate, too.

    """
    kernel = Kernel(plan.seed, on_trace)
    with (
        simulated(kernel),
        installed(MODULES, kernel.random),
        patch.object(logplayer.source, "_RETRY_NS", 100 * MS),
        patch.object(ziplog.client.cursors.claims, "_CLAIM_INTERVAL_NS", 50 * MS),
    ):
        return PlayerRun(kernel, plan).outcome()


def main(first: int, last: int, *, is_pushed: bool = False, is_traced: bool = False) -> int:
    """Run seeds; print those that fail."""
    failed = 0
    for seed in range(first, last + 1):
        try:
            plan = (draw_pushed if is_pushed else draw_player)(seed)
            outcome = run_player(plan, print if is_traced else None)
        except AssertionError as error:
            failed += 1
            print(f"seed {seed}: {' '.join(str(error).split())[:600]}", flush=True)  # noqa: T201
        else:
            if is_traced:
                print(outcome)  # noqa: T201
    print(f"{last - first + 1} seeds, {failed} failed")  # noqa: T201
    return failed


if __name__ == "__main__":
    arguments = [int(one) for one in sys.argv[1:] if not one.startswith("-")]
    has = set(sys.argv)
    failures = main(
        arguments[0], arguments[-1], is_pushed="--pushed" in has, is_traced="--trace" in has
    )
    sys.exit(bool(failures))
