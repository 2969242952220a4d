"""Mutants of regions. See tests/sim/mutation."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, Final

from mms.reconfiguration import Reconfiguration
from mms.servers import Servers
from tests.sim.mutation import busy, mutant, replaced
from tests.sim.plan import Fault, Plan
from tests.sim.regions import Regions
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
    faults = (Fault(at_ms + 10 * i, "relabel", (f"shard-{i}-1",), amount=3) for i in range(2))
    return busy(seed, *faults, shards=2, regions=_regions(_WIDE[0], _NARROW))


@mutant(_relabelled, "two servers restart with another region")
def labels_never_change() -> Iterator[None]:
    """The placement of a live shard keeps the region that a server reported first (section 20)."""
    with replaced(Servers, "is_relabelled", lambda _self, _placement: False):
        yield
