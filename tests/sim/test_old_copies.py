"""Servers that stop cleanly and get an older copy of their disk: nothing acknowledged is lost."""

from __future__ import annotations

from copy import deepcopy
from random import Random
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import pytest

from tests.properties import seeds
from tests.sim import faults as kinds
from tests.sim.mutation import logs_are_not_compared
from tests.sim.plan import Fault, draw
from tests.sim.run import run

if TYPE_CHECKING:
    from tests.sim.faults import Faults

#: Time after which a server with an old copy is in service again, with the log of another one.
_COPIED_MS: Final = 2_500
#: Period of the stops.
_SPAN_MS: Final = 7_000


class OldCopies:
    """Clean stops, after some of which a server starts with the disk of an earlier stop."""

    def __init__(self, seed: int) -> None:
        self._random: Final = Random(seed)
        #: By server: the contents of its disk after a clean stop.
        self._kept: Final[dict[str, Any]] = {}
        #: Number of servers that got an old copy.
        self.restored = 0

    def stop(self, faults: Faults, fault: Fault) -> bool:
        """Stop a server cleanly; put an old copy in place of its disk if another one has all."""
        (name,) = fault.targets
        if not faults.has_good_peer(name) or not faults.stop(fault):
            return False
        disk = faults.cluster.disks[name]
        if name in self._kept and self._random.random() < 0.6:
            self.restored += 1
            disk._root = deepcopy(self._kept[name])
            disk.used_bytes = sum(len(file.data) for _, file in disk._files())
            return faults.lasting(fault, lambda: None, [name])
        self._kept[name] = deepcopy(disk._root)
        return True


def old_copies(seed: int) -> int:
    """Run a seed; return how many servers got an old copy."""
    random, copies = Random(seed), OldCopies(seed)
    plan = draw(seed)._replace(
        shards=1, f=1 + seed % 2, durability="memory", mms=1, handlers=1, naps=False, calls=40,
        writers=2, readers=1, speculators=0, owners=0, rows=0, bulk=0, database=None, regions=None,
        is_raft_real=False, think_us=120_000, span_ms=_SPAN_MS,
    )  # fmt: skip
    drawn = [fault for fault in plan.faults if fault.kind in {"kill", "skew", "clog", "slow-disk"}]
    stops = [
        Fault(at_ms, "stop", (random.choice(plan.servers),), _COPIED_MS)
        for at_ms in range(200, _SPAN_MS, 300)
    ]
    with patch.dict(kinds.KINDS, {"stop": copies.stop}):
        run(plan._replace(faults=tuple(sorted([*drawn, *stops]))))
    return copies.restored


@pytest.mark.parametrize("block", seeds(2, 40))
def test_nothing_acknowledged_is_lost(block: int) -> None:
    assert sum(old_copies(seed) for seed in range(4 * block, 4 * block + 4)) >= 4


def test_without_the_comparison_a_run_fails() -> None:
    with (
        logs_are_not_compared(),
        pytest.raises(AssertionError, match=r"was stable|gsns must increase"),
    ):
        list(map(old_copies, range(40)))
