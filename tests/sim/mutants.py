"""Mutants of one view, of readers and of disks; importing this module registers all mutants.

Recoveries and leases: tests/sim/mutants_of_views; changes of shards: tests/sim/mutants_of_shards;
long lease histories: tests/sim/mutants_of_leases; appends: tests/sim/mutants_of_appends; durability
levels: tests/sim/mutants_of_levels; early delivery: tests/sim/mutants_of_speculation; cursors:
tests/sim/mutants_of_cursors; repeated rows: tests/sim/mutants_of_rows;
regions: tests/sim/mutants_of_regions, tests/sim/mutants_of_near_reads. See tests/sim/mutation.
"""

from __future__ import annotations

from collections import OrderedDict
from random import Random
from typing import TYPE_CHECKING, Any, Final

import msgspec

import shard.replica
from shard.ordering.backup import Backup
from shard.ordering.primary import Primary
from shard.recovery.log_comparison import entries_after
from shard.replica import Replica
from shard.serving.readers import Readers
from shard.state.guesses import Guesses
from shard.state.replica_state import ReplicaState
from tests.sim import (
    mutants_of_appends,
    mutants_of_cursors,
    mutants_of_leases,
    mutants_of_levels,
    mutants_of_logdb,
    mutants_of_near_reads,
    mutants_of_rebuilds,
    mutants_of_regions,
    mutants_of_rows,
    mutants_of_sessions,
    mutants_of_shards,
    mutants_of_speculation,
    mutants_of_time,
    mutants_of_views,
)
from tests.sim.mutation import (
    LAN,
    LOSSY,
    MUTANTS,
    busy,
    kill_and_lose,
    kill_any_server,
    kill_the_primary,
    logs_are_not_compared,
    lossy,
    mutant,
    replaced,
    two_shards,
    undisturbed,
)
from tests.sim.plan import Fault, Plan
from tests.simulator.kernel import MS, US
from tests.simulator.network import Conditions
from ziplog.client.inserts.inserts import Inserts
from ziplog.client.reads.read import Reads
from ziplog.client.reads.subscribe import Subscription
from ziplog.core.units import NEVER
from ziplog.runtime.driver import Driver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shard.state.sessions import HeldUnit
    from ziplog import wire

# Imported modules register their mutants.
__all__ = [
    "MUTANTS", "mutants_of_appends", "mutants_of_cursors", "mutants_of_leases",
    "mutants_of_levels", "mutants_of_logdb", "mutants_of_near_reads", "mutants_of_rebuilds",
    "mutants_of_regions", "mutants_of_rows", "mutants_of_sessions", "mutants_of_shards",
    "mutants_of_speculation", "mutants_of_time", "mutants_of_views",
]  # fmt: skip

_replace: Final = msgspec.structs.replace


# --- inside a view -------------------------------------------------------------------------------


def _kill_and_stall(seed: int) -> Plan:
    """Twelve clients compete for slots, and servers receive their records in different orders."""
    stalls = Conditions(delay_ns=(20 * US, 10 * MS), stalls=0.2, stall_ns=500 * MS)
    at_ms = Random(f"kill {seed}").randrange(50, 200)
    return busy(
        seed, Fault(at_ms, "kill", ("shard-0-0",)), writers=12, lanes=4, calls=40, think_us=0,
        conditions=stalls,
    )  # fmt: skip


@mutant(
    _kill_and_stall,
    "the primary is killed under the load of twelve; a frame in five is up to 0.5 s late",
)
def displaced_unit_is_guessed_again() -> Iterator[None]:
    """A backup gives a displaced unit, and the units after it, the next slots (D3, D4)."""
    displace, apply = Backup._displace, Backup._apply
    losers: dict[Backup, list[HeldUnit]] = {}

    def displaced(self: Backup, units: list[HeldUnit]) -> None:
        displace(self, units)
        losers.setdefault(self, []).extend(units)

    def applied(self: Backup, now: int) -> None:
        apply(self, now)
        sessions = self._state.sessions.by_client
        lost = [
            unit
            for unit in losers.pop(self, [])
            if unit.gsns is None
            and unit.client in sessions
            and sessions[unit.client].units.get(unit.seq) is unit
        ]
        if not lost:
            return
        behind = list(self.guesses.promised.values())
        self.guesses.promised.clear()
        self.guesses._update_promised_end()
        for unit in (*lost, *behind):
            unit.gsns = None
            if self.guesses.promise(unit, self._state.stream.end):
                self._state.ack(unit)

    with replaced(Backup, "_displace", displaced), replaced(Backup, "_apply", applied):
        yield


@mutant(kill_and_lose, "the primary is killed under load; a frame in five is lost")
def promise_moves_to_the_next_epoch() -> Iterator[None]:
    """A backup moves its promises when an epoch is over (D3)."""
    arrived = Backup.accept

    def moved(self: Backup, session: Any, unit: HeldUnit, now: int) -> None:
        floor, promised = self._state.clock.current_epoch_base(now), self.guesses.promised
        for first in [first for first in promised if first < floor]:
            old = promised.pop(first)
            self.guesses._update_promised_end()
            old.gsns = None
            if self.guesses.promise(old, max(floor, self._state.stream.end)):
                self._state.ack(old)
        arrived(self, session, unit, now)

    with replaced(Backup, "accept", moved):
        yield


@mutant(kill_the_primary, "the primary is killed under load; slow network")
def stable_counts_promises() -> Iterator[None]:
    """A backup reports its guesses as decided (D7)."""
    original = Backup.on_batch_end

    def report(self: Backup, now: int) -> None:
        stream, guessed = self._state.stream, len(self.guesses.promised)
        stream.last += guessed
        try:
            original(self, now)
        finally:
            stream.last -= guessed

    with replaced(Backup, "on_batch_end", report):
        yield


@mutant(kill_the_primary, "the primary is killed under load; slow network")
def other_copies_stay() -> Iterator[None]:
    """A unit that the primary placed elsewhere also stays at its promised slot (D9, D22)."""
    place = Guesses.apply_place

    def kept(self: Guesses, unit: HeldUnit, gsns: list[int]) -> Any:
        former, copy = unit.gsns, None
        if former and former[0] > gsns[-1]:
            copy = _replace(unit)
        displaced = place(self, unit, gsns)
        if copy is not None and former:
            self.promised = OrderedDict(sorted([*self.promised.items(), (former[0], copy)]))
            self._update_promised_end()
        return displaced

    with replaced(Guesses, "apply_place", kept):
        yield


@mutant(lossy, "no faults; the network loses a frame in twenty")
def no_duplicate_is_recognised() -> Iterator[None]:
    """A server treats a copy of a placed unit as another unit (D9)."""
    insert = Replica._insert

    def inserted(self: Replica, route: bytes, message: wire.Insert) -> None:
        session = self.state.sessions.by_client.get(message.client)
        unit = session.units.get(message.seq) if session is not None else None
        if session is not None and unit is not None and unit.confirmed:
            del session.units[message.seq]
        insert(self, route, message)

    with replaced(Replica, "_insert", inserted):
        yield


@mutant(lossy, "no faults; the network loses a frame in twenty")
def gap_is_passed() -> Iterator[None]:
    """A backup applies entries in spite of a gap before them (D7)."""
    forwarded = Backup.on_forward

    def passed(self: Backup, forward: wire.Forward, now: int) -> Any:
        expected = self._state.stream.last + len(self._pending) + 1
        if forward.first > expected:
            forward = _replace(forward, first=expected)
        return forwarded(self, forward, now)

    with replaced(Backup, "on_forward", passed):
        yield


@mutant(two_shards, "no faults; two shards, fast network")
def after_is_ignored() -> Iterator[None]:
    """The primary places a record without regard to `after` (T 4.2.1)."""
    arrived = Primary.accept

    def anywhere(self: Primary, session: Any, unit: HeldUnit, now: int) -> None:
        unit.after = 0
        arrived(self, session, unit, now)

    with replaced(Primary, "accept", anywhere):
        yield


@mutant(kill_the_primary, "the primary is killed under load; slow network")
def restart_in_the_same_view() -> Iterator[None]:
    """A crashed server continues in its view with the content of its disk (D2)."""
    start = shard.replica.start

    def go_on(state: ReplicaState, saved: bytes | None, now: int, *, limbo: bool) -> bool:
        if start(state, saved, now, limbo=limbo):
            return True
        store, stream = state.store, state.stream
        if state.server_state != "limbo" or not state.cluster or not store.last_view:
            return False
        fseq, tables = store.last_table()
        state.sessions.install(tables, now, store.last_end - 1, 0)
        for entry in entries_after(store, fseq):
            state.sessions.replay(entry, now)
        window = list(entries_after(store, stream.stable))
        stream.restore(stream.stable_mark, stream.durable_mark, window)
        state.server_state, state.view = "up", store.last_view
        return True

    # Its log may be shorter than the others'.
    with replaced(shard.replica, "start", go_on), logs_are_not_compared():
        yield


@mutant(kill_the_primary, "the primary is killed under load; slow network")
def client_completes_on_the_primarys_word() -> Iterator[None]:
    """A client completes an insert on the primary's ack alone (T 4.2.1, D8)."""
    on_ack = Inserts.on_ack

    def completed(self: Inserts, ack: wire.InsertAck) -> None:
        on_ack(self, ack)
        window = self.windows.get(ack.shard)
        unit = window.inflight.get(ack.seq) if window is not None else None
        if window is not None and unit is not None and unit.acks.get(0) is ack:
            self._complete_unit(window, unit, ack.gsns)

    with replaced(Inserts, "on_ack", completed):
        yield


def _kill_two(seed: int) -> Plan:
    random = Random(f"kill {seed}")
    first = random.randrange(10, 200)
    victims = random.sample(["shard-0-0", "shard-0-1", "shard-0-2"], 2)
    faults = [Fault(first + i, "kill", (name,)) for i, name in enumerate(victims)]
    return busy(seed, *faults, f=2, conditions=LOSSY)


@mutant(_kill_two, "f = 2; two servers are killed under load; the network loses frames")
def client_completes_on_a_majority() -> Iterator[None]:
    """A client completes an insert on the acks of a majority (T 4.2.1, D8)."""
    on_ack = Inserts.on_ack

    def completed(self: Inserts, ack: wire.InsertAck) -> None:
        on_ack(self, ack)
        window = self.windows.get(ack.shard)
        unit = window.inflight.get(ack.seq) if window is not None else None
        if window is None or unit is None or 0 not in unit.acks:
            return
        gsns = unit.acks[0].gsns
        if sum(one.gsns == gsns for one in unit.acks.values()) > unit.replicas // 2:
            self._complete_unit(window, unit, gsns)

    with replaced(Inserts, "on_ack", completed):
        yield


# --- readers -------------------------------------------------------------------------------------


def _three_servers(seed: int) -> Plan:
    """A shard of three; in a shard of two, the serving backup knows itself what is stable."""
    return kill_the_primary(seed)._replace(f=2)


@mutant(_three_servers, "the primary of three servers is killed under load; slow network")
def unstable_records_are_delivered() -> Iterator[None]:
    """A subscriber receives records that only one server holds (T 4.2.2 literally; D43)."""
    drained, catch_up = Replica._on_batch_end, Readers._catch_up

    def caught_up(self: Readers, *args: Any) -> int:
        state, stream = self._state, self._state.stream
        kept = stream.stable, stream.stable_end, state._frontier
        stream.stable, stream.stable_end = stream.last, stream.end
        try:
            return catch_up(self, *args)
        finally:
            stream.stable, stream.stable_end, state._frontier = kept

    def looked(self: Replica) -> None:
        readers = self._readers
        if self.state.server_state == "up":
            for key, subscription in readers.subscriptions.items():
                if subscription.sent < self.state.clock.next_owned(self.state.stream.end):
                    readers._lagging[key] = subscription
        drained(self)

    with replaced(Replica, "_on_batch_end", looked), replaced(Readers, "_catch_up", caught_up):
        yield


@mutant(undisturbed, "no faults; slow network")
def frontier_passes_a_hole() -> Iterator[None]:
    """A shard's frontier lies after a position that it has not decided (D44)."""
    frontier = ReplicaState.frontier.fget  # type: ignore[attr-defined]

    def behind(self: ReplicaState) -> int:
        true = frontier(self)
        self._frontier = max(true, min(self.clock.next_owned(true + 1), self.clock.limit))
        return self._frontier

    with replaced(ReplicaState, "frontier", property(behind)):
        yield


@mutant(kill_any_server, "two shards; a server of the first is killed; slow network")
def silent_shard_is_skipped() -> Iterator[None]:
    """A client takes a shard's positions for no-ops during its recovery (D29)."""
    limit = Subscription._limit

    def skipped(self: Subscription) -> int:
        silent = {}
        for number, stream in self._streams.items():
            route = self._routing.route(number)
            if route is not None and route.is_unavailable:
                silent[stream] = stream.frontier
                stream.frontier = self._leases.stop
        try:
            return limit(self)
        finally:
            for stream, frontier in silent.items():
                stream.frontier = frontier

    with replaced(Subscription, "_limit", skipped):
        yield


@mutant(kill_the_primary, "the primary is killed under load; slow network")
def one_replica_answers_a_read() -> Iterator[None]:
    """A read accepts any single replica's answer on a record that is not stable (D42)."""
    on_reply, start = Reads.on_reply, Reads.start

    def asked(self: Reads, call: int, request: Any) -> None:
        start(self, call, request)
        reading = self._pending.get(call)
        if reading is not None and reading.retry_at != NEVER:
            reading.asks_all = True
            self._send(reading)

    def believed(self: Reads, reply: wire.ReadReply) -> None:
        is_record = reply.answer == "record"
        on_reply(self, _replace(reply, stable=True) if is_record else reply)

    with replaced(Reads, "on_reply", believed), replaced(Reads, "start", asked):
        yield


# --- disks ---------------------------------------------------------------------------------------


def _blackout(seed: int) -> Plan:
    at_ms = Random(f"power {seed}").randrange(10, 200)
    fault = Fault(at_ms, "power-all")
    return busy(seed, fault, durability="disk", lanes=4, think_us=0, conditions=LAN)


@mutant(_blackout, "level `disk`; the power of all machines fails under load")
def acks_before_the_disk() -> Iterator[None]:
    """A server at level `disk` acks entries before they are on its disk (D15)."""
    init = Driver.__init__

    def begun(self: Driver, *args: Any, **how: Any) -> None:
        init(self, *args, **{**how, "flush_before_send": False})

    with replaced(Driver, "__init__", begun):
        yield
