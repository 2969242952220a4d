"""A trial: a cluster across regions, clients in all of them, faults, and a verdict.

    with Network((*REGIONS, layout.OPERATOR)) as network:
        network.enter(layout.OPERATOR)
        with RegionTrial(network, folder, Shape()) as trial:
            trial.inject(fault, print)
            verdict = trial.judge()

Invariant: when a trial is left, none of its processes runs any more.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fault_injection.trial import untried
from wan import floor, layout

from region_trial import clients, seen, verdict
from region_trial.clients import RegionPlan
from region_trial.verdict import Injected, Limits
from tests.history import events, report
from tests.history import observed as history
from tests.history.probe import Health
from tests.history.processes import ClientProcesses
from tests.history.rules import check
from tests.history.workload import losses_of, read_all
from ziplog.errors import ZiplogError
from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import Self

    from wan.network import Network

    from region_trial.schedule import RegionFault

REGIONS: Final = ("A", "B", "C")
ROUND_TRIPS_MS: Final = {("A", "B"): 40.0, ("B", "C"): 80.0, ("C", "A"): 120.0}
JITTER_MS: Final = 2.0
_SLOWER: Final = 5
_MIX: Final = {"insert": 40, "nowait": 10, "batch": 5, "read": 30, "tail": 5, "sync": 3}
_START_S: Final = 120.0
_HEALTHY_S: Final = 60.0
_POLL_S: Final = 0.1
#: Time in which each region's writer and reader must have begun.
_WORKING_S: Final = 60.0
_CALL_S: Final = 5.0
#: Runnable processes for each core; a machine with more falsifies times.
_MAX_LOAD: Final = 1.0


@dataclass(frozen=True)
class Shape:
    """Size and settings of a trial."""

    seed: int = 1
    #: Keys of `[cluster]`.
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: Both servers of each shard are in one region, so no record is in two.
    is_broken: bool = False
    #: Operations a second of the client of each region that does everything.
    rate_per_s: float = 5.0

    @property
    def all_settings(self) -> dict[str, Any]:
        """All keys of `[cluster]` that differ from their defaults."""
        regions = {"min_regions": 1 if self.is_broken else 2}
        times = {"rtt_ms": int(max(ROUND_TRIPS_MS.values())), "suspicion_ms": 1000, "epoch_ms": 20}
        return times | regions | dict(self.settings)


class Verdict(NamedTuple):
    """Result of a trial."""

    #: Figures of each fault (`verdict.row`).
    rows: list[dict[str, Any]]
    #: The numbers of checked operations.
    figures: dict[str, Any]
    #: What is wrong, and what was too slow; a line each.
    broken: list[str]
    slow: list[str]
    #: Why times of this run say little; "": they count.
    not_credible: str
    #: Of each fault (`verdict.windows`).
    windows: list[dict[str, Any]]


class RegionTrial:
    """A cluster and its clients."""

    def __init__(self, network: Network, folder: Path, shape: Shape) -> None:
        """Prepare.

        Args:
            network: has `REGIONS` and `layout.OPERATOR`; the calling process is in the latter.
            folder: gets the cluster's data and the history.
            shape: of the trial.

        """
        self._network: Final = network
        self._shape: Final = shape
        self._folder: Final = folder
        self._history: Final = folder / "history"
        self._stack: Final = contextlib.ExitStack()
        self._injected: Final[list[Injected]] = []
        self._placements: Final[dict[int, tuple[int, list[str]]]] = {}
        self._losses: Final[set[tuple[int, int, int]]] = set()

    def __enter__(self) -> Self:
        """Start everything; return when each region's writer and reader work."""
        network, shape = self._network, self._shape
        network.set_round_trips(ROUND_TRIPS_MS, JITTER_MS)
        shards = [(r, r) for r in REGIONS] if shape.is_broken else layout.triangle(REGIONS)
        layout.write_file(self._folder / "data", network, REGIONS, shards, shape.all_settings)
        with contextlib.ExitStack() as stack:
            self._cluster = stack.enter_context(
                Cluster(
                    self._folder / "data",
                    launcher=network.launcher(),
                    timeout=_START_S,
                    supervise=False,
                )
            )
            self._plan = RegionPlan(
                bootstrap=self._cluster.endpoint,
                directory=str(self._history),
                mix=_MIX,
                seed=shape.seed,
                rate_per_s=shape.rate_per_s,
                timeout_s=_CALL_S,
                router=network.pid,
                regions=list(REGIONS),
                min_regions=2,
                requests_regions=not shape.is_broken,
            )
            self._history.mkdir()
            path = self._history / f"trial{events.SUFFIX}"
            self._recorder = stack.enter_context(events.Recorder(path, "trial"))
            self._health = stack.enter_context(Health(self._cluster.endpoint))
            self._start_clients(stack)
            self._used, self._since = network.report()["cpu_s"], time.monotonic()
            self._stack.push(stack.pop_all())
        return self

    def __exit__(self, *_: object) -> None:
        """Stop everything."""
        self._stack.close()

    def _start_clients(self, stack: contextlib.ExitStack) -> None:
        kinds = (
            ("client", clients.run_mixed, clients.CLIENTS),
            ("writer", clients.run_writer, clients.WRITERS),
            ("reader", clients.run_reader, clients.READERS),
        )
        self._clients: dict[str, list[ClientProcesses]] = {}
        for index, region in enumerate(REGIONS):
            self._clients[region] = [
                ClientProcesses(name, run, self._plan, clients.first_number(kind, index))
                for name, run, kind in kinds
            ]
        stack.callback(self._stop_clients)
        for region in REGIONS:
            for processes in self._clients[region]:
                processes.start()
        deadline = time.monotonic() + _WORKING_S
        while not all(s.writer and s.reader for s in self._seen().values()):
            if time.monotonic() > deadline:
                message = f"not every region's writer and reader work after {_WORKING_S:g} s"
                raise TimeoutError(message)
            time.sleep(1.0)

    def _seen(self) -> dict[str, verdict.Seen]:
        return seen.gather(self._history, REGIONS)

    def _stop_clients(self) -> list[str]:
        everything = [one for of_region in self._clients.values() for one in of_region]
        for processes in everything:
            processes.terminate()
        return [text for processes in everything for text in processes.stop()]

    # --- faults ---

    def inject(self, fault: RegionFault, say: Callable[[str], None]) -> None:
        """Inject a fault for its time, heal it, and wait until everything is whole."""
        self._note(str(fault), say)
        getattr(self, f"_{fault.kind}")(fault)
        began = events.now()
        self.watch(fault.seconds)
        healed = events.now()
        getattr(self, f"_heal_{fault.kind}")(fault)
        whole, last = self._await_whole()
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        self._injected.append(Injected(fault, began, healed, whole, load))
        after = "not whole" if whole is None else f"whole {(whole - healed) / 1e9:.2f} s"
        missing = ", ".join(f"{name} {state}" for name, state in last.items())
        self._note(f"{fault.kind_of_one} healed, {after} after that; last: {missing}", say)

    def watch(self, seconds: float) -> None:
        """Let time pass, and write placements and losses into the history."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._record_status()
            time.sleep(_POLL_S)

    def _record_status(self) -> None:
        """Write changed placements and losses into the history."""
        status = self._health.status()
        if status is None:
            return
        for shard in status["shards"]:
            placement = shard["view"], shard["regions"]
            if self._placements.get(shard["id"]) != placement:
                self._placements[shard["id"]] = placement
                self._recorder.call(events.PlacementIs(events.now(), shard["id"], *placement))
        if not losses_of(status) <= self._losses:
            self._losses.update(losses_of(status))
            self._recorder.call(events.Losses(events.now(), sorted(self._losses)))

    def _await_whole(self) -> tuple[int | None, dict[str, str]]:
        """Wait until everything is whole; return when, and what was the last that was not."""
        deadline = time.monotonic() + _HEALTHY_S
        last: dict[str, str] = {}
        while time.monotonic() < deadline:
            missing = self._health.unhealthy()
            if not missing:
                return events.now(), last
            last = missing
            time.sleep(_POLL_S)
        return None, last

    def _note(self, text: str, say: Callable[[str], None]) -> None:
        self._recorder.call(events.Fault(events.now(), text))
        say(text)

    def _nodes(self, region: str) -> list[str]:
        return [node.name for node in self._cluster.config.nodes if node.region == region]

    def _kill(self, fault: RegionFault) -> None:
        for processes in self._clients[fault.region]:
            for number in processes.running():
                processes.kill(number)
        for name in self._nodes(fault.region):
            self._cluster.kill(name)

    def _heal_kill(self, fault: RegionFault) -> None:
        for name in self._nodes(fault.region):
            self._cluster.restart(name)
        for processes in self._clients[fault.region]:
            processes.start()

    def _cut_off(self, region: str, *, is_cut: bool) -> None:
        for other in (*REGIONS, layout.OPERATOR):
            if other != region:
                self._network.cut(region, other, is_cut=is_cut)
                self._network.cut(other, region, is_cut=is_cut)

    def _cut(self, fault: RegionFault) -> None:
        self._cut_off(fault.region, is_cut=True)

    def _heal_cut(self, fault: RegionFault) -> None:
        self._cut_off(fault.region, is_cut=False)

    def _slow(self, fault: RegionFault) -> None:
        self._network.set_round_trips(
            {p: _SLOWER * ms for p, ms in ROUND_TRIPS_MS.items() if fault.region in p}, JITTER_MS
        )

    def _heal_slow(self, _: RegionFault) -> None:
        self._network.set_round_trips(ROUND_TRIPS_MS, JITTER_MS)

    def _part(self, fault: RegionFault) -> None:
        self._network.cut(fault.region, fault.other)
        self._network.cut(fault.other, fault.region)

    def _heal_part(self, fault: RegionFault) -> None:
        self._network.cut(fault.region, fault.other, is_cut=False)
        self._network.cut(fault.other, fault.region, is_cut=False)

    # --- the verdict ---

    def judge(self) -> Verdict:
        """Stop the clients, read everything, and judge."""
        router = (self._network.report()["cpu_s"] - self._used) / (time.monotonic() - self._since)
        broken = [f"ended by an error: {name}" for name in self._stop_clients()]
        self._record_status()
        try:
            read_all(self._plan)
        except ZiplogError as error:
            broken.append(f"it cannot be read at the end: {error}")
        self._recorder.close()
        shape, saw = self._shape.all_settings, self._seen()
        limits = Limits(shape["suspicion_ms"] / 1000, shape["rtt_ms"] / 1000)
        slow = []
        for one in self._injected:
            broken += verdict.broken_promises(one, saw)
            slow += verdict.too_slow(one, saw, limits)
        judgement = check(history.gather(events.files_of([self._history])))
        broken += report.violation_lines(judgement)
        figures = report.summary(judgement)
        broken += untried(len(self._injected), figures["acknowledged"])
        return Verdict(
            [verdict.row(one, saw) for one in self._injected],
            figures | {"router_core_share": round(router, 2)},
            broken,
            slow,
            _why_not_credible(max((one.load for one in self._injected), default=0.0), router),
            [verdict.windows(one, saw) for one in self._injected],
        )


def _why_not_credible(load: float, router: float) -> str:
    if load > _MAX_LOAD:
        return f"{load:.1f} runnable processes for each core"
    if router > floor.MAX_CORE_SHARE:
        return f"the router needs {router:.0%} of a core"
    return ""
