"""Mutants of recoveries and leases: rules between views. See tests/sim/mutation."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, Final

import msgspec

import failure_handler.recovery
import shard.recovery.state_transfer
from failure_handler.state import Begin, HandlerState
from mms.leases import LeasePlan
from mms.state import ClusterState
from shard.ordering.admission import Admission
from shard.recovery.participant import RecoveryParticipant
from shard.replica import Replica
from shard.state.epoch_clock import EpochClock
from shard.state.sessions import HeldUnit, Sessions
from tests.sim.mutation import (
    LAN,
    busy,
    kill_and_lose,
    kill_any_server,
    kill_the_primary,
    mutant,
    part_the_servers,
    replaced,
)
from tests.sim.plan import Fault, Plan
from tests.simulator.kernel import MS, US
from tests.simulator.network import Conditions
from ziplog import wire
from ziplog.client.inserts import inserts
from ziplog.client.inserts.inserts import Inserts
from ziplog.core.view import LeaseRun, run_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shard.state.replica_state import ReplicaState

_replace: Final = msgspec.structs.replace


# --- from view to view ---------------------------------------------------------------------------


def _kill_early_and_hold_up(seed: int) -> Plan:
    """The primary is killed when most calls have begun, and servers received parts of them."""
    stalls = Conditions(delay_ns=(20 * US, 10 * MS), loss=0.1, stalls=0.1, stall_ns=300 * MS)
    at_ms = Random(f"kill {seed}").randrange(10, 40)
    return busy(
        seed, Fault(at_ms, "kill", ("shard-0-0",)), writers=12, lanes=16, calls=20, think_us=0,
        conditions=stalls,
    )  # fmt: skip


@mutant(
    _kill_early_and_hold_up,
    "the primary is killed when calls begin; one frame in ten is lost, and one in ten is late",
)
def unit_gets_behind_its_followers() -> Iterator[None]:
    """A client sends open units to a later view despite placed later units of the call (D13)."""
    with replaced(inserts, "has_later_unit", lambda _call, _units: False):
        yield


@mutant(kill_and_lose, "the primary is killed under load; a frame in five is lost")
def only_confirmed_is_rolled_forward() -> Iterator[None]:
    """A recovery continues from the confirmed entries, and drops promises (D22)."""
    roll = RecoveryParticipant._roll_forward

    def rolled(self: RecoveryParticipant, message: wire.Freeze, _promised: Any, now: int) -> bool:
        return roll(self, message, [], now)

    with replaced(RecoveryParticipant, "_roll_forward", rolled):
        yield


@mutant(part_the_servers, "primary and backup do not hear each other for two seconds; slow network")
def survivor_acks_after_its_promise() -> Iterator[None]:
    """A server still acks in this view after its state was taken for the next one (D20)."""
    roll, insert = RecoveryParticipant._roll_forward, Replica._insert
    ends: dict[ReplicaState, int] = {}
    taken: dict[tuple[ReplicaState, bytes, int], list[int]] = {}

    def rolled(self: RecoveryParticipant, message: wire.Freeze, promised: Any, now: int) -> bool:
        units = list(promised)
        slots = [unit.gsns[-1] + 1 for unit in units]
        ends[self._state] = max([self._state.stream.end, *slots])
        return roll(self, message, units, now)

    def inserted(self: Replica, route: bytes, message: wire.Insert) -> None:
        state, clock = self.state, self.state.clock
        session = state.sessions.by_client.get(message.client)
        is_known = session is not None and message.seq in session.units
        if (
            state.server_state != "frozen"
            or message.view != state.view
            or is_known
            or state not in ends
        ):
            insert(self, route, message)
            return
        key = (state, message.client, message.seq)
        if key not in taken:
            floor = max(ends[state], message.after + 1, clock.current_epoch_base(self._now))
            taken[key] = clock.first_slots(floor, message.count)
            ends[state] = max([ends[state], *(gsn + 1 for gsn in taken[key])])
        if taken[key]:
            unit = HeldUnit(message.client, message.seq, message.count, 0, route=route)
            unit.gsns, unit.confirmed = taken[key], state.server == 0
            state.ack(unit)

    with (
        replaced(RecoveryParticipant, "_roll_forward", rolled),
        replaced(Replica, "_insert", inserted),
    ):
        yield


def _held_up(seed: int) -> Plan:
    """Clients' messages to the primary arrive after the shard entered another view."""
    at_ms = Random(f"hold {seed}").randrange(20, 150)
    links = tuple(name for i in range(4) for name in (f"writer-{i}", "shard-0-0"))
    faults = Fault(at_ms, "clog", links, 3_000), Fault(at_ms + 5, "kill", ("shard-0-1",))
    return busy(seed, *faults, shards=2, lanes=4, conditions=LAN)


@mutant(
    _held_up, "two shards; a backup is killed while clients' messages to the primary are delayed"
)
def views_do_not_matter() -> Iterator[None]:
    """A server accepts inserts, acks, forwards and reports of older views (D1)."""
    admit, on_ack = Admission.admit, Inserts.on_ack

    def admitted(self: Admission, route: bytes, message: wire.Insert, *rest: Any) -> Any:
        return admit(self, route, _replace(message, view=self._state.view), *rest)

    def acked(self: Inserts, ack: wire.InsertAck) -> None:
        window = self.windows.get(ack.shard)
        unit = window.inflight.get(ack.seq) if window is not None else None
        on_ack(self, _replace(ack, view=unit.message.view) if unit is not None else ack)

    def is_mine(self: Replica, message: Any) -> bool:
        state = self.state
        return (state.server_state, message.cluster, message.shard) == (
            "up",
            state.cluster,
            state.shard,
        )

    with (
        replaced(Admission, "admit", admitted),
        replaced(Inserts, "on_ack", acked),
        replaced(Replica, "_is_mine", is_mine),
    ):
        yield


def _two_attempts(seed: int) -> Plan:
    """The servers lose contact; the handler's messages are late, so it tries both servers."""
    at_ms = Random(f"cut {seed}").randrange(10, 200)
    apart = ("shard-0-0", "shard-0-1", "shard-0-1", "shard-0-0")
    from_handler = ("fh-0", "shard-0-0", "fh-0", "shard-0-1")
    return busy(
        seed, Fault(at_ms, "cut", apart, 4_000), Fault(at_ms + 1, "clog", from_handler, 4_000),
        durability="disk", conditions=LAN,
    )  # fmt: skip


@mutant(
    _two_attempts, "the servers lose contact, and the handler's messages to both arrive 4 s late"
)
def two_recoveries_of_one_view() -> Iterator[None]:
    """All attempts from a view have one number, and any promise to it counts (D21)."""
    # It is found because the recovery is stuck; `two_states_begin_one_view` shows a second state.
    conductor = failure_handler.recovery.Recovery
    begin, propose = HandlerState._begin, conductor._propose

    def proposed(self: Any, command: Any, now: int) -> None:
        if isinstance(command, Begin):
            attempt = _replace(command.attempt, recovery=command.view + 1)
            command = _replace(command, attempt=attempt)
        propose(self, command, now)

    def begun(self: HandlerState, command: Begin) -> Any:
        known = self.shards.get(command.shard)
        if known is not None and known.is_under_way and known.view == command.view:
            self._keep(_replace(known, attempt=command.attempt))
            return ""
        return begin(self, command)

    def frozen(self: Any, _route: bytes, message: wire.Frozen) -> None:
        known = self._refresh()
        if known is not None and known.is_under_way and message.recovery == self._recovery:
            self._frozen = message

    with (
        replaced(conductor, "_propose", proposed),
        replaced(HandlerState, "_begin", begun),
        replaced(conductor, "on_frozen", frozen),
    ):
        yield


def _part_busy_servers(seed: int) -> Plan:
    return part_the_servers(seed)._replace(writers=2, calls=400, think_us=10_000, conditions=LAN)


@mutant(_part_busy_servers, "primary and backup do not hear each other for two seconds")
def two_states_begin_one_view() -> Iterator[None]:
    """Every server that has promised starts the next view with its own state (D21)."""
    enter = RecoveryParticipant._enter

    def entered(self: RecoveryParticipant, decision: wire.ViewDecided) -> bool:
        state = self._state
        if enter(self, decision):
            return True
        if state.server_state != "frozen" or decision.view != self.number:
            return False
        state.view, state.view_base = decision.view, state.stream.last
        state.server_state, self.transfer = "joined", None
        return True

    with replaced(RecoveryParticipant, "_enter", entered):
        yield


@mutant(kill_the_primary, "the primary is killed under load; slow network")
def sessions_do_not_survive_the_view() -> Iterator[None]:
    """A server forgets in a recovery which units it has (D9)."""
    part = Sessions.part

    def forgotten(self: Sessions, *arguments: Any) -> Any:
        tables, is_more = part(self, *arguments)
        return [
            _replace(table, first_incomplete=1, units=[], is_cut=False) for table in tables
        ], is_more

    def dropped(self: Sessions) -> None:
        self.by_client.clear()

    with (
        replaced(Sessions, "part", forgotten),
        replaced(Sessions, "drop_undecided", dropped),
    ):
        yield


@mutant(kill_the_primary, "the primary is killed under load; slow network")
def undecided_log_is_kept() -> Iterator[None]:
    """A joining server keeps entries that the survivor does not have (D25)."""
    with replaced(shard.recovery.state_transfer, "_common", lambda _, request: request.after):
        yield


@mutant(kill_any_server, "two shards; a server is killed under load; slow network")
def limbo_answers_absent() -> Iterator[None]:
    """A server that forgot its state reports a record as absent (D13, D2)."""
    serve = Replica._serve

    def served(self: Replica, route: bytes, message: Any) -> None:
        state = self.state
        if state.server_state != "limbo" or not isinstance(message, wire.Locate):
            serve(self, route, message)
            return
        state.send(
            route,
            wire.Located(
                state.cluster, state.shard, message.view + 1, state.server, message.client,
                message.seq, "absent", [],
            ),
        )  # fmt: skip

    with replaced(Replica, "_serve", served):
        yield


# --- leases --------------------------------------------------------------------------------------


@mutant(kill_any_server, "two shards; a server of the first is killed; slow network")
def stale_schedule() -> Iterator[None]:
    """A server of shard 1 divides positions among the previous members of the lease (D30)."""
    lease_of = EpochClock.lease_of

    def stale(self: EpochClock, lease: Any) -> Any:
        former = [run for run in self.recent if run.last.number < lease.number]
        alone = [r.last.members for r in former if len(r.last.members) < len(lease.members)]
        return _replace(lease, members=alone[-1]) if self.shard == 1 and alone else lease

    def own(self: EpochClock, gsn: int) -> Any:
        lease = lease_of(self, gsn)
        return None if lease is None else stale(self, lease)

    def next_owned(self: EpochClock, gsn: int) -> int:
        while (lease := own(self, gsn)) is not None:
            gsn = lease.next_owned(self.shard, gsn)
            if gsn < lease.stop:
                break
        return gsn

    with replaced(EpochClock, "lease_of", own), replaced(EpochClock, "next_owned", next_owned):
        yield


@mutant(kill_any_server, "two shards; a server of the first is killed; slow network")
def second_descriptor_for_an_epoch() -> Iterator[None]:
    """The membership service grants the lease in force again when its members change (D30)."""
    propose, grant = LeasePlan.propose, ClusterState._grant

    def proposed(self: LeasePlan, members: Any, now: int, **how: bool) -> Any:
        lease, last = propose(self, members, now, **how), self.last
        if last is None or members == last.members:
            return lease
        return _replace(last, members=members)

    def granted(self: ClusterState, command: Any) -> Any:
        lease, last = command.lease, self.last
        if last is None or lease.number != last.number or lease == last:
            return grant(self, command)
        self._place(command.placements)
        run = self.runs.pop()
        if run.count > 1:
            before = run.first
            while before.number < last.number - 1:
                before = before.following()
            self.runs.append(LeaseRun(run.first, run.count - 1, before))
        self.runs.append(run_of(lease))
        self._digests[lease.number] = lease.digest
        return ""

    with replaced(LeasePlan, "propose", proposed), replaced(ClusterState, "_grant", granted):
        yield
