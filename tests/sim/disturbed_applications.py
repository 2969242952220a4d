"""Applications whose log is disturbed: uneven rates, changes of shards, a straggler, a kill.

Each is an `Application` of `tests.sim.applications`; it ends by itself.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from tests.sim.applications import WARM_UP, Application, Setting
from tests.sim.history import History
from tests.sim.latency import Loop
from tests.sim.operator import Operator
from tests.sim.plan import server_name
from tests.simulator.kernel import MS, S
from ziplog.types import Confirmed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.sim.cluster import SimCluster
    from ziplog.client.common import requests
    from ziplog.types import Event

#: More inserts than any of these runs has.
_ENDLESS: Final = 1_000_000
#: Interval at which a run looks at the cluster.
_LOOK_NS: Final = 10 * MS


class Uneven(Application):
    """One shard's rate changes; `factor` returns by how much, by the time in ms."""

    def __init__(
        self, factor: Callable[[int], float], cluster: SimCluster, setting: Setting, count: int
    ) -> None:
        self._factor: Final = factor
        self._began = cluster.kernel.now
        cluster.choose = self._choose  # type: ignore[method-assign]
        super().__init__(cluster, setting, count)

    def factor_at(self, now: int) -> float:
        """Return the factor of the shard's rate at a time."""
        return self._factor((now - self._began) // MS)

    def _choose(self, _payload: bytes, _key: bytes | None, live: Sequence[int]) -> int:
        first, *others = sorted(live)
        factor, random = self.factor_at(self.cluster.kernel.now), self.cluster.kernel.random
        is_first = random.random() * (factor + len(others)) < factor
        return first if is_first else random.choice(others)

    def _pause_ns(self) -> int:
        shards = self.setting.world.shards
        factor = self.factor_at(self.cluster.kernel.now)
        return round(super()._pause_ns() * shards / (factor + shards - 1))

    def outputs(self) -> dict[float, list[int]]:
        """Return the times to the output in ns, by the factor when the record was inserted."""
        found: dict[float, list[int]] = {}
        for gsn, called in list(self.called.items())[WARM_UP:]:
            found.setdefault(self.factor_at(called), []).append(self.consumer.emitted[gsn] - called)
        return found


class Changing(Application):
    """Shards are added and removed while the application reads."""

    #: Times in ms, kinds and shards.
    CHANGES: Final[tuple[tuple[int, requests.Change, int], ...]] = (
        (300, "add", 2), (900, "remove", 0), (1_500, "add", 3), (2_100, "remove", 2),
        (2_700, "add", 4), (3_300, "remove", 1),
    )  # fmt: skip
    _END_MS: Final = 4_000

    def __init__(self, cluster: SimCluster, setting: Setting) -> None:
        self.operator = Operator(cluster, History(seed=0))
        self._ends_at = cluster.kernel.now + self._END_MS * MS
        super().__init__(cluster, setting, _ENDLESS)
        for at_ms, kind, shard in self.CHANGES:
            cluster.kernel.after(at_ms * MS, partial(self.operator.change, kind, shard))

    @property
    def is_done(self) -> bool:
        if self.cluster.kernel.now >= self._ends_at and not self.operator.open:
            self.left = min(self.left, 1)
        return super().is_done


class Straggling(Application):
    """The frames of the last shard's primary become late, until the shard is parked and after."""

    #: Delay of the frames.
    LATE_NS: Final = 150 * MS
    #: How long the run lasts before the frames are late, and after the shard is parked.
    _PHASE_NS: Final = 1 * S

    def __init__(self, cluster: SimCluster, setting: Setting) -> None:
        self._shard = setting.world.shards - 1
        self.late_at = cluster.kernel.now + self._PHASE_NS
        #: When the shard was parked; 0: it was not.
        self.parked_at = 0
        cluster.network.on_carry = self._delay
        super().__init__(cluster, setting, _ENDLESS)
        cluster.kernel.after(_LOOK_NS, self._look)

    def _delay(self, src: str, _dst: str, _frame: bytes) -> int | None:
        is_late = self.cluster.kernel.now >= self.late_at
        return self.LATE_NS if is_late and src == server_name(self._shard, 0) else None

    def _look(self) -> None:
        state, now = self.cluster.state.placements[self._shard].state, self.cluster.kernel.now
        if state == "parked" and not self.parked_at:
            self.parked_at = now
        if self.parked_at and now >= self.parked_at + self._PHASE_NS:
            self.left = min(self.left, 1)
        else:
            self.cluster.kernel.after(_LOOK_NS, self._look)

    def deliveries(self) -> dict[str, list[int]]:
        """Return the times to the delivery in ns, before, while and after the shard is late."""
        found: dict[str, list[int]] = {"before": [], "late": [], "parked": []}
        for gsn, called in list(self.called.items())[WARM_UP:]:
            phase = "before" if called < self.late_at else "late"
            phase = "parked" if self.parked_at <= called and self.parked_at else phase
            found[phase].append(self.consumer.delivered[gsn] - called)
        return found


class Killed(Application):
    """The primary of the only shard dies under the load of six clients; `is_alone`: see below.

    `is_alone`: it is cut from its backup 3 ms before, so it decides what no other server gets.
    """

    _ALONE_NS: Final = 3 * MS
    _CUT_NS: Final = 2 * S
    _CLIENTS: Final = 5
    #: A pause of confirmations is the recovery if it is longer.
    _RECOVERY_NS: Final = 20 * MS

    def __init__(self, cluster: SimCluster, setting: Setting, *, is_alone: bool) -> None:
        kernel = cluster.kernel
        self._is_alone = is_alone
        #: When the primary was killed, and when the first confirmation after its recovery came; 0:
        #: not yet.
        self.killed_at = self.confirmed_at = 0
        self._last_at = 0
        super().__init__(cluster, setting, _ENDLESS)
        for number in range(self._CLIENTS):
            Loop(cluster, f"writer-{number + 1}", ["insert"], _ENDLESS, 0)
        kernel.after(100 * MS + kernel.random.randrange(50 * MS), self._disturb)

    def _disturb(self) -> None:
        cluster, pair = self.cluster, ("shard-0-0", "shard-0-1")
        if not self._is_alone:
            self._kill()
            return
        for link in (pair, pair[::-1]):
            cluster.network.cut(*link)
            cluster.kernel.after(self._CUT_NS, partial(cluster.network.heal, *link))
        cluster.kernel.after(self._ALONE_NS, self._kill)

    def _kill(self) -> None:
        self.killed_at = self._last_at = self.cluster.kernel.now
        self.cluster.nodes["shard-0-0"].kill()

    def on_events(self, events: Sequence[Event]) -> None:
        """Note when the first confirmation after the recovery comes."""
        super().on_events(events)
        now = self.cluster.kernel.now
        if self.killed_at and not self.confirmed_at and any(type(e) is Confirmed for e in events):
            if now - self._last_at > self._RECOVERY_NS:
                self.confirmed_at = now
                self.left = min(self.left, 1)
            self._last_at = now
