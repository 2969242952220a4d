"""Mutants of the rebuild of a lost membership service. See tests/sim/mutation."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, Final

from mms import rebuild, rebuilt_leases
from tests.sim.mutation import LAN, busy, mutant, replaced
from tests.sim.plan import Fault, Plan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mms.rebuilt_leases import Span
    from ziplog.core.holdings import ServerHoldings
    from ziplog.core.view import LeaseRun


def _crashed(seed: int) -> Plan:
    """Servers die or stop under load, and the membership service is rebuilt."""
    at_ms = Random(f"rebuilt {seed}").randrange(100, 600)
    return busy(
        seed, Fault(at_ms, "rebuild", amount=1), shards=2, think_us=1_000, conditions=LAN, lanes=4
    )


def _recovered(seed: int) -> Plan:
    """A server dies, its shard recovers, and membership service and handler are lost."""
    random = Random(f"rebuilt {seed}")
    name = random.choice(("shard-0-0", "shard-0-1"))
    return busy(
        seed,
        Fault(random.randrange(10, 100), "kill", (name,)),
        Fault(random.randrange(3_000, 4_000), "rebuild", amount=3),
        shards=2, think_us=20_000, calls=200,
    )  # fmt: skip


def _powerless(seed: int) -> Plan:
    """All machines lose power as load begins, and the membership service is rebuilt.

    The first lease under load starts at once: its records are acked before it is on a disk.
    """
    at_ms = Random(f"powerless {seed}").randrange(20)
    return busy(
        seed, Fault(at_ms, "rebuild", amount=8), think_us=200, conditions=LAN, lanes=8,
        writers=8,
    )  # fmt: skip


_POWERLESS: Final = "all machines lose power as load begins; a rebuild"
_CRASHED: Final = "two shards; servers stop or die under load; a rebuild"
_RECOVERED: Final = "two shards, one of them recovered; a rebuild without the failure handler's log"


@mutant(_crashed, _CRASHED)
def rebuilt_leases_are_given_again() -> Iterator[None]:
    """The first lease after a rebuild follows all recorded and unrecorded leases (section 16)."""
    rebuilt = rebuilt_leases.rebuilt_runs

    def without_the_last(servers: Sequence[ServerHoldings], trim: int) -> list[LeaseRun]:
        """Forget the last recorded leases, and grant the positions after the others."""
        return rebuilt(servers, trim)[:1]

    with replaced(rebuild, "rebuilt_runs", without_the_last):
        yield


@mutant(_powerless, _POWERLESS)
def no_positions_are_skipped() -> Iterator[None]:
    """The rebuild skips the positions that unrecorded leases may have (section 16)."""
    numbered = rebuilt_leases._numbered

    def without_the_gap(spans: Sequence[Span], number: int) -> list[LeaseRun]:
        return numbered([span for span in spans if span.first.members], number)

    with replaced(rebuilt_leases, "_numbered", without_the_gap):
        yield


@mutant(_recovered, _RECOVERED)
def rebuilt_view_is_too_low() -> Iterator[None]:
    """A rebuilt view is not below one that a server was in (section 16)."""
    view = rebuild._view

    def first_view(*arguments: Any) -> int:
        view(*arguments)
        return 1

    with replaced(rebuild, "_view", first_view):
        yield
