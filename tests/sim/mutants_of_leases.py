"""Mutants of the announcement of a long lease history. See tests/sim/mutation."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final

from mms import lease_history
from mms.state import ClusterState
from tests.sim.mutation import busy, mutant, replaced
from tests.sim.plan import AGED_RUNS, Fault, Plan

if TYPE_CHECKING:
    from collections.abc import Iterator


def _aged(seed: int) -> Plan:
    """The history of leases gets long, and then a backup is killed under load."""
    at_ms = Random(f"aged {seed}").randrange(20, 200)
    faults = (
        Fault(at_ms, "age", amount=AGED_RUNS),
        Fault(at_ms + 400, "kill", ("shard-0-1",)),
    )
    return busy(seed, *faults, shards=2, think_us=20_000)


_AGED: Final = "two shards; the history of leases gets long, and a backup is killed"


@mutant(_aged, _AGED)
def whole_history_is_sent() -> Iterator[None]:
    """One message sends a server all leases that it lacks (section 3)."""

    def all_of_them(_state: ClusterState, _number: int, _gsn: int) -> None:
        return None

    with (
        replaced(ClusterState, "first_needed", all_of_them),
        replaced(lease_history, "fitting", list),
    ):
        yield
