"""What holds for all tests, and in which order several workers take them.

Rule: tests that share something dear (a module's cluster, Spark's session) are one worker's; what
takes long begins first, so that all workers end at about the same time.
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

# How long an example takes depends on what else the machine does: no test asserts on that.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A port that is free is not taken yet: each worker looks among its own.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
new_shard._FREE_PORTS = new_shard._FREE_PORTS[_WORKER % _WORKERS :: _WORKERS]  # type: ignore[misc]

#: Modules whose tests share the Spark session, so are a group.
_SPARK = re.compile(r"tests/spark_reader/test_(spark_\w+|faults|catalog)\.py::")
#: Modules whose tests share nothing, and take so long together that each is a group.
_SPREAD = re.compile(r"tests/sim/test_(mutants|sim)\.py::")


class Groups(LoadScopeScheduling):
    """Gives workers one group after the other, in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Groups:
    """Give the workers' tests out in groups, whatever `--dist` says."""
    config.option.loadscopereorder = False
    return Groups(config, log)


def _group(nodeid: str) -> str:
    """Return what a test must share a worker with."""
    if _SPARK.match(nodeid):
        return "spark"
    return nodeid if _SPREAD.match(nodeid) else nodeid.partition("::")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let workers begin with what takes long."""
    for item in items:
        needs_session = "spark" in getattr(item, "fixturenames", ())
        assert not needs_session or _group(item.nodeid) == "spark", f"{item.nodeid}: see _SPARK"
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """Return when it is a test's turn: Spark, whole clusters, the simulator, all else."""
    if _group(item.nodeid) == "spark":
        return 0
    if item.get_closest_marker("slow") is None:
        return 3
    return 2 if _SPREAD.match(item.nodeid) else 1


def pytest_collection_finish() -> None:
    """Let collections of garbage, of which there are many, pass over what there is for good."""
    gc.collect()
    gc.freeze()
