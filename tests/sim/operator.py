"""Operator of a run: changes shards, and gives regions up, with a client of its own.

Rule: as in `ziplog shard`, a change is requested until it is answered: it is done, or a
`ConfigError` contains the reason of the refusal. All changes and their results are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from tests.sim.plan import shard_of
from tests.simulator.kernel import S
from ziplog.client import placement_arguments
from ziplog.client.common.requests import ChangeRegionRequest, ConnectRequest
from ziplog.core.units import NEVER
from ziplog.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.sim.cluster import SimCluster
    from tests.sim.history import History
    from tests.sim.plan import Fault
    from tests.sim.programs import ClientProgram
    from ziplog.client.common import requests
    from ziplog.config import NodeConfig


@dataclass
class Change:
    """A requested change."""

    kind: requests.Change
    shard: int
    #: Virtual time, nanoseconds.
    asked: int
    #: 0: the change is open.
    ended: int = 0
    #: The reason of its refusal; None: it is done or open.
    refused: ConfigError | None = None
    #: It adds a shard that spans fewer regions than the cluster file requires.
    is_too_narrow: bool = False

    def __str__(self) -> str:
        how = "under way" if not self.ended else f"refused ({self.refused})"
        return f"{self.kind} {self.shard}: {how if self.refused or not self.ended else 'done'}"


class Operator:
    """The operator of a cluster, and its changes."""

    def __init__(self, cluster: SimCluster, history: History) -> None:
        self._cluster: Final = cluster
        self._history: Final = history
        self._process: Final = cluster.client("operator")
        self.changes: Final[list[Change]] = []
        self._added_again: Final[set[int]] = set()

    @property
    def open(self) -> list[Change]:
        """The open changes."""
        return [change for change in self.changes if not change.ended]

    @property
    def awaited(self) -> list[Change]:
        """The open changes that end: a shard with lost servers neither joins nor is finalized."""
        lost = self._cluster.has_lost_servers
        return [c for c in self.open if c.kind == "remove" or not lost(c.shard)]

    def request(self, fault: Fault) -> Change:
        """Start a plan's change immediately, concurrently with open ones."""
        kind = cast("requests.Change", fault.kind.removesuffix("-shard"))
        return self.change(kind, shard_of(fault))

    def change(self, kind: requests.Change, shard: int) -> Change:
        """Start a change; the servers of a joining shard are started first.

        Servers that span too few regions are not started: their shard is refused.
        """
        change = Change(kind, shard, self._cluster.kernel.now)
        self.changes.append(change)
        servers: Sequence[NodeConfig] = ()
        if kind == "add":
            change.is_too_narrow = self._cluster.is_too_narrow(shard)
            cluster = self._cluster
            servers_of = cluster.servers_to_add if change.is_too_narrow else cluster.add_servers
            servers = servers_of(shard)
        replicas = {node.name: node.endpoint for node in servers}
        regions = {node.name: node.region for node in servers if node.region}
        request = placement_arguments.change(shard, kind, NEVER, replicas, regions)
        self._program().call(request, lambda result: self._answered(change, result))
        return change

    def add_again(self, shard: int) -> None:
        """Add a shard that a rebuild of the membership service forgot, as its report demands."""
        self._added_again.add(shard)
        self.change("add", shard)

    def give_up(self, region: str, is_over: Callable[[], bool]) -> None:
        """Request that a region be given up, once a second until it is or `is_over`."""
        kernel = self._cluster.kernel

        def request() -> None:
            if not is_over():
                deadline = self._process.clock() + S
                self._program().call(ChangeRegionRequest(deadline, region, True), answered)

        def answered(result: Any) -> None:
            kernel.trace(f"operator: give up {region}: {result!r}")
            if result is not None:
                # A ConfigError: no server is there, perhaps not any more.
                assert isinstance(result, (UnavailableError, ConfigError)), result
                kernel.after(S, request)

        request()

    def _answered(self, change: Change, result: Any) -> None:
        kernel = self._cluster.kernel
        assert result is None or isinstance(result, ConfigError), f"{change}: {result!r}"
        change.ended, change.refused = kernel.now, result
        kernel.trace(f"operator: {change}")
        if result is None and change.kind != "add":
            self._history.left(kernel.now, change.shard)

    def check_end(self) -> None:
        """Check every shard's final state, and that every refusal had a reason."""
        assert not self.awaited, f"not answered: {'; '.join(map(str, self.awaited))}"
        for change in self.changes:
            if change.refused is not None:
                assert _reason(change) in self._reasons(change), f"{change}"
        left = {c.shard for c in self.changes if c.kind != "add" and c.refused is None}
        states = {
            p.shard: p.state
            for p in self._cluster.state.placements.values()
            if not self._cluster.has_lost_servers(p.shard)
        }
        wanted = {shard: "finalized" if shard in left else "live" for shard in states}
        assert states == wanted, f"{states} after {'; '.join(map(str, self.changes))}"

    def _reasons(self, change: Change) -> set[str]:
        """Return the possible reasons of a change's refusal, given earlier changes."""
        of_shard = [one for one in self.changes if one.shard == change.shard]
        before = [one for one in of_shard if one.asked <= change.ended]
        has_left = any(one.kind != "add" and one.refused is None for one in before)
        if change.kind == "add":
            return {"narrow"} if change.is_too_narrow else {"retired"} if has_left else set()
        was_there = change.shard < self._cluster.plan.shards
        is_there = any(
            c.kind == "add" and c.refused is None and c.ended and c.ended <= change.asked
            for c in before
        )
        is_known = (was_there or is_there) and change.shard not in self._added_again
        return {"last-shard"} if is_known else {"last-shard", "no-such-shard"}

    def _program(self) -> ClientProgram:
        """Return the operator's program; the first use starts the process."""
        if not self._process.is_up:
            self._process.start()
            program = cast("ClientProgram", self._process.program)
            program.call(ConnectRequest(NEVER), lambda _limits: None)
        return cast("ClientProgram", self._process.program)


def _reason(change: Change) -> str:
    """Return the service's reason of a refusal, from the error."""
    allowed = str(change.refused)
    words = {
        "never comes back": "retired", "the last shard": "last-shard", "one of [": "",
        "that min_regions": "narrow",
    }  # fmt: skip
    found = [reason for text, reason in words.items() if text in allowed]
    return (found[0] or "no-such-shard") if found else allowed
