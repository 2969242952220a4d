"""Mutants of leases: who may use which, and how a long history is sent. See tests/sim/mutation."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final

from mms import lease_history, state
from mms.state import ClusterState
from shard.state.epoch_clock import EpochClock
from tests.sim.mutation import busy, mutant, replaced
from tests.sim.plan import AGED_RUNS, Fault, Plan
from ziplog.core.view import run_of

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
        replaced(state, "fitting", list),
    ):
        yield


def _without_leases(seed: int) -> Plan:
    """The membership service stands still for longer than a lease, under load."""
    at_ms = Random(f"still {seed}").randrange(20, 200)
    return busy(seed, Fault(at_ms, "pause", ("mms-0",), 1_500), shards=2, think_us=20_000)


@mutant(_without_leases, "two shards; the membership service stands still under load")
def clock_decides() -> Iterator[None]:
    """A server uses positions of a lease that it does not hold, once its clock is there (D39)."""
    current = EpochClock.current_epoch_base

    def reached(self: EpochClock, now: int) -> int:
        base = current(self, now)
        while (ends := self.ends_at) is not None and now >= ends and self.last is not None:
            lease = self.last.following()
            self._add_run(run_of(lease), 0)
            self._note_own([run_of(lease)])
            self.lease, self._lease_began_at = lease, ends
            base = current(self, now)
        return base

    with replaced(EpochClock, "current_epoch_base", reached):
        yield
