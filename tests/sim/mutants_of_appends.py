"""Mutants of appends, seals and sealed tails. See tests/sim/mutation.

Rules that seeds do not break are broken in the scripts of tests/sim/test_appends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.sim.mutation import LAN, busy, mutant, replaced
from ziplog.client.inserts.results import Results

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sim.plan import Plan
    from ziplog.client.common.unknown_outcome import UnknownOutcome


def _appending(seed: int) -> Plan:
    """Two shards, most of the load within a few epochs, half of it appends."""
    return busy(seed, shards=2, think_us=0, conditions=LAN, appends=0.5)


_APPENDING: Final = "two shards; half of the inserts are appends"


@mutant(_appending, _APPENDING)
def append_returns_when_it_is_placed() -> Iterator[None]:
    """An append waits until its position is sealed (17.1)."""

    def seal(self: Results, number: int, _deadline: int, outcome: UnknownOutcome) -> None:
        self._context.complete(number, list(outcome.results))

    with replaced(Results, "seal", seal):
        yield


@mutant(_appending, _APPENDING)
def first_record_of_a_call_is_sealed() -> Iterator[None]:
    """An append of many records waits for the seal of its last one (17.1)."""

    def seal(self: Results, number: int, deadline: int, outcome: UnknownOutcome) -> None:
        results = list(outcome.results)
        first = min((rid.gsn for rid in results if rid is not None), default=0)
        self._seals.wait(number, first, deadline, results, outcome.unsealed_error, outcome.shard)

    with replaced(Results, "seal", seal):
        yield
