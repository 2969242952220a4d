"""A process of a player in a simulated cluster: the production node and driver, and targets.

A step of a target takes time. Its thread stands still with its process. A step under way may still
have its effect after the process was killed, as a request that was on its way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logplayer.node import PlayerNode
from logplayer.push.messages import decode, decode_any
from logplayer.push.receiver_node import ReceiverNode
from logplayer.steps import CloseTarget, Deliver, OpenTarget, StepEnded
from tests.sim.player.plan import LEASE_MS
from tests.sim.player.targets import Connections, Fault, Sink, Store
from tests.simulator.kernel import MS, US
from tests.simulator.process import Process
from ziplog.core.node import Complete
from ziplog.runtime.driver import Driver

if TYPE_CHECKING:
    from collections.abc import Callable

    from logplayer.contract import Batch, Opened, TargetSpec, Task
    from logplayer.settings import PlayerSettings
    from tests.sim.cluster import SimCluster
    from tests.sim.player.oracle import Oracle

#: Duration of a step; of one of a slow target; and how much later a late step has its effect.
_STEP_NS: Final = (50 * US, 3 * MS)
_SLOW_NS: Final = 400 * MS
_LATE_NS: Final = (1 * MS, 400 * MS)
_PAUSED_NS: Final = 5 * MS


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

    def __init__(self, cluster: SimCluster, unknown: float, outcomes: tuple[str, ...]) -> None:
        """Make no target yet.

        Args:
            cluster: the log.
            unknown: the probability of a step of unknown outcome.
            outcomes: what happens to such a step.

        """
        self.cluster: Final = cluster
        self.targets: Final[dict[str, Store | Sink]] = {}
        self.down: Final[set[str]] = set()
        self.slow: Final[set[str]] = set()
        self.unknown = unknown
        self._outcomes: Final = outcomes
        #: Since when processes do not reach the membership service, by their names.
        self.isolated: Final[dict[str, int]] = {}
        #: The cursors of tasks whose last steps may have an effect later.
        self.late: set[str] = set()

    def fault(self, kind: str, argument: Task | Batch) -> Fault:
        """Return what goes wrong with a step."""
        task: Any = argument if kind == "open" else argument.task  # type: ignore[union-attr]
        random = self.cluster.kernel.random
        if task.target in self.down:
            return "before"
        if random.random() < self.unknown:
            found = random.choice(self._outcomes)
            if found == "late":
                self.late.add(task.cursor)
            return found
        return None

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

    def __init__(self, process: Process, outside: Outside) -> None:
        self._process: Final = process
        self._outside: Final = outside
        self._connections: Final = Connections(outside.targets, outside.fault, outside.later)

    @property
    def _steps(self) -> dict[Any, Any]:
        return {
            OpenTarget: self._begin, Deliver: self._begin, CloseTarget: lambda _effect: None
        }  # fmt: skip

    def _begin(self, effect: OpenTarget | Deliver) -> None:
        task = effect.task if isinstance(effect, OpenTarget) else effect.batch.task
        pause = self._outside.step_ns(task.target)
        self._process.kernel.after(pause, lambda: self._run(effect))

    def _run(self, effect: OpenTarget | Deliver) -> None:
        process, kernel = self._process, self._process.kernel
        if process.program is not self:
            if isinstance(effect, Deliver) and kernel.random.random() < 0.5:
                self._outside.late.add(effect.batch.task.cursor)
                self._outside.later(lambda: self._connections.deliver(effect.batch))
            return
        if process.is_paused:
            kernel.after(_PAUSED_NS, lambda: self._run(effect))
            return
        if isinstance(effect, OpenTarget):
            result: Any = self._connections.open(effect.task)
        else:
            result = self._connections.deliver(effect.batch)
        kernel.trace(f"{process.name}: {_text(effect)}: {result!r}")
        self.driver.post(StepEnded(effect.worker, result))

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
        super().__init__(process, outside)
        self.node: Final = PlayerNode(
            client, [node.endpoint for node in cluster.config.mms], settings,
            owner=f"{process.name}:{process.starts}:{client[:4].hex()}", now=process.clock(),
        )  # fmt: skip
        #: The results of calls.
        self.results: Final[dict[int, Any]] = {}
        #: Claims that another process took.
        self.taken = 0
        for task in self.node.tasks.values():
            self._count_losses(task)
        self.driver = Driver(
            self.node, transport, clock=process.clock, on_halt=process.halt, decode=decode_any,
            carry_out={
                **self._steps,
                Complete: lambda effect: self.results.__setitem__(effect.id, effect.result),
            },
        )  # fmt: skip

    def _count_losses(self, task: Any) -> None:
        lost = task.on_claim_lost

        def on_claim_lost(reason: str) -> None:
            self.taken += "claimed it" in reason
            lost(reason)

        task.on_claim_lost = on_claim_lost

    def _begin(self, effect: OpenTarget | Deliver) -> None:
        process, now = self._process, self._process.kernel.now
        since = self._outside.isolated.get(process.name, now)
        assert now <= since + LEASE_MS * MS, (
            f"silence: {process.name} begins a step {(now - since) // MS} ms after the"
            " membership service was heard"
        )
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
