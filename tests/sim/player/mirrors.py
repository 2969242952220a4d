"""A run with mirrors: production nodes and targets, and a target log in memory.

    a target's step begins --> its thread stops before each call of the target log --> step ends

Only one thread runs at a time: the kernel continues a step some time later, unless its process is
paused or dead. So owners overlap within their steps. Calls fail before or after their effect, or
have it later. At the end a reader of the target log must get each task's records once, in order.
"""

from __future__ import annotations

import threading
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple
from unittest.mock import patch

import logplayer.source
import ziplog.client.cursors.claims
from logplayer.contract import TargetSpec, cursor_name
from logplayer.node import PlayerNode
from logplayer.partitions import partition_of
from logplayer.settings import PlayerSettings
from logplayer.steps import CloseTarget, Deliver, OpenTarget, StepEnded
from logplayer.targets import log_target
from logplayer.targets.log_target import LogTarget
from tests.sim import verdict
from tests.sim.plan import Plan, draw
from tests.sim.player.clients import Admin, Auditor, Inserter
from tests.sim.player.repetitions import RepeatingInserter, check_mirror, items
from tests.sim.simulated import simulated
from tests.sim.stages import Outcome, Run
from tests.simulator.kernel import MS, US, Kernel, S
from tests.simulator.process import Process
from tests.unit.logplayer.targets.mirrors import Client, Death, TargetLog
from ziplog.client.common.requests import EditRequest
from ziplog.core.node import Complete
from ziplog.runtime.driver import Driver
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logplayer.contract import Target

FaultKind = Literal[
    "kill-player", "pause-player", "leave-shard", "lose-memory", "recreate", "trim-source",
]  # fmt: skip
#: Weights of the faults of a drawn plan.
WEIGHTS: Final[dict[FaultKind, int]] = {
    "kill-player": 5, "pause-player": 6, "leave-shard": 3, "lose-memory": 3,
}  # fmt: skip
LEASE_MS: Final = 600
PLAYER: Final = "orders"
TARGET: Final = "copy"
_UNIT_ROWS: Final = 2
#: Duration of a call of the target log, how much later a late one has its effect, and how often
#: the target log flushes.
_CALL_NS: Final = (50 * US, 4 * MS)
_LATE_NS: Final = (1 * MS, 400 * MS)
_FLUSH_NS: Final = 30 * MS
_PAUSED_NS: Final = 5 * MS
_RESTART_NS: Final = 200 * MS
#: A deleted cursor is created again once all that its processes have sent is there.
_QUIET_NS: Final = 600 * MS


class MirrorFault(NamedTuple):
    """A fault of a process or of the target log, or an operator's change."""

    at_ms: int
    kind: FaultKind
    number: int = 0
    for_ms: int = 0


class MirrorPlan(NamedTuple):
    """The plan of one run."""

    seed: int
    #: Number of processes.
    players: int
    partitions: int
    records: int
    #: Probability that a call of the target log fails.
    failures: float
    #: Time in which records are inserted and faults begin.
    span_ms: int
    faults: tuple[MirrorFault, ...]
    #: Probability that an insert repeats a row of the source, which has no archives.
    repeats: float = 0.0
    commit_ms: int = 50

    @property
    def cluster(self) -> Plan:
        """The plan of the cluster of the source."""
        return draw(self.seed, faults=0)._replace(
            shards=1 + self.seed % 2, f=0, durability="memory", mms=1, handlers=1, writers=0,
            readers=0, calls=0, naps=False, span_ms=self.span_ms, is_raft_real=False,
        )  # fmt: skip


def draw_mirror(seed: int) -> MirrorPlan:
    """Return the plan of a seed."""
    random = Random(f"mirror {seed}")
    span_ms = random.choice((1_000, 2_000, 4_000))
    kinds = random.choices(list(WEIGHTS), list(WEIGHTS.values()), k=random.choice((0, 2, 4, 7)))
    faults = sorted(
        MirrorFault(
            random.randrange(span_ms), kind, random.randrange(9),
            random.choice((100, LEASE_MS // 2, 2 * LEASE_MS, 4 * LEASE_MS)),
        )
        for kind in kinds
    )  # fmt: skip
    return MirrorPlan(
        seed, random.choice((1, 2, 3)), random.choice((1, 1, 2)), random.choice((20, 60, 150)),
        random.choice((0.0, 0.02, 0.1)), span_ms, tuple(faults),
    )  # fmt: skip


def pairs(payloads: Sequence[bytes], _keys: object = None) -> list[tuple[int, int]]:
    """Split rows into units of two."""
    stops = range(0, len(payloads), _UNIT_ROWS)
    return [(at, min(at + _UNIT_ROWS, len(payloads))) for at in stops]


class Step:
    """A step of a target; its thread stops before each call of the target log."""

    #: The step that runs.
    current: Step

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act: Final = act
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._order = ""
        self.result: Any = None
        self.has_ended = False
        self._thread: Final = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def resume(self, order: str = "") -> None:
        """Continue to the next call, or to the end; `order`: what goes wrong with the call."""
        self._order, Step.current = order, self
        self._go.release()
        self._stopped.acquire()
        if self.has_ended:
            self._thread.join()

    def end(self) -> None:
        """Let it die at the call where it stands."""
        while not self.has_ended:
            self.resume("die")

    def stop(self, _what: str) -> str:
        """Wait for the next order, in the step's thread."""
        self._stopped.release()
        self._go.acquire()
        if self._order == "die":
            raise Death
        return self._order

    def _run(self) -> None:
        self._go.acquire()
        try:
            if self._order != "die":
                self.result = self._act()
        except Death:
            pass
        except Exception as error:  # noqa: BLE001 - the node decides
            self.result = error
        self.has_ended = True
        self._stopped.release()


class Outside:
    """The target log of a run, and what is wrong with it."""

    def __init__(self, kernel: Kernel, failures: float) -> None:
        self.kernel: Final = kernel
        self.failures = failures
        self.log: Final = TargetLog(shards=3)
        self.steps: Final[set[Step]] = set()

    def start(self) -> None:
        """Flush the log from time to time."""
        self.log.flush()
        self.kernel.after(_FLUSH_NS, self.start)

    def connect(self) -> Client:
        return Client(self.log, lambda what: Step.current.stop(what))  # noqa: PLW0108 - a later step

    def order(self) -> str:
        """Return what goes wrong with a call."""
        random = self.kernel.random
        if random.random() >= self.failures:
            return ""
        order = random.choice(("lost", "late", "reply"))
        if order == "late":
            self.kernel.after(random.randrange(*_LATE_NS), self.log.place_late)
        return order

    def end(self) -> None:
        """End the threads of all steps."""
        for step in self.steps:
            step.end()


class MirrorProgram:
    """The program of a player's process."""

    def __init__(self, process: Process, endpoints: list[str], outside: Outside,
                 settings: PlayerSettings) -> None:  # fmt: skip
        assert process.transport is not None
        client = process.kernel.random.randbytes(16)
        self._process: Final = process
        self._outside: Final = outside
        #: By worker.
        self._targets: Final[dict[int, LogTarget]] = {}
        self.node: Final = PlayerNode(
            client, endpoints, settings,
            owner=f"{process.name}:{process.starts}:{client[:4].hex()}", now=process.clock(),
        )  # fmt: skip
        self.driver: Final = Driver(
            self.node, process.transport, clock=process.clock, on_halt=process.halt,
            carry_out={
                OpenTarget: self._begin, Deliver: self._begin,
                CloseTarget: lambda effect: self._targets.pop(effect.worker, None),
                Complete: lambda _effect: None,
            },
        )  # fmt: skip

    def _begin(self, effect: OpenTarget | Deliver) -> None:
        target = self._targets.get(effect.worker)
        if target is None:
            target = LogTarget(self._outside.connect, None, has_envelope=False)
            self._targets[effect.worker] = target
        if isinstance(effect, OpenTarget):
            step = Step(partial(target.open, effect.task))
        else:
            step = Step(partial(target.deliver, effect.batch))
        self._outside.steps.add(step)
        self._later(lambda: self._continue(effect.worker, step))

    def _later(self, act: Callable[[], None]) -> None:
        kernel = self._process.kernel
        kernel.after(kernel.random.randrange(*_CALL_NS), act)

    def _continue(self, worker: int, step: Step) -> None:
        process, kernel = self._process, self._process.kernel
        if process.program is not self:
            if kernel.random.random() < 0.5:
                step.resume(self._outside.order())  # A request that was on its way.
            step.end()
        elif process.is_paused:
            kernel.after(_PAUSED_NS, lambda: self._continue(worker, step))
            return
        else:
            step.resume(self._outside.order())
            if not step.has_ended:
                self._later(lambda: self._continue(worker, step))
                return
            kernel.trace(f"{process.name}: worker {worker}: {step.result!r}")
            self.driver.post(StepEnded(worker, step.result))
        self._outside.steps.discard(step)

    def turn(self) -> None:
        self.driver.run_once()

    def check(self) -> None:
        self.node.check()

    def end(self) -> None:
        """Do nothing: all that it had is gone."""


def no_connection() -> Target:
    raise AssertionError("the program connects")


class MirrorRun(Run):
    """The stages of such a run."""

    def __init__(self, kernel: Kernel, plan: MirrorPlan) -> None:
        super().__init__(kernel, plan.cluster)
        self._mirror_plan: Final = plan
        self.outside: Final = Outside(kernel, plan.failures)
        spec = TargetSpec(
            name=TARGET, connect=no_connection, stores_position=True, partitions=plan.partitions,
            batch_records=5, retry_first_ms=20, retry_last_ms=200,
        )  # fmt: skip
        self._settings: Final = PlayerSettings(
            name=PLAYER, targets=(spec,), lease_ms=LEASE_MS, memory_bytes=2_000,
            commit_ms=plan.commit_ms, idle_ms=300,
        )  # fmt: skip
        self._names: Final = [cursor_name(PLAYER, TARGET, n) for n in range(plan.partitions)]
        given: Any = plan
        self.inserter: Final = (
            RepeatingInserter(self.shared, "inserter", given, plan.repeats)
            if plan.repeats
            else Inserter(self.shared, "inserter", given)
        )
        self.workers.append(self.inserter)
        self._admin: Final = Admin(self.shared, "admin")
        self._auditor: Final = Auditor(self.shared, "auditor")
        self._processes: Final[list[Process]] = []
        #: Number of rows of former cursors, which were deleted.
        self._former = 0
        #: A task has refused to continue, so the cursor was created again.
        self._was_refused = False
        self._faults_done = 0

    def _prepare(self) -> None:
        plan = self._mirror_plan
        self._admin.start()
        if plan.repeats:
            self._auditor.start()
        self.outside.start()
        endpoints = [node.endpoint for node in self.cluster.config.mms]
        for number in range(plan.players):
            process = Process(
                self.cluster.network, f"player-{number}", None,
                lambda process: MirrorProgram(process, endpoints, self.outside, self._settings),
            )  # fmt: skip
            self._processes.append(process)
            process.start()
        for fault in plan.faults:
            self.kernel.after(fault.at_ms * MS, partial(self._begin, fault))

    def _end_of_faults(self, began: int) -> int:
        plan = self._mirror_plan
        ends = [one.at_ms + one.for_ms for one in plan.faults]
        return began + max([plan.span_ms, *ends]) * MS + 2 * _QUIET_NS

    def _settle(self) -> None:
        for process in self._processes:
            process.resume()
        self.outside.failures = 0.0
        self.outside.log.finalize()
        super()._settle()

    def _open(self) -> list[object]:
        return [*self.operator.open, *["inserts"] * bool(self.inserter.open)]

    # --- faults ---

    def _begin(self, fault: MirrorFault) -> None:
        self.kernel.trace(f"fault: {fault}")
        self._faults_done += 1
        process, log = self._processes[fault.number % len(self._processes)], self.outside.log
        match fault.kind:
            case "kill-player" if process.is_up:
                process.kill()
                self.kernel.after(_RESTART_NS, partial(self._start, process))
            case "pause-player":
                process.pause()
                self.kernel.after(fault.for_ms * MS, process.resume)
            case "leave-shard":
                live = [number for number, one in log.shards.items() if one.state == "live"]
                if len(live) > 1:
                    log.leave(live[fault.number % len(live)])
                    self.kernel.after(fault.for_ms * MS, log.finalize)
            case "lose-memory":
                log.lose_memory()
            case "recreate":
                self._recreate()
            case "trim-source":
                self._trim_source()

    def _start(self, process: Process) -> None:
        if not process.is_up:
            process.start()

    def _trim_source(self) -> None:
        """Trim what the cursor has passed and the auditor has read."""
        cursor = self.cluster.state.cursors.get(self._names[0])
        if cursor is not None and self._auditor.records:
            last = self._auditor.records[-1].rid.gsn
            self._admin.trim(RecordId(min(cursor.position, last), 0), force=False)

    def _recreate(self) -> None:
        """End all processes, delete the cursor, and start them again."""
        for process in self._processes:
            process.kill()

        def deleted(result: Any) -> None:
            assert result is None, result
            self._former = len(self.outside.log.read())
            for process in self._processes:
                self._start(process)

        def delete() -> None:
            request = EditRequest(self._admin.deadline(5 * S), self._names[0], "delete")
            self._admin.program().call(request, deleted)

        self.kernel.after(_QUIET_NS, delete)

    # --- the end ---

    def _audit(self) -> int:
        if not self._mirror_plan.repeats:
            self._auditor.start()
        assert self._pass_until(lambda: self._auditor.is_done, verdict.HEALED_NS)
        records = self._auditor.records
        last = records[-1].rid.gsn

        def is_played() -> bool:
            if not self._was_refused and "is not the record to which" in self._states():
                self._was_refused = True
                self._recreate()  # As the task's error asks for.
            cursors = [self.cluster.state.cursors.get(name) for name in self._names]
            return all(one is not None and one.position > last for one in cursors)

        assert self._pass_until(is_played, verdict.HEALED_NS), f"liveness: {self._states()}"
        return len(records)

    def _states(self) -> str:
        programs = [one.program for one in self._processes]
        return "; ".join(
            f"{task.name}: {task.state} at {task.delivery.position}, {task.error}"
            for program in programs
            if isinstance(program, MirrorProgram)
            for task in program.node.tasks.values()
        )

    def _judge(self, healed: int, records: int) -> Outcome:  # noqa: ARG002 - as of every run
        self.monitor.check_end()
        partitions = self._mirror_plan.partitions
        found = self.outside.log.read()
        parts = {one.payload: partition_of(one, partitions) for one in self._auditor.records}
        if isinstance(self.inserter, RepeatingInserter):
            self._check_repetitions(self.inserter)
            partitions = 0
        for part in range(partitions):
            wanted = [one for one in self._auditor.records if parts[one.payload] == part]
            self._compare(
                part, [(one.key, one.payload) for one in wanted],
                [one for one in found if parts[one[1]] == part],
            )  # fmt: skip
        return Outcome(
            self.kernel.trace_hash(), self.kernel.now / S, self.kernel.steps,
            self._mirror_plan.records, self._faults_done, records, was_searched=False,
        )  # fmt: skip

    def _check_repetitions(self, inserter: RepeatingInserter) -> None:
        """Compare the rows of a deleted cursor, and those of the present one."""
        trim, found = self.cluster.state.trim, self.outside.log.read()
        allowed = items(self._auditor.records, inserter.repetitions, trim)
        if self._was_refused:
            assert any(one.is_repetition for one in allowed), "a task has failed without a reason"
            check_mirror(found[: self._former], allowed, is_whole=False)
            allowed = [one for one in allowed if one.gsn >= trim]
        check_mirror(found[self._former :], allowed, is_whole=True)

    def _compare(self, part: int, wanted: list[Any], found: list[Any]) -> None:
        """Compare what a reader gets: a deleted cursor has made a copy of the first records."""
        expected = wanted[: self._former] + wanted
        assert found == expected, f"exactly-once: the mirror of {part} has {found}, not {expected}"


def run_mirror(plan: MirrorPlan, on_trace: Callable[[str], object] | None = None) -> Outcome:
    """Execute a plan.

    Raises:
        AssertionError: a guarantee was violated; errors of processes propagate, too.

    """
    kernel = Kernel(plan.seed, on_trace)
    with (
        simulated(kernel),
        patch.object(log_target, "split_into_row_units", pairs),
        patch.object(logplayer.source, "_RETRY_NS", 100 * MS),
        patch.object(ziplog.client.cursors.claims, "_CLAIM_INTERVAL_NS", 50 * MS),
    ):
        run = MirrorRun(kernel, plan)
        try:
            return run.outcome()
        finally:
            run.outside.end()
