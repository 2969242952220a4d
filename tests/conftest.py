"""Settings of all tests, and the distribution of tests over xdist workers.

Rule: tests that share an expensive fixture (a module's cluster, the Spark session) run in one
worker; slow groups start first, so that all workers end at about the same time.
"""

from __future__ import annotations

import gc
import os
import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from ziplog.deploy import new_shard

if TYPE_CHECKING:
    from xdist.remote import Producer

# The duration of an example depends on the load of the machine: no test asserts on it.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Two workers could find the same free port, so each worker searches its own share of ports.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
new_shard._FREE_PORTS = new_shard._FREE_PORTS[_WORKER % _WORKERS :: _WORKERS]  # type: ignore[misc]

#: Modules that share the Spark session, and so form one group.
_SPARK = re.compile(r"tests/spark_reader/test_(spark_\w+|faults|catalog)\.py::")
#: Modules with long, independent tests: each test is a group.
_SPREAD = re.compile(r"tests/sim/test_(mutants|sim)\.py::")


class Groups(LoadScopeScheduling):
    """Assigns whole groups to workers, in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Groups:
    """Schedule by groups, regardless of `--dist`."""
    config.option.loadscopereorder = False
    return Groups(config, log)


def _group(nodeid: str) -> str:
    """Return the group of a test; a group runs in one worker."""
    if _SPARK.match(nodeid):
        return "spark"
    return nodeid if _SPREAD.match(nodeid) else nodeid.partition("::")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort slow groups to the front."""
    for item in items:
        needs_session = "spark" in getattr(item, "fixturenames", ())
        assert not needs_session or _group(item.nodeid) == "spark", f"{item.nodeid}: see _SPARK"
    if hasattr(config, "workerinput"):
        items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    """Return the sort key of a test: Spark, whole clusters, the simulator, the rest."""
    if _group(item.nodeid) == "spark":
        return 0
    if item.get_closest_marker("slow") is None:
        return 3
    return 2 if _SPREAD.match(item.nodeid) else 1


def pytest_collection_finish() -> None:
    """Exclude all collected objects from the many garbage collections that follow."""
    gc.collect()
    gc.freeze()
