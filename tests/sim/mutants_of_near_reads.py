"""Mutants of reads near the client. See tests/sim/mutation."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final

import msgspec

from shard.ordering.backup import Backup
from tests.sim.mutation import LOSSY, busy, logs_are_not_compared, mutant, replaced
from tests.sim.plan import Fault, Plan
from tests.sim.regions import Regions
from ziplog.client.reads.read import PendingRead, Reads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shard.state.replica_state import ReplicaState
    from ziplog import wire
    from ziplog.client.common.routing import Route

_DELAYS_US: Final = (10_000, 20_000, 30_000)


def _regions(*shard: str) -> Regions:
    return Regions(_DELAYS_US, (shard,), 1, is_near=False)


def _far_primary(seed: int, *faults: Fault) -> Plan:
    """Two clients of three have a backup in their region, and the primary in another one."""
    return busy(seed, *faults, regions=_regions("us", "eu", "ap"), f=2, writers=6, think_us=500)


def _isolated_backup(seed: int) -> Plan:
    """A backup is cut off from all servers and services, and not from its clients."""
    at_ms = Random(f"isolate {seed}").randrange(50, 200)
    return _far_primary(seed, Fault(at_ms, "isolate", ("shard-0-1",), 4_000))._replace(
        calls=400, span_ms=4_000, think_us=10_000
    )


@mutant(_isolated_backup, "three regions; a backup is cut off from the servers, not from clients")
def near_replica_says_not_yet() -> Iterator[None]:
    """A read accepts the nearest replica's answer that a position is not decided (section 20)."""
    compare = Reads._compare

    def believed(self: Reads, reply: wire.ReadReply, pending: PendingRead, route: Route) -> None:
        if reply.answer == "not-yet" and not pending.asks_all:
            self._fail_missing(pending, "the position is not decided yet")
        else:
            compare(self, reply, pending, route)

    with replaced(Reads, "_compare", believed):
        yield


def _far_pair(seed: int) -> Plan:
    """Twelve clients compete for slots at a pair of servers in two regions."""
    plan = _far_primary(seed)._replace(f=1, regions=_regions("us", "eu"))
    return plan._replace(writers=12, lanes=4, calls=40, think_us=0)


@mutant(_far_pair, "three regions; twelve clients write to a primary and a backup in two of them")
def near_unstable_counts() -> Iterator[None]:
    """A read accepts the nearest replica's record that is not stable (section 20)."""
    on_reply = Reads.on_reply

    def believed(self: Reads, reply: wire.ReadReply) -> None:
        pending = self._by_number.get(reply.request)
        if reply.answer == "record" and pending is not None and not pending.asks_all:
            reply = msgspec.structs.replace(reply, stable=True)
        on_reply(self, reply)

    with replaced(Reads, "on_reply", believed):
        yield


def _lose_two_of_three(seed: int) -> Plan:
    """The primary and a backup die; the other backup, which did not hear the primary, continues."""
    random = Random(f"lose {seed}")
    at_ms, third = random.randrange(50, 300), random.choice((1, 2))
    faults = (
        Fault(at_ms - 40, "clog", ("shard-0-0", f"shard-0-{third}"), 600),
        Fault(at_ms, "kill", ("shard-0-0",)),
        Fault(at_ms + 1, "kill", (f"shard-0-{3 - third}",)),
    )
    plan = _far_primary(seed, *faults)
    return plan._replace(lanes=8, think_us=0, readers=3, conditions=LOSSY)


@mutant(_lose_two_of_three, "three regions; two servers are killed while the third hears neither")
def near_backup_knows_what_is_stable() -> Iterator[None]:
    """A backup of three gives the readers in its region what it applied (section 20)."""
    init = Backup.__init__

    def begun(self: Backup, state: ReplicaState) -> None:
        init(self, state)
        self._is_only = True  # type: ignore[misc]

    # The third server lacks what this one reports as stable.
    with replaced(Backup, "__init__", begun), logs_are_not_compared():
        yield
