"""Inserts on the short path have the same results as inserts that are stepped."""

from __future__ import annotations

import random
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shard.ordering.forwards import LINGER_NS, MAX_LINGERING
from shard.ordering.lag_fix import LagFix
from shard.ordering.plain_inserts import GENERAL_END_INTERVAL_NS, PlainInserts
from shard.replica import Replica
from tests.properties import examples
from tests.world import (
    CLUSTER,
    MS,
    US,
    Link,
    Probe,
    World,
    calm_world,
    first_lease,
    insert,
    placements,
    probe,
)
from ziplog import wire
from ziplog.core.entries import Place, Skip
from ziplog.core.node import BatchEnd, Broadcast, Received, Send, StorageChanged
from ziplog.core.view import run_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.core.message import Message
    from ziplog.core.view import ShardState
    from ziplog.wire import StreamKind

PRIMARY, BACKUP = "shard-0-0", "shard-0-1"
SERVERS = (BACKUP, PRIMARY)


def replica(world: World, name: str) -> Replica:
    node = world.nodes[name]
    assert isinstance(node, Replica)
    return node


def settled(world: World, inserts: int, *, start: int = 1) -> int:
    """Insert units one after another, as a single client does; return the next seq."""
    for seq in range(start, start + inserts):
        for name in SERVERS:
            world.send("c", name, insert(seq, first_incomplete=seq))
        world.run(300 * US)
    return start + inserts


def be_calm(world: World) -> None:
    """Let the backup count all guesses so far as right."""
    backup = replica(world, BACKUP)._backup
    assert backup is not None
    backup._reports._wrong_guesses = 0
    backup._reports._due = 0


def followed(credit: int = 2**30) -> tuple[World, int]:
    """Return a world whose shard has a reader at its backup, and the next seq."""
    world = calm_world()
    world.send("c", BACKUP, wire.Subscribe(CLUSTER, 0, 1, b"c" * 16, 1, 1, credit))
    seq = settled(world, 10)
    for name in SERVERS:
        replica(world, name).step(BatchEnd(), world.now)
    return world, seq


def sent(path: PlainInserts, kind: type[Any]) -> list[Any]:
    """Return the messages of one kind that the path has sent since the last call."""
    effects = path.pop_effects()
    messages = [effect.message for effect in effects if isinstance(effect, Send | Broadcast)]
    return [message for message in messages if isinstance(message, kind)]


def calm() -> tuple[World, int]:
    """Return a world whose shard forwards in batches, and the next seq."""
    world = calm_world()
    be_calm(world)
    return world, settled(world, 10)


# --- which inserts take the short path ---


def test_inserts_of_one_client_take_the_short_path() -> None:
    world, seq = calm()
    before = world.plain_inserts
    settled(world, 100, start=seq)
    assert world.plain_inserts - before >= 180


def test_plain_insert_is_forwarded_after_the_linger_time() -> None:
    world, seq = calm()
    path = replica(world, PRIMARY).plain_inserts
    world.run(10 * MS)
    replica(world, PRIMARY).step(BatchEnd(), world.now)
    before = world.now
    assert path.end_batch(before) == before + GENERAL_END_INTERVAL_NS, "nothing lingers"
    assert path.insert(b"<c", insert(seq, first_incomplete=seq), before) is not None
    assert path.end_batch(before) == before + LINGER_NS
    assert not sent(path, wire.Forward)
    assert path.end_batch(before + LINGER_NS) == before + GENERAL_END_INTERVAL_NS
    (forward,) = sent(path, wire.Forward)
    assert [decision.seq for decision in forward.decisions] == [seq]


def test_insert_at_a_backup_has_no_effect_but_its_ack() -> None:
    world, seq = calm()
    for number in range(seq, seq + 3):
        path = replica(world, BACKUP).plain_inserts
        ack = path.insert(b"<c", insert(number, first_incomplete=number), world.now)
        assert ack is not None
        assert not ack.confirmed
        assert not path.pop_effects()


def test_full_batch_of_decisions_is_forwarded_at_once() -> None:
    world, seq = calm()
    path = replica(world, PRIMARY).plain_inserts
    for number in range(seq, seq + MAX_LINGERING):
        path.insert(b"<c", insert(number, first_incomplete=seq), world.now)
    assert path.end_batch(world.now) > world.now, "no BatchEnd is due"
    (forward,) = sent(path, wire.Forward)
    assert len(forward.decisions) >= MAX_LINGERING


def test_decisions_of_a_shard_that_is_not_calm_are_forwarded_after_each_batch() -> None:
    world = calm_world()
    seq = settled(world, 10)
    path = replica(world, PRIMARY).plain_inserts
    assert not path.pop_effects()
    assert path.insert(b"<c", insert(seq, first_incomplete=seq), world.now) is not None
    assert path.end_batch(world.now) > world.now, "no BatchEnd is due"
    assert [m.first for m in sent(path, wire.Forward)] == [world.stores[PRIMARY].last_fseq + 1]


def test_decisions_of_a_followed_shard_are_delivered_without_an_end_of_the_batch() -> None:
    world, seq = followed()
    path, peer = replica(world, PRIMARY).plain_inserts, replica(world, BACKUP).plain_inserts
    plain, now = insert(seq, first_incomplete=seq), world.now
    assert peer.insert(b"<c", plain, now) is not None
    assert path.insert(b"<c", plain, now) is not None
    assert peer.end_batch(now) > now
    assert not sent(peer, wire.Deliver), "only decided records are delivered"
    assert path.end_batch(now) > now
    (forward,) = sent(path, wire.Forward)
    assert peer.receive(b"<s", forward, now)
    assert peer.end_batch(now) > now
    (delivered,) = sent(peer, wire.Deliver)
    assert [unit.gsns for unit in delivered.units] == [[delivered.frontier - 1]]


def test_batch_end_is_due_a_while_after_the_last_one() -> None:
    world, seq = followed()
    path, began = replica(world, PRIMARY).plain_inserts, world.now
    for number in range(3):
        now = began + number * MS
        assert path.insert(b"<c", insert(seq + number, first_incomplete=seq), now) is not None
        assert path.end_batch(now) == began + GENERAL_END_INTERVAL_NS
    replica(world, PRIMARY).step(BatchEnd(), now)
    assert path.end_batch(now) == now + GENERAL_END_INTERVAL_NS


def test_batch_end_is_due_when_a_delayed_hint_is() -> None:
    world, seq = followed()
    path, node = replica(world, PRIMARY).plain_inserts, replica(world, PRIMARY)
    with patch.object(LagFix, "on_batch_end"):
        node._lag_fix.due = world.now + 1
        assert path.insert(b"<c", insert(seq, first_incomplete=seq), world.now) is not None
        assert path.end_batch(world.now) == world.now + 1


def test_batch_end_is_due_when_a_reader_waits_for_a_report() -> None:
    world, seq = calm()
    path, node = replica(world, PRIMARY).plain_inserts, replica(world, PRIMARY)
    node.step(BatchEnd(), world.now)
    assert path.insert(b"<c", insert(seq, first_incomplete=seq), world.now) is not None
    path.end_batch(world.now + LINGER_NS)
    assert sent(path, wire.Forward)
    end = node.state.stream.end
    assert path.receive(b"<c", wire.Want(CLUSTER, 0, 7, end - 1), world.now + LINGER_NS)
    assert path.end_batch(world.now + LINGER_NS) <= world.now + LINGER_NS


def test_closed_path_forwards_nothing() -> None:
    world, seq = followed()
    path, node = replica(world, PRIMARY).plain_inserts, replica(world, PRIMARY)
    assert path.insert(b"<c", insert(seq, first_incomplete=seq), world.now) is not None
    node.state.server_state = "frozen"
    node.step(BatchEnd(), world.now)
    assert path.end_batch(world.now) == 0
    assert not path.pop_effects()


def test_primary_without_backups_delivers_on_the_short_path() -> None:
    world = calm_world(f=0)
    world.send("c", PRIMARY, wire.Subscribe(CLUSTER, 0, 1, b"c" * 16, 1, 1, 2**30))
    seq = 1
    for seq in range(1, 5):
        world.send("c", PRIMARY, insert(seq, first_incomplete=seq))
        world.run(MS)
    path = replica(world, PRIMARY).plain_inserts
    assert path.insert(b"<c", insert(seq + 1, first_incomplete=seq), world.now) is not None
    assert path.end_batch(world.now) > world.now, "no BatchEnd is due"
    (delivered,) = sent(path, wire.Deliver)
    assert [unit.gsns for unit in delivered.units] == [[delivered.frontier - 1]]


def forward_of(world: World, *units: int, skipped: int = 0) -> wire.Forward:
    """Return the primary's forward of these units of client c, without bodies."""
    path, now = replica(world, PRIMARY).plain_inserts, world.now
    for seq in units:
        assert path.insert(b"<c", insert(seq, first_incomplete=units[0]), now) is not None
    path.end_batch(now)
    (forward,) = sent(path, wire.Forward)
    return msgspec.structs.replace(
        forward, first=forward.first + skipped, decisions=forward.decisions[skipped:]
    )


@pytest.mark.parametrize("skipped", [0, 1], ids=["a body", "a decision"])
def test_missing_part_of_the_stream_closes_the_backups_path(skipped: int) -> None:
    world, seq = followed()
    path = replica(world, BACKUP).plain_inserts
    if skipped:
        assert path.insert(b"<c", insert(seq + 1, first_incomplete=seq), world.now) is not None
    assert path.receive(b"<s", forward_of(world, seq, seq + 1, skipped=skipped), world.now)
    assert path.end_batch(world.now) == 0, "the backup must request what is missing"
    assert path.insert(b"<c", insert(seq, first_incomplete=seq), world.now) is None


def test_backup_that_is_not_aligned_closes_its_path() -> None:
    world, seq = followed()
    path, node = replica(world, BACKUP).plain_inserts, replica(world, BACKUP)
    assert node._backup is not None
    assert path.insert(b"<c", insert(seq, first_incomplete=seq), world.now) is not None
    forward = forward_of(world, seq)
    node._backup.guesses._slots_behind = 1
    assert path.receive(b"<s", forward, world.now)
    assert path.end_batch(world.now) == 0


def test_backup_reports_before_it_delivers() -> None:
    world, seq = followed()
    path = replica(world, BACKUP).plain_inserts
    assert path.insert(b"<c", insert(seq, first_incomplete=seq), world.now) is not None
    forward = msgspec.structs.replace(forward_of(world, seq), report_immediately=True)
    assert path.receive(b"<s", forward, world.now)
    path.end_batch(world.now)
    messages = [effect.message for effect in path.pop_effects() if isinstance(effect, Send)]
    assert [type(message) for message in messages] == [wire.Report, wire.Deliver]


def test_reader_that_is_behind_needs_the_batch_end() -> None:
    world, seq = followed(credit=10 * 1024)
    path = replica(world, BACKUP).plain_inserts
    units = range(seq, seq + 20)
    for number in units:
        plain = insert(number, first_incomplete=seq, size=1000)
        assert path.insert(b"<c", plain, world.now) is not None
        assert replica(world, PRIMARY).plain_inserts.insert(b"<c", plain, world.now) is not None
    replica(world, PRIMARY).plain_inserts.end_batch(world.now)
    (forward,) = sent(replica(world, PRIMARY).plain_inserts, wire.Forward)
    assert path.receive(b"<s", forward, world.now)
    assert path.end_batch(world.now) == 0


@pytest.mark.parametrize(
    "changes",
    [{"view": 2}, {"shard": 1}, {"cluster": CLUSTER + 1}],
    ids=["view", "shard", "cluster"],
)
def test_foreign_forward_changes_nothing(changes: dict[str, int]) -> None:
    world, seq = followed()
    path = replica(world, BACKUP).plain_inserts
    forward = msgspec.structs.replace(forward_of(world, seq), **changes)
    last = replica(world, BACKUP).state.stream.last
    for name in SERVERS:
        assert replica(world, name).plain_inserts.receive(b"<s", forward, world.now)
    assert path.end_batch(world.now) == world.now + GENERAL_END_INTERVAL_NS
    assert replica(world, BACKUP).state.stream.last == last
    assert not path.pop_effects()


def test_closed_path_handles_no_forward() -> None:
    world, seq = followed()
    forward = forward_of(world, seq)
    node = replica(world, BACKUP)
    last = node.state.stream.last
    node.step(Received(b"<c", wire.Tail(CLUSTER, 0, 1, 2**40)), world.now)
    assert not node.plain_inserts.receive(b"<s", forward, world.now)
    assert node.state.stream.last == last


def test_a_hint_is_decided_and_forwarded_on_the_short_path() -> None:
    world, seq = followed()
    path, node = replica(world, PRIMARY).plain_inserts, replica(world, PRIMARY)
    end = node.state.stream.end
    assert path.receive(b"<s", wire.Ahead(CLUSTER, 1, end + 10), world.now)
    assert node.state.stream.end == end + 10
    path.end_batch(world.now)
    (forward,) = sent(path, wire.Forward)
    assert forward.decisions == [Skip(end, end + 10)]
    # Inserts continue after it.
    assert path.insert(b"<c", insert(seq, first_incomplete=seq), world.now) is not None
    assert path.receive(b"<s", wire.Ahead(CLUSTER, 1, end), world.now), "an old one changes nothing"
    path.end_batch(world.now)
    (forward,) = sent(path, wire.Forward)
    assert [type(decision) for decision in forward.decisions] == [Place]


def test_hint_of_another_cluster_and_on_a_closed_path_changes_nothing() -> None:
    world, _ = followed()
    node = replica(world, PRIMARY)
    end = node.state.stream.end
    assert node.plain_inserts.receive(b"<s", wire.Ahead(CLUSTER + 1, 1, end + 10), world.now)
    assert not node.plain_inserts.pop_effects()
    node.step(Received(b"<c", wire.Tail(CLUSTER, 0, 1, 2**40)), world.now)
    assert not node.plain_inserts.receive(b"<s", wire.Ahead(CLUSTER, 1, end + 10), world.now)
    assert node.state.stream.end == end


def test_short_path_ends_where_the_next_lease_begins() -> None:
    world, seq = calm()
    path, node = replica(world, PRIMARY).plain_inserts, replica(world, PRIMARY)
    message = wire.LeaseAnnounced(
        CLUSTER, [run_of(first_lease(1).following())], 2_000, placements(1, 1), 0
    )
    node.step(Received(b"mms-0", message), world.now)
    node.step(BatchEnd(), world.now)
    begins = world.now + 2 * MS
    assert path.insert(b"<c", insert(seq, first_incomplete=seq), begins) is None
    assert path.insert(b"<c", insert(seq, first_incomplete=seq), begins - 1) is not None


@pytest.mark.parametrize("name", SERVERS)
def test_short_path_keeps_tombstones_and_the_horizon(name: str) -> None:
    world, seq = calm()
    path = replica(world, name).plain_inserts
    session = replica(world, name).state.sessions.by_client[b"c" * 16]
    session.refused[seq] = 1
    assert path.insert(b"<c", insert(seq, first_incomplete=seq), world.now) is None
    session.refused.clear()
    session.horizon = 5
    old = msgspec.structs.replace(insert(seq, first_incomplete=seq), since=5)
    assert path.insert(b"<c", old, world.now) is None
    new = msgspec.structs.replace(old, since=6)
    assert path.insert(b"<c", new, world.now) is not None
    assert session.last_seen == world.now


@pytest.mark.parametrize("state", ["leaving", "parked", "recovering"])
@pytest.mark.parametrize("name", SERVERS)
def test_only_a_live_shard_has_the_short_path(name: str, state: ShardState) -> None:
    world, seq = calm()
    node = replica(world, name)
    node.state.shard_state = state
    node.step(BatchEnd(), world.now)
    plain = insert(seq, first_incomplete=seq)
    assert node.plain_inserts.insert(b"<c", plain, world.now) is None
    node.state.shard_state = "live"
    node.state.has_no_positions = True
    node.step(BatchEnd(), world.now)
    assert node.plain_inserts.insert(b"<c", plain, world.now) is None


@pytest.mark.parametrize(
    "message",
    [
        insert(11, first_incomplete=11, view=2),
        insert(11, first_incomplete=11, shard=1),
        insert(11, first_incomplete=11, client=b"n" * 16),
        insert(11, first_incomplete=11, after=2**40),
        insert(11, first_incomplete=11, predecessor=11),
        insert(11, first_incomplete=8, predecessor=12),
        insert(10, first_incomplete=10),
        insert(9, first_incomplete=9),
        insert(11 + 2**20, first_incomplete=11),
        insert(11, first_incomplete=11, size=2**20),
        wire.Insert(CLUSTER, 0, 1, b"c" * 16, 11, 11, 0, 0, 1, b"no body"),
        wire.Insert(CLUSTER + 1, 0, 1, b"c" * 16, 11, 11, 0, 0, 1, b"no body"),
    ],
    ids=[
        "view", "shard", "new client", "after", "own predecessor", "later predecessor", "copy",
        "completed", "window", "too large", "malformed", "cluster",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", SERVERS)
def test_unusual_insert_is_stepped(name: str, message: wire.Insert) -> None:
    world, seq = calm()
    assert seq == 11
    path = replica(world, name).plain_inserts
    counter = replica(world, name).state.ack_counter
    assert path.insert(b"<c", message, world.now) is None
    assert replica(world, name).state.ack_counter == counter
    assert not path.pop_effects()
    assert path.insert(b"<c", insert(11, first_incomplete=11), world.now) is not None


@pytest.mark.parametrize("name", SERVERS)
def test_any_step_ends_the_short_path_until_the_batch_end(name: str) -> None:
    world, seq = calm()
    node = replica(world, name)
    plain = insert(seq, first_incomplete=seq)
    node.step(Received(b"<c", wire.Tail(CLUSTER, 0, 1, 2**40)), world.now)
    assert node.plain_inserts.insert(b"<c", plain, world.now) is None
    node.step(BatchEnd(), world.now)
    assert node.plain_inserts.insert(b"<c", plain, world.now) is not None


@pytest.mark.parametrize("name", SERVERS)
def test_full_disk_closes_the_short_path(name: str) -> None:
    world, seq = calm()
    world.inject(name, StorageChanged(full=True))
    path = replica(world, name).plain_inserts
    assert path.insert(b"<c", insert(seq, first_incomplete=seq), world.now) is None
    world.inject(name, StorageChanged(full=False))
    assert path.insert(b"<c", insert(seq, first_incomplete=seq), world.now) is not None


def test_level_disk_has_no_short_path() -> None:
    world = calm_world(durability="disk")
    settled(world, 20)
    assert world.plain_inserts == 0


# --- the same results ---


class Schedule:
    """Random messages of clients and of the membership service, the same for each world."""

    def __init__(self, seed: int, *, has_short_path: bool) -> None:
        self._random = random.Random(seed)
        self._lease = first_lease(2, epochs=4, epoch_size=self._random.choice([48, 256, 1 << 24]))
        # With lag-fix, hints and idle epochs depend on the times of `BatchEnd` and `Wakeup`.
        self.world = calm_world(shards=2, lease=self._lease, lag_fix=False)
        self.world.has_short_path = has_short_path
        for name in ("d", "e"):
            self.world.add(name, Probe())
        if self._random.random() < 0.5:
            self.world.send("d", BACKUP, self._subscription("d"))
        self._lease_at = self.world.now
        self._seqs = dict.fromkeys("cde", 1)
        self._completed = dict.fromkeys("cde", 1)
        self._spread = self._random.choice([0, 0, 20, 200])
        self.world.flush_ns = self._random.choice([0, 3, 10]) * MS
        for src in ("c", "d", "e", PRIMARY, BACKUP):
            for dst in ("c", "d", "e", PRIMARY, BACKUP):
                self.world.links[src, dst] = Link(self._delays(f"{seed}{src}{dst}"))
        be_calm(self.world)

    def _delays(self, seed: str) -> Callable[[], int]:
        generator = random.Random(seed)
        return lambda: (50 + generator.randrange(self._spread + 1)) * US

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step()
        self.world.run(100 * MS)

    def _step(self) -> None:
        world, chance = self.world, self._random.random()
        if world.now - self._lease_at > 20 * MS:
            self._announce_lease()
        if chance < 0.01:
            self._to_servers("c", wire.Want(CLUSTER, 0, 0, self._random.randrange(1, 5000)))
        elif chance < 0.03:
            ahead = self._lease.base + self._random.randrange(300)
            self._to_servers("d", wire.Ahead(CLUSTER, 1, ahead))
        elif chance < 0.035:
            world.send("c", BACKUP, self._subscription("c"))
        elif chance < 0.04:
            world.send("c", BACKUP, wire.Unsubscribe(CLUSTER, 0, b"c" * 16, 1))
        elif chance < 0.05:
            be_calm(world)
        elif chance < 0.055:
            credit = self._random.choice([self._lease.base + 500, 2**31])
            world.send("c", BACKUP, wire.Credit(CLUSTER, 0, 1, b"c" * 16, 1, credit))
        elif chance < 0.06:
            world.run(self._random.choice([3, 12, 50]) * MS)
        else:
            self._insert(self._random.choice("cccde"))
        world.run(self._random.choice([0, 30, 150, 300, 300, 600]) * US)

    def _subscription(self, client: str) -> wire.Subscribe:
        credit = self._random.choice([2_000, 2**30])
        kind: StreamKind = self._random.choice(["units", "units", "frontier"])
        return wire.Subscribe(CLUSTER, 0, 1, client.encode() * 16, 1, 1, credit, kind)

    def _insert(self, client: str) -> None:
        draw = self._random
        seq = self._seqs[client]
        if draw.random() < 0.9:
            self._completed[client] = max(self._completed[client], seq - draw.choice([0, 0, 1, 5]))
        if seq > 1 and draw.random() < 0.05:
            seq -= 1  # another copy
        else:
            self._seqs[client] += 1
        after = draw.choice([0] * 10 + [draw.randrange(1, 3000), self._lease.base])
        is_chained = draw.random() < 0.1
        message = insert(
            seq,
            client=client.encode() * 16,
            first_incomplete=min(self._completed[client], seq),
            predecessor=seq - 1 if is_chained else 0,
            after=after,
            count=draw.choice([1] * 8 + [2, 17]),
            copy=1,
        )
        self._to_servers(client, message)

    def _to_servers(self, client: str, message: Message) -> None:
        for name in SERVERS:
            self.world.send(client, name, message)

    def _announce_lease(self) -> None:
        self._lease, self._lease_at = self._lease.following(), self.world.now
        message = wire.LeaseAnnounced(CLUSTER, [run_of(self._lease)], 15_000, placements(2, 1), 0)
        for name in SERVERS:
            self.world.send("mms-0", name, message, reply=True)


def received_by(world: World, name: str) -> list[tuple[int, bytes, Any]]:
    """Return what a probe received, in order of time, and of the source within a moment."""
    return sorted(probe(world, name).received, key=itemgetter(0, 1))


@example(3566958)  # Two servers answer in the same nanosecond.
@example(10484)  # A flush ends in the nanosecond in which the last known epoch ends.
@given(st.integers(0, 2**32))
@examples(40, deadline=None)
def test_short_path_changes_no_ack_and_no_entry(seed: int) -> None:
    schedules = [Schedule(seed, has_short_path=short) for short in (True, False)]
    for schedule in schedules:
        schedule.run(300)
    short, stepped = (schedule.world for schedule in schedules)
    for name in "cde":
        assert received_by(short, name) == received_by(stepped, name)
    for name in SERVERS:
        assert short.stores[name].history == stepped.stores[name].history
        forwards = [
            [
                message
                for src, _, message in world.sent
                if src == name and isinstance(message, wire.Forward | wire.Report)
            ]
            for world in (short, stepped)
        ]
        assert forwards[0] == forwards[1]
    assert stepped.plain_inserts == 0 < short.plain_inserts
    assert not stepped.plain_messages
