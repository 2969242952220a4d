"""The tiers of the tests, and the order in which several workers take them.

The folder is the tier: `unit` has neither processes nor the simulator, `integration` starts real
processes, `sim` (with `model` and `raft`) runs whole clusters in virtual time, `spark` needs Java.
What takes minutes in any of them is marked `nightly`. Tests that share a module's cluster, or the
Spark session, run on one worker. Tests of real processes mostly wait, the others compute. One
worker begins with those that compute, so that the cores are busy while the other workers wait.
"""

from __future__ import annotations

import gc
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.fork_server import ForkServer
from tests.properties import examples
from ziplog.deploy import new_shard
from ziplog.runtime import child_processes

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from xdist.remote import Producer
    from xdist.workermanage import WorkerController

# The time of an example depends on the machine's load: no test asserts on it.
settings.register_profile("scaled", examples(100, deadline=None))
settings.load_profile("scaled")

# A port that is free is not taken yet: each worker looks among its own.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
new_shard._FREE_PORTS = new_shard._FREE_PORTS[_WORKER % _WORKERS :: _WORKERS]  # type: ignore[misc]

_ROOT: Final = Path(__file__).resolve().parent
#: Tiers in the order in which workers take them.
_ORDER: Final = ("spark", "raft", "integration", "model", "sim", "unit")
#: Tiers whose tests mostly wait, for processes and time-outs.
_WAITING: Final = ("spark", "tests/raft/", "tests/integration/")
#: Modules whose tests share nothing and take long: each test is a group.
_SPREAD: Final = (
    "tests/integration/test_chaos.py",
    "tests/integration/test_logdb.py",
    "tests/integration/test_readme.py",
    "tests/integration/test_reconfiguration.py",
    "tests/integration/test_replicated_services.py",
    "tests/integration/ziplog/client/test_client_interrupts.py",
    "tests/raft/test_processes.py",
    "tests/sim/test_mutants.py",
    "tests/sim/test_sim.py",
)
#: Modules that share a cluster and take long: they begin before the other modules of their tier.
_LONG: Final = ("test_local.py", "test_cluster_identity.py", "test_restart.py")
#: Modules that test how nodes start and end: their nodes are started by `python -m`.
_REAL_STARTS: Final = (
    "test_local.py",
    "test_refused_starts.py",
    "test_supervisor.py",
    "test_supervisor_thread.py",
)


class Groups(LoadScopeScheduling):
    """Gives workers one group after the other, in the order in which they were collected.

    The last worker takes the tests that compute first, the others those that wait. If a worker
    crashes, the test that it ran has failed; the others take the rest of its groups.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        """Take back the groups of a worker that ended; return the test that it ran, if it did."""
        crashed: str | None = None
        for scope, group in self.assigned_work.pop(node).items():
            left = {test: False for test, is_done in group.items() if not is_done}
            if left and crashed is None:
                crashed = next(iter(left))
                del left[crashed]
            if left:
                self.workqueue[scope] = left
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        """Give a worker groups until it has 3 tests: it begins none before it has the next one."""
        if node not in self.registered_collections:
            return  # It replaces a worker, and still collects.
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) <= 2:
            try:
                super()._reschedule(node)
            except OSError:  # It crashed; `remove_node` follows.
                return

    def _assign_work_unit(self, node: WorkerController) -> None:
        computes = node.gateway.id == f"gw{self.numnodes - 1}"
        for group in self.workqueue:
            if group.startswith(_WAITING) != computes:
                self.workqueue.move_to_end(group, last=False)
                break
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("tests/spark/"):
            return "spark"
        return nodeid if nodeid.startswith(_SPREAD) else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Groups:
    """Give the workers' tests out in groups, whatever `--dist` says."""
    config.option.loadscopereorder = False
    return Groups(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that selects the long tests."""
    parser.addoption("--nightly", action="store_true", help="run the tests marked nightly, only")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of Spark, select by `--nightly`, and sort by tier."""
    for item in items:
        if _tier(item) == "spark":
            item.add_marker("spark")
    is_nightly = config.getoption("nightly")
    other = [item for item in items if bool(item.get_closest_marker("nightly")) != is_nightly]
    if other:
        config.hook.pytest_deselected(items=other)
    left_out = set(other)
    chosen = [item for item in items if item not in left_out]
    items[:] = sorted(chosen, key=_place)


def _place(item: pytest.Item) -> tuple[int, bool]:
    return _ORDER.index(_tier(item)), item.path.name not in _LONG


def _tier(item: pytest.Item) -> str:
    return _tier_of(item.path)


@cache
def _tier_of(path: Path) -> str:
    return path.relative_to(_ROOT).parts[0]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without the garbage collector, which later passes over all that exists."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Return this worker's fork server."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="module", autouse=True)
def _forked_nodes(request: pytest.FixtureRequest, fork_server: ForkServer) -> Iterator[None]:
    """Fork the nodes of clusters, but for tests of their starts."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name not in _REAL_STARTS:
            patch.setattr(child_processes, "_spawn", fork_server.spawn)
        yield
