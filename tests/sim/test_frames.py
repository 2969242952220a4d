"""Every message built from state fits a frame, at the largest legal state.

Hypothesis draws sizes at the limits that the code enforces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from failure_handler.service import MAX_ORDERS
from logdb import wire as kv
from logdb.coordinator.queries import MAX_ROWS, MAX_VALUE_BYTES
from logdb.records import MAX_KEY_BYTES, Entry, KeyRead
from mms.commands import PlaceShard, RecordLoss, decode_refusal
from mms.service import MembershipService
from mms.snapshot import Snapshot
from mms.state import (
    MAX_LOSSES,
    MAX_PLACEMENTS_BYTES,
    ClusterState,
)
from shard.ordering.admission import MAX_UNIT_BYTES
from shard.ordering.forwards import (
    MAX_FORWARD_BYTES,
    MAX_FORWARD_DECISIONS,
    MAX_UNSTABLE_RECORDS,
)
from shard.serving.subscription import MAX_DELIVER_BYTES, UNIT_OVERHEAD_BYTES
from shard.state.epoch_clock import EpochClock
from tests.properties import examples
from tests.services import CLUSTER, S
from tests.unit.mms.world import config
from ziplog import wire
from ziplog.core.cursors import (
    MAX_CURSORS,
    MAX_HOLD_S,
    MAX_LEASE_MS,
    MAX_MARK_BYTES,
    MAX_MOVES,
    Cursor,
    CursorMove,
)
from ziplog.core.entries import Decision, Place, Unit
from ziplog.core.fields import MAX_SHARDS, MAX_UNIT_RECORDS
from ziplog.core.gsn import MAX_ROUND
from ziplog.core.node import Broadcast, Committed, LeaderChanged, Propose, Received, Restored, Send
from ziplog.core.view import (
    KEPT_RUNS,
    NO_DIGEST,
    Lease,
    LeaseRun,
    Member,
    Placement,
    Replica,
    run_of,
)
from ziplog.types import RecordId
from ziplog.wire.cursors import MAX_LISTED, OwnedTerm, RefusedMove

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ziplog.core.message import Message
    from ziplog.core.node import Effect

HIGH = 2**62
LARGEST_KEY = b"\xff" * MAX_KEY_BYTES


def fits(message: Message) -> int:
    """Return the length of a message's frame; raise if it is too long."""
    return len(wire.encode(message))


# --- the membership service ---


def placement(shard: int, replicas: int, name: str) -> Placement:
    servers = tuple(
        Replica(f"{shard}-{i}{name}"[:128], f"{shard}.{i}{name}:65535"[:256], "f" * 32)
        for i in range(replicas)
    )
    return Placement(shard, 2**32 - 1, "live", servers)


def placements(replicas: int, name: str) -> list[Placement]:
    """Return the largest number of shards that the service accepts."""
    size = len(msgspec.msgpack.encode(placement(2**31 - 1, replicas, name)))
    count = min(MAX_SHARDS, (MAX_PLACEMENTS_BYTES - 8) // size)
    return [placement(2**31 - 1 - count + index, replicas, name) for index in range(count)]


def history(members: Iterable[int], count: int) -> list[LeaseRun]:
    shards = tuple(Member(shard, 2**32 - 1, 1) for shard in members)[:MAX_ROUND]
    lease = Lease(HIGH, NO_DIGEST, HIGH, HIGH, 16, 2**8, 10, shards)
    runs = [run_of(lease)]
    for _ in range(count - 1):
        lease = lease.following(epoch_ms=21 - lease.epoch_ms)
        runs.append(run_of(lease))
    return runs


def aged(places: list[Placement], members: int, runs: int) -> tuple[MembershipService, Lease]:
    """Return the service's leader with a state of such a size, and its last lease."""
    found = history((one.shard for one in places[:members]), runs)
    last = found[-1].last
    losses = [
        RecordLoss(places[0].shard, 2**32 - 1, last.stop - 1, last.stop) for _ in range(MAX_LOSSES)
    ]
    snapshot = Snapshot(
        CLUSTER, "c" * 256, places, found, 0, -1, [], losses,
        cursors=largest_cursors(MAX_CURSORS),
    )  # fmt: skip
    service = MembershipService(
        config(), "mms-0", pid=1, cluster=CLUSTER, incarnation=1, now=1000 * S
    )
    service.step(Restored(msgspec.msgpack.encode(snapshot)), 1000 * S)
    service.step(LeaderChanged("mms-0", is_self=True), 1000 * S)
    return service, last


def sent(effects: list[Effect]) -> Iterator[Message]:
    for effect in effects:
        if isinstance(effect, Send | Broadcast):
            yield effect.message


def heartbeat(one: Placement, lease: Lease | None, needs_from: int) -> wire.Heartbeat:
    return wire.Heartbeat(
        CLUSTER, one.replicas[0].name, one.replicas[0].endpoint, one.shard, one.view, 1, 1, "up",
        False, 0, 0, 0, lease.number if lease else 0, lease.digest if lease else NO_DIGEST, 0,
        shard_state="live", needs_from=needs_from,
    )  # fmt: skip


def all_answers(service: MembershipService, last: Lease) -> Iterator[Message]:
    """Yield the messages of the service to nodes that request all of its state."""
    now = 1000 * S + 1
    for question in (wire.Hello(0, 1), wire.StatusQuery(CLUSTER, 2)):
        yield from sent(service.step(Received(b"c", question), now))
    for effect in service.step(Received(b"c", wire.LeaseQuery(CLUSTER, 3, 1)), now):
        if isinstance(effect, Propose):
            result = ClusterState.apply(service.state, effect.command)
            yield from sent(service.step(Committed(effect.command, result), now))
    first = service.state.runs[0].first
    one = next(iter(service.state.placements.values()))
    for held in (None, first, last):
        for needs_from in (0, 1, last.stop - 1):
            now += 600_000_000
            message = heartbeat(one, held, needs_from)
            yield from sent(service.step(Received(b"s", message), now))
    yield from sent(service.announcements.announce_all(now))
    limit = last.stop
    runs = service.state.runs_until(limit, KEPT_RUNS)
    yield wire.Removed(CLUSTER, 9, one.shard, 3, limit, runs)
    yield wire.Freeze(CLUSTER, one.shard, 2, 3, limit, runs, 2**63 - 1)


@pytest.mark.parametrize(
    ("replicas", "name", "members", "runs"),
    [
        (2, "", MAX_SHARDS, KEPT_RUNS),
        (2, "", 16, 20_000),
        (1, "", 1000, 600),
        (16, "", 17, 5_000),
        pytest.param(2, "x" * 240, 2, 60_000, marks=pytest.mark.nightly),
        (16, "\N{GRINNING FACE}" * 240, 3, 100),
    ],
)
def test_every_message_of_the_membership_service_fits(
    replicas: int, name: str, members: int, runs: int
) -> None:
    service, last = aged(placements(replicas, name), members, runs)
    sizes: dict[str, int] = {}
    for message in all_answers(service, last):
        kind = type(message).__name__
        sizes[kind] = max(sizes.get(kind, 0), fits(message))
    expected = {
        "ClusterInfo", "StatusReply", "LeaseHistory", "LeaseAnnounced", "Removed", "Freeze",
    }  # fmt: skip
    assert sizes.keys() >= expected


def largest_cursors(count: int) -> list[Cursor]:
    """Return cursors of which every field has its largest size."""
    return [
        Cursor(
            f"{index:0128d}", HIGH, HIGH, HIGH, bytes(MAX_MARK_BYTES), HIGH, HIGH, True, b"o" * 16,
            "\N{GRINNING FACE}" * 256, b"c" * 16, b"e" * 16, MAX_LEASE_MS, True, HIGH, MAX_HOLD_S,
            True, HIGH,
        )
        for index in range(count)
    ]  # fmt: skip


def test_every_message_about_cursors_fits() -> None:
    cursors = largest_cursors(MAX_CURSORS)
    names = [cursor.name for cursor in cursors]
    owned = [OwnedTerm(name, HIGH) for name in names]
    fits(wire.CursorReply(CLUSTER, HIGH, "trimmed", cursors[0], 2**31 - 1, HIGH))
    fits(wire.CursorRenewal(CLUSTER, HIGH, b"o" * 16, owned))
    moves = [CursorMove(name, HIGH, HIGH, HIGH, bytes(MAX_MARK_BYTES)) for name in names]
    fits(wire.CursorMoves(CLUSTER, HIGH, moves[:MAX_MOVES]))
    refused = [RefusedMove(one.name, "no-such-position", one) for one in cursors[:MAX_MOVES]]
    fits(wire.CursorsMoved(CLUSTER, HIGH, refused))
    for lost, paused in ((cursors, []), ([], cursors)):
        fits(wire.CursorsRenewed(CLUSTER, HIGH, lost, [], paused))
    fits(wire.CursorsRenewed(CLUSTER, HIGH, [], names, []))
    shards, silent = [2**31 - 1] * MAX_LISTED, [True] * MAX_LISTED
    fits(wire.CursorList(CLUSTER, HIGH, cursors[:MAX_LISTED], shards, True, silent))


def test_shards_with_placements_that_would_not_fit_are_refused() -> None:
    state = ClusterState()
    state.cluster = CLUSTER
    full = placements(16, "x" * 240)
    state.placements = {one.shard: one for one in full}
    new = PlaceShard(
        Placement(1, 1, "joining", tuple(Replica(f"n{i}", "y" * 250 + str(i)) for i in range(16)))
    )
    assert decode_refusal(state.apply(new.encode())) == "too-many"
    del state.placements[full[-1].shard]
    assert decode_refusal(state.apply(new.encode())) == ""


@examples(200)
@given(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**32 - 1)), max_size=40),
    st.integers(1, 2**62),
    st.integers(1, 2**62),
)
def test_a_run_is_never_longer_than_its_bound(
    shards: list[tuple[int, int]], number: int, count: int
) -> None:
    members = tuple(Member(shard, view, MAX_ROUND) for shard, view in shards)
    lease = Lease(number, b"\xff" * 8, number, number, 2**16, 2**28, 3_600_000, members)
    run = LeaseRun(lease, count, lease)
    assert len(msgspec.msgpack.encode(run)) <= run.max_bytes


# --- storage servers ---


def units(count: int, records: int, body: int) -> list[Unit]:
    gsns = list(range(HIGH, HIGH + records))
    return [Unit(HIGH, gsns, bytes(body)) for _ in range(count)]


@pytest.mark.parametrize("members", [1, 16, 1000, 16_384])
@pytest.mark.parametrize("records", [1, 256, 4096])
def test_every_delivery_fits(members: int, records: int) -> None:
    runs = history(range(2**31 - members, 2**31), KEPT_RUNS if members < 10_000 else 12)
    clock = EpochClock(0)
    clock.announce(runs, 0, 0)
    leases = clock.runs_after(0, NO_DIGEST)
    body = records + 8  # each record is only its length
    count = MAX_DELIVER_BYTES // (body + UNIT_OVERHEAD_BYTES)
    for sent_units in (units(count, records, body), units(1, records, MAX_UNIT_BYTES)):
        for message in (wire.Deliver, wire.Early):
            fits(message(CLUSTER, 0, 1, 0, 1, HIGH, HIGH, sent_units, leases, HIGH))


def test_missing_leases_of_a_subscriber_follow() -> None:
    runs = history(range(16_384), 12)
    clock = EpochClock(0)
    clock.announce(runs, 0, 0)
    held, found = runs[0].first, []
    while part := clock.runs_after(held.number, held.digest):
        found += part
        held = part[-1].last
    assert [run.last for run in found] == [run.last for run in runs[1:]]


@pytest.mark.parametrize("records", [1, 4096])
def test_every_message_of_a_primary_to_its_backups_fits(records: int) -> None:
    total = MAX_UNSTABLE_RECORDS + 4095
    gsns = list(range(HIGH, HIGH + records))
    places: list[Decision] = [
        Place(b"c" * 16, HIGH, HIGH, HIGH, gsns, 2**32 - 1) for _ in range(total // records)
    ]
    first = msgspec.structs.replace(places[0], body=bytes(max(MAX_FORWARD_BYTES, MAX_UNIT_BYTES)))
    decisions = [first, *places[1:MAX_FORWARD_DECISIONS]]
    fits(wire.Forward(CLUSTER, 0, 1, HIGH, 1, decisions, HIGH, HIGH))


def test_messages_bounded_by_count_fit() -> None:
    gsns = list(range(HIGH, HIGH + MAX_UNIT_RECORDS))
    steps = [wire.Step(HIGH, HIGH)] * wire.MAX_STEPS
    orders = [wire.Order("\N{GRINNING FACE}" * 256, 2**32 - 1)] * MAX_ORDERS
    fits(wire.InsertAck(CLUSTER, 0, 1, 0, HIGH, HIGH, HIGH, True, gsns))
    fits(wire.Located(CLUSTER, 0, 1, 0, b"c" * 16, HIGH, "present", gsns))
    fits(wire.Outlined(CLUSTER, 0, 1, 0, HIGH, HIGH, steps, 65_535))
    fits(wire.Orders(CLUSTER, HIGH, orders))


# --- the database ---


def test_every_message_of_coordinators_and_their_clients_fits() -> None:
    rid = RecordId(HIGH, 2**31 - 1)
    entry = Entry(HIGH, rid, 2**31 - 1)
    keys = [LARGEST_KEY] * kv.MAX_KEYS
    absent = [kv.KeyResult(entry)] * (kv.MAX_KEYS - 1)
    fits(kv.Got(CLUSTER, 1, rid, [*absent, kv.KeyResult(entry, bytes(MAX_VALUE_BYTES))], []))
    fits(kv.Got(CLUSTER, 1, rid, [], keys))
    rows = [(LARGEST_KEY, kv.KeyResult(entry, bytes(MAX_VALUE_BYTES // MAX_ROWS)))] * MAX_ROWS
    fits(kv.Scanned(CLUSTER, 1, rid, rows, LARGEST_KEY, False, b"d" * 16, []))
    fits(kv.Scanned(CLUSTER, 1, rid, [], None, True, b"d" * 16, keys))
    fits(kv.Validated(CLUSTER, 1, rid, keys))
    fits(kv.Decided(CLUSTER, b"s" * 8, HIGH, rid, "conflict", keys))
    fits(kv.Get(CLUSTER, 1, keys, 0, True, [], [], HIGH))
    reads = [KeyRead(LARGEST_KEY, HIGH)] * (8 * 1024 * 1024 // (MAX_KEY_BYTES + 16))
    fits(kv.Validate(CLUSTER, 1, reads, []))
