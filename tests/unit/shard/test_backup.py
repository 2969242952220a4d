from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
from crc32c import crc32c

from shard.ordering.backup import MAX_HELD_DECISIONS, STABLE_REQUEST_DELAY_NS
from shard.replica import Replica
from tests.actors import Client
from tests.checkers import decided, places
from tests.world import (
    CLUSTER,
    MS,
    US,
    Link,
    S,
    World,
    add_shard,
    calm_world,
    first_lease,
    grant,
    insert,
    placements,
    probe,
)
from ziplog import wire
from ziplog.core.entries import Decision, Expire, Place, Skip
from ziplog.core.node import Received
from ziplog.core.view import run_of

if TYPE_CHECKING:
    from shard.ordering.backup import Backup
    from ziplog.core.message import Message

PRIMARY, BACKUP = "shard-0-0", "shard-0-1"


def backup_of(world: World) -> Backup:
    replica = world.nodes[BACKUP]
    assert isinstance(replica, Replica)
    assert replica._backup is not None
    return replica._backup


def acks(world: World, server: int = 1) -> list[tuple[int, bool, list[int]]]:
    """Return what a server acked: (seq, decided, gsns)."""
    found = probe(world).of(wire.InsertAck)
    return [(ack.seq, ack.confirmed, ack.gsns) for ack in found if ack.server == server]


def send(world: World, message: Message, *, to: str = BACKUP) -> None:
    world.send("c", to, message)
    world.run(1 * MS)


def forward(first: int, *decisions: Decision, stable: int = 0, view: int = 1) -> wire.Forward:
    return wire.Forward(CLUSTER, 0, view, 1, first, list(decisions), stable, 0)


def lonely_backup(**config: object) -> World:
    """Return a world with a probe for its primary: the tests send its messages."""
    world = calm_world(**config)  # type: ignore[arg-type]
    world.paused.add(PRIMARY)
    return world


def place(message: wire.Insert, *gsns: int, body: bool = False) -> Place:
    return Place(message.client, message.seq, message.first_incomplete, 0, list(gsns),
                      crc32c(message.body), message.body if body else None)  # fmt: skip


# --- guesses and decisions ---


def test_right_guess_is_not_acked_again() -> None:
    world = lonely_backup()
    unit = insert(1)
    send(world, unit)
    send(world, forward(1, place(unit, 1)))
    assert acks(world) == [(1, False, [1])]
    send(world, unit)
    assert acks(world)[1:] == [(1, True, [1])]


def test_wrong_guess_is_corrected_and_the_displaced_unit_waits() -> None:
    world = lonely_backup()
    one, two = insert(1), insert(2)
    send(world, one)
    send(world, two)
    send(world, forward(1, place(two, 1)))
    assert acks(world) == [(1, False, [1]), (2, False, [2]), (2, True, [1])]
    send(world, one)
    assert len(acks(world)) == 3, "a displaced unit is not acked"
    send(world, forward(2, place(one, 2)))
    assert acks(world)[3:] == [(1, True, [2])]


def test_late_client_copy_is_acked_as_decided() -> None:
    world = lonely_backup()
    unit = insert(1)
    send(world, forward(1, place(unit, 1, body=True)))
    assert acks(world) == []
    send(world, unit)
    assert acks(world) == [(1, True, [1])]
    assert len(places(world, BACKUP)) == 1


def test_no_op_breaks_a_promise() -> None:
    world = lonely_backup()
    send(world, insert(1))
    send(world, forward(1, Skip(1, 5)))
    send(world, insert(1))
    assert acks(world) == [(1, False, [1])]
    assert not backup_of(world).guesses.promised


# --- a primary without space ---


def beat(full: str = "", server: int = 0) -> wire.Beat:
    return wire.Beat(CLUSTER, 0, 1, server, 1, "up", 1000, full)


def promises(world: World) -> list[tuple[int, str, int]]:
    """Return the refusals: (seq, code, number of copies that the server never accepts)."""
    return [(one.request, one.code, one.copies) for one in probe(world).of(wire.Refused)]


def test_a_backup_refuses_what_its_primary_has_no_space_for() -> None:
    world = lonely_backup()
    send(world, beat("its disk is full"))
    send(world, insert(1, copy=1))
    assert promises(world) == [(1, "no-space", 1)]
    assert probe(world).of(wire.Refused)[0].detail == "shard-0-0: its disk is full"
    send(world, beat())
    send(world, insert(1, copy=1))  # The network delivers it twice.
    send(world, insert(1, copy=2))
    assert promises(world)[1:] == [(1, "full", 1)]
    assert acks(world) == [(1, False, [1])]


def test_refused_units_leave_no_gap_in_the_guesses() -> None:
    world = lonely_backup()
    for seq in range(1, 6):
        send(world, insert(seq, copy=1))
    send(world, beat("its disk is full"))
    send(world, forward(1, Skip(1, 10)))
    assert len(promises(world)) == 5
    send(world, beat())
    send(world, insert(6))
    assert acks(world)[5:] == [(6, False, [10])]


def test_the_short_path_is_closed_while_the_primary_has_no_space() -> None:
    world = lonely_backup()
    replica = world.nodes[BACKUP]
    assert isinstance(replica, Replica)
    unit = insert(1, copy=1)
    send(world, unit)
    send(world, forward(1, place(unit, 1)))
    assert replica.plain_inserts.insert(b"c", insert(2, copy=1), world.now + 1) is not None
    send(world, beat("its disk is full"))
    assert replica.plain_inserts.insert(b"c", insert(3, copy=1), world.now + 1) is None


def test_other_backups_without_space_change_nothing() -> None:
    world = lonely_backup(f=2)
    send(world, beat("its disk is full", server=2))
    send(world, insert(1, copy=1))
    assert acks(world) == [(1, False, [1])]


def test_a_backup_keeps_its_promises_until_the_primary_breaks_them() -> None:
    world = lonely_backup()
    send(world, insert(1, copy=1))
    send(world, beat("its disk is full"))
    assert not promises(world), "the primary may have accepted it before"
    send(world, forward(1, Skip(1, 5)))
    assert promises(world) == [(1, "no-space", 1)]
    send(world, insert(1, copy=1))
    assert acks(world) == [(1, False, [1])]


def test_a_unit_without_slots_is_refused_once_the_primary_has_no_space() -> None:
    world = lonely_backup()
    send(world, insert(1, copy=1))
    send(world, forward(1, Skip(1, 5)))
    send(world, insert(1, copy=2))
    assert not promises(world)
    send(world, beat("its disk is full"))
    assert promises(world) == [(1, "no-space", 2)]


def test_another_copy_of_a_unit_without_slots_is_refused() -> None:
    """A unit of an earlier view may be held since before the primary's heartbeat."""
    world = lonely_backup(durability="disk")
    send(world, insert(1, copy=1))
    replica = world.nodes[BACKUP]
    assert isinstance(replica, Replica)
    replica.state.primary_full = "its disk is full"
    send(world, insert(1, copy=2))
    assert promises(world) == [(1, "no-space", 2)]


def test_a_decision_that_waits_for_another_body_keeps_its_unit() -> None:
    world = lonely_backup(durability="disk")
    one, two = insert(1, copy=1), insert(2, copy=1)
    send(world, two)
    send(world, forward(1, place(one, 1), place(two, 2)))
    send(world, beat("its disk is full"))
    assert not promises(world)
    send(world, forward(1, place(one, 1, body=True)))
    assert acks(world) == [(2, True, [2])]


def test_a_decision_of_the_primary_overrides_the_refusal() -> None:
    world = lonely_backup(durability="disk")
    unit = insert(1, copy=1)
    send(world, unit)
    send(world, beat("its disk is full"))
    assert promises(world) == [(1, "no-space", 1)]
    send(world, forward(1, place(unit, 1, body=True)))
    send(world, insert(1, copy=1))
    assert acks(world) == [(1, True, [1])]


# --- epochs, predecessors, bodies ---


def test_epoch_change_moves_no_promise() -> None:
    world = lonely_backup()
    send(world, insert(1))
    world.run(100 * MS)
    send(world, insert(2))
    send(world, insert(1))
    guessed = acks(world)
    assert guessed[0] == guessed[2] == (1, False, [1])
    assert guessed[1][2][0] > first_lease(1).epoch_size


def test_successor_gets_no_guess_before_its_predecessor() -> None:
    world = lonely_backup()
    send(world, insert(2, predecessor=1))
    send(world, insert(1))
    send(world, insert(3, predecessor=1))
    assert [seq for seq, _, _ in acks(world)] == [1, 3]


def test_disk_level_acks_only_what_is_decided() -> None:
    world = lonely_backup(durability="disk")
    unit = insert(1)
    send(world, unit)
    send(world, unit)
    assert acks(world) == []
    send(world, forward(1, place(unit, 1)))
    assert acks(world) == [(1, True, [1])]


def test_body_that_differs_from_the_primarys_is_requested() -> None:
    world = lonely_backup()
    send(world, insert(1, size=3))
    mine = insert(1)
    send(world, forward(1, place(mine, 1)))
    assert decided(world, BACKUP) == []
    send(world, forward(1, place(mine, 1, body=True)))
    assert [p.body for p in places(world, BACKUP)] == [mine.body]
    assert acks(world)[-1] == (1, True, [1])


# --- the stream ---


def test_stream_is_applied_in_order_and_a_gap_is_requested_at_once() -> None:
    world = lonely_backup()
    one, two = insert(1), insert(2)
    send(world, one)
    send(world, two)
    world.trace.clear()
    world.tracing = True
    send(world, forward(2, place(two, 2)))
    assert decided(world, BACKUP) == []
    assert f"{BACKUP} -> {PRIMARY}: Resend first=1 bodies=0" in world.trace
    send(world, forward(1, place(one, 1), place(two, 2)))
    assert [e.fseq for e in decided(world, BACKUP)] == [1, 2]
    send(world, forward(1, place(one, 1)))
    assert len(decided(world, BACKUP)) == 2, "applied decisions are ignored"


def test_missing_body_is_requested_after_a_grace_period() -> None:
    world = lonely_backup()
    one, two, three = insert(1), insert(2), insert(3)
    send(world, two)
    world.tracing = True
    send(world, forward(1, place(one, 1), place(two, 2), place(three, 3)))
    assert not any("Resend" in line for line in world.trace)
    world.run(2 * MS)
    assert f"{BACKUP} -> {PRIMARY}: Resend first=1 bodies=3" in world.trace
    send(world, forward(1, place(one, 1, body=True)))
    assert [e.fseq for e in decided(world, BACKUP)] == [1, 2], "the third body is still missing"
    send(world, three)
    assert len(decided(world, BACKUP)) == 3
    assert acks(world)[-1] == (3, True, [3])


def test_guess_after_a_missing_body_avoids_the_received_positions() -> None:
    world = lonely_backup()
    one, two, three = insert(1), insert(2), insert(3)
    send(world, forward(1, place(one, 1), place(two, 2)))
    send(world, three)
    send(world, two)
    assert acks(world) == [(3, False, [3])]


def test_grace_period_restarts_for_each_body() -> None:
    """Forwards that arrive before the clients' copies must not make every body travel twice."""
    world = lonely_backup()
    world.links["c", BACKUP] = Link(delay=lambda: 50 * US)
    world.tracing = True
    send(world, forward(1, place(insert(1), 1)))
    for seq in range(1, 40):
        world.send("c", BACKUP, forward(seq + 1, place(insert(seq + 1), seq + 1)))
        world.send("c", BACKUP, insert(seq))
        world.run(900 * US)
    assert len(decided(world, BACKUP)) == 39
    assert not any("Resend" in line for line in world.trace)


def test_held_back_decisions_are_bounded() -> None:
    world = lonely_backup()
    first = insert(1)
    send(world, forward(1, place(first, 1), *[Skip(g, g + 1) for g in range(2, 9000)]))
    for start in (9000, 17_000):
        skips = [Skip(g, g + 1) for g in range(start, start + 8000)]
        send(world, forward(start, *skips))
    assert len(backup_of(world)._pending) == MAX_HELD_DECISIONS
    send(world, first)
    assert len(decided(world, BACKUP)) == MAX_HELD_DECISIONS


def test_only_decided_entries_are_reported() -> None:
    world = lonely_backup()
    world.tracing = True
    send(world, insert(1))
    unit = insert(2)
    send(world, forward(1, place(unit, 1)))
    assert [line for line in world.trace if "Report" in line] == [
        f"{BACKUP} -> {PRIMARY}: Report held=0 durable=0"
    ]


def test_lost_stable_watermark_is_requested() -> None:
    world = calm_world(f=2)  # the only backup determines stability itself
    world.run(400 * MS)  # the lease is in its last epoch: no more epochs end
    send(world, wire.Want(CLUSTER, 0, 0, 5), to=PRIMARY)
    # The last forward, with the stable watermark, is lost.
    world.links[PRIMARY, BACKUP] = Link(lose=lambda: True)
    world.run(20 * MS)
    world.links.clear()
    stream = backup_of(world)._state.stream
    assert stream.stable < stream.last
    last = stream.last
    world.run(STABLE_REQUEST_DELAY_NS + 10 * MS)
    assert stream.stable >= last


# --- abandoned units ---


def test_orphan_is_dropped_when_its_client_abandons_it() -> None:
    """D12: a unit that reached only the backup leaves no state."""
    world = lonely_backup()
    backup = backup_of(world)
    send(world, insert(1))
    send(world, insert(2, first_incomplete=2))
    assert 1 in backup._state.sessions.by_client[b"c" * 16].units, "a promise stays"
    send(world, forward(1, Skip(1, 9)))
    session = backup._state.sessions.by_client[b"c" * 16]
    assert sorted(session.units) == [2]
    send(world, insert(3, first_incomplete=3))
    assert sorted(session.units) == [3]
    assert backup._undecided_bytes == len(insert(3).body)


def test_decision_settles_the_units_below_it() -> None:
    world = lonely_backup()
    send(world, insert(1))
    later = insert(2, first_incomplete=2)
    send(world, forward(1, place(insert(1), 1), place(later, 2, body=True)), to=BACKUP)
    session = backup_of(world)._state.sessions.by_client[later.client]
    assert session.first_incomplete == 2
    assert list(session.units) == [2]


def test_orphans_do_not_fill_the_backup_permanently() -> None:
    """Bodies without slots are dropped when their clients settle, not kept up to the limit."""
    world = lonely_backup()
    backup = backup_of(world)
    for seq in range(1, 200):
        send(world, insert(seq, first_incomplete=seq, size=1000))
        end = backup._state.stream.end
        send(world, forward(seq, Skip(end, end + 3)))
    assert backup._undecided_bytes <= 2 * len(insert(1, size=1000).body)


def test_expiry_keeps_promises() -> None:
    """A client may return at the moment when the primary expires its session."""
    world = lonely_backup()
    one, two = insert(1), insert(2)
    send(world, one)
    send(world, forward(1, place(one, 1)))
    send(world, two)
    send(world, forward(2, Expire(b"c" * 16)))
    session = backup_of(world)._state.sessions.by_client[b"c" * 16]
    assert sorted(session.units) == [2]
    send(world, two)
    assert acks(world)[-1] == (2, False, [2])
    send(world, forward(3, place(two, 2)))
    assert [p.seq for p in places(world, BACKUP)] == [1, 2]


def test_session_known_only_to_the_backup_expires() -> None:
    world = lonely_backup(session_timeout_s=2)
    send(world, insert(1))
    send(world, forward(1, Skip(1, 5)))
    sessions = backup_of(world)._state.sessions.by_client
    world.run(1 * S)
    assert sessions
    world.run(3 * S)
    assert not sessions


# --- D5: guesses are right again ---


@pytest.mark.parametrize(
    "servers", [(1,), (0,), (1, 1, 1)], ids=["backup only", "primary only", "three at the backup"]
)
def test_fast_path_share_returns_after_an_orphan(servers: tuple[int, ...]) -> None:
    """10,000 inserts a second, forwards that take 1 ms; a client fails while it sends."""
    random = Random(3)
    world = World(Link(delay=lambda: (50 + random.randrange(3)) * US))
    add_shard(world, 0)
    world.links[PRIMARY, BACKUP] = Link(delay=lambda: 1 * MS)
    grant(world, first_lease(1, epochs=64), 1)
    world.run(2 * MS)
    clients = [Client(f"client-{i}", 1, retry_ns=50 * MS) for i in range(8)]
    for client in clients:
        world.add(client.name, client)
    jobs = []
    for index in range(1400):
        client = random.choice(clients)
        for server in servers if index == 300 else ():
            client.insert(world, 0, to=[server], abandon=True)
        jobs.append(client.insert(world, 0))
        world.run(int(random.expovariate(1 / 100)) * US)
    world.run(100 * MS)
    assert all(job.gsns for job in jobs)
    before, after = (sum(j.fast for j in some) / len(some) for some in (jobs[:300], jobs[400:]))
    assert before >= 0.88
    assert after >= before - 0.04
    assert after >= 0.85


def test_epoch_change_displaces_only_units_in_flight() -> None:
    """After the no-ops, the next guess leaves room for the units that they displaced."""
    world = lonely_backup()
    units = [insert(seq) for seq in range(1, 6)]
    for unit in units:
        send(world, unit)
    base = first_lease(1).epoch_size + 1
    send(world, forward(1, Skip(1, base), place(units[0], base), place(units[1], base + 1)))
    send(world, insert(6))
    assert acks(world)[-1] == (6, False, [base + 5])


def test_fast_clock_displaces_nothing_while_inserts_arrive() -> None:
    lease = first_lease(1, epoch_ms=1000)
    world = calm_world(lease=lease)
    ahead = wire.LeaseAnnounced(CLUSTER, [run_of(lease.following())], 0, placements(1, 1), 0)
    send(world, insert(1), to=PRIMARY)
    send(world, insert(1))
    world.inject(BACKUP, Received(b"mms-0", ahead))
    for seq in range(2, 8):
        unit = insert(seq)
        world.send("c", PRIMARY, unit)
        world.send("c", BACKUP, unit)
        world.run(1 * MS)
    assert acks(world)[1:] == [(seq, False, [seq]) for seq in range(2, 8)]


# --- restart ---


def test_restarted_backup_requests_missing_decisions() -> None:
    world = lonely_backup()
    send(world, forward(1, Skip(1, 5), stable=1))
    world.restart(BACKUP)
    world.tracing = True
    world.run(1 * MS)
    assert f"{BACKUP} -> {PRIMARY}: Resend first=2 bodies=0" in world.trace


def test_restarted_backup_keeps_promises_and_requests_missing_decisions() -> None:
    world = lonely_backup()
    one, two = insert(1), insert(2)
    send(world, one)
    send(world, two)
    send(world, forward(1, Skip(1, 2)))
    world.restart(BACKUP)
    world.tracing = True
    world.run(1 * MS)
    assert f"{BACKUP} -> {PRIMARY}: Resend first=2 bodies=0" in world.trace
    send(world, two)
    assert acks(world)[-1] == (2, False, [2])
    send(world, forward(2, place(one, 2)))
    assert acks(world)[-1] == (2, False, [2]), "the route to the client was forgotten"
    send(world, one)
    assert acks(world)[-1] == (1, True, [2])
