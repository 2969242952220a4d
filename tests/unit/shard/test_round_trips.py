"""Servers far apart begin leases at the same moment, primaries earlier by the delay to the backups.

See docs/protocol.md, section 20.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from shard.replica import Replica
from shard.state.replica_state import ReplicaConfig
from shard.state.round_trips import RoundTrips
from tests.memory_store import MemoryStore
from tests.world import CLUSTER, MS, S, first_lease, placements
from ziplog import wire
from ziplog.core import view
from ziplog.core.node import (
    BatchEnd,
    Broadcast,
    LogWarning,
    Received,
    ReportBadMessage,
    Wakeup,
)

if TYPE_CHECKING:
    from ziplog.core.message import Message
    from ziplog.core.node import Effect

NODE, OTHER = b"mms-0", b"mms-1"
LEASE = first_lease(1, epochs=64)
#: The start of a server's clock, and the one-way delay to the service.
START, WAY = 7 * S, 30 * MS


class Server:
    """A server, by default the primary of a pair, and the service 30 ms away."""

    def __init__(self, rtt_ms: int = 100, *, index: int = 0, f: int = 1) -> None:
        nodes = tuple(view.Replica(name.decode(), "host:1") for name in (NODE, OTHER))
        replicas = tuple(view.Replica(f"shard-0-{i}", f"host:{2 + i}") for i in range(f + 1))
        config = ReplicaConfig(
            f"shard-0-{index}", f"host:{2 + index}", 0, index, replicas, nodes, "memory", f,
            wire.Limits(rtt_ms=rtt_ms),
        )  # fmt: skip
        self.f = f
        self.now = START
        self.config, self.store = config, MemoryStore()
        self.replica = Replica(config, self.store, None, limbo=False, incarnation=1, now=START)
        self.clock = self.replica.state.clock

    def restart(self) -> None:
        """Store the log, stop cleanly, and start again."""
        for entry in self.replica.state.stream.window:
            self.store.append(entry)
        checkpoint = self.replica.checkpoint()
        self.replica = Replica(
            self.config, self.store, checkpoint, limbo=False, incarnation=2, now=self.now
        )
        self.clock = self.replica.state.clock

    def heartbeat(self) -> wire.Heartbeat:
        """Wait for the next heartbeat."""
        while True:
            for effect in self.replica.step(Wakeup(), self.now):
                if isinstance(effect, Broadcast) and isinstance(effect.message, wire.Heartbeat):
                    return effect.message
            due = self.replica.next_wakeup()
            assert due is not None
            self.now = max(self.now, due)

    def receive(self, message: Message, node: bytes = NODE) -> list[Effect]:
        effects = self.replica.step(Received(node, message), self.now)
        self.replica.check()
        return effects

    def measure(self, took: int = 2 * WAY, node: bytes = NODE) -> None:
        """Have a node answer the next heartbeat."""
        sent_us = self.heartbeat().sent_us
        self.now += took
        self.receive(wire.Echo(CLUSTER, sent_us), node)

    def announce(
        self, lease: view.Lease, starts_ms: int, node: bytes = NODE, *, published: bool = False
    ) -> None:
        message = wire.LeaseAnnounced(
            CLUSTER, [view.run_of(lease)], starts_ms * 1000, placements(1, self.f), 0,
            is_publication=published,
        )  # fmt: skip
        self.receive(message, node)

    @property
    def half_ms(self) -> float:
        """Half of the round trip that the server takes."""
        return self.replica.state.round_trips.one_way_ns(NODE) / MS


def test_without_a_round_trip_in_the_cluster_file_nothing_is_measured() -> None:
    server = Server(rtt_ms=0)
    assert server.heartbeat().sent_us == 0
    for sent_us in (0, START // 1000):
        server.receive(wire.Echo(CLUSTER, sent_us))
    assert server.half_ms == 0
    server.announce(LEASE, 500)
    server.announce(LEASE.following(), 0)
    assert server.clock._lease_began_at == server.now


def test_a_heartbeat_has_the_time_of_its_server() -> None:
    server = Server()
    sent = [server.heartbeat().sent_us for _ in range(3)]
    assert sent == [START // 1000, (START + S) // 1000, (START + 2 * S) // 1000]


@pytest.mark.parametrize("published", [False, True])
def test_a_lease_begins_at_the_moment_that_the_service_planned(published: bool) -> None:
    server = Server()
    server.announce(LEASE, 0)
    server.measure()
    sent_at = server.now - WAY
    # Near the end of the lease before; otherwise it would begin there.
    server.announce(LEASE.following(), 607, published=published)
    assert server.clock.next_lease_at == sent_at + 607 * MS


@pytest.mark.parametrize("published", [False, True])
def test_a_lease_that_should_have_begun_is_in_the_epoch_of_the_others(published: bool) -> None:
    server = Server()
    server.announce(LEASE, 0)
    server.measure()
    lease = LEASE.following()
    server.announce(lease, 0, published=published)
    assert server.clock.lease == lease
    assert server.clock.current_epoch_base(server.now) == lease.base + 3 * lease.epoch_size


def test_the_first_lease_begins_with_the_others_too() -> None:
    server = Server()
    server.measure()
    server.announce(LEASE, 0)
    assert server.clock.current_epoch_base(server.now) == LEASE.base + 3 * LEASE.epoch_size


def test_no_position_of_a_lease_is_taken_before_the_server_holds_it() -> None:
    server = Server()
    server.measure()
    server.announce(LEASE, 0)
    server.now += 10 * S  # by its clock, many leases have passed
    assert server.clock.current_epoch_base(server.now) == LEASE.stop - LEASE.epoch_size
    assert server.clock.next_owned(LEASE.stop) == server.clock.limit == LEASE.stop


def test_each_node_of_the_service_is_measured_for_itself() -> None:
    server = Server()
    server.announce(LEASE, 0)
    server.measure(60 * MS, NODE)
    server.measure(20 * MS, OTHER)
    server.announce(LEASE.following(), 0, OTHER)
    assert server.clock._lease_began_at == server.now - 10 * MS
    assert server.half_ms == 30


def test_the_least_of_the_last_eight_round_trips_counts() -> None:
    server = Server()
    for took_ms in (80, 40, *[90] * 7):
        server.measure(took_ms * MS)
    assert server.half_ms == 20
    server.measure(90 * MS)
    assert server.half_ms == 45


def test_an_echo_counts_once_and_no_echo_counts_after_a_newer_one() -> None:
    server = Server()
    first, second = server.heartbeat().sent_us, server.heartbeat().sent_us
    server.now += 60 * MS
    server.receive(wire.Echo(CLUSTER, second))
    server.now -= 40 * MS  # neither of these would be the least otherwise
    for late in (second, first):
        server.receive(wire.Echo(CLUSTER, late))
    assert server.half_ms == 30


def test_an_echo_that_took_more_than_two_round_trips_is_no_sample() -> None:
    server = Server()
    server.measure(201 * MS)
    assert server.half_ms == 0
    server.measure(200 * MS)
    assert server.half_ms == 100


def test_an_echo_of_an_older_heartbeat_than_the_last_eight_is_no_sample() -> None:
    trips = RoundTrips(1000)
    sent = [trips.on_heartbeat_sent(START + i * MS) for i in range(9)]
    trips.on_echo(NODE, sent[0], START + 10 * MS)
    assert trips.one_way_ns(NODE) == 0
    trips.on_echo(NODE, sent[1], START + 11 * MS)
    assert trips.one_way_ns(NODE) == 5 * MS


@pytest.mark.parametrize("sent_us", [0, 1, START // 1000 - 1, START // 1000 + 1, 2**63 - 1])
def test_an_echo_of_no_heartbeat_is_no_sample(sent_us: int) -> None:
    server = Server()
    assert server.heartbeat().sent_us == START // 1000
    server.now += 20 * MS
    server.receive(wire.Echo(CLUSTER, sent_us))
    assert server.half_ms == 0


@pytest.mark.parametrize("sent_us", [-1, 2**63])
def test_an_echo_with_an_impossible_time_is_not_a_message(sent_us: int) -> None:
    frame = wire.encode(wire.Echo(CLUSTER, sent_us))
    with pytest.raises(wire.ProtocolError):
        wire.decode(frame)


def test_an_echo_of_another_process_or_cluster_is_no_sample() -> None:
    server = Server()
    server.announce(LEASE, 0)
    echo = wire.Echo(CLUSTER, server.heartbeat().sent_us)
    server.now += 20 * MS
    reports = server.receive(echo, b"shard-0-1")
    assert any(isinstance(effect, ReportBadMessage) for effect in reports)
    server.receive(replace(echo, cluster=CLUSTER + 1))
    assert server.half_ms == server.replica.state.round_trips.one_way_ns(b"shard-0-1") == 0
    server.receive(echo)
    assert server.half_ms == 10


def warnings(server: Server, took: int) -> list[str]:
    """Return what the server logs at the answer to its next heartbeat."""
    sent_us = server.heartbeat().sent_us
    server.now += took
    effects = server.receive(wire.Echo(CLUSTER, sent_us))
    return [effect.text for effect in effects if isinstance(effect, LogWarning)]


def test_a_server_warns_once_of_round_trips_above_that_of_the_cluster_file() -> None:
    server = Server(rtt_ms=50)
    assert [warnings(server, 51 * MS) for _ in range(7)] == [[]] * 7
    (warning,) = warnings(server, 130 * MS)
    assert "to mms-0 takes at least 51 ms, but rtt_ms in the cluster file is 50" in warning
    assert [warnings(server, 130 * MS) for _ in range(20)] == [[]] * 20


def test_a_late_answer_now_and_then_is_no_reason_to_warn() -> None:
    server = Server(rtt_ms=50)
    for _ in range(10):
        assert [warnings(server, 500 * MS) for _ in range(7)] == [[]] * 7
        assert warnings(server, 50 * MS) == []


# --- the head start of a primary ---

FAR = 40 * MS


def reported(
    trips: RoundTrips, took: int, *backups: bytes, last: int = 1, now: int = START
) -> None:
    """Have the backups report a forward up to entry `last` after `took` ns."""
    trips.on_forward(last, now)
    for backup in backups:
        trips.on_report(backup, last, now + took)


def test_the_first_report_that_covers_a_forward_is_a_sample() -> None:
    trips = RoundTrips(100)
    trips.on_forward(7, START)
    trips.on_report(b"near", 6, START + MS)  # of an earlier forward
    assert trips.one_way_ns(b"near") == 0
    trips.on_report(b"near", 9, START + FAR)
    trips.on_report(b"near", 9, START + FAR // 2)  # again
    trips.on_report(b"far", 7, START + 2 * FAR)
    assert trips.one_way_ns(b"near") == FAR // 2
    assert trips.one_way_ns(b"far") == FAR


def test_one_forward_is_measured_at_a_time() -> None:
    trips = RoundTrips(100)
    trips.on_forward(1, START)
    trips.on_forward(2, START + 200 * MS)  # the first one may still be reported
    trips.on_report(b"backup", 2, START + 200 * MS)
    assert trips.one_way_ns(b"backup") == 100 * MS
    trips.on_forward(3, START + 201 * MS)
    trips.on_report(b"backup", 3, START + 211 * MS)
    assert trips.one_way_ns(b"backup") == 5 * MS


def test_a_report_that_took_more_than_two_round_trips_is_no_sample() -> None:
    trips = RoundTrips(100)
    reported(trips, 201 * MS, b"backup")
    assert trips.one_way_ns(b"backup") == 0


def test_without_a_round_trip_in_the_cluster_file_no_forward_is_measured() -> None:
    trips = RoundTrips(0)
    reported(trips, 0, b"backup")
    reported(trips, MS, b"backup", last=2, now=START + S)
    assert trips.one_way_ns(b"backup") == 0


def forward(server: Server, *took: int) -> None:
    """Have the primary close positions for a reader, and each backup report it after `took` ns."""
    end = server.replica.state.stream.end
    server.receive(wire.Want(CLUSTER, 0, 1, server.clock.next_owned(end)), b"reader")
    effects = server.replica.step(BatchEnd(), server.now)
    assert any(isinstance(one, Broadcast) and type(one.message) is wire.Forward for one in effects)
    last = server.replica.state.stream.last
    sent = server.now
    for index, ns in enumerate(took, 1):
        server.now = sent + ns
        report = wire.Report(CLUSTER, 0, 1, index, 1, last, last)
        server.receive(report, f"shard-0-{index}".encode())


def test_a_primary_begins_a_lease_early_by_the_delay_to_its_backup() -> None:
    server = Server()
    server.announce(LEASE, 0)
    forward(server, FAR)
    lease = LEASE.following()
    server.announce(lease, 0)
    assert server.clock._lease_began_at == server.now - FAR // 2
    assert server.clock.current_epoch_base(server.now) == lease.base + 2 * lease.epoch_size


def test_a_report_of_entries_from_before_a_restart_is_no_sample() -> None:
    """The backup holds them, and has sent the report before the forward reaches it."""
    server = Server()
    server.announce(LEASE, 0)
    forward(server)
    last = server.replica.state.stream.last
    server.restart()
    effects = server.replica.step(BatchEnd(), server.now)
    assert any(isinstance(one, Broadcast) and type(one.message) is wire.Forward for one in effects)
    assert server.replica.state.stream.last == last, "nothing new was forwarded"
    server.now += MS
    server.receive(wire.Report(CLUSTER, 0, 1, 1, 1, last, last), b"shard-0-1")
    server.now += S
    forward(server, FAR)
    assert server.replica.state.round_trips.one_way_ns(b"shard-0-1") == FAR // 2


def test_the_farthest_backup_counts() -> None:
    server = Server(f=2)
    server.announce(LEASE, 0)
    forward(server, FAR // 2, FAR)
    server.announce(LEASE.following(), 0)
    assert server.clock._lease_began_at == server.now - FAR // 2


def test_the_next_lease_has_the_whole_head_start_and_the_one_after_it_none_more() -> None:
    server = Server()
    server.announce(LEASE, 0)
    forward(server, FAR)
    ends = server.clock.ends_at
    assert ends is not None
    lease = LEASE.following()
    server.announce(lease, (ends - server.now) // MS)
    assert server.clock.next_lease_at == ends - FAR // 2
    server.announce(lease.following(), (ends - server.now) // MS + 640)
    assert server.clock._upcoming[-1][0] == ends + 640 * MS - FAR // 2


def test_a_backup_begins_leases_with_the_service() -> None:
    server = Server(index=1)
    server.announce(LEASE, 0)
    reported(server.replica.state.round_trips, FAR, b"shard-0-0")
    server.announce(LEASE.following(), 0)
    assert server.clock._lease_began_at == server.now
