"""The membership service in virtual time: emulated servers, consensus that commits on request."""

import json
from typing import Any

from mms.commands import decode_command
from mms.service import MembershipService
from mms.state import ClusterState
from tests.services import CLUSTER, MS, S, ServiceWorld, cluster_config
from ziplog.config import ClusterConfig
from ziplog.core.message import Message
from ziplog.core.node import Committed, Event, LeaderChanged, Received, Wakeup
from ziplog.core.view import NO_DIGEST, Lease, LeaseRun, Replica, run_of, unfold
from ziplog.core.wire_use import Release, WireUse
from ziplog.wire import Heartbeat, LeaseAnnounced, NodeInfo, StatusQuery, StatusReply, Want


def config(shards: int = 2, mms: int = 1, **options: Any) -> ClusterConfig:
    return cluster_config(shards, mms=mms, **options)


class FakeServer:
    """A fake storage server: it holds the announced leases."""

    def __init__(self, name: str, shard: int) -> None:
        self.name, self.shard = name, shard
        self.route = b"route " + name.encode()
        self.incarnation = 1
        self.identity = f"directory of {name}"
        self.alive = True
        self.is_disconnected = False
        self.state = "starting"
        self.full = ""
        self.active = False
        self.rate = 0
        self.lease: Lease | None = None
        self.trim = 0
        #: Whether its heartbeats report the trim point: it is on its disk.
        self.records_trims = True
        self.frontier = 0
        #: Whether it has readers, and the lag of its frontier then, in ns.
        self.has_readers = False
        self.behind = 0
        self.halted = False
        self.view = 1
        #: The announced state of its shard.
        self.placed = ""
        self.sealed = False
        self.has_gap = False
        #: The position from which it needs leases; 0: an older version, without that field.
        self.needs_from = 1
        self.stable_gsn = 7
        self.announced: list[LeaseAnnounced] = []
        #: The endpoint whose publication brought the last lease; "": none did.
        self.publisher = ""
        self.loses_publications = False
        self.wants: list[Want] = []
        #: Its release, the one that it uses, and what the service reported.
        self.release = Release("0.1")
        self.wire = 1
        #: The durability level that it keeps to.
        self.level = ""
        self.region = ""
        #: Its process is to end.
        self.is_stopping = False
        self.reports: list[NodeInfo] = []

    def heartbeat(self) -> Heartbeat:
        lease = self.lease
        view = 0 if self.state == "starting" else self.view
        return Heartbeat(
            CLUSTER if lease else 0, self.name, "127.0.0.1:1", self.shard, view, self.incarnation,
            99, self.state, self.active, self.rate, self.frontier, 0,  # type: ignore[arg-type]
            lease.number if lease else 0, lease.digest if lease else NO_DIGEST,
            self.trim if self.records_trims else 0,
            self.stable_gsn, 5, self.identity, self.placed,  # type: ignore[arg-type]
            has_readers=self.has_readers, holes=3, is_sealed=self.sealed,
            has_gap=self.has_gap, needs_from=self.needs_from, publisher=self.publisher,
            full=self.full, version=self.release.version, first_wire=self.release.wires.first,
            last_wire=self.release.wires.last, wire=self.wire,
            level=self.level,  # type: ignore[arg-type]
            region=self.region, is_stopping=self.is_stopping,
        )  # fmt: skip

    def receive(self, message: Message) -> None:
        if self.is_disconnected or not self.alive:
            return
        if isinstance(message, Want):
            self.wants.append(message)
            self.frontier = max(self.frontier, message.gsn + 1)
        elif isinstance(message, NodeInfo):
            self.reports.append(message)
        elif isinstance(message, LeaseAnnounced):
            self.announced.append(message)
            self.trim = max(self.trim, message.trim)
            if message.runs or message.after:
                self.has_gap = message.after > (self.lease.number if self.lease is not None else 0)
            former = self.lease
            for run in message.runs or self._unfold(message):
                self._take(run.first, run.last, is_cut=message.is_cut)
            if message.is_publication and not self.has_gap:
                self.publisher = message.publisher
            elif self.lease != former:
                self.publisher = ""
            states = [p.state for p in message.placements if p.shard == self.shard]
            self.placed = states[0] if states else self.placed
            if self.state == "starting" and self.lease is not None and states:
                self.state = "up"

    def _unfold(self, message: LeaseAnnounced) -> list[LeaseRun]:
        runs = unfold(self.lease, message.after, message.steps) if self.lease is not None else []
        assert not runs or runs[-1].last.digest == message.digest
        return runs

    def _take(self, first: Lease, last: Lease, *, is_cut: bool) -> None:
        held = self.lease
        if held is not None and last.number == held.number and last != held:
            self.halted = True
        if held is not None and first.number == held.number + 1:
            assert first.predecessor == held.digest
            assert first.base == held.stop
        follows = held is None or is_cut or first.number <= held.number + 1
        if follows and (held is None or last.number > held.number):
            self.lease = last


class World(ServiceWorld):
    """The service, its servers, and a consensus that commits after `delay` ns."""

    def __init__(
        self, cluster: ClusterConfig | None = None, delay: int = MS, publisher: str = ""
    ) -> None:
        super().__init__(cluster or config())
        self.delay, self.publisher = delay, publisher
        self.published: list[LeaseAnnounced] = []
        self.consensus = ClusterState()
        self.log: list[bytes] = []
        self.proposed: list[tuple[int, bytes]] = []
        self.sent: list[tuple[bytes, Message]] = []
        #: The release of the service's node, and the version in its directory.
        self.release, self.wire = Release("0.1"), 1
        self.is_cut_off = False
        self.is_checked = True
        self.may_warn = False
        #: The wall clock of the service's process, minus `now`.
        self.wall_offset_ns = 0
        #: Leases, with their past or planned starts.
        self.begun: list[tuple[int, Lease]] = []
        self.servers = [
            FakeServer(node.name, shard.id)
            for shard in self.config.shards
            for node in shard.replicas
        ]
        for server in self.servers:
            server.region = self.config.node(server.name).region or ""
        self.heartbeat_times: dict[str, int] = dict.fromkeys(
            (s.name for s in self.servers), self.now
        )
        self.start()

    def add_servers(self, shard: int, count: int = 2) -> list[Replica]:
        """Start the servers of another shard; return their addresses."""
        added = [FakeServer(f"shard-{shard}-{i}", shard) for i in range(count)]
        self.servers += added
        self.heartbeat_times |= {server.name: self.now for server in added}
        return [Replica(s.name, f"127.0.0.1:{9000 + 10 * shard + i}") for i, s in enumerate(added)]

    def start(self) -> None:
        """Restart the service from the state of consensus."""
        self.service = MembershipService(
            self.config, "mms-0", pid=1, cluster=CLUSTER, incarnation=len(self.log), now=self.now,
            publisher=self.publisher, wire_use=WireUse(self.release, self.wire),
            wall_offset_ns=lambda: self.wall_offset_ns, free_bytes=lambda: 5_000,
        )  # fmt: skip
        self.proposed.clear()
        replay = ClusterState()
        for command in self.log:
            self.step(Committed(command, replay.apply(command)))

    def lead(self) -> "World":
        self.step(LeaderChanged("mms-0", is_self=True))
        return self

    def step(self, event: Event) -> None:
        self.carry_out("mms-0", self.service.step(event, self.now))
        assert self.may_warn or not self.warnings, self.warnings
        if self.is_checked:
            self.service.check()

    def propose(self, _name: str, command: bytes) -> None:
        self.proposed.append((self.now + self.delay, command))

    def transmit(self, _src: str, dst: bytes, message: Message) -> None:
        self.sent.append((dst, message))
        for server in self.servers:
            if server.route == dst:
                self._deliver(server, message)

    def publish(self, _name: str, message: Message) -> None:
        assert isinstance(message, LeaseAnnounced)
        self.published.append(message)
        for server in self.servers:
            if server.lease is not None and not server.loses_publications:
                self._deliver(server, message)

    def _deliver(self, server: FakeServer, message: Message) -> None:
        held = server.lease
        server.receive(message)
        if server.has_gap or (held is None and server.lease is not None):
            self.heartbeat_times[server.name] = self.now  # it says so at once

    def send_heartbeat(self, server: FakeServer) -> None:
        self.heartbeat_times[server.name] = self.now + (S // 4 if server.has_readers else S)
        if server.has_readers:
            server.frontier = max(server.frontier, self.ran_at(self.now - server.behind))
        self.step(Received(server.route, server.heartbeat()))

    def ran_at(self, then: int) -> int:
        """Return the base of the epoch that ran then."""
        at, lease = next(one for one in reversed(self.begun) if one[0] <= then)
        index = min((then - at) // (lease.epoch_ms * MS), lease.epochs - 1)
        return lease.epoch_base(lease.first_epoch + index)

    def run(self, duration: int) -> "World":
        stop = self.now + duration
        while True:
            due = [(at, 1) for at, _ in self.proposed[:1] if not self.is_cut_off]
            server = self._next_server()
            if server is not None:
                due.append((self.heartbeat_times[server.name], 2))
            wakeup = self.service.next_wakeup()
            if wakeup is not None:
                due.append((wakeup, 3))
            at, kind = min(due, default=(stop, 0))
            if at >= stop:
                self.now = stop
                return self
            self.now = max(self.now, at)
            self.happen(kind, server)

    def _next_server(self) -> FakeServer | None:
        """Return the server that sends the next heartbeat."""
        alive = [server for server in self.servers if server.alive]
        times = [self.heartbeat_times[server.name] for server in alive]
        return alive[times.index(min(times))] if alive else None

    def happen(self, kind: int, server: FakeServer | None) -> None:
        if kind == 1:
            _, command = self.proposed.pop(0)
            self.log.append(command)
            self.step(Committed(command, self.consensus.apply(command)))
            last, starts = self.service.plan.last, self.service.plan.starts
            if last is not None and last not in [lease for _, lease in self.begun]:
                self.begun = [one for one in self.begun if one[0] < starts]
                self.begun.append((starts, last))
        elif kind == 2 and server is not None:
            self.send_heartbeat(server)
        else:
            self.step(Wakeup())

    def send(self, message: Message, src: bytes = b"client") -> None:
        self.step(Received(src, message))

    def answers(self, kind: type[Message], dst: bytes = b"client") -> list[Any]:
        return [message for route, message in self.sent if route == dst and type(message) is kind]

    @property
    def lease(self) -> Lease:
        last = self.service.state.last
        assert last is not None
        return last

    def commands(self) -> list[str]:
        """Return the kinds of the committed commands, without records of events."""
        kinds = [type(decode_command(command)).__name__ for command in self.log]
        return [kind for kind in kinds if kind != "RecordEvents"]

    def events(self) -> list[tuple[str, int | None, str | None, str]]:
        """Return the recorded events: kind, shard, node, text."""
        self.sent.clear()
        self.send(StatusQuery(0, 6, "events"))
        document = json.loads(self.answers(StatusReply)[0].document)
        return [(one["kind"], one["shard"], one["node"], one["text"]) for one in document["events"]]

    def age(self, runs: int) -> "World":
        """Grant `runs` more lease runs, without an announcement."""
        last, added = self.lease, []
        for _ in range(runs):
            last = last.following(epoch_ms=21 - last.epoch_ms if last.epoch_ms < 20 else 10)
            added.append(run_of(last))
        for state in (self.consensus, self.service.state):
            state.runs = state.runs + added
            state.history_bytes += sum(run.max_bytes for run in added)
        self.service.plan.on_restored(last, self.now)
        self.service._leases._weights.on_granted(last.members)
        self.service.check()
        self.is_checked = False  # a check would read every run
        return self

    def set_active(self, active: bool = True) -> None:
        for server in self.servers:
            changed = server.active != active
            server.active = active
            if changed and active:
                self.send_heartbeat(server)

    def status(self) -> dict[str, Any]:
        self.sent.clear()
        self.send(StatusQuery(0, 5))
        document: dict[str, Any] = json.loads(self.answers(StatusReply)[0].document)
        return document


def working(shards: int = 3, delay: int = MS, rate: int = 10_000, publisher: str = "") -> World:
    """Return a service at work: all shards are equally fast."""
    world = World(config(shards=shards), delay, publisher).lead().run(S)
    for server in world.servers:
        server.rate = rate
    world.set_active()
    return world.run(3 * S)


def members(world: World) -> list[int]:
    return [member.shard for member in world.lease.members]


def state(world: World, shard: int = 0) -> str:
    return world.service.state.placements[shard].state
