"""Mutants of regions. See tests/sim/mutation."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, Final

import msgspec

import failure_handler.recovery
from failure_handler.members import Members
from failure_handler.state import Begin, HandlerState
from mms.reconfiguration import Reconfiguration
from mms.servers import Servers
from tests.sim.mutation import LAN, busy, mutant, replaced
from tests.sim.plan import Fault, Plan
from tests.sim.region_faults import Alone
from tests.sim.regions import REGIONS, Regions
from ziplog.client.inserts.shard_selector import ShardSelector

if TYPE_CHECKING:
    from collections.abc import Iterator

_NARROW: Final = ("eu", "eu")
_WIDE: Final = (("ap", "eu"), ("us", "ap"))


def _regions(*shards: tuple[str, ...], min_regions: int = 1) -> Regions:
    return Regions((10_000, 20_000, 30_000), shards, min_regions, is_near=False)


def _mixed(seed: int) -> Plan:
    """One of three shards is in one region."""
    return busy(seed, shards=3, regions=_regions(_WIDE[0], _NARROW, _WIDE[1]))


@mutant(_mixed, "three shards over regions, one of them in one region")
def any_shard_will_do() -> Iterator[None]:
    """A client offers all live shards to the policy, whatever regions they span (section 20)."""
    with replaced(ShardSelector, "required", lambda _self, _request: 1):
        yield


def _wide_shard_leaves(seed: int) -> Plan:
    """Inserts are in flight at a shard of two regions that leaves; one shard is in one region."""
    at_ms = Random(f"leave {seed}").randrange(50, 300)
    return _mixed(seed)._replace(
        faults=(Fault(at_ms, "remove-shard", ("shard-0",)),), lanes=8, think_us=0
    )


@mutant(_wide_shard_leaves, "the same; a shard of two regions leaves under load")
def moved_without_regions() -> Iterator[None]:
    """A record that moves to another shard forgets how many regions it needs (section 20)."""
    select = ShardSelector.__call__

    def moved(self: ShardSelector, call: Any) -> Any:
        with replaced(ShardSelector, "required", lambda _self, _request: 1):
            return select(self, call)

    with replaced(ShardSelector, "__call__", moved):
        yield


def _narrow_shard(seed: int) -> Plan:
    """An operator adds a shard of one region to a cluster that requires two."""
    at_ms = Random(f"add {seed}").randrange(50, 300)
    regions = _regions(_WIDE[0], _NARROW, min_regions=0)
    return busy(seed, Fault(at_ms, "add-shard", ("shard-1",)), regions=regions)


@mutant(_narrow_shard, "an operator adds a shard of one region where two are required")
def narrow_shard_is_added() -> Iterator[None]:
    """The leader adds a shard of fewer regions than its cluster file requires (section 20)."""
    init = Reconfiguration.__init__

    def begun(self: Reconfiguration, state: Any, servers: Any, services: Any, _count: int) -> None:
        init(self, state, servers, services)

    with replaced(Reconfiguration, "__init__", begun):
        yield


def _relabelled(seed: int) -> Plan:
    """A server of each shard restarts with another region."""
    at_ms = Random(f"relabel {seed}").randrange(50, 300)
    faults = (Fault(at_ms + 10 * i, "relabel", (f"shard-{i}-1",), amount=2) for i in range(2))
    return busy(seed, *faults, shards=2, regions=_regions(_WIDE[0], _NARROW))


@mutant(_relabelled, "two servers restart with another region")
def labels_never_change() -> Iterator[None]:
    """The placement of a live shard keeps the region that a server reported first (section 20)."""
    with replaced(Servers, "is_relabelled", lambda _self, _placement: False):
        yield


# --- lost regions --------------------------------------------------------------------------------

#: A shard with a server in each region, and one without servers in the other two.
_EVERYWHERE: Final = (REGIONS, ("ap", "ap", "ap"))


def _alone(seed: int, how: Alone, for_ms: int) -> Plan:
    """Return a run in which region ap, which has both services, goes on alone for a while."""
    at_ms = Random(f"alone {seed}").randrange(50, 300)
    fault = Fault(at_ms, "strand-region", ("ap",), for_ms, int(how))
    return busy(seed, fault, shards=2, f=2, lanes=4, conditions=LAN, regions=_regions(*_EVERYWHERE))


def _survivor_dies_alone(seed: int) -> Plan:
    return _alone(seed, Alone.LOSES_DISK, 4_000)


@mutant(_survivor_dies_alone, "f = 2; a server is cut off from both others, and loses its disk")
def confirmed_by_survivor_alone() -> Iterator[None]:
    """The survivor alone confirms a view, though no region was given up (section 20, rule 11)."""
    with replaced(Members, "copies_needed", lambda *_: 1):
        yield


def _survivor_restarts(seed: int) -> Plan:
    return _alone(seed, Alone.GIVEN_UP | Alone.KILLED, 15_000)


@mutant(
    _survivor_restarts,
    "f = 2; the operator gives up two regions, which return when the last server is killed",
)
def lost_region_still_votes() -> Iterator[None]:
    """A server that returns in its old view is a candidate after a confirmation (20, rule 11)."""
    conductor, begin = failure_handler.recovery, HandlerState._begin
    in_view = conductor.in_view

    def in_any_view(members: Any, placement: Any, _first: int, last: int, now: int) -> Any:
        return in_view(members, placement, 1, last, now)

    def begun(self: HandlerState, command: Begin) -> Any:
        known = self.shards.get(command.shard)
        if known is not None and not known.is_finished:
            self._keep(msgspec.structs.replace(known, confirmed=1))
        return begin(self, command)

    with replaced(conductor, "in_view", in_any_view), replaced(HandlerState, "_begin", begun):
        yield
