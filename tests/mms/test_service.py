"""The membership service in virtual time: emulated servers, consensus that commits on request."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from mms.questions import MAX_PENDING
from mms.service import ACTIVE_NS, FIRST_LEASE_NS, MembershipService
from mms.state import ClusterState, GrantLease, decode_command
from ziplog.config import ClusterConfig, NodeConfig, ShardConfig
from ziplog.node import (
    Broadcast,
    Committed,
    Complain,
    Effect,
    Event,
    Halt,
    LeaderChanged,
    PeersChanged,
    Propose,
    Received,
    Restored,
    Send,
    Wakeup,
)
from ziplog.view import NO_DIGEST, Lease, fingerprint
from ziplog.wire import (
    ClusterInfo,
    Frontier,
    Heartbeat,
    Hello,
    LeaseAnnounced,
    LeaseHistory,
    LeaseQuery,
    Message,
    NotLeader,
    Refused,
    StatusQuery,
    StatusReply,
    Trim,
    TrimReply,
    Want,
)

MS: Final = 1_000_000
S: Final = 1000 * MS
CLUSTER: Final = 4711


def config(shards: int = 2, mms: int = 1, **options: Any) -> ClusterConfig:
    return ClusterConfig(
        name="c",
        data_dir=Path("nowhere"),
        mms=tuple(
            NodeConfig(f"mms-{i}", "127.0.0.1", 7000 + i, 7100 + i) for i in range(mms)
        ),
        shards=tuple(
            ShardConfig(
                shard,
                tuple(
                    NodeConfig(f"shard-{shard}-{i}", "127.0.0.1", 8000 + 2 * shard + i)
                    for i in range(2)
                ),
            )
            for shard in range(shards)
        ),
        **options,
    )  # fmt: skip


class FakeServer:
    """A storage server as the service sees it: it holds what it is told."""

    def __init__(self, name: str, shard: int) -> None:
        self.name, self.shard = name, shard
        self.route = b"route " + name.encode()
        self.incarnation = 1
        self.identity = f"directory of {name}"
        self.alive = True
        self.deaf = False
        self.state = "starting"
        self.active = False
        self.rate = 0
        self.lease: Lease | None = None
        self.trim = 0
        self.frontier = 0
        self.halted = False
        self.told: list[LeaseAnnounced] = []
        self.wants: list[Want] = []

    def heartbeat(self) -> Heartbeat:
        lease = self.lease
        view = 0 if self.state == "starting" else 1
        return Heartbeat(
            CLUSTER if lease else 0, self.name, "127.0.0.1:1", self.shard, view, self.incarnation,
            99, self.state, self.active, self.rate, self.frontier, 0,  # type: ignore[arg-type]
            lease.number if lease else 0, lease.digest if lease else NO_DIGEST, self.trim, 7, 5,
            self.identity,
        )  # fmt: skip

    def receive(self, message: Message) -> None:
        if self.deaf or not self.alive:
            return
        if isinstance(message, Want):
            self.wants.append(message)
            self.frontier = max(self.frontier, message.gsn + 1)
        elif isinstance(message, LeaseAnnounced):
            self.told.append(message)
            self.trim = max(self.trim, message.trim)
            for run in message.runs:
                self._take(run.first, run.last)
            placed = any(p.shard == self.shard for p in message.placements)
            if self.state == "starting" and self.lease is not None and placed:
                self.state = "up"

    def _take(self, first: Lease, last: Lease) -> None:
        held = self.lease
        if held is not None and last.number == held.number and last != held:
            self.halted = True
        if held is not None and first.number == held.number + 1:
            assert first.predecessor == held.digest
            assert first.base == held.stop
        if held is None or (first.number <= held.number + 1 and last.number > held.number):
            self.lease = last


class World:
    """The service, its servers, and a consensus that commits after `delay` ns."""

    def __init__(self, cluster: ClusterConfig | None = None, delay: int = MS) -> None:
        self.config = cluster or config()
        self.now = 1000 * S
        self.delay = delay
        self.consensus = ClusterState()
        self.log: list[bytes] = []
        self.proposed: list[tuple[int, bytes]] = []
        self.sent: list[tuple[bytes, Message]] = []
        self.complaints: list[str] = []
        self.is_cut_off = False
        self.servers = [
            FakeServer(node.name, shard.id)
            for shard in self.config.shards
            for node in shard.replicas
        ]
        self.beats: dict[str, int] = dict.fromkeys((s.name for s in self.servers), self.now)
        self.start()

    def start(self) -> None:
        """Start the service anew, from what consensus has."""
        self.service = MembershipService(
            self.config, "mms-0", pid=1, cluster=CLUSTER, incarnation=len(self.log), now=self.now
        )
        self.proposed.clear()
        replay = ClusterState()
        for command in self.log:
            self.step(Committed(command, replay.apply(command)))

    def lead(self) -> "World":
        self.step(LeaderChanged("mms-0", is_self=True))
        return self

    def step(self, event: Event) -> None:
        for effect in self.service.step(event, self.now):
            self.carry_out(effect)
        self.service.check()

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Propose():
                self.proposed.append((self.now + self.delay, effect.command))
            case Send():
                self.deliver(effect.dst, effect.message)
            case Broadcast():
                for dst in effect.dsts:
                    self.deliver(dst, effect.message)
            case Complain():
                self.complaints.append(effect.reason)
            case _:
                raise AssertionError(effect)

    def deliver(self, dst: bytes, message: Message) -> None:
        self.sent.append((dst, message))
        for server in self.servers:
            if server.route == dst:
                server.receive(message)

    def hear(self, server: FakeServer) -> None:
        self.beats[server.name] = self.now + S
        self.step(Received(server.route, server.heartbeat()))

    def run(self, duration: int) -> "World":
        stop = self.now + duration
        while True:
            due = [(at, 1) for at, _ in self.proposed[:1] if not self.is_cut_off]
            due += [(self.beats[s.name], 2) for s in self.servers if s.alive]
            wakeup = self.service.next_wakeup()
            if wakeup is not None:
                due.append((wakeup, 3))
            at, kind = min(due, default=(stop, 0))
            if at >= stop:
                self.now = stop
                return self
            self.now = max(self.now, at)
            self.happen(kind)

    def happen(self, kind: int) -> None:
        if kind == 1:
            _, command = self.proposed.pop(0)
            self.log.append(command)
            self.step(Committed(command, self.consensus.apply(command)))
        elif kind == 2:
            name = min((s.name for s in self.servers if s.alive), key=lambda name: self.beats[name])
            self.hear(next(s for s in self.servers if s.name == name))
        else:
            self.step(Wakeup())

    def ask(self, message: Message, src: bytes = b"client") -> None:
        self.step(Received(src, message))

    def answers(self, kind: type[Message], dst: bytes = b"client") -> list[Any]:
        return [message for route, message in self.sent if route == dst and type(message) is kind]

    @property
    def lease(self) -> Lease:
        last = self.service.state.last
        assert last is not None
        return last

    def commands(self) -> list[str]:
        return [type(decode_command(command)).__name__ for command in self.log]

    def set_active(self, active: bool = True) -> None:
        for server in self.servers:
            changed = server.active != active
            server.active = active
            if changed and active:
                self.hear(server)

    def status(self) -> dict[str, Any]:
        self.sent.clear()
        self.ask(StatusQuery(0, 5))
        document: dict[str, Any] = json.loads(self.answers(StatusReply)[0].document)
        return document


# --- the start -----------------------------------------------------------------------------


def test_the_first_lease_is_granted_when_all_servers_reported() -> None:
    world = World().lead().run(100 * MS)
    assert world.commands() == ["CreateCluster", "GrantLease"]
    assert world.service.state.cluster == CLUSTER
    assert [(m.shard, m.weight) for m in world.lease.members] == [(0, 1), (1, 1)]
    assert (world.lease.base, world.lease.first_epoch) == (1, 0)
    assert all(server.lease == world.lease for server in world.servers)
    assert all(server.state == "up" for server in world.servers)


def test_the_first_lease_waits_two_seconds_for_the_last_server() -> None:
    world = World()
    world.servers[3].alive = False
    world.lead().run(FIRST_LEASE_NS - 100 * MS)
    assert world.commands() == ["CreateCluster"]
    world.run(S)
    assert [m.shard for m in world.lease.members] == [0]
    assert {p.shard: p.state for p in world.service.state.placements.values()} == {
        0: "live", 1: "joining"
    }  # fmt: skip
    world.servers[3].alive = True
    world.run(2 * S)
    assert [m.shard for m in world.lease.members] == [0, 1]


def test_nothing_is_announced_before_it_is_committed() -> None:
    world = World(delay=700 * MS).lead()
    world.run(1399 * MS)
    assert world.service.state.last is None
    assert not any(server.told for server in world.servers)
    world.run(3 * S)
    assert all(server.told for server in world.servers)


# --- leases ----------------------------------------------------------------------------------


def test_idle_leases_are_long_and_equal() -> None:
    world = World().lead().run(120 * S)
    assert world.lease.epoch_ms == 1000
    grants = world.commands().count("GrantLease")
    assert 7 <= grants <= 9
    assert len(world.log) <= 11  # far below one command a second
    assert len(world.service.state.runs) == 1


def test_work_after_idleness_starts_short_leases_at_once() -> None:
    world = World().lead().run(30 * S)
    number = world.lease.number
    world.set_active()
    world.run(5 * MS)
    assert world.lease.number == number + 1
    assert world.lease.epoch_ms == 10
    assert world.servers[0].told[-1].starts_in_us == 0
    assert all(server.lease == world.lease for server in world.servers)


def test_at_work_one_lease_is_ahead_and_commands_are_few() -> None:
    world = World().lead().run(5 * S)
    world.set_active()
    world.run(S)
    for server in world.servers:
        server.told.clear()
    before = len(world.log)
    world.run(10 * S)
    assert len(world.log) - before <= 100
    told = [message for message in world.servers[0].told if message.runs]
    assert 60 <= len(told) <= 66
    # Half a lease, 80 ms, less the time to commit.
    assert all(70_000 <= message.starts_in_us <= 80_000 for message in told)
    assert len(world.service.state.runs) <= 3


@pytest.mark.parametrize(("epoch_ms", "epochs"), [(1, 256), (10, 16), (500, 16)])
def test_short_epochs_mean_more_of_them_a_lease(epoch_ms: int, epochs: int) -> None:
    world = World(config(epoch_ms=epoch_ms)).lead().run(S)
    world.set_active()
    before = len(world.log)
    world.run(2 * S)
    assert len(world.log) - before <= 20
    assert (world.lease.epochs, world.lease.epoch_ms) == (epochs, epoch_ms)
    assert world.lease.epochs * world.lease.epoch_size == 2**28


def test_without_work_leases_become_long_again() -> None:
    world = World().lead().run(S)
    world.set_active()
    world.run(S)
    world.set_active(active=False)
    world.run(ACTIVE_NS + 20 * S)
    assert world.lease.epoch_ms == 1000


def test_a_slow_commit_delays_the_next_lease_and_nothing_else() -> None:
    world = World().lead().run(S)
    world.set_active()
    world.run(S)
    world.delay = 400 * MS
    world.run(3 * S)
    assert world.servers[0].told[-1].starts_in_us == 0
    assert all(server.lease == world.lease for server in world.servers)


def test_a_proposal_that_got_lost_is_made_again() -> None:
    world = World().lead().run(S)
    world.set_active()
    world.run(S)
    world.is_cut_off = True
    world.run(500 * MS)
    assert len(world.proposed) >= 1
    world.proposed.clear()
    world.is_cut_off = False
    number = world.lease.number
    world.run(3 * S)
    assert world.lease.number > number + 10


def test_a_new_leader_goes_on_after_the_last_lease_at_once() -> None:
    world = World().lead().run(30 * S)
    last = world.lease
    world.start()
    for server in world.servers:
        server.told.clear()
    world.lead().run(S)
    assert world.lease.number == last.number + 1
    assert world.lease.predecessor == last.digest
    assert world.lease.members == last.members
    assert all(server.told[0].starts_in_us == 0 for server in world.servers)
    assert all(server.lease == world.lease for server in world.servers)


def test_a_follower_learns_and_is_silent() -> None:
    world = World().lead().run(5 * S)
    follower = MembershipService(world.config, "mms-0", pid=1, cluster=9, incarnation=1, now=0)
    follower.step(LeaderChanged("mms-1", is_self=False), world.now)
    follower.step(Restored(world.consensus.snapshot()), world.now)
    for server in world.servers:
        assert follower.step(Received(server.route, server.heartbeat()), world.now) == []
    assert follower.next_wakeup() is None
    assert follower.state.snapshot() == world.service.state.snapshot()
    follower.check()


def test_another_result_than_consensus_gave_halts() -> None:
    world = World().lead().run(S)
    effects = world.service.step(Committed(b"\x91\x05", b"\xa0"), world.now)
    assert [type(effect) for effect in effects] == [Halt]


# --- servers ---------------------------------------------------------------------------------


def test_a_deaf_server_gets_all_leases_when_it_hears_again() -> None:
    world = World().lead().run(S)
    world.set_active()
    world.servers[1].deaf = True
    world.run(2 * S)
    assert world.servers[1].lease != world.lease
    world.servers[1].deaf = False
    world.run(1100 * MS)
    assert world.servers[1].lease == world.lease


def test_a_silent_shard_is_parked_and_comes_back() -> None:
    world = World().lead().run(5 * S)
    world.servers[2].alive = False
    world.run(5 * S)
    assert [m.shard for m in world.lease.members] == [0]
    assert world.status()["shards"][1]["state"] == "parked"
    world.servers[2].alive = True
    world.run(3 * S)
    assert [m.shard for m in world.lease.members] == [0, 1]
    assert world.status()["shards"][1]["state"] == "live"


def test_a_server_in_limbo_parks_its_shard() -> None:
    world = World().lead().run(5 * S)
    world.servers[3].state = "limbo"
    world.run(3 * S)
    assert [m.shard for m in world.lease.members] == [0]
    assert world.status()["shards"][1]["replicas"][1]["state"] == "limbo"


def test_the_last_shard_is_never_parked() -> None:
    world = World().lead().run(5 * S)
    for server in world.servers:
        server.alive = False
    world.run(60 * S)
    assert [m.shard for m in world.lease.members] == [0, 1]


def test_a_service_that_was_stopped_blames_nobody() -> None:
    world = World().lead().run(5 * S)
    members = world.lease.members
    world.now += 60 * S
    world.beats = dict.fromkeys(world.beats, world.now + 500 * MS)
    for server in world.servers[:2]:  # those of the other shard are on their way
        world.hear(server)
    before = len(world.log)
    world.run(5 * S)
    assert world.lease.members == members
    grants = [decode_command(command) for command in world.log[before:]]
    assert not any(isinstance(grant, GrantLease) and grant.placements for grant in grants)


def test_weights_follow_rates() -> None:
    world = World().lead().run(S)
    for server in world.servers:
        server.rate = 4000 if server.shard else 1000
    world.set_active()
    world.run(6 * S)
    assert [(m.shard, m.weight) for m in world.lease.members] == [(0, 1), (1, 4)]


def test_a_server_that_was_told_another_lease_is_told_the_true_one() -> None:
    world = World().lead().run(5 * S)
    liar = world.servers[0]
    assert liar.lease is not None
    liar.lease = Lease(
        liar.lease.number, liar.lease.predecessor, liar.lease.base, 0, 1, 1, 77, liar.lease.members
    )
    world.run(2 * S)
    assert liar.halted
    assert world.service.announcements.contradictions > 0


def test_a_restarted_server_is_answered_at_once() -> None:
    world = World().lead().run(5 * S)
    server = world.servers[0]
    server.told.clear()
    server.incarnation = 2
    world.hear(server)
    assert server.told[0].placements == list(world.service.state.placements.values())


def test_a_heartbeat_of_another_cluster_is_refused() -> None:
    world = World().lead().run(S)
    beat = world.servers[0].heartbeat()
    other = Heartbeat(CLUSTER + 1, *(getattr(beat, name) for name in beat.__struct_fields__[1:]))
    world.ask(other)
    assert [refused.code for refused in world.answers(Refused)] == ["wrong-cluster"]


def test_a_server_that_nobody_knows_is_ignored() -> None:
    world = World().lead().run(S)
    world.sent.clear()
    for node, shard in (("shard-9-0", 9), ("shard-0-0", 1)):
        server = FakeServer(node, shard)
        world.ask(server.heartbeat())
    assert world.sent == []
    assert len(world.complaints) == 2


def test_a_server_that_lost_its_directory_is_in_limbo_for_ever() -> None:
    world = World().lead().run(5 * S)
    server = world.servers[2]
    frontier = server.frontier
    # It comes back with an empty directory: nothing that it says gives it away but the identity.
    server.alive, server.state, server.lease, server.frontier = False, "starting", None, 10**9
    server.incarnation, server.identity = 2, "another directory"
    world.run(10 * S)
    server.alive = True
    world.hear(server)
    assert server.told[-1].placements[1].replicas[0].fingerprint == fingerprint(
        "directory of shard-1-0"
    )
    # Whatever it makes of that.
    for state in ("starting", "up"):
        server.state = state
        world.run(5 * S)
        shard = world.status()["shards"][1]
        assert (shard["state"], shard["replicas"][0]["state"]) == ("parked", "limbo")
        assert [member.shard for member in world.lease.members] == [0]
    assert world.service.servers.frontier(1) == frontier
    # Nor is it forgotten by the service.
    world.start()
    world.lead().run(5 * S)
    assert world.status()["shards"][1]["replicas"][0]["state"] == "limbo"
    # With its directory, it is itself again.
    server.identity, server.incarnation = "directory of shard-1-0", 3
    world.run(5 * S)
    assert world.status()["shards"][1]["state"] == "live"


def test_a_name_alone_makes_no_server() -> None:
    world = World().lead().run(5 * S)
    stranger = FakeServer("shard-0-0", 0)
    stranger.identity, stranger.route, stranger.state = "stranger", b"stranger", "limbo"
    stranger.frontier = 2**63 - 1
    world.run(S)
    for _ in range(10):
        world.ask(stranger.heartbeat(), b"stranger")
        world.ask(Frontier(CLUSTER, 0, 1, 1, 2**63 - 1), b"stranger")
        world.run(S)
    assert len(world.complaints) == 20
    assert world.answers(LeaseAnnounced, b"stranger") == []
    shard = world.status()["shards"][0]
    assert (shard["state"], shard["replicas"][0]["state"]) == ("live", "up")
    assert world.service.servers.frontier(0) < 2**63 - 1


# --- clients ---------------------------------------------------------------------------------


def test_hello_is_answered_with_the_cluster() -> None:
    world = World(config(mms=3)).lead().run(S)
    world.ask(Hello(0, 3))
    (info,) = world.answers(ClusterInfo)
    assert (info.cluster, info.request, info.name, info.durability) == (CLUSTER, 3, "c", "memory")
    assert [p.shard for p in info.placements] == [0, 1]
    assert info.leases[-1].last == world.lease
    world.step(LeaderChanged("mms-2", is_self=False))
    world.ask(Hello(CLUSTER, 4))
    assert world.answers(ClusterInfo)[1].mms[0] == "127.0.0.1:7002"


def test_before_there_is_a_cluster_or_a_leader_the_client_is_told_so() -> None:
    world = World(config(mms=3))
    for message in (Hello(0, 1), LeaseQuery(0, 2, 1), Trim(0, 3, 1), StatusQuery(0, 4)):
        world.ask(message)
    assert [(m.request, m.leader) for m in world.answers(NotLeader)] == [
        (1, ""), (2, ""), (3, ""), (4, "")
    ]  # fmt: skip


def test_a_follower_names_the_leader() -> None:
    world = World(config(mms=3)).lead().run(S)
    world.step(LeaderChanged("mms-1", is_self=False))
    world.ask(StatusQuery(0, 4))
    assert [m.leader for m in world.answers(NotLeader)] == ["127.0.0.1:7001"]


def test_a_lease_query_is_answered_behind_a_barrier() -> None:
    world = World().lead().run(20 * S)
    stop = world.lease.stop
    world.ask(LeaseQuery(CLUSTER, 1, 5))
    world.ask(LeaseQuery(CLUSTER, 2, stop))
    assert world.answers(LeaseHistory) == []
    world.run(100 * MS)
    found, nothing = world.answers(LeaseHistory)
    assert found.runs == world.service.state.runs
    assert nothing.runs == []
    assert world.commands()[-1] == "Barrier"


def test_many_questions_share_barriers_and_are_bounded() -> None:
    world = World().lead().run(S)
    before = len(world.log)
    for request in range(MAX_PENDING + 10):
        world.ask(LeaseQuery(CLUSTER, request, 5))
    assert len(world.answers(Refused)) == 10
    world.run(S)
    assert len(world.answers(LeaseHistory)) == MAX_PENDING
    assert len(world.log) - before <= 4


def test_a_leader_that_lost_its_followers_answers_nothing_from_memory() -> None:
    world = World().lead().run(S)
    world.is_cut_off = True
    world.ask(LeaseQuery(CLUSTER, 1, 5))
    world.run(5 * S)
    assert world.answers(LeaseHistory) == []
    assert [m.request for m in world.answers(NotLeader)] == [1]


def test_a_leader_that_steps_down_sends_everybody_away() -> None:
    world = World(config(mms=3)).lead().run(S)
    world.is_cut_off = True
    world.ask(LeaseQuery(CLUSTER, 1, 5))
    world.ask(Trim(CLUSTER, 2, 5))
    world.step(LeaderChanged("mms-1", is_self=False))
    assert sorted(m.request for m in world.answers(NotLeader)) == [1, 2]


# --- trim ------------------------------------------------------------------------------------


def test_a_trim_wants_commits_and_waits_until_all_refuse() -> None:
    world = World().lead().run(5 * S)
    world.ask(Trim(CLUSTER, 9, 1000))
    world.run(20 * MS)
    primaries = [server for server in world.servers if server.name.endswith("-0")]
    assert all(server.wants[0].gsn == 999 and server.wants[0].request for server in primaries)
    assert not any(server.wants for server in world.servers if server not in primaries)
    assert world.service.state.trim == 0  # not stable as far as is known
    for server in primaries:
        world.ask(Frontier(CLUSTER, server.shard, 1, 1, server.frontier), server.route)
    world.run(5 * MS)
    assert world.service.state.trim == 1000
    assert all(server.trim == 1000 for server in world.servers)
    assert world.answers(TrimReply) == []  # no server said so yet
    world.run(2 * S)
    assert world.answers(TrimReply) == [TrimReply(CLUSTER, 9, 1000)]


def test_a_trim_does_not_wait_for_a_server_that_is_down() -> None:
    world = World().lead().run(5 * S)
    world.servers[1].alive = False
    world.run(4 * S)
    world.ask(Trim(CLUSTER, 9, 1000))
    world.run(4 * S)
    assert world.answers(TrimReply) == [TrimReply(CLUSTER, 9, 1000)]


def test_a_trim_that_cannot_become_stable_gives_up() -> None:
    world = World().lead().run(5 * S)
    world.servers[0].alive = False
    world.ask(Trim(CLUSTER, 9, 1000))
    world.run(29 * S)
    assert world.answers(TrimReply) == []
    world.run(2 * S)
    assert world.answers(TrimReply) == [TrimReply(CLUSTER, 9, 0, "not-stable")]
    assert world.service.state.trim == 0


def test_a_position_that_nobody_was_given_cannot_be_trimmed() -> None:
    world = World().lead().run(5 * S)
    world.ask(Trim(CLUSTER, 9, world.lease.stop))
    world.run(100 * MS)
    assert world.answers(TrimReply) == [TrimReply(CLUSTER, 9, 0, "no-such-position")]


def test_a_trim_below_the_trim_point_is_done() -> None:
    world = World().lead().run(5 * S)
    for request, gsn in ((1, 1000), (2, 1000), (3, 5), (4, 0)):
        world.ask(Trim(CLUSTER, request, gsn))
        world.run(3 * S)
    assert [(m.request, m.trim, m.error) for m in world.answers(TrimReply)] == [
        (request, 1000, "") for request in (1, 2, 3, 4)
    ]


# --- status ----------------------------------------------------------------------------------


def test_the_status_document() -> None:
    world = World(config(mms=3)).lead().run(5 * S)
    world.step(PeersChanged(("mms-2",)))
    for server in world.servers:
        server.rate, server.frontier = 1200, 2**24 + 1
    world.run(2 * S)
    document = world.status()
    assert document["cluster"] == "c"
    assert document["durability"] == "memory"
    assert document["epoch"] in range(5, 9)
    assert document["finalized_epoch"] == 0
    assert document["trimmed_before"] == "0@0"
    assert document["failure_handlers"] == []
    assert [(n["name"], n["leader"], n["state"], n["pid"]) for n in document["mms"]] == [
        ("mms-0", True, "up", 1), ("mms-1", False, "down", None), ("mms-2", False, "up", None)
    ]  # fmt: skip
    shard = document["shards"][0]
    assert {key: shard[key] for key in shard if key != "replicas"} == {
        "id": 0, "view": 1, "state": "live", "rate_per_s": 1200, "stable_gsn": 7, "durable_gsn": 5,
    }  # fmt: skip
    assert shard["replicas"][1] == {
        "name": "shard-0-1", "endpoint": "127.0.0.1:8001", "role": "backup", "pid": 99,
        "state": "up",
    }  # fmt: skip


def test_the_age_of_a_heartbeat_is_the_state_of_a_node() -> None:
    world = World().lead().run(5 * S)
    world.hear(world.servers[0])
    world.servers[0].alive = False
    states = []
    for _ in range(3):
        world.run(2 * S)
        states.append(world.status()["shards"][0]["replicas"][0]["state"])
    assert states == ["up", "suspect", "down"]


def test_the_trim_point_names_its_shard() -> None:
    world = World().lead().run(5 * S)
    world.ask(Trim(CLUSTER, 9, 1000))
    world.run(3 * S)
    assert world.status()["trimmed_before"] == "1000@1"


def test_finalized_epochs_follow_the_slowest_frontier_at_most_once_a_second() -> None:
    world = World().lead().run(S)
    world.set_active()
    for second in range(1, 6):
        for server in world.servers:
            server.frontier = 1 + second * 2**24 + (5 * 2**24 if server.shard else 0)
        world.run(S)
    assert world.service.state.finalized in (3, 4)
    assert world.commands().count("SetFinalized") <= 5
    world.run(2 * S)
    assert world.status()["finalized_epoch"] == 4
