"""Mutants of joining, leaving and parked shards. See tests/sim/mutation."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, Final

import shard.ordering.admission
import shard.ordering.backup
import shard.ordering.primary
import shard.storage.flusher
from mms.reconfiguration import Reconfiguration
from mms.state import ClusterState
from shard.ordering.backup import Backup
from tests.sim.mutation import LAN, LOSSY, SLOW, busy, logs_are_not_compared, mutant, replaced
from tests.sim.plan import Fault, Plan
from tests.simulator.kernel import MS, US, S
from tests.simulator.network import Conditions
from ziplog.client.inserts.inflight import InflightUnit
from ziplog.segments.entry import NO_SPACE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mms.commands import GrantLease
    from shard.state.replica_state import ReplicaState
    from shard.state.sessions import HeldUnit, Session
    from ziplog.wire import RefusalCode, Refused

_WRITERS: Final = range(4)


# --- permanent refusals --------------------------------------------------------------------------


def _parked(seed: int) -> Plan:
    """A shard with a slow backup is parked and returns; some inserts arrive even later."""
    at_ms = Random(f"park {seed}").randrange(50, 500)
    servers = ("shard-0-0", "shard-0-1")
    late = [Fault(at_ms + 601 * i, "clog", servers, 600) for i in range(6)]
    links = tuple(name for i in _WRITERS for to in servers for name in (f"writer-{i}", to))
    held = [Fault(1_000 + 301 * i, "clog", links, 300) for i in range(10)]
    stalls = Conditions(delay_ns=(20 * US, 2 * MS), stalls=0.15, stall_ns=12 * S)
    return busy(
        seed, *late, *held, Fault(12_000, "kill-fh", ("fh-0",)), shards=2, lanes=16, calls=300,
        think_us=200_000, conditions=stalls,
    )  # fmt: skip


@mutant(_parked, "two shards; one is parked and returns; a frame in seven is seconds late")
def redirect_without_a_tombstone() -> Iterator[None]:
    """A server forgets its permanent refusals (docs/protocol.md, section 13)."""
    bury = shard.ordering.admission.refuse_permanently

    def forgotten(
        state: ReplicaState, route: bytes, session: Session, seq: int, why: str = ""
    ) -> None:
        bury(state, route, session, seq, why)
        session.refused.pop(seq)

    with (
        replaced(shard.ordering.admission, "refuse_permanently", forgotten),
        replaced(shard.ordering.backup, "refuse_permanently", forgotten),
        replaced(shard.ordering.primary, "refuse_permanently", forgotten),
    ):
        yield


def _half_refused(seed: int) -> Plan:
    """The primary receives inserts after its last lease, and dies before its last no-ops arrive."""
    at_ms = Random(f"leave {seed}").randrange(20, 150)
    links = tuple(name for i in _WRITERS for name in (f"writer-{i}", "shard-0-0"))
    faults = (
        Fault(at_ms, "clog", links, 200),
        Fault(at_ms + 20, "cut", ("shard-0-0", "shard-0-1"), 600),
        Fault(at_ms + 30, "remove-shard", ("shard-0",)),
        Fault(at_ms + 621, "kill", ("shard-0-0",)),
    )
    return busy(seed, *faults, shards=2, lanes=4, think_us=0, conditions=LAN)


_HALF_REFUSED: Final = (
    "two shards; one leaves; its primary receives inserts too late, and dies with its last no-ops"
)


@mutant(_half_refused, _HALF_REFUSED)
def refusal_beside_a_promise() -> Iterator[None]:
    """A backup permanently refuses a unit, and keeps the slot that it promised it (D3)."""
    copied = Backup.on_copy

    def refused(self: Backup, unit: HeldUnit, since: int) -> None:
        state = self._state
        if state.has_no_positions and unit.gsns is not None and not unit.confirmed:
            state.refuse(unit.route, unit.seq, "redirect", "the shard has no more positions")
        else:
            copied(self, unit, since)

    with replaced(Backup, "on_copy", refused):
        yield


@mutant(_half_refused, _HALF_REFUSED)
def one_redirect_is_enough() -> Iterator[None]:
    """A client takes one permanent refusal for all replicas' (docs/protocol.md, section 13)."""
    is_absent = InflightUnit.is_absent.fget  # type: ignore[attr-defined]

    def absent(self: InflightUnit) -> bool:
        return bool(self.redirects) or is_absent(self)

    with (
        replaced(InflightUnit, "is_absent", property(absent)),
        replaced(InflightUnit, "is_redirected", property(lambda self: bool(self.redirects))),
    ):
        yield


# --- refusals for lack of room -------------------------------------------------------------------


def _no_room(seed: int) -> Plan:
    """A shard's disk is repeatedly full."""
    random = Random(f"full {seed}")
    faults = (
        Fault(60 * i + random.randrange(20), "full-disk", ("shard-0-0",), random.randrange(10, 40))
        for i in range(1, 40)
    )
    return busy(
        seed, *faults, shards=2, f=0, durability="disk", lanes=8, calls=300, think_us=10_000,
        conditions=_TWICE,
    )  # fmt: skip


def _rarely_there(seed: int) -> Plan:
    """Views change while clients are idle."""
    random = Random(f"kill {seed}")
    servers = ("shard-0-0", "shard-1-0")
    faults = (
        Fault(2_000 * i + random.randrange(1_000), "kill", (servers[i % 2],)) for i in range(1, 30)
    )
    return busy(
        seed, *faults, shards=2, f=0, durability="disk", think_us=6_000_000, conditions=_TWICE,
    )  # fmt: skip


_TWICE: Final = Conditions(delay_ns=(20 * US, 5 * MS), repeats=0.3, stalls=0.1)


@mutant(
    _rarely_there, "two shards; views change while clients are idle; a frame in three arrives twice"
)
def refusals_are_counted() -> Iterator[None]:
    """A client counts any refusal as that of one more copy (docs/protocol.md, section 4)."""

    def counted(self: InflightUnit, refused: Refused) -> None:
        server = refused.server
        self.refusals = {**self.refusals, server: self.refusals.get(server, 0) + 1}

    with replaced(InflightUnit, "add_refusal", counted):
        yield


@mutant(_no_room, "two shards; the disk of one is often full; a frame in three arrives twice")
def lack_of_room_without_a_tombstone() -> Iterator[None]:
    """A server forgets which copies it promised never to accept (docs/protocol.md, section 4)."""
    put_off = shard.ordering.admission.refuse_for_now

    def forgotten(
        state: ReplicaState,
        route: bytes,
        session: Session,
        seq: int,
        copy: int,
        why: str,
        *,
        code: RefusalCode = "full",
    ) -> None:
        put_off(state, route, session, seq, copy, why, code=code)
        session.refused.pop(seq, None)

    with replaced(shard.ordering.admission, "refuse_for_now", forgotten):
        yield


# --- commits of the membership service -----------------------------------------------------------


def _leave_and_die(seed: int) -> Plan:
    """A shard leaves while one of its servers is recovered."""
    random = Random(f"leave {seed}")
    name, at_ms = random.choice(("shard-0-0", "shard-0-1")), random.randrange(20, 150)
    later = random.choice((0, 300, 1_000, 2_000))
    faults = Fault(at_ms, "kill", (name,)), Fault(at_ms + later, "remove-shard", ("shard-0",))
    return busy(seed, *faults, shards=2)


@mutant(_leave_and_die, "two shards; one leaves while one of its servers is recovered")
def retired_shard_comes_back_live() -> Iterator[None]:
    """A leaving shard is a member again after a recovery."""
    with replaced(ClusterState, "returns_as", lambda _self, _shard: "live"):
        yield


def _leave(seed: int) -> Plan:
    at_ms = Random(f"leave {seed}").randrange(20, 150)
    return busy(seed, Fault(at_ms, "remove-shard", ("shard-0",)), shards=2, conditions=SLOW)


@mutant(_leave, "two shards, one of which leaves; slow network")
def finalized_before_all_are_sealed() -> Iterator[None]:
    """A shard is finalized as soon as it is out of the leases."""

    def is_sealed(self: Reconfiguration, number: int, _now: int) -> bool:
        return self._state.placements[number].state == "leaving"

    with replaced(Reconfiguration, "_is_sealed", is_sealed):
        yield


@mutant(_leave, "two shards, one of which leaves; slow network")
def lease_without_a_limit() -> Iterator[None]:
    """A lease excludes a leaving shard, and no message gives the end of its positions."""
    grant = ClusterState._grant

    def granted(self: ClusterState, command: GrantLease) -> Any:
        before = dict(self.retired)
        refusal = grant(self, command)
        self.retired.update(before)
        return refusal

    with replaced(ClusterState, "_grant", granted):
        yield


# --- refusals of the machine ----------------------------------------------------------------------


def _no_descriptors(seed: int) -> Plan:
    """All replicas of a shard repeatedly lack descriptors at the same moment."""
    random = Random(f"descriptors {seed}")
    servers = ("shard-0-0", "shard-0-1")
    faults = (
        Fault(60 * i + random.randrange(20), "no-descriptors", servers, random.randrange(10, 40))
        for i in range(1, 40)
    )
    return busy(seed, *faults, shards=1, lanes=8, calls=300, think_us=10_000)


@mutant(_no_descriptors, "one shard; its replicas lack descriptors at the same moments")
def refused_file_ends_the_server() -> Iterator[None]:
    """A server halts where the system does not open its next segment (section 10)."""
    with replaced(shard.storage.flusher, "REFUSED", NO_SPACE):
        yield


# --- stable entries ------------------------------------------------------------------------------


def _lose_the_first_two(seed: int) -> Plan:
    """The primary and the most advanced backup die; the third server continues."""
    random = Random(f"kill {seed}")
    at_ms = random.randrange(50, 300)
    third = random.choice((1, 2))
    other = f"shard-0-{3 - third}"
    faults = (
        Fault(at_ms - 40, "clog", ("shard-0-0", f"shard-0-{third}"), 600),
        Fault(at_ms, "kill", ("shard-0-0",)),
        Fault(at_ms + 1, "kill", (other,)),
    )
    return busy(seed, *faults, f=2, lanes=8, think_us=0, conditions=LOSSY)


@mutant(_lose_the_first_two, "f = 2; two servers are killed while the third does not hear one")
def backup_of_three_knows_what_is_stable() -> Iterator[None]:
    """A backup of three treats applied entries as stable, which is correct only in a pair."""
    init = Backup.__init__

    def begun(self: Backup, state: ReplicaState) -> None:
        init(self, state)
        self._is_only = True  # type: ignore[misc]

    # The third server lacks what this one reports as stable.
    with replaced(Backup, "__init__", begun), logs_are_not_compared():
        yield
