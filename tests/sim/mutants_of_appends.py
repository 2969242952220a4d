"""Mutants of appends, seals and sealed tails. See tests/sim/mutation.

Rules that seeds do not break are broken in the scripts of tests/sim/test_appends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tests.sim.mutation import LAN, busy, mutant, replaced
from ziplog.client.seals.seals import Seals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sim.plan import Plan


def _appending(seed: int) -> Plan:
    """Two shards, most of the load within a few epochs, half of it appends."""
    return busy(seed, shards=2, think_us=0, conditions=LAN, appends=0.5)


_APPENDING: Final = "two shards; half of the inserts are appends"


@mutant(_appending, _APPENDING)
def append_returns_when_it_is_placed() -> Iterator[None]:
    """An append waits until its position is sealed (17.1)."""

    def wait(self: Seals, call: int, _gsn: int, _deadline: int, result: Any, *_: Any) -> None:
        self._context.complete(call, result)

    with replaced(Seals, "wait", wait):
        yield


@mutant(_appending, _APPENDING)
def first_record_of_a_call_is_sealed() -> Iterator[None]:
    """An append of many records waits for the seal of its last one (17.1)."""

    wait = Seals.wait

    def wait_for_first(self: Seals, call: int, gsn: int, deadline: int, *rest: Any) -> None:
        result = rest[0]
        if isinstance(result, list):
            gsn = min(rid.gsn for rid in result if rid is not None)
        wait(self, call, gsn, deadline, *rest)

    with replaced(Seals, "wait", wait_for_first):
        yield
