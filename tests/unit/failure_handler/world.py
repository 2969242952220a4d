"""A cluster in virtual time: real failure handlers and membership service, fake storage servers."""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from failure_handler.service import FailureHandler
from failure_handler.state import Finish, HandlerState, decode_command
from mms.commands import decode_command as decode_mms
from mms.service import MembershipService
from mms.state import ClusterState
from tests.services import CLUSTER, MS, S, ServiceWorld, cluster_config
from tests.unit.failure_handler.servers import HOP, Entry, FakeServer
from ziplog.core.message import Message
from ziplog.core.node import Committed, Event, LeaderChanged, Received, Wakeup
from ziplog.core.view import Replica
from ziplog.wire import (
    Freeze,
    Frozen,
    Orders,
    OrdersQuery,
    StatusQuery,
    StatusReply,
    Suspect,
    ViewDecided,
)

if TYPE_CHECKING:
    from ziplog.config import ClusterConfig

#: Duration of a commit.
COMMIT: Final = 2 * MS
#: Delay after which a supervisor restarts a dead process.
RESTART: Final = 500 * MS

#: From sender, receiver and message to the delays of its copies; none if it is lost.
Network = Callable[[str, str, Message], list[int]]


def config(shards: int = 1, f: int = 1, handlers: int = 1, **options: Any) -> ClusterConfig:
    return cluster_config(shards, f=f, handlers=handlers, **options)


class World(ServiceWorld):
    """The whole cluster. Time passes in `run` and `until` only."""

    def __init__(self, cluster: ClusterConfig | None = None) -> None:
        super().__init__(cluster or config())
        self.started = self.now
        self.views: dict[tuple[int, int], ViewDecided] = {}  # as if confirmed
        self.heartbeats: dict[str, int] = {}
        self.network: Network = lambda _src, _dst, _message: [HOP]
        self.cut: set[str] = set()
        self.queue: list[tuple[int, int, Callable[[], None]]] = []
        self.count = 0
        self.sent: list[tuple[int, str, str, Message]] = []
        self.acked: list[str] = []
        self.commands: list[tuple[int, Any]] = []
        self.mms_commands: list[Any] = []
        self.servers = [
            FakeServer(self, node.name, shard.id, index)
            for shard in self.config.shards
            for index, node in enumerate(shard.replicas)
        ]
        for server in self.servers:
            server.region = self.config.node(server.name).region or ""
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
        """Start all processes, and make the first handler the leader."""
        self.elect("fh-0")
        self.until(lambda: all(server.state == "up" for server in self.servers))
        self.run(1200 * MS)  # all nodes know all placements
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

    def transmit(self, src: str, dst: bytes, message: Message) -> None:
        """Deliver a message of a handler or of the membership service."""
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
        """Kill the leading handler, make the next one the leader, and restart the dead one."""
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
        """Insert at all servers but one; return whether all of them acked it."""
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

    def is_live(self, shard: int = 0, view: int | None = None, state: str = "live") -> bool:
        placement = self.mms.state.placements[shard]
        servers = [s for s in self.servers if s.shard == shard]
        return (
            placement.state == state
            and view in {None, placement.view}
            and all(s.state == "up" and s.view == placement.view for s in servers)
            and (not (known := self.consensus.shards.get(shard)) or known.is_finished)
        )

    def add_servers(self, shard: int) -> list[Replica]:
        """Start the servers of another shard; return their addresses."""
        added = [FakeServer(self, f"shard-{shard}-{i}", shard, i) for i in range(self.config.f + 1)]
        self.servers += added
        for server in added:
            self.every(100 * MS, server.tick)
        return [Replica(s.name, f"127.0.0.1:{9000 + 16 * shard + s.index}") for s in added]

    def until_live(self, shard: int = 0, view: int | None = None, limit: int = 60 * S) -> World:
        return self.until(lambda: self.is_live(shard, view), limit)

    def decided(self, kind: type) -> list[Any]:
        return [command for _, command in self.commands if type(command) is kind]

    def orders(self, handler: str = "") -> list[str]:
        """Return the nodes that the handler orders to be restarted."""
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
        """Assert that every loss of an acked record is reported, and that all servers agree."""
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


#: Phases of a recovery to view 2, as the test sees them.
PHASES: dict[str, Callable[[World], bool]] = {
    "suspected": lambda world: bool(world.messages(Suspect)),
    "begun": lambda world: bool(world.commands),
    "removed": lambda world: world.mms.state.placements[0].state == "recovering",
    "asked": lambda world: bool(world.messages(Freeze)),
    "frozen": lambda world: any(server.state == "frozen" for server in world.servers),
    "promised": lambda world: bool(world.messages(Frozen)),
    "decided": lambda world: world.consensus.shards[0].view >= 2 if world.commands else False,
    "entered": lambda world: any(server.state == "joined" for server in world.servers),
    "joined": lambda world: all(server.state == "joined" for server in world.servers),
    "returned": lambda world: world.mms.state.placements[0].view >= 2,
    "finished": lambda world: bool(world.decided(Finish)),
}


def reach(world: World, phase: str, limit: int = 60 * S) -> None:
    world.until(lambda: PHASES[phase](world), limit)
