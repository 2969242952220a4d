"""A run with players: inserts, faults, healing, and the oracle's checks.

python -m tests.sim.player.run 1 100            # seeds
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from msgspec import structs

import logplayer.source
import ziplog.client.cursors.claims
from logplayer.contract import TargetSpec, cursor_name
from logplayer.settings import PlayerSettings
from tests.sim import verdict
from tests.sim.player.oracle import Oracle
from tests.sim.player.plan import LEASE_MS, PlayerFault, PlayerPlan, draw_player
from tests.sim.player.process import (
    ObservedSink,
    ObservedStore,
    Outside,
    PlayerProgram,
    add_player,
    add_receiver,
    node_of,
)
from tests.sim.player.targets import is_odd
from tests.sim.simulated import simulated
from tests.sim.stages import Outcome, Run
from tests.sim.workload import FETCH_NS, FETCH_RECORDS, Client
from tests.simulator.kernel import MS, Kernel, S
from ziplog.client.common.requests import (
    EditRequest,
    FetchRequest,
    InsertRequest,
    SubscribeRequest,
)
from ziplog.types import RID_GENESIS, CursorInfo, Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable

    from logplayer.contract import Target
    from logplayer.task import PlayerTask
    from tests.sim.workload import Shared
    from tests.simulator.process import Process

PLAYER: Final = "orders"
_CALL_NS: Final = 5 * S
_KEYS: Final = (b"a", b"b", b"c", b"d", b"e", None)
#: A killed process is started again after so long.
_RESTART_NS: Final = 200 * MS


def no_connection() -> Target:
    raise AssertionError("the model of the targets connects")


class Inserter(Client):
    """A client that inserts the records of a run."""

    def __init__(self, shared: Shared, name: str, plan: PlayerPlan) -> None:
        super().__init__(shared, name)
        self.left = self.open = plan.records
        self._think_ns: Final = plan.span_ms * MS // plan.records

    def next_call(self) -> None:
        if not self.left:
            return
        self.left -= 1
        pause = self.random.randrange(2 * self._think_ns)
        self.shared.cluster.kernel.after(pause, self.unless_killed(self._insert))

    def _insert(self) -> None:
        request = InsertRequest(
            self.deadline(60 * S), [self.shared.payload()], RID_GENESIS,
            self.random.choice(_KEYS), 0,
        )  # fmt: skip
        self.program().call(request, self._inserted)

    def _inserted(self, result: Any) -> None:
        if not isinstance(result, BaseException):
            self.shared.known += result
        self.open -= 1
        self.next_call()


class Admin(Client):
    """An operator of cursors."""

    def next_call(self) -> None:
        """Do nothing: the run calls `edit`."""

    def edit(
        self, name: str, what: Any, position: RecordId, then: Callable[[CursorInfo], None]
    ) -> None:
        """Change a cursor."""
        request = EditRequest(self.deadline(_CALL_NS), name, what, position)

        def done(result: Any) -> None:
            if isinstance(result, CursorInfo):
                then(result)

        self.program().call(request, done)


class Auditor(Client):
    """A client that reads the whole log once."""

    def __init__(self, shared: Shared, name: str) -> None:
        super().__init__(shared, name)
        self.records: Final[list[Record]] = []
        self.is_done = False
        self._subscription = 0

    def next_call(self) -> None:
        request = SubscribeRequest(self.deadline(60 * S), RID_GENESIS, follow=False)
        self.program().call(request, self._subscribed)

    def _subscribed(self, number: Any) -> None:
        assert isinstance(number, int), number
        self._subscription = number
        self._fetch()

    def _fetch(self) -> None:
        request = FetchRequest(self.deadline(FETCH_NS), self._subscription, FETCH_RECORDS)
        self.program().call(request, self._fetched)

    def _fetched(self, result: Any) -> None:
        assert not isinstance(result, BaseException), result
        self.records.extend(result.records)
        if result.ended:
            self.is_done = True
        else:
            self._fetch()


class PlayerRun(Run):
    """The stages of such a run."""

    def __init__(self, kernel: Kernel, plan: PlayerPlan) -> None:
        super().__init__(kernel, plan.cluster)
        self.players_plan: Final = plan
        self.outside: Final = Outside(self.cluster, plan.unknown, plan.outcomes)
        targets, specs = self.outside.targets, []
        #: The targets of receivers, with the receivers' endpoints.
        self._behind: Final[list[TargetSpec]] = []
        for number, one in enumerate(plan.targets):
            name = f"target-{number}"
            target = (ObservedStore if one.kind == "store" else ObservedSink)(name)
            spec = TargetSpec(
                name=name, connect=no_connection, stores_position=target.stores_position,
                partitions=one.partitions, batch_records=one.batch_records, retry_first_ms=20,
                retry_last_ms=200, rejected=one.rejected or "stop", keeps_rejected=True,
            )  # fmt: skip
            if one.rejected:
                target.rejects = lambda record: "it is odd" if is_odd(record) else ""
                target.names_rejected = one.names_rejected
            if one.is_pushed:
                behind = spec
                spec = structs.replace(behind, connect=None, receiver=f"10.9.0.{number}:7600")
                self._behind.append(structs.replace(behind, receiver=spec.receiver))
            targets[name] = target
            target.spec = spec
            specs.append(spec)
        self.oracle: Final = Oracle(
            PLAYER,
            specs,
            targets,
            lambda name: self.cluster.state.cursors.get(name),  # noqa: PLW0108 - the state is replaced
        )
        self.oracle.late = self.outside.late
        for target in targets.values():
            target.oracle = self.oracle  # type: ignore[union-attr]
        self.settings: Final = PlayerSettings(
            name=PLAYER, targets=tuple(specs), lease_ms=LEASE_MS, memory_bytes=plan.memory_bytes,
            commit_ms=plan.commit_ms, idle_ms=300,
        )  # fmt: skip
        self.inserter: Final = Inserter(self.shared, "inserter", plan)
        self.workers.append(self.inserter)
        self.admin: Final = Admin(self.shared, "admin")
        self.auditor: Final = Auditor(self.shared, "auditor")
        self.processes: Final[list[Process]] = []
        self.receivers: Final[list[Process]] = []
        self._endings: Final[list[Callable[[], None]]] = []
        self._faults_done = 0

    @property
    def names(self) -> list[str]:
        """The names of all tasks' cursors."""
        return [
            cursor_name(PLAYER, spec.name, partition)
            for spec in self.settings.targets
            for partition in range(spec.partitions)
        ]

    def _prepare(self) -> None:
        self.admin.start()
        for spec in self._behind:
            self.receivers.append(add_receiver(self.outside, spec.receiver, spec))
        for _ in range(self.players_plan.players):
            self._add_player()
        for fault in self.players_plan.faults:
            self.kernel.after(fault.at_ms * MS, partial(self._begin, fault))

    def _add_player(self) -> None:
        name = f"player-{len(self.processes)}"
        self.processes.append(add_player(self.outside, name, self.settings))

    def check_servers(self) -> None:
        super().check_servers()
        self.oracle.check()
        if self.players_plan.is_calm:
            programs = [process.program for process in self.processes]
            taken = sum(one.taken for one in programs if isinstance(one, PlayerProgram))
            assert not taken, f"D6: {taken} claims were taken without a fault"

    def _end_of_faults(self, began: int) -> int:
        plan = self.players_plan
        return began + max([plan.span_ms, *(one.at_ms + one.for_ms for one in plan.faults)]) * MS

    def _settle(self) -> None:
        """End the faults of players and targets, too."""
        for ending in self._endings:
            ending()
        self.outside.unknown = 0.0
        super()._settle()

    def _open(self) -> list[object]:
        return [*self.operator.open, *["inserts"] * bool(self.inserter.open)]

    # --- faults ---

    def _begin(self, fault: PlayerFault) -> None:
        self.kernel.trace(f"fault: {fault}")
        self._faults_done += 1
        acts: dict[str, Callable[[PlayerFault], None]] = {
            "kill-player": self._kill, "pause-player": self._pause, "isolate-player": self._isolate,
            "add-player": lambda _fault: self._add_player(), "target-down": self._down,
            "target-slow": self._slow, "target-empty": self._empty, "lead-mms": self._lead,
            "kill-mms": self._kill_mms, "kill-receiver": self._kill_receiver,
            "pause-receiver": self._pause_receiver, "cut-receiver": self._cut_receiver,
        }  # fmt: skip
        acts.get(fault.kind, self._edit)(fault)

    def _lasting(self, fault: PlayerFault, ending: Callable[[], None]) -> None:
        self._endings.append(ending)
        self.kernel.after(fault.for_ms * MS, ending)

    def _process(self, fault: PlayerFault) -> Process:
        return self.processes[fault.number % len(self.processes)]

    def _target(self, fault: PlayerFault) -> str:
        return self.settings.targets[fault.number % len(self.settings.targets)].name

    def _kill(self, fault: PlayerFault) -> None:
        process = self._process(fault)
        if process.is_up:
            process.kill()
            self.kernel.after(_RESTART_NS, process.start)

    def _pause(self, fault: PlayerFault) -> None:
        process = self._process(fault)
        process.pause()
        self._lasting(fault, process.resume)

    def _isolate(self, fault: PlayerFault) -> None:
        name, network = self._process(fault).name, self.cluster.network
        services = [node.name for node in self.cluster.config.mms]
        for service in services:
            network.cut(name, service)
            network.cut(service, name)
        self.outside.isolated.setdefault(name, self.kernel.now)

        def end() -> None:
            self.outside.isolated.pop(name, None)
            for service in services:
                network.heal(name, service)
                network.heal(service, name)

        self._lasting(fault, end)

    def _receiver(self, fault: PlayerFault) -> Process:
        return self.receivers[fault.number % len(self.receivers)]

    def _kill_receiver(self, fault: PlayerFault) -> None:
        process = self._receiver(fault)
        if process.is_up:
            process.kill()
            self.kernel.after(fault.for_ms * MS, process.start)

    def _pause_receiver(self, fault: PlayerFault) -> None:
        process = self._receiver(fault)
        if process.is_up:
            process.pause()
            self._lasting(fault, process.resume)

    def _cut_receiver(self, fault: PlayerFault) -> None:
        """Cut a receiver off, in one or in both directions."""
        receiver, player = self._receiver(fault).name, self._process(fault).name
        network, ways = self.cluster.network, [(receiver, player), (player, receiver)]
        cut = ways[: 1 + fault.number % 2]
        for way in cut:
            network.cut(*way)

        def end() -> None:
            for way in cut:
                network.heal(*way)

        self._lasting(fault, end)

    def _down(self, fault: PlayerFault) -> None:
        name = self._target(fault)
        self.outside.down.add(name)
        self._lasting(fault, lambda: self.outside.down.discard(name))

    def _slow(self, fault: PlayerFault) -> None:
        name = self._target(fault)
        self.outside.slow.add(name)
        self._lasting(fault, lambda: self.outside.slow.discard(name))

    def _empty(self, fault: PlayerFault) -> None:
        name = self._target(fault)
        target = self.outside.targets[name]
        if isinstance(target, ObservedStore):
            self.oracle.emptied.add(name)
            target.rows.clear()
            self.oracle.forget(name)

    def _lead(self, fault: PlayerFault) -> None:
        group: Any = self.cluster.mms
        leader = group.leader
        if leader:
            group.isolate(leader)
            self._lasting(fault, partial(group.rejoin, leader))

    def _kill_mms(self, fault: PlayerFault) -> None:
        nodes = self.cluster.config.mms
        process = self.cluster.nodes[nodes[fault.number % len(nodes)].name]
        if process.is_up:
            process.kill()

    def _edit(self, fault: PlayerFault) -> None:
        name, known = self.names[fault.number % len(self.names)], self.shared.known
        position = RID_GENESIS
        if fault.kind == "seek":
            position = self.kernel.random.choice((RID_GENESIS, known[-1], known[len(known) // 2]))
        if fault.kind == "pause" and fault.number % 2:
            position = known[-1]
        self._change(name, fault.kind, position)

    def _change(self, name: str, what: str, position: RecordId) -> None:
        def done(info: CursorInfo) -> None:
            if what == "seek":
                self.oracle.sought(name, info)

        self.admin.edit(name, what, position, done)

    # --- the end ---

    def _audit(self) -> int:
        """Read the log; wait until the targets have all of it."""
        self.auditor.start()
        done = self._pass_until(lambda: self.auditor.is_done, verdict.HEALED_NS)
        assert done, f"the log cannot be read: {self.cluster.states()}"
        asked_at = 0

        def is_played() -> bool:
            nonlocal asked_at
            if self._is_played():
                return True
            if self.kernel.now >= asked_at:
                asked_at = self.kernel.now + 3 * LEASE_MS * MS
                self._help_tasks()
            return False

        assert self._pass_until(is_played, verdict.HEALED_NS), f"liveness: {self._states()}"
        are_kept = self._pass_until(self._are_shares_kept, verdict.HEALED_NS)
        assert are_kept, f"shares: {self._states()}"
        return len(self.auditor.records)

    def _help_tasks(self) -> None:
        """Resume paused tasks, and seek those whose targets were emptied, as an operator."""
        for process in self.processes:
            node = node_of(process)
            for task in node.tasks.values() if node is not None else ():
                if task.state == "failed" and task.spec.name in self.oracle.emptied:
                    self._change(task.name, "seek", RID_GENESIS)
        for name in self.names:
            cursor = self.cluster.state.cursors.get(name)
            if cursor is not None and cursor.is_paused:
                self._change(name, "resume", RID_GENESIS)

    def _is_played(self) -> bool:
        last = self.auditor.records[-1].rid.gsn if self.auditor.records else 0
        cursors = [self.cluster.state.cursors.get(name) for name in self.names]
        return all(
            one is not None and one.owner and not one.is_paused and one.position > last
            for one in cursors
        )

    def _owned(self) -> list[list[PlayerTask]]:
        """Return the tasks that each living process holds."""
        nodes = [node for process in self.processes if (node := node_of(process)) is not None]
        return [[task for task in node.tasks.values() if task.claim.is_held] for node in nodes]

    def _are_shares_kept(self) -> bool:
        counts = sorted(map(len, self._owned()))
        return sum(counts) == len(self.names) and counts[-1] - counts[0] <= 1

    def _states(self) -> str:
        rows = [self.cluster.states()]
        for process in self.processes:
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
        repeated = self.oracle.repetitions
        assert not plan.is_calm or not repeated, (
            f"at-least-once: {repeated} repetitions without a fault"
        )
        return Outcome(
            self.kernel.trace_hash(), self.kernel.now / S, self.kernel.steps, plan.records,
            self._faults_done, records, was_searched=False,
        )  # fmt: skip


def run_player(plan: PlayerPlan, on_trace: Callable[[str], object] | None = None) -> Outcome:
    """Execute a plan.

    Raises:
        AssertionError: a guarantee was violated; errors of processes propagate, too.

    """
    kernel = Kernel(plan.seed, on_trace)
    with (
        simulated(kernel),
        patch.object(logplayer.source, "_RETRY_NS", 100 * MS),
        patch.object(ziplog.client.cursors.claims, "_CLAIM_INTERVAL_NS", 50 * MS),
    ):
        return PlayerRun(kernel, plan).outcome()


def main(first: int, last: int, *, is_traced: bool = False) -> int:
    """Run seeds; print those that fail."""
    failed = 0
    for seed in range(first, last + 1):
        try:
            outcome = run_player(draw_player(seed), print if is_traced else None)
        except AssertionError as error:
            failed += 1
            print(f"seed {seed}: {' '.join(str(error).split())[:600]}", flush=True)  # noqa: T201
        else:
            if is_traced:
                print(outcome)  # noqa: T201
    print(f"{last - first + 1} seeds, {failed} failed")  # noqa: T201
    return failed


if __name__ == "__main__":
    arguments = [int(one) for one in sys.argv[1:3]]
    sys.exit(bool(main(arguments[0], arguments[-1], is_traced="--trace" in sys.argv)))
