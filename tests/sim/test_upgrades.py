"""Nodes start with either of two releases, while an operator tries to finish the upgrade."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import pytest

import ziplog.client.common.routing
from mms.upgrades import Upgrades
from tests.properties import seeds
from tests.sim.plan import draw
from tests.sim.run import LogRun
from tests.sim.simulated import simulated
from tests.simulator.kernel import MS, Kernel, S
from ziplog.client.common.requests import FinishUpgradeRequest
from ziplog.core.wire_use import Release, WireRange, WireUse
from ziplog.errors import UnavailableError

if TYPE_CHECKING:
    from tests.sim.plan import Plan

OLD: Final = Release("0.1")
NEW: Final = Release("0.2", WireRange(1, 2))
#: Interval between the operator's attempts.
_ATTEMPT_NS: Final = 700 * MS
#: Share of the starts with the later release.
_LATER: Final = 0.7


class UpgradeRun(LogRun):
    """A run whose nodes start with either release, until version 2 is in use."""

    def __init__(self, kernel: Kernel, plan: Plan) -> None:
        super().__init__(kernel, plan)
        self.random: Final = Random(f"releases {plan.seed}")
        self.is_over = False
        self.refusals: Final[list[str]] = []
        self.cluster.release_of = self._release_of

    def _release_of(self, _name: str) -> Release:
        """Return a release at random; the later one if only that one may run."""
        is_later = self.is_over or self.cluster.state.wire > 1 or self.random.random() < _LATER
        return NEW if is_later else OLD

    def _prepare(self) -> None:
        self.kernel.after(_ATTEMPT_NS, self._finish)

    def _finish(self) -> None:
        if self.cluster.state.wire == 1:
            program = self.operator._program()
            deadline = self.operator._process.clock() + S
            program.call(FinishUpgradeRequest(deadline, 2), self._on_answer)
            self.kernel.after(_ATTEMPT_NS, self._finish)

    def _on_answer(self, result: Any) -> None:
        if isinstance(result, UnavailableError):
            self.refusals.append(str(result))
        else:
            assert result == self.cluster.state.wire == 2

    def _settle(self) -> None:
        """Bring all nodes to the later release, one after the other, and finish the upgrade.

        Servers stop cleanly: the only server of a shard (f=0) may lose records when it is killed.
        """
        super()._settle()
        self.is_over = True
        for name, process in self.cluster.nodes.items():
            use = self.use(name)
            if use is not None and use.release == OLD:
                server = self.cluster.server(name)
                if server is not None:
                    process.from_inside(server.stop)
                if process.is_up:
                    process.kill()
                super()._settle()
        is_done = self._pass_until(self._is_finished, 60 * S)
        assert is_done, f"not finished: {self.refusals[-1:]}"

    def _is_finished(self) -> bool:
        """Whether all nodes use the later version."""
        uses = [self.use(name) for name in self.cluster.nodes]
        return all(use is not None and use.wire == 2 for use in uses)

    def use(self, name: str) -> WireUse | None:
        """Return the version that a node uses, if it runs."""
        program: Any = self.cluster.nodes[name].program
        if program is None:
            return None
        node = getattr(program, "replica", None) or program.node
        found: WireUse = node.wire_use
        return found

    def check_servers(self) -> None:
        super().check_servers()
        in_use = self.cluster.state.wire
        uses = [use for name in self.cluster.nodes if (use := self.use(name)) is not None]
        assert all(use.wire <= in_use for use in uses), "newer forms before the upgrade is finished"
        assert all(use.release.wires.has(use.wire) for use in uses)


@pytest.fixture(autouse=True)
def later_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have clients that know both versions."""
    monkeypatch.setattr(ziplog.client.common.routing, "VERSIONS", NEW.wires)


def upgrade(seed: int) -> UpgradeRun:
    """Run the plan of a seed with two releases."""
    plan = draw(seed)._replace(database=None)
    kernel = Kernel(seed)
    with simulated(kernel, is_raft_real=plan.is_raft_real):
        run = UpgradeRun(kernel, plan)
        run.outcome()
    return run


@pytest.mark.parametrize("seed", seeds(3, 13))
def test_an_upgrade_among_faults_is_finished_once_all_nodes_are_ready(seed: int) -> None:
    upgrade(seed)


def test_an_upgrade_that_is_finished_too_early_stops_nodes() -> None:
    """The rule that the membership service checks all nodes first is broken."""
    broken = patch.object(Upgrades, "_obstacles", lambda *_: iter(()))
    with broken, pytest.raises(AssertionError, match=r"stopped themselves: .*but this release"):
        list(map(upgrade, range(1, 13)))


def test_a_node_that_uses_a_version_too_early_is_found() -> None:
    """The rule that a node waits for the version in use is broken."""
    broken = patch.object(WireUse, "__init__", _eager)
    with broken, pytest.raises(AssertionError, match="newer forms before"):
        upgrade(1)


def _eager(use: WireUse, release: Release, recorded: int) -> None:
    use.release = release  # type: ignore[misc]
    use.wire = max(recorded, release.wires.last)
