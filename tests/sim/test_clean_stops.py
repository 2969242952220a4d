"""Servers that are asked to stop: their shards leave the leases first, and no record is lost."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final
from unittest.mock import patch

import pytest

from shard.membership.stopping import STOP_NS
from tests.properties import seeds
from tests.sim import faults as kinds
from tests.sim.plan import Fault, draw
from tests.sim.run import run
from ziplog.core.node import StopRequested
from ziplog.core.units import NS_PER_MS

if TYPE_CHECKING:
    from tests.sim.faults import Faults

#: Period of the stops, and the distance between two of them.
_SPAN_MS: Final = 9_000
_EVERY_MS: Final = 1_500


class CleanStops:
    """Stops of servers as by SIGTERM: the process ends when its node orders it."""

    def __init__(self) -> None:
        #: Time from each request to the end of the process, in ns.
        self.took: Final[list[int]] = []

    def stop(self, faults: Faults, fault: Fault) -> bool:
        """Ask a server to stop; its process ends as soon as the node orders it."""
        (name,) = fault.targets
        server, process = faults.cluster.server(name), faults.cluster.nodes[name]
        if server is None or process.is_paused or not faults.may_fail(name):
            return False
        asked_at = process.kernel.now
        process.from_inside(lambda: server.driver.post(StopRequested()))

        def end() -> None:
            if process.program is not server:
                return  # It was killed meanwhile.
            if server.driver._stopping and faults.stop(fault):
                self.took.append(process.kernel.now - asked_at)
            else:
                process.kernel.after(NS_PER_MS, end)

        end()
        return True


def clean_stops(seed: int) -> list[int]:
    """Run a seed; return how long each stop took, in ns."""
    random, stops = Random(seed), CleanStops()
    plan = draw(seed)._replace(
        shards=2 + seed % 2, f=1 + seed % 2, calls=40, writers=2, readers=1, speculators=0,
        owners=0, rows=0, bulk=0, database=None, regions=None, mms=1, handlers=1, naps=False,
        is_raft_real=False, think_us=120_000, span_ms=_SPAN_MS,
    )  # fmt: skip
    drawn = [fault for fault in plan.faults if fault.kind in {"kill", "skew", "clog", "slow-disk"}]
    asked = [
        Fault(at_ms, "stop", (random.choice(plan.servers),))
        for at_ms in range(500, _SPAN_MS, _EVERY_MS)
    ]
    with patch.dict(kinds.KINDS, {"stop": stops.stop}):
        run(plan._replace(faults=tuple(sorted([*drawn, *asked]))))
    return stops.took


@pytest.mark.parametrize("block", seeds(1, 40))
def test_nothing_is_lost_and_most_servers_need_not_wait_for_the_limit(block: int) -> None:
    took = [ns for seed in range(4 * block, 4 * block + 4) for ns in clean_stops(seed)]
    assert len(took) >= 8
    assert sum(ns < STOP_NS for ns in took) > len(took) / 2
