from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shard.ordering import admission as module
from shard.recovery.checkpoint import Checkpoint
from shard.replica import Replica
from shard.state.sessions import Sessions
from tests.checkers import decided, places, session_tables
from tests.properties import examples, seeds
from tests.storm import Storm, Weather
from tests.world import (
    CLUSTER,
    MS,
    Probe,
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
from ziplog.core.entries import Body, Expire, Place, Skip, Unit, encode_body
from ziplog.core.fields import MAX_UNIT_RECORDS
from ziplog.core.node import LogWarning, Received, ReportBadMessage, StorageChanged
from ziplog.core.view import fingerprint, run_of

if TYPE_CHECKING:
    from ziplog.core.message import Message
    from ziplog.segments.entry import Entry

PRIMARY, BACKUP = "shard-0-0", "shard-0-1"


def replica(world: World, name: str = PRIMARY) -> Replica:
    node = world.nodes[name]
    assert isinstance(node, Replica)
    return node


def send(world: World, *messages: Message, to: str = PRIMARY) -> None:
    for message in messages:
        world.send("c", to, message)
    world.run(1 * MS)


def refusals(world: World) -> list[tuple[int, str]]:
    return [(refused.request, refused.code) for refused in probe(world).of(wire.Refused)]


# --- storms: everything at once, then the checks of tests/checkers.py ---


@examples(40, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    weather=st.builds(
        Weather,
        shards=st.integers(1, 2),
        f=st.integers(0, 2),
        steps=st.sampled_from((10, 40)),
        loss=st.sampled_from((0.0, 0.05, 0.2)),
        repeats=st.sampled_from((0.0, 0.2)),
        delay_us=st.sampled_from((101, 1000, 4000)),
        epoch_size=st.sampled_from((24, 200, 1 << 20)),
        durability=st.sampled_from(("memory", "memory", "disk")),
        restarts=st.booleans(),
        trims=st.booleans(),
        abandoned=st.sampled_from((0.0, 0.1)),
        flush_us=st.sampled_from((0, 500, 5000)),
    ),
)
def test_nothing_is_lost_duplicated_or_stuck(seed: int, weather: Weather) -> None:
    Storm(seed, weather).run()


@pytest.mark.parametrize("seed", seeds(2, 40))
def test_long_storms(seed: int) -> None:
    Storm(seed, Weather(steps=200, f=1 + seed % 2, trims=seed % 3 == 0)).run()


# --- refusals ---


def test_other_clusters_shards_and_views_are_refused() -> None:
    world = calm_world()
    good = insert(1)
    send(world, replace(good, cluster=CLUSTER + 1), replace(good, shard=4), replace(good, view=2))
    send(world, replace(good, view=2), to=BACKUP)
    assert [code for _, code in refusals(world)] == [
        "wrong-cluster", "wrong-shard", "wrong-view", "wrong-view",
    ]  # fmt: skip
    assert {refused.view for refused in probe(world).of(wire.Refused)} == {1}
    assert decided(world, PRIMARY) == []
    assert not probe(world).of(wire.InsertAck)


def test_messages_of_other_views_between_replicas_are_ignored() -> None:
    """D1: neither a forward, nor a report, nor a request."""
    world = calm_world()
    world.paused.add(BACKUP)
    send(world, insert(1))
    world.paused.clear()
    world.trace.clear()
    stale = wire.Forward(CLUSTER, 0, 2, 1, 1, [Skip(1, 9)], 1, 1)
    world.inject(BACKUP, Received(b"<c", stale))
    assert not any(isinstance(e.decision, Skip) for e in decided(world, BACKUP)[:1])
    before = replica(world)._primary._backups.held[1]  # type: ignore[union-attr]
    world.inject(PRIMARY, Received(b"<c", wire.Report(CLUSTER, 0, 2, 1, 1, 1, 1)))
    assert replica(world)._primary._backups.held[1] == before  # type: ignore[union-attr]
    count = len(world.sent)
    world.inject(PRIMARY, Received(b"<c", wire.Resend(CLUSTER, 0, 2, 1, 1, 5)))
    assert not any(isinstance(m, wire.Forward) for _, _, m in world.sent[count:])


def test_server_without_a_lease_is_not_ready() -> None:
    world = World()
    add_shard(world, 0)
    world.add("c", Probe())
    send(world, insert(1))
    assert refusals(world) == [(1, "not-ready")]
    heartbeat = probe(world, "mms-0").of(wire.Heartbeat)[0]
    assert (heartbeat.cluster, heartbeat.state, heartbeat.lease) == (0, "starting", 0)


def test_reused_identities_are_refused() -> None:
    world = calm_world()
    send(world, insert(1), insert(2, first_incomplete=2))
    send(world, insert(2, size=1), insert(2, count=2), insert(1))
    assert refusals(world) == [
        (2, "identity-reused"),
        (2, "identity-reused"),
        (1, "identity-reused"),
    ]
    assert [p.seq for p in places(world, PRIMARY)] == [1, 2]


def test_malformed_units_are_refused() -> None:
    world = calm_world()
    good = insert(3)
    send(
        world,
        replace(good, body=b"\xff\x00"),
        replace(good, seq=4, count=2),
        replace(good, seq=5, predecessor=5),
        replace(good, seq=6, predecessor=9),
    )
    assert refusals(world) == [(seq, "malformed") for seq in (3, 4, 5, 6)]


def test_large_payloads_keys_and_units_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = calm_world()
    limits = wire.Limits()
    key = encode_body(Body(1, bytes(limits.max_key_bytes + 1), [b""]))
    keys = [b"k", None, bytes(limits.max_key_bytes + 1)]
    named = encode_body(Body(1, None, [b""] * 3, None, keys))
    fitting = encode_body(Body(1, None, [b""] * 3, None, [*keys[:2], b""]))
    send(
        world, insert(1, size=limits.max_payload_bytes), replace(insert(2), body=key),
        replace(insert(3, count=3), body=named), replace(insert(4, count=3), body=fitting),
    )  # fmt: skip
    monkeypatch.setattr(module, "MAX_UNIT_BYTES", 3000)
    send(world, insert(5, count=10, size=400), insert(6, size=2000))
    assert refusals(world) == [
        (1, "too-large"),
        (2, "too-large"),
        (3, "too-large"),
        (5, "too-large"),
    ]


def test_largest_unit_fits_into_every_frame() -> None:
    """A forward with its body, and a delivery with it, can be sent."""
    body = bytes(module.MAX_UNIT_BYTES)
    gsns = [2**62 + index for index in range(MAX_UNIT_RECORDS)]
    place = Place(b"c" * 16, 2**62, 2**62, 2**62, gsns, 2**32 - 1, body)
    many = [replace(place, body=None, gsns=gsns[:1])] * 4096
    assert wire.encode(wire.Forward(CLUSTER, 0, 1, 1, 1, [place, *many], 1, 1))
    lease = first_lease(4000)
    unit = Unit(1, gsns, body)
    runs = [run_of(lease)] * 64
    assert wire.encode(wire.Deliver(CLUSTER, 0, 1, 0, 1, 1, 2, [unit], runs, 2))


def test_window_of_incomplete_units_is_bounded() -> None:
    world = calm_world()
    limit = wire.Limits().max_unsettled_units
    send(world, insert(limit), insert(limit + 1), insert(limit + 1, first_incomplete=2))
    assert refusals(world) == [(limit + 1, "full")]


def test_number_of_clients_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shard.state.sessions.MAX_SESSIONS", 2)
    world = calm_world()
    for client in (b"a", b"b", b"c", b"a"):
        send(world, insert(1, client=client * 16))
    assert refusals(world) == [(1, "full")]


def test_full_disk_refuses_new_units_and_acks_known_ones() -> None:
    world = calm_world()
    send(world, insert(1))
    world.inject(PRIMARY, StorageChanged(full=True))
    send(world, insert(2), insert(1))
    assert refusals(world) == [(2, "no-space")]
    assert [ack.seq for ack in probe(world).of(wire.InsertAck)] == [1, 1]
    world.inject(PRIMARY, StorageChanged(full=False))
    send(world, insert(2))
    assert [p.seq for p in places(world, PRIMARY)] == [1, 2]


# --- refusals for lack of room ---


def promises(world: World) -> list[tuple[int, int]]:
    """Return the seq and the number of copies of every refusal."""
    return [(refused.request, refused.copies) for refused in probe(world).of(wire.Refused)]


def fill(world: World, *, full: bool = True) -> None:
    for name in (PRIMARY, BACKUP):
        world.inject(name, StorageChanged(full=full))


@pytest.mark.parametrize("to", [PRIMARY, BACKUP])
def test_copy_refused_for_lack_of_room_is_never_accepted(to: str) -> None:
    """Its client may have inserted the record elsewhere since."""
    world = calm_world()
    fill(world)
    send(world, insert(1, copy=2), to=to)
    fill(world, full=False)
    for copy in (2, 1, 2):  # the network delivers late, and twice
        send(world, insert(1, copy=copy), to=to)
    assert promises(world) == [(1, 2)] * 4
    assert [code for _, code in refusals(world)] == ["no-space", "full", "full", "full"]
    send(world, insert(1, copy=3), to=to)
    (ack,) = probe(world).of(wire.InsertAck)
    send(world, insert(1, copy=1), to=to)
    assert probe(world).of(wire.InsertAck)[-1].gsns == ack.gsns, "it is known now"
    assert len(refusals(world)) == 4


def test_lack_of_room_is_remembered_by_a_server_that_stops_cleanly() -> None:
    world = calm_world()
    fill(world)
    send(world, insert(1, copy=4), insert(2))
    fill(world, full=False)
    world.restart(PRIMARY)
    grant(world, first_lease(1), 1)
    world.run(5 * MS)
    send(world, insert(1, copy=4))
    assert promises(world) == [(1, 4), (2, 0), (1, 4)]


def test_the_refusal_with_the_most_copies_is_repeated() -> None:
    world = calm_world()
    fill(world)
    send(world, *(insert(1, copy=copy) for copy in (1, 3, 2)))
    assert promises(world) == [(1, 1), (1, 3), (1, 3)]


def test_refusal_of_unnumbered_copies_is_no_promise() -> None:
    """Older clients send unnumbered copies: a promise would exclude them permanently."""
    world = calm_world()
    fill(world)
    send(world, insert(1), insert(2, copy=1))
    fill(world, full=False)
    send(world, insert(1), insert(3))
    assert promises(world) == [(1, 0), (2, 1)]
    assert [p.seq for p in places(world, PRIMARY)] == [1, 3]


def test_primarys_decision_overrides_a_backups_lack_of_room() -> None:
    world = calm_world()
    world.inject(BACKUP, StorageChanged(full=True))
    for name in (BACKUP, PRIMARY):
        send(world, insert(1, copy=1), to=name)
    world.run(20 * MS)
    assert promises(world) == [(1, 1)]
    send(world, insert(1, copy=1), to=BACKUP)
    assert [ack.server for ack in probe(world).of(wire.InsertAck)] == [0, 1]
    assert places(world, BACKUP) == places(world, PRIMARY) != []


@pytest.mark.parametrize("name", [PRIMARY, BACKUP])
def test_copy_that_arrives_while_too_much_waits_is_never_accepted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = calm_world()
    with monkeypatch.context() as patched:
        patched.setattr("shard.ordering.primary.MAX_WAITING_UNITS", 0)
        patched.setattr("shard.ordering.backup.MAX_UNDECIDED_BYTES", -1)
        send(world, insert(1, copy=1), to=name)
    send(world, insert(1, copy=1), to=name)
    assert promises(world) == [(1, 1), (1, 1)]
    assert not probe(world).of(wire.InsertAck)
    send(world, insert(1, copy=2), to=name)
    assert len(probe(world).of(wire.InsertAck)) == 1


def test_refusal_outside_the_window_is_no_promise() -> None:
    """So the number of tombstones is bounded."""
    world = calm_world()
    limit = wire.Limits().max_unsettled_units
    send(world, insert(limit + 1, copy=1))
    assert promises(world) == [(limit + 1, 0)]
    assert {code for _, code in refusals(world)} == {"full"}


# --- many clients ---


def other(number: int) -> bytes:
    return number.to_bytes(16, "big")


def settled(first_incomplete: int, client: bytes, view: int = 1) -> wire.Settled:
    return wire.Settled(CLUSTER, 0, view, client, first_incomplete)


@pytest.mark.parametrize("to", [PRIMARY, BACKUP])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_refusal_of_a_new_client_is_a_promise(
    monkeypatch: pytest.MonkeyPatch, to: str, is_restarted: bool
) -> None:
    """The client inserts elsewhere, and there may be room when a late copy arrives."""
    monkeypatch.setattr("shard.state.sessions.MAX_SESSIONS", 1)
    world = calm_world()
    send(world, insert(1, client=other(1)), to=to)
    send(world, *(insert(1, client=other(2), copy=copy) for copy in (2, 1)), to=to)
    send(world, insert(1, client=other(3)), to=to)
    assert promises(world) == [(1, 2), (1, 2), (1, 0)]
    if is_restarted:
        world.restart(to)
        grant(world, first_lease(1), 1)
        world.run(5 * MS)
    monkeypatch.setattr("shard.state.sessions.MAX_SESSIONS", 3)
    acks = len(probe(world).of(wire.InsertAck))
    send(world, *(insert(1, client=other(2), copy=copy) for copy in (1, 2)), to=to)
    assert promises(world)[3:] == [(1, 2), (1, 2)]
    assert len(probe(world).of(wire.InsertAck)) == acks
    send(world, insert(1, client=other(2), copy=3), to=to)
    assert len(probe(world).of(wire.InsertAck)) == acks + 1


def test_units_reported_as_settled_are_forgotten() -> None:
    world = calm_world()
    for name in (PRIMARY, BACKUP):
        send(world, *(insert(seq, count=3) for seq in (1, 2, 3)), to=name)
    world.run(20 * MS)
    client = b"c" * 16
    for name in (PRIMARY, BACKUP):
        send(world, settled(9, client, view=2), settled(9, other(4)), to=name)
        assert sorted(replica(world, name).state.sessions.by_client[client].units) == [1, 2, 3]
        send(world, settled(3, client), settled(2, client), to=name)
        assert sorted(replica(world, name).state.sessions.by_client[client].units) == [3]
        assert list(replica(world, name).state.sessions.by_client) == [client]
        send(world, insert(2, count=3), to=name)
    assert {code for _, code in refusals(world)} == {"identity-reused"}


def test_sessions_without_units_are_evicted_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The primary decides it, so that all replicas forget the same clients."""
    monkeypatch.setattr("shard.state.sessions.MAX_SESSIONS", 8)
    world = calm_world(session_timeout_s=60)
    both = (PRIMARY, BACKUP)
    for number in range(8):
        for name in both:
            send(world, insert(1, client=other(number)), to=name)
    for number in (1, 3, 4, 6):
        for name in both:
            send(world, settled(2, other(number)), to=name)
    world.run(15 * S)
    assert all(len(replica(world, name).state.sessions.by_client) == 8 for name in both)
    world.run(15 * S)
    for name in both:
        known = [int.from_bytes(c, "big") for c in replica(world, name).state.sessions.by_client]
        assert known == [0, 2, 4, 5, 6, 7]
    expired = [e.decision.client for e in world.stores[BACKUP].log if is_expire(e)]  # type: ignore[union-attr]
    assert expired == [other(1), other(3)]


def is_expire(entry: Entry) -> bool:
    return isinstance(entry.decision, Expire)


def test_sessions_are_stored_while_inserts_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shard.state.session_tables.TABLE_BYTES", 500)
    monkeypatch.setattr("shard.state.session_tables.PART_BYTES", 1)
    world = calm_world()
    for name in (PRIMARY, BACKUP):
        send(
            world,
            *(insert(s, client=other(c), count=3) for s in (1, 2, 3) for c in (1, 2)),
            to=name,
        )
    world.run(1 * S)
    for name in (PRIMARY, BACKUP):
        stored = Sessions()
        stored.install(world.stores[name].last_table()[1], 0, 0, 0)
        assert session_tables(stored) == session_tables(replica(world, name).state.sessions) != []


# --- leases and heartbeats ---


def test_second_descriptor_of_a_lease_halts() -> None:
    world = calm_world()
    grant(world, first_lease(1, epoch_ms=99), 1)
    world.run(1 * MS)
    assert sorted(name for name, _ in world.halts) == [PRIMARY, BACKUP]
    assert "announced twice" in world.halts[0][1]
    assert "run `ziplog membership rebuild`" in world.halts[0][1], "the error names the remedy"


def test_announcement_from_another_process_is_ignored() -> None:
    world = calm_world()
    lease = first_lease(1, epoch_ms=99)
    for message in (
        wire.LeaseAnnounced(CLUSTER, [run_of(lease)], 0, placements(1, 1), 2**63 - 1),
        wire.LeaseAnnounced(CLUSTER + 1, [run_of(first_lease(1))], 0, placements(1, 1), 0),
        wire.LeaseHistory(CLUSTER, 1, [], [], 0),
        wire.Hello(CLUSTER, 1),
    ):
        for route in (b"<mms-0", b"<c", b"\0abcd", b""):
            (effect,) = replica(world).step(Received(route, message), world.now)
            assert isinstance(effect, ReportBadMessage)
            assert effect.src == route
            assert type(message).__name__ in effect.reason
    assert world.halts == []
    assert replica(world).state.trim == 0


@pytest.mark.parametrize("known", ["", "its own", "another's"])
def test_server_joins_its_shard_only_with_the_known_data_directory(known: str) -> None:
    world = World()
    add_shard(world, 0, identity="its own")
    world.add("c", Probe())
    (placement,) = placements(1, 1)
    replicas = [replace(one, fingerprint=fingerprint(known)) for one in placement.replicas]
    placement = replace(placement, replicas=tuple(replicas))
    message = wire.LeaseAnnounced(CLUSTER, [run_of(first_lease(1))], 0, [placement], 0)
    effects = replica(world).step(Received(b"mms-0", message), world.now)
    warnings = [effect.text for effect in effects if isinstance(effect, LogWarning)]
    world.run(1 * MS)
    (last,) = {h.state for h in probe(world, "mms-0").of(wire.Heartbeat) if h.node == PRIMARY}
    if known == "another's":
        assert last == "limbo"
        assert ["another data directory" in text for text in warnings] == [True]
        send(world, insert(1))
        assert refusals(world) == [(1, "not-ready")]
    else:
        assert (last, warnings) == ("up", [])


def test_another_cluster_halts() -> None:
    world = calm_world()
    other = wire.LeaseAnnounced(CLUSTER + 1, [run_of(first_lease(1))], 0, placements(1, 1), 0)
    world.inject(PRIMARY, Received(b"mms-0", other))
    assert [name for name, _ in world.halts] == [PRIMARY]


def test_heartbeats_report_the_state_that_the_service_needs() -> None:
    world = calm_world()
    send(world, insert(1))
    send(world, insert(1), to=BACKUP)
    world.run(2 * S)
    for name in (PRIMARY, BACKUP):
        last = [h for h in probe(world, "mms-0").of(wire.Heartbeat) if h.node == name][-1]
        state = replica(world, name).state
        assert (last.state, last.view, last.lease) == ("up", 1, 1)
        assert last.digest == first_lease(1).digest
        assert last.frontier == state.frontier > 1
        assert (last.stable_gsn, last.durable_gsn) == (1, 1)


def test_trim_is_remembered_before_it_is_confirmed() -> None:
    """The service commits a trim point by heartbeats, so a crash must not undo it."""
    world = calm_world()
    send(world, insert(1))
    send(world, insert(1), to=BACKUP)
    world.run(5 * MS)
    order: list[str] = []
    message = wire.LeaseAnnounced(CLUSTER, [], 0, placements(1, 1), 2)
    effects = replica(world).step(Received(b"mms-0", message), world.now)
    order += [type(effect).__name__ for effect in effects]
    assert set(order) == {"Persist"}
    assert effects[-1].entry.decision.trim == 2  # type: ignore[attr-defined]
    for effect in effects:
        world._carry_out(PRIMARY, effect)
    world.run(1 * MS)
    world.restart(PRIMARY, clean=False)
    send(world, wire.Read(CLUSTER, 0, 1, 1, 1))
    assert probe(world).of(wire.ReadReply)[-1].answer == "trimmed"


# --- limbo and checkpoints ---


def test_limbo_refuses_everything_but_stable_reads() -> None:
    world = calm_world()
    send(world, insert(1))
    send(world, insert(1), to=BACKUP)
    world.run(300 * MS)
    world.restart(BACKUP, clean=False)
    world.tracing = True
    send(world, insert(2))
    send(world, insert(2), wire.Tail(CLUSTER, 0, 1, 1, 0), to=BACKUP)
    world.run(100 * MS)
    assert refusals(world) == [(2, "not-ready")]
    assert not any("Report" in line or "Resend" in line for line in world.trace)
    assert replica(world).state.stream.stable < replica(world).state.stream.last
    grant(world, first_lease(1).following(), 1)
    world.run(5 * MS)
    assert replica(world, BACKUP).state.server_state == "limbo"


def test_checkpoint_taken_in_limbo_is_limbo() -> None:
    """A clean stop does not restore what a crash lost."""
    world = calm_world()
    send(world, insert(1))
    world.run(300 * MS)
    world.restart(PRIMARY, clean=False)
    world.restart(PRIMARY)
    assert replica(world).state.server_state == "limbo"
    grant(world, first_lease(1), 1)
    world.run(5 * MS)
    assert replica(world).state.server_state == "limbo"


def test_checkpoint_holds_everything() -> None:
    world = calm_world(f=1)
    for seq in range(1, 6):
        send(world, insert(seq, first_incomplete=seq // 2), to=(PRIMARY, BACKUP)[seq % 2])
    world.paused |= {PRIMARY, BACKUP}
    for name in (PRIMARY, BACKUP):
        before = replica(world, name).checkpoint()
        world.restart(name)
        after = replica(world, name).checkpoint()
        old, new = (msgspec.msgpack.decode(c, type=Checkpoint) for c in (before, after))
        for _, _, units in (*old.sessions, *new.sessions):
            for unit in units:
                unit.route = b""
        assert new == old


def test_first_start_without_anything_is_not_limbo() -> None:
    world = World()
    add_shard(world, 0)
    grant(world, first_lease(1), 1)
    world.run(2 * MS)
    assert replica(world).state.server_state == "up"


@examples(40, derandomize=True)
@given(st.lists(st.binary(max_size=40), max_size=10), st.integers(0, 3))
def test_random_messages_break_nothing(bodies: list[bytes], kind: int) -> None:
    world = calm_world()
    for body in bodies:
        number = int.from_bytes(body[:7], "big")
        messages: list[Any] = [
            wire.Insert(
                CLUSTER, 0, 1, b"z" * 16, number, number // 3, number // 2, number, 1, body
            ),
            wire.Report(CLUSTER, 0, 1, 1, 1, 0, number),
            wire.Resend(CLUSTER, 0, 1, 1, number, number % 65536),
            wire.Want(CLUSTER, 0, number % 5, number),
        ]
        send(world, messages[kind])
        send(world, wire.Read(CLUSTER, 0, 1, 1, number), wire.Tail(CLUSTER, 0, 1, 1, number))
        send(world, wire.Credit(CLUSTER, 0, 1, b"z" * 16, number, number))
    send(world, insert(1))
    send(world, insert(1), to=BACKUP)
    assert not world.halts
    assert len({tuple(a.gsns) for a in probe(world).of(wire.InsertAck) if a.seq == 1}) >= 1
