"""A cluster in virtual time: failure handlers and a membership service that are real, and servers
that are not: a log is a list, taking one over is a copy, and being silent is what the test says.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from failure_handler.service import FailureHandler
from failure_handler.state import HandlerState, decode_command
from mms.service import MembershipService
from mms.state import ClusterState
from mms.state import decode_command as decode_mms
from ziplog.config import ClusterConfig, NodeConfig, ShardConfig
from ziplog.node import (
    Broadcast,
    Committed,
    Complain,
    Connect,
    Effect,
    Event,
    LeaderChanged,
    Propose,
    Received,
    Send,
    Wakeup,
    Warn,
)
from ziplog.view import NO_DIGEST, Lease, fingerprint
from ziplog.wire import (
    Freeze,
    Frozen,
    Heartbeat,
    LeaseAnnounced,
    Message,
    Orders,
    OrdersQuery,
    StatusQuery,
    StatusReply,
    Suspect,
    ViewDecided,
)

MS: Final = 1_000_000
S: Final = 1000 * MS
CLUSTER: Final = 4711
#: How long a message takes, a commit, and a flush.
HOP: Final = MS // 10
COMMIT: Final = 2 * MS
FLUSH: Final = 3 * MS
#: How soon a supervisor starts a dead process again.
RESTART: Final = 500 * MS

Entry = tuple[int, str]
#: Who sends, to whom, what: after how long it arrives; a copy for each, none if it is lost.
Network = Callable[[str, str, Message], list[int]]


def config(shards: int = 1, f: int = 1, handlers: int = 1, **options: Any) -> ClusterConfig:
    return ClusterConfig(
        name="c",
        data_dir=Path("nowhere"),
        f=f,
        mms=(NodeConfig("mms-0", "127.0.0.1", 7000, 7100),),
        failure_handlers=tuple(
            NodeConfig(f"fh-{i}", "127.0.0.1", 7200 + i, 7300 + i) for i in range(handlers)
        ),
        shards=tuple(
            ShardConfig(
                shard,
                tuple(
                    NodeConfig(f"shard-{shard}-{i}", "127.0.0.1", 8000 + 16 * shard + i)
                    for i in range(f + 1)
                ),
            )
            for shard in range(shards)
        ),
        **options,
    )


class FakeServer:
    """A storage server as a failure handler sees it."""

    def __init__(self, world: World, name: str, shard: int, index: int) -> None:
        self.world, self.name, self.shard, self.index = world, name, shard, index
        self.identity = f"directory of {name}"
        self.alive = True
        self.incarnation = 100 + index
        self.state = "starting"
        self.view = 0
        #: The entries of its log, each with the view of who wrote it; so many are on its disk.
        self.log: list[Entry] = []
        self.flushed = 0
        self.filled_to = 0
        self.number = 0
        self.decided_end = 0
        self.lease: Lease | None = None
        #: Its shard gets no more leases.
        self.is_removed = False
        #: Peers that it takes for dead whatever they do.
        self.accuses: set[int] = set()
        self.beats = {i: world.now for i in range(world.config.f + 1) if i != index}
        self.unfit: set[int] = set()
        self.halted = ""

    @property
    def route(self) -> bytes:
        return f"route {self.name} {self.incarnation}".encode()

    @property
    def suspects(self) -> list[int]:
        now = self.world.now
        return sorted(
            {i for i, heard in self.beats.items() if now - heard >= S}
            | self.unfit
            | (self.accuses - {self.index})
        )

    # --- what it says ---

    def tick(self) -> None:
        """Ten times a second."""
        if not self.alive:
            return
        for peer in self.world.peers(self):
            self.world.post(
                self.name, peer.name, lambda p=peer: p.beaten(self.index, self.view, self.state)
            )
        self.say()
        if self.world.now - self.world.started >= self.world.heartbeats.get(self.name, 0):
            self.world.heartbeats[self.name] = self.world.now - self.world.started + S
            self.heartbeat()

    def say(self) -> None:
        is_fine = not (self.suspects or self.is_removed) and self.state in {"starting", "up"}
        if not self.lease or is_fine:
            return
        last_view = self.log[-1][0] if self.log else 0
        message = Suspect(
            CLUSTER, self.name, self.shard, self.view, self.index, self.incarnation,
            self.state, self.suspects, len(self.log), last_view, self.number, self.identity,
        )  # type: ignore[arg-type] # fmt: skip
        for handler in self.world.config.failure_handlers:
            self.world.send_handler(self, handler.name, message)

    def heartbeat(self) -> None:
        lease = self.lease
        states = {"frozen": "up", "joined": "starting"}
        message = Heartbeat(
            CLUSTER if lease else 0, self.name, "127.0.0.1:1", self.shard, self.view,
            self.incarnation, 99, states.get(self.state, self.state), False, 0,
            self.filled_to, 0, lease.number if lease else 0,
            lease.digest if lease else NO_DIGEST, 0, 0, 0, self.identity,
        )  # type: ignore[arg-type] # fmt: skip
        world = self.world
        world.post(
            self.name, "mms-0",
            lambda: world.step_mms(Received(self.route, message)), message,
        )  # fmt: skip

    def beaten(self, peer: int, view: int, state: str) -> None:
        if not self.alive:
            return
        if view > self.view and state in {"up", "joined"} and self.is_in_view:
            self.stand_by(view)
        if view == self.view and state in {"up", "frozen", "joined"}:
            self.beats[peer] = self.world.now
            self.unfit.discard(peer)
        elif state == "limbo" or 0 < view < self.view:
            self.unfit.add(peer)

    @property
    def is_in_view(self) -> bool:
        return self.state in {"up", "frozen", "joined"}

    def stand_by(self, number: int) -> None:
        """Take nothing more, but keep what the view left: it may be asked for yet."""
        self.state, self.number = "frozen", max(self.number, number)

    def leave(self) -> None:
        self.state = "limbo"
        del self.log[self.flushed :]

    # --- what it is told ---

    def receive(self, src: str, message: Message) -> None:
        if not self.alive or self.halted:
            return
        match message:
            case LeaseAnnounced():
                self.announced(message)
            case Freeze():
                self.freeze(src, message)
            case ViewDecided():
                self.decided(message)

    def announced(self, message: LeaseAnnounced) -> None:
        for run in message.runs:
            if self.lease is None or run.last.number > self.lease.number:
                self.lease = run.last
        placement = next((p for p in message.placements if p.shard == self.shard), None)
        if placement is None:
            return
        self.is_removed = placement.state == "recovering"
        known = placement.replicas[self.index].fingerprint
        if self.state == "starting" and placement.state != "joining":
            fits = known in {"", fingerprint(self.identity)}
            self.state, self.view = ("up", placement.view) if fits else ("limbo", 0)
        elif self.is_in_view and placement.view > self.view:
            self.leave()
        elif self.state == "joined" and placement.state == "live" and placement.view == self.view:
            self.state = "up"
            self.unfit.clear()
            self.beats = dict.fromkeys(self.beats, self.world.now)

    def freeze(self, src: str, message: Freeze) -> None:
        fits = message.view == self.view if self.is_in_view else message.view >= self.view
        if (
            self.state == "starting"
            or not fits
            or message.recovery < self.number
            or message.incarnation not in {0, self.incarnation}
        ):
            return
        if self.state != "frozen" or message.recovery > self.number:
            # The end of what a decided view holds: an attempt that failed may have filled the rest.
            decided = sum(1 for view, _ in self.log if view <= message.view)
            is_whole = decided == len(self.log) and self.filled_to >= message.limit
            self.decided_end = message.limit if is_whole else 1 + decided
            if self.filled_to < message.limit:
                self.log.append((message.recovery, f"no-ops to {message.limit}"))
                self.filled_to = message.limit
            if self.state == "limbo":
                self.view = message.view
            self.state, self.number = "frozen", message.recovery
        incarnation = self.incarnation

        def flushed() -> None:
            if self.alive and self.incarnation == incarnation and self.number == message.recovery:
                self.flushed = len(self.log)
                self.world.send_handler(self, src, self.promise())

        self.world.at(FLUSH, flushed)

    def promise(self) -> Frozen:
        return Frozen(
            CLUSTER, self.shard, self.view, self.number, self.index, self.incarnation, 0,
            self.decided_end, len(self.log), 0, digest_of(self.log),
        )  # fmt: skip

    def decided(self, message: ViewDecided) -> None:
        decided = msgspec.structs.replace(message, is_confirmed=True)
        if self.world.views.setdefault((self.shard, message.view), decided) != decided:
            self.halted = f"two decisions about view {message.view}"
        if message.survivor == self.index:
            if (
                self.state == "frozen"
                and message.view == self.number
                and message.incarnation == self.incarnation
            ):
                assert message.digest == digest_of(self.log)
                self.state, self.view = "joined", message.view
        elif message.view >= self.number and message.view > self.view:
            if self.is_in_view:
                self.stand_by(message.view)
            self.number = message.view
            self.world.at(2 * HOP, lambda i=self.incarnation: self.fetch(message, i))

    def fetch(self, decision: ViewDecided, incarnation: int) -> None:
        """Take the survivor's log over, if it is there and has it."""
        survivor = self.world.server(self.shard, decision.survivor)
        if (
            not self.alive
            or (self.incarnation, self.number) != (incarnation, decision.view)
            or self.state not in {"limbo", "frozen"}
        ):
            return
        if (
            survivor.alive
            and survivor.state in {"joined", "up"}
            and survivor.view == decision.view
            and self.world.is_linked(self.name, survivor.name)
        ):
            self.log = survivor.log[: decision.last]
            assert digest_of(self.log) == decision.digest
            self.flushed, self.filled_to = len(self.log), survivor.filled_to
            self.state, self.view = "joined", decision.view
            self.say()
            self.heartbeat()
        else:
            self.world.at(100 * MS, lambda: self.fetch(decision, incarnation))

    # --- what happens to it ---

    def crash(self) -> None:
        self.alive = False
        del self.log[self.flushed :]

    def restart(self, *, wiped: bool = False) -> None:
        assert not self.alive
        self.alive = True
        self.incarnation += 1000
        self.state, self.view, self.number = "limbo", 0, 0
        self.unfit.clear()
        if wiped:
            self.identity += "'"
            self.state, self.lease = "starting", None
            self.log, self.flushed, self.filled_to = [], 0, 0
        elif not self.log:
            self.filled_to = 0
        self.beats = dict.fromkeys(self.beats, self.world.now + 4 * S)
        self.world.heartbeats[self.name] = 0


def digest_of(log: list[Entry]) -> bytes:
    return repr(log).encode().__hash__().to_bytes(8, "big", signed=True) * 2


class World:
    """All of it. Time passes in `run` and `until` only."""

    def __init__(self, cluster: ClusterConfig | None = None) -> None:
        self.config = cluster or config()
        self.now = self.started = 1000 * S
        self.views: dict[tuple[int, int], ViewDecided] = {}  # as if confirmed
        self.heartbeats: dict[str, int] = {}
        self.network: Network = lambda _src, _dst, _message: [HOP]
        self.cut: set[str] = set()
        self.queue: list[tuple[int, int, Callable[[], None]]] = []
        self.count = 0
        self.sent: list[tuple[int, str, str, Message]] = []
        self.warnings: list[str] = []
        self.complaints: list[str] = []
        self.acked: list[str] = []
        self.commands: list[tuple[int, Any]] = []
        self.mms_commands: list[Any] = []
        self.servers = [
            FakeServer(self, node.name, shard.id, index)
            for shard in self.config.shards
            for index, node in enumerate(shard.replicas)
        ]
        self.consensus, self.mms_consensus = HandlerState(), ClusterState()
        self.log: list[tuple[bytes, bytes]] = []
        self.leader = ""
        self.handlers: dict[str, FailureHandler] = {}
        self.supervised = True
        self.mms = MembershipService(
            self.config, "mms-0", pid=1, cluster=CLUSTER, incarnation=1, now=self.now
        )
        for node in self.config.failure_handlers:
            self.start_handler(node.name)
        self.step_mms(LeaderChanged("mms-0", is_self=True))
        for server in self.servers:
            self.every(100 * MS, server.tick)

    def live(self) -> World:
        """Let everything start, and the first handler lead."""
        self.elect("fh-0")
        self.until(lambda: all(server.state == "up" for server in self.servers))
        self.run(1200 * MS)  # everybody knows where everything is
        assert not self.commands
        return self

    # --- time ---

    def at(self, delay: int, what: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.queue, (self.now + delay, self.count, what))

    def every(self, pause: int, what: Callable[[], None]) -> None:
        def again() -> None:
            what()
            self.at(pause, again)

        self.at(0, again)

    def run(self, duration: int) -> World:
        stop = self.now + duration
        self.until(lambda: self.now >= stop, duration + S)
        return self

    def until(self, condition: Callable[[], bool], limit: int = 60 * S) -> World:
        stop = self.now + limit
        while not condition():
            assert self.now < stop, "it does not happen"
            self.happen()
        return self

    def happen(self) -> None:
        nodes: list[Any] = [self.mms, *self.handlers.values()]
        due = [(at, node) for node in nodes if (at := node.next_wakeup()) is not None]
        at, node = min(due, key=lambda one: one[0])
        if self.queue and self.queue[0][0] <= at:
            at, _, what = heapq.heappop(self.queue)
            self.now = max(self.now, at)
            what()
        else:
            self.now = max(self.now, at)
            if node is self.mms:
                self.step_mms(Wakeup())
            else:
                self.step_handler(node.name, Wakeup())
        self.check()

    # --- the network ---

    def is_linked(self, src: str, dst: str) -> bool:
        return not {src, dst} & self.cut

    def post(
        self, src: str, dst: str, deliver: Callable[[], None], message: Message | None = None
    ) -> None:
        delays = [HOP]
        if message is not None:
            self.sent.append((self.now, src, dst, message))
            delays = self.network(src, dst, message)
        for delay in delays:
            self.at(delay, lambda: deliver() if self.is_linked(src, dst) else None)

    def send_handler(self, server: FakeServer, handler: str, message: Message) -> None:
        route = server.route

        def deliver() -> None:
            if handler in self.handlers:
                self.step_handler(handler, Received(route, message))

        self.post(server.name, handler, deliver, message)

    def send(self, src: str, dst: bytes, message: Message) -> None:
        """Carry a message of a handler or of the membership service."""
        if dst == b"mms-0":
            event = Received(f"route {src}".encode(), message)
            self.post(src, "mms-0", lambda: self.step_mms(event), message)
        elif dst.startswith(b"route fh"):
            handler = dst.decode().split()[1]
            answer = Received(src.encode(), message)
            self.post(
                src, handler,
                lambda: self.step_handler(handler, answer) if handler in self.handlers else None,
                message,
            )  # fmt: skip
        elif dst.startswith(b"route shard"):
            server = next(s for s in self.servers if s.name == dst.decode().split()[1])
            self.post(
                src, server.name,
                lambda: server.receive(src, message) if server.route == dst else None,
                message,
            )  # fmt: skip
        else:
            self.sent.append((self.now, src, dst.decode(), message))

    # --- the nodes ---

    def carry_out(self, name: str, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self.send(name, effect.dst, effect.message)
                case Broadcast():
                    for dst in effect.dsts:
                        self.send(name, dst, effect.message)
                case Propose():
                    self.propose(name, effect.command)
                case Warn():
                    self.warnings.append(effect.text)
                case Complain():
                    self.complaints.append(effect.reason)
                case Connect():
                    pass
                case _:
                    raise AssertionError(effect)

    def propose(self, name: str, command: bytes) -> None:
        if name == "mms-0":
            self.at(COMMIT, lambda: self.commit_mms(command))
        elif name == self.leader and name in self.handlers:
            self.at(COMMIT, lambda: self.commit(command))

    def commit_mms(self, command: bytes) -> None:
        self.mms_commands.append(decode_mms(command))
        self.step_mms(Committed(command, self.mms_consensus.apply(command)))

    def commit(self, command: bytes) -> None:
        result = self.consensus.apply(command)
        self.consensus.check()
        self.log.append((command, result))
        if not result[1:]:
            self.commands.append((self.now, decode_command(command)))
        for name in list(self.handlers):
            self.step_handler(name, Committed(command, result))

    def step_mms(self, event: Event) -> None:
        self.carry_out("mms-0", self.mms.step(event, self.now))

    def step_handler(self, name: str, event: Event) -> None:
        handler = self.handlers[name]
        self.carry_out(name, handler.step(event, self.now))
        handler.check()

    def start_handler(self, name: str) -> None:
        self.handlers[name] = FailureHandler(self.config, name, pid=7, now=self.now)
        for command, result in self.log:
            self.step_handler(name, Committed(command, result))
        if self.leader:
            self.step_handler(name, LeaderChanged(self.leader, is_self=False))

    def elect(self, name: str) -> None:
        self.leader = name
        for other in list(self.handlers):
            self.step_handler(other, LeaderChanged(name, is_self=other == name))

    def fail_over(self) -> None:
        """The leading handler dies, the next one leads; the dead one is started again."""
        names = [node.name for node in self.config.failure_handlers]
        old = self.leader
        del self.handlers[old]
        self.start_handler(old)
        self.elect(names[(names.index(old) + 1) % len(names)])

    # --- servers ---

    def server(self, shard: int, index: int) -> FakeServer:
        return next(s for s in self.servers if (s.shard, s.index) == (shard, index))

    def peers(self, server: FakeServer) -> list[FakeServer]:
        return [s for s in self.servers if s.shard == server.shard and s is not server]

    def kill(self, *servers: FakeServer, wiped: bool = False) -> None:
        for server in servers:
            if server.alive:
                server.crash()
                if self.supervised:
                    self.at(RESTART, lambda s=server: s.alive or s.restart(wiped=wiped))

    def insert(self, record: str, shard: int = 0, *, flush: bool = True, but: int = -1) -> bool:
        """Insert at all servers but one; whether all of them acked it."""
        servers = [s for s in self.servers if s.shard == shard]
        acks = 0
        for server in servers:
            if server.alive and server.state == "up" and server.index != but:
                server.log.append((server.view, record))
                if flush:
                    server.flushed = len(server.log)
                acks += 1
        is_acked = acks == len(servers) and len({s.view for s in servers}) == 1
        if is_acked:
            self.acked.append(record)
        return is_acked

    # --- questions ---

    def is_live(self, shard: int = 0, view: int | None = None) -> bool:
        placement = self.mms.state.placements[shard]
        servers = [s for s in self.servers if s.shard == shard]
        return (
            placement.state == "live"
            and view in {None, placement.view}
            and all(s.state == "up" and s.view == placement.view for s in servers)
            and (not (known := self.consensus.shards.get(shard)) or known.is_finished)
        )

    def until_live(self, shard: int = 0, view: int | None = None, limit: int = 60 * S) -> World:
        return self.until(lambda: self.is_live(shard, view), limit)

    def decided(self, kind: type) -> list[Any]:
        return [command for _, command in self.commands if type(command) is kind]

    def orders(self, handler: str = "") -> list[str]:
        """Return the nodes that the handler orders to be started."""
        self.sent = []
        self.step_handler(handler or self.leader, Received(b"supervisor", OrdersQuery(CLUSTER, 1)))
        (answer,) = [m for _, _, dst, m in self.sent if dst == "supervisor"]
        assert isinstance(answer, Orders)
        return [order.node for order in answer.orders]

    def status(self) -> dict[str, Any]:
        self.sent = []
        self.step_mms(Received(b"client", StatusQuery(CLUSTER, 1)))
        (answer,) = [m for _, _, dst, m in self.sent if dst == "client"]
        assert isinstance(answer, StatusReply)
        return dict(json.loads(answer.document))

    def messages(self, kind: type[Message]) -> list[Any]:
        return [message for _, _, _, message in self.sent if type(message) is kind]

    def check(self) -> None:
        """Nothing that was acked is lost without being said, and nobody disagrees."""
        for server in self.servers:
            assert not server.halted, server.halted
            if server.alive and server.state == "up" and not self.mms.state.losses:
                records = {record for _, record in server.log}
                assert records.issuperset(self.acked) or server.shard, "an acked record is gone"
        by_view: dict[tuple[int, int], list[Entry]] = {}
        for server in self.servers:
            if server.alive and server.state == "joined":
                log = by_view.setdefault((server.shard, server.view), server.log)
                assert log == server.log, "two logs of one view"


def storm(seed: int, lost: float = 0.2, twice: float = 0.1, late: float = 0.2) -> Network:
    """Return a network that loses, repeats and delays messages."""
    generator = random.Random(seed)

    def network(_src: str, _dst: str, _message: Message) -> list[int]:
        if generator.random() < lost:
            return []
        delays = [HOP]
        if generator.random() < late:
            delays = [generator.randrange(HOP, 400 * MS)]
        if generator.random() < twice:
            delays.append(generator.randrange(HOP, 2 * S))
        return delays

    return network
