"""Applications in virtual time: they read the log, compute on batches, and have output.

An application reads by a subscription behind an ordering layer (`gate`), by a subscription
(`subscribe`) or by a speculation (`speculate`). It uses the bookkeeping of
`ziplog.speculation.process`, so batches and outputs are the same; only computing takes virtual time
instead of a thread's. A subscription's records are final when they come.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from tests.sim.latency import Pair, World, run_in
from tests.sim.scalog import SimLayer
from tests.simulator.kernel import MS
from ziplog.speculation import _Run
from ziplog.types import RID_GENESIS, Delivery

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.sim.cluster import SimCluster
    from tests.simulator.kernel import Kernel
    from tests.simulator.process import Process
    from ziplog.types import Event

KINDS: Final = ("gate", "subscribe", "speculate")
#: Nodes of the gate's layer.
_LAYER_NODES: Final = 3
#: Most records that wait for `apply`; the default of `Log.speculate`.
_MAX_PENDING: Final = 10_000
#: Records at the beginning of a run that are not counted: the gate begins to follow the shards.
WARM_UP: Final = 100


class Setting(NamedTuple):
    """What one application reads, how, and how long it computes."""

    world: World
    kind: str
    #: Mean pause of the writer between two inserts.
    pause_ns: int = 4 * MS
    #: Computing time of a batch.
    compute_ns: int = 0
    #: Interval between two cuts of the gate's layer.
    t_ord_ns: int = MS


class Consumer:
    """The computing of an application: one batch at a time, and output of what is final."""

    def __init__(self, kernel: Kernel, compute_ns: int) -> None:
        self._kernel, self._compute_ns = kernel, compute_ns
        self._run: Final = _Run(RID_GENESIS, _MAX_PENDING)
        self._is_computing = False
        #: By gsn, in ns: when a record was delivered, when its computing began and ended, and when
        #: its output left.
        self.delivered: Final[dict[int, int]] = {}
        self.began: Final[dict[int, int]] = {}
        self.computed: Final[dict[int, int]] = {}
        self.emitted: Final[dict[int, int]] = {}
        #: Number of effects that were undone.
        self.undone = 0

    def add(self, events: Sequence[Event]) -> None:
        """Take the next events."""
        for event in events:
            if type(event) is Delivery:
                self.delivered[event.record.rid.gsn] = self._kernel.now
        if events:
            self._run.add(list(events), is_closed=False)
        self._advance()

    def _advance(self) -> None:
        """Do what `process` does between two waits."""
        run, now = self._run, self._kernel.now
        while (final := run.next_final()) is not None:
            self.emitted[final[0].rid.gsn] = now
            run.on_emitted()
        if self._is_computing:
            return
        self.undone += sum(1 for _ in run.pop_void())
        if run.waiting:
            gsns = [record.rid.gsn for record in run.begin()]
            self.began.update(dict.fromkeys(gsns, now))
            self._is_computing = True
            self._kernel.after(self._compute_ns, partial(self._end, gsns))

    def _end(self, gsns: list[int]) -> None:
        self.computed.update(dict.fromkeys(gsns, self._kernel.now))
        self._is_computing = False
        self._run.end([None] * len(gsns))
        self._advance()


class Application(Pair):
    """A client that inserts after random pauses, and an application that reads."""

    def __init__(self, cluster: SimCluster, setting: Setting, count: int) -> None:
        self.setting = setting
        self.consumer = Consumer(cluster.kernel, setting.compute_ns)
        super().__init__(cluster, WARM_UP + count, 0, speculates=setting.kind == "speculate")

    def _new_reader(self) -> Process:
        if self.setting.kind == "gate":
            SimLayer(self.cluster, _LAYER_NODES, self.setting.t_ord_ns)
        return super()._new_reader()

    def _pause_ns(self) -> int:
        return round(self.cluster.kernel.random.expovariate(1 / self.setting.pause_ns))

    def on_events(self, events: Sequence[Event]) -> None:
        """Pass the events to the application."""
        super().on_events(events)
        self.consumer.add(events)

    @property
    def is_done(self) -> bool:
        return not self.left and self.called.keys() <= self.consumer.emitted.keys()

    def took(self) -> dict[str, list[int]]:
        """Return the durations in ns of each counted record: of its insert, and of its parts.

        `delivery`, `queue`, `compute` and `wait` (for the confirmation) add up to `output`.
        """
        ends = self.consumer
        gsns = list(self.called)[WARM_UP:]
        steps = (self.called, ends.delivered, ends.began, ends.computed, ends.emitted)
        parts = {
            name: [after[gsn] - before[gsn] for gsn in gsns]
            for name, before, after in zip(
                ("delivery", "queue", "compute", "wait"), steps, steps[1:], strict=False
            )
        }
        parts["output"] = [ends.emitted[gsn] - self.called[gsn] for gsn in gsns]
        parts["insert"] = [self.inserted[gsn] for gsn in gsns]
        return parts


def run_application(
    setting: Setting,
    count: int,
    seed: int,
    begin: Callable[[SimCluster, Setting, int], Application] = Application,
) -> Application:
    """Run an application until it has had output for all counted records."""
    world = setting.world._replace(is_raft_real=setting.kind == "gate")
    return run_in(world, lambda cluster: begin(cluster, setting, count), seed)
