"""A process of a player in a simulated cluster: the production node and driver, and targets.

A step of a target takes time. Its thread stands still with its process. A step under way may still
have its effect after the process was killed, as a request that was on its way.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from logplayer.calls import StopCall
from logplayer.node import PlayerNode
from logplayer.push.messages import decode, decode_any
from logplayer.push.receiver_node import ReceiverNode
from logplayer.steps import CloseTarget, Deliver, OpenTarget, StepEnded
from tests.sim.player.files import FilesConnection, Killed, SharedDisk, SharedFiles
from tests.sim.player.plan import LEASE_MS
from tests.sim.player.steps import ProcessSteps, StepHistory
from tests.sim.player.targets import Connections, Fault, Sink, Store
from tests.simulator.kernel import MS, US
from tests.simulator.process import Process
from ziplog.core.node import Call, Complete
from ziplog.core.units import NEVER
from ziplog.runtime.driver import Driver

if TYPE_CHECKING:
    from collections.abc import Callable

    from logplayer.contract import Batch, Opened, TargetSpec, Task
    from logplayer.settings import PlayerSettings
    from tests.sim.cluster import SimCluster
    from tests.sim.player.oracle import Oracle
    from tests.sim.player.plan import PlayerPlan

#: Duration of a step; of one of a slow target; and how much later a late step has its effect.
_STEP_NS: Final = (50 * US, 3 * MS)
_SLOW_NS: Final = 400 * MS
_LATE_NS: Final = (1 * MS, 400 * MS)
_PAUSED_NS: Final = 5 * MS
#: A connection is closed so late that its step under way has begun.
_CLOSE_NS: Final = 500 * MS
#: How long a worker stands still in a call of the disk; and how many do so one in another.
_STALL_NS: Final = (1 * MS, 3 * LEASE_MS * MS)
_MAX_STALLS: Final = 3


class ObservedStore(Store):
    """A store that the oracle observes."""

    oracle: Oracle
    spec: TargetSpec

    def open(self, task: Task) -> Opened:
        row = self.rows.get(task.partition)
        if row is not None and row.seek < task.seek and row.birth == task.birth:
            self.oracle.ended(self.spec, task.partition, row)
        opened = super().open(task)
        self.oracle.opened(task)
        return opened

    def deliver(self, batch: Batch) -> bytes | None:
        before = self.rows.get(batch.task.partition)
        try:
            mark = super().deliver(batch)
        except Exception:
            if before is None or before.position != batch.start:
                self.oracle.refused(batch, before)
            raise
        self.oracle.delivered(batch)
        return mark


class ObservedSink(Sink):
    """A sink that the oracle observes."""

    oracle: Oracle
    spec: TargetSpec

    def deliver(self, batch: Batch) -> bytes | None:
        mark = super().deliver(batch)
        self.oracle.check_task(self.spec, batch.task.partition)
        return mark


class Outside:
    """The targets of a run, and what is wrong with them."""

    #: What observes the targets.
    oracle: Oracle

    def __init__(self, cluster: SimCluster, plan: PlayerPlan) -> None:
        """Make no target of a plan yet; `cluster`: the log."""
        self.cluster: Final = cluster
        self.targets: Final[dict[str, Store | Sink | SharedFiles]] = {}
        self.disk: Final = SharedDisk(cluster.kernel.random, shows_late=plan.shows_late)
        self.disk.on_call = self._on_disk_call
        self.down: Final[set[str]] = set()
        self.slow: Final[set[str]] = set()
        self.unknown = plan.unknown
        #: Probability that a worker stands still in a call of the disk.
        self.stalls = plan.stalls
        self._outcomes: Final = plan.outcomes
        #: The steps that use the disk: the process and its program, one in the other.
        self._steps: Final[list[tuple[Process, StepProgram]]] = []
        #: By process: how slow its clock was.
        self.rates: Final[dict[str, float]] = {}
        #: Since when processes do not reach the membership service, by their names.
        self.isolated: Final[dict[str, int]] = {}
        #: The cursors of tasks whose last steps may have an effect later.
        self.late: set[str] = set()
        self.history: Final = StepHistory(lambda: cluster.kernel.now)

    def fault(self, kind: str, argument: Task | Batch) -> Fault:
        """Return what goes wrong with a step."""
        task: Any = argument if kind == "open" else argument.task  # type: ignore[union-attr]
        random = self.cluster.kernel.random
        if task.target in self.down:
            return "before"
        if random.random() < self.unknown:
            found = random.choice(self._outcomes)
            if found == "late" and isinstance(self.targets[task.target], SharedFiles):
                return "after"  # A worker does one step at a time; see `_on_disk_call`.
            if found == "late":
                self.late.add(task.cursor)
            return found
        return None

    def run(self, process: Process, program: StepProgram, act: Callable[[], Any]) -> Any:
        """Run a step; None: the process died in it."""
        self._steps.append((process, program))
        try:
            return act()
        except Killed:
            return None
        finally:
            self._steps.pop()

    def _on_disk_call(self) -> None:
        """Let the worker stand still, sometimes with its process; end it if that died."""
        if not self._steps:
            return
        process, program = self._steps[-1]
        random, kernel = self.cluster.kernel.random, self.cluster.kernel
        is_alive = process.program is program
        if is_alive and len(self._steps) <= _MAX_STALLS and random.random() < self.stalls:
            if random.random() < 1 / 2:
                process.pause()
            kernel.run(random.randrange(*_STALL_NS))
            if process.program is program:
                process.resume()
        if process.program is not program:
            raise Killed

    def step_ns(self, target: str) -> int:
        """Return how long a step takes."""
        random = self.cluster.kernel.random
        return random.randrange(*_STEP_NS) + (_SLOW_NS if target in self.slow else 0)

    def later(self, act: Callable[[], Any]) -> None:
        """Have an effect later."""
        self.cluster.kernel.after(self.cluster.kernel.random.randrange(*_LATE_NS), act)


class StepProgram:
    """A program whose node has steps of targets carried out."""

    driver: Driver

    def __init__(self, process: Process, outside: Outside, owner: str = "") -> None:
        self._process: Final = process
        clock = lambda: process.kernel.now  # noqa: E731 - a clock of two words
        self._history: Final = ProcessSteps(outside.history, clock, owner)
        self._outside: Final = outside
        self._connections: Final = Connections(outside.targets, outside.fault, outside.later)
        #: Those of workers that write files.
        self._files: Final[dict[int, tuple[FilesConnection, Connections]]] = {}

    @property
    def _steps(self) -> dict[Any, Any]:
        return {OpenTarget: self._begin, Deliver: self._begin, CloseTarget: self._close}

    def _connections_of(self, worker: int, name: str) -> Connections:
        outside = self._outside
        target = outside.targets[name]
        if not isinstance(target, SharedFiles):
            return self._connections
        if worker not in self._files:
            own = FilesConnection(target, outside.oracle)
            connections = Connections({name: own}, outside.fault, outside.later)
            self._files[worker] = own, connections
        return self._files[worker][1]

    def _close(self, effect: CloseTarget) -> None:
        """Have the worker close its connection, after its step under way."""
        own, _ = self._files.pop(effect.worker, (None, None))
        if own is not None:
            self._process.kernel.after(_CLOSE_NS, partial(self._end_connection, own))

    def _end_connection(self, own: FilesConnection) -> None:
        if self._process.is_paused or own.is_busy:
            self._process.kernel.after(_PAUSED_NS, partial(self._end_connection, own))
        elif self._process.program is self:
            self._outside.run(self._process, self, own.close)

    def _begin(self, effect: OpenTarget | Deliver) -> None:
        target = _task_of(effect).target
        # On a disk that shows changes late, an owner of a former term may report a step that no
        # later owner finds. The contents of the directory are checked instead.
        is_exactly_once = self._outside.targets[target].stores_position
        is_exactly_once &= not self._outside.disk.shows_late
        self._history.begin(effect, is_exactly_once=is_exactly_once)
        # A worker that is closed ends its step under way with its own connection.
        own = self._connections_of(effect.worker, target)
        self._process.kernel.after(self._outside.step_ns(target), lambda: self._run(effect, own))

    def _run(self, effect: OpenTarget | Deliver, connections: Connections) -> None:
        process, kernel = self._process, self._process.kernel
        if process.program is not self:
            is_sent = isinstance(effect, Deliver) and not self._is_of_files(effect)
            if isinstance(effect, Deliver) and is_sent and kernel.random.random() < 0.5:
                self._outside.late.add(effect.batch.task.cursor)
                self._outside.later(lambda: self._connections.deliver(effect.batch))
            return
        if process.is_paused:
            kernel.after(_PAUSED_NS, lambda: self._run(effect, connections))
            return
        if isinstance(effect, OpenTarget):
            act: Callable[[], Any] = partial(connections.open, effect.task)
        else:
            act = partial(connections.deliver, effect.batch)
        result = self._outside.run(process, self, act)
        if process.program is not self:
            return
        kernel.trace(f"{process.name}: {_text(effect)}: {result!r}")
        self._history.end(effect.worker, result)
        self.driver.post(StepEnded(effect.worker, result))

    def _is_of_files(self, effect: Deliver) -> bool:
        return isinstance(self._outside.targets[effect.batch.task.target], SharedFiles)

    def turn(self) -> None:
        self.driver.run_once()

    def end(self) -> None:
        """Do nothing: all that it had is gone."""


class PlayerProgram(StepProgram):
    """The program of a player's process."""

    def __init__(self, process: Process, outside: Outside, settings: PlayerSettings) -> None:
        transport = process.transport
        assert transport is not None
        cluster, client = outside.cluster, process.kernel.random.randbytes(16)
        super().__init__(process, outside, f"{process.name}:{process.starts}")
        #: Called once it has stopped.
        self._on_stopped: Callable[[], object] = lambda: None
        self.node: Final = PlayerNode(
            client, [node.endpoint for node in cluster.config.mms], settings,
            owner=f"{process.name}:{process.starts}:{client[:4].hex()}", now=process.clock(),
        )  # fmt: skip
        #: Claims that another process took.
        self.taken = 0
        for task in self.node.tasks.values():
            self._count_losses(task)
        self.driver = Driver(
            self.node, transport, clock=process.clock, on_halt=process.halt, decode=decode_any,
            carry_out={**self._steps, Complete: lambda _effect: self._on_stopped()},
        )  # fmt: skip

    def stop(self, then: Callable[[], object]) -> None:
        """Drain all tasks, then call `then`."""
        self._on_stopped = then
        self.driver.post(Call(1, StopCall(NEVER)))

    def _count_losses(self, task: Any) -> None:
        lost = task.on_claim_lost

        def on_claim_lost(reason: str) -> None:
            self.taken += "claimed it" in reason
            lost(reason)

        task.on_claim_lost = on_claim_lost

    def _begin(self, effect: OpenTarget | Deliver) -> None:
        process, now = self._process, self._process.kernel.now
        since = self._outside.isolated.get(process.name, now)
        lease_ns = int(LEASE_MS * MS / self._outside.rates.get(process.name, 1.0))
        assert now <= since + lease_ns, (
            f"silence: {process.name} begins a step {(now - since) // MS} ms after the"
            " membership service was heard"
        )
        # Without records, a step finishes what the target collects.
        is_new = isinstance(effect, Deliver) and effect.batch.start < effect.batch.stop
        stop = effect.batch.stop if is_new else 0
        self._outside.oracle.began(_task_of(effect), f"{process.name}:{process.starts}", stop, now)
        super()._begin(effect)

    def check(self) -> None:
        self.node.check()


class ReceiverProgram(StepProgram):
    """The program of a receiver's process."""

    def __init__(self, process: Process, outside: Outside, spec: TargetSpec) -> None:
        transport = process.transport
        assert transport is not None
        super().__init__(process, outside)
        self._node: Final = ReceiverNode(spec)
        self.driver = Driver(
            self._node, transport, clock=process.clock, on_halt=process.halt, decode=decode,
            carry_out=self._steps,
        )  # fmt: skip

    def check(self) -> None:
        self._node.check()


def _task_of(effect: OpenTarget | Deliver) -> Task:
    return effect.task if isinstance(effect, OpenTarget) else effect.batch.task


def _text(effect: OpenTarget | Deliver) -> str:
    if isinstance(effect, OpenTarget):
        return f"open {effect.task.cursor} term {effect.task.term}"
    batch = effect.batch
    return f"deliver {batch.task.cursor} term {batch.task.term} [{batch.start}, {batch.stop})"


def add_player(outside: Outside, name: str, settings: PlayerSettings) -> Process:
    """Start a process of a player."""

    def start(process: Process) -> PlayerProgram:
        return PlayerProgram(process, outside, settings)

    process = Process(outside.cluster.network, name, None, start)
    process.start()
    return process


def add_receiver(outside: Outside, endpoint: str, spec: TargetSpec) -> Process:
    """Start the process of a receiver."""

    def start(process: Process) -> ReceiverProgram:
        return ReceiverProgram(process, outside, spec)

    process = Process(outside.cluster.network, f"receiver-{spec.name}", endpoint, start)
    process.start()
    return process


def node_of(process: Process) -> PlayerNode | None:
    """Return the node that a process runs; None: it does not run."""
    program = process.program
    return program.node if isinstance(program, PlayerProgram) else None
