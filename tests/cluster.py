"""A whole cluster in a `World`: the membership service, storage servers and clients, all pure.

Consensus is a list: what the service proposes is committed after half a millisecond, in order.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from failure_handler.service import FailureHandler
from failure_handler.state import HandlerState
from mms.service import MembershipService
from mms.state import ClusterState
from shard.replica import Replica, ReplicaConfig
from tests.world import MS, S, World, address, shard_names
from ziplog import policy
from ziplog.client.client_node import ClientCore
from ziplog.client.common.requests import (
    ConnectRequest,
    FetchRequest,
    InsertRequest,
    Preferences,
    ReadRequest,
    SubscribeRequest,
    TailRequest,
    TrimRequest,
)
from ziplog.config import ClusterConfig, NodeConfig, ShardConfig
from ziplog.core.node import Call, Committed, LeaderChanged, Restored
from ziplog.core.units import NEVER
from ziplog.types import RID_GENESIS, Record, RecordId
from ziplog.wire import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from tests.world import Link
    from ziplog.client.common.requests import Policy
    from ziplog.types import Durability

COMMIT = MS // 2
#: Interval between the kill of a server and its restart.
RESTART = 700 * MS


class Consensus:
    """A consensus group of one node that commits commands in order, after a delay."""

    def __init__(self, machine: Any, build: Callable[[], Any], world: World, name: str) -> None:
        self.machine = machine
        self._build, self._world, self._name = build, world, name
        #: Commit time and content of each pending command.
        self._commands: list[tuple[int, bytes]] = []
        self.lead()

    def lead(self) -> None:
        """Start or restart the node: it gets the state, and becomes the leader."""
        self.node = self._build()
        self._world.add(self._name, self.node)
        self._world.down.discard(self._name)
        self._world.paused.discard(self._name)
        self._world.inject(self._name, Restored(self.machine.snapshot()))
        self._world.inject(self._name, LeaderChanged(self._name, is_self=True))

    def propose(self, command: bytes) -> None:
        """Accept a command."""
        self._commands.append((self._world.now + COMMIT, command))

    def next_commit(self) -> int | None:
        """Return the commit time of the next command."""
        return self._commands[0][0] if self._commands else None

    def commit(self) -> None:
        """Commit the next command, whether or not the node is running."""
        _, command = self._commands.pop(0)
        result = self.machine.apply(command)
        if self._name not in self._world.down:
            self._world.inject(self._name, Committed(command, result))


class PureCluster:
    """A cluster with one node of the membership service, and one of the failure handler if asked.

    Its supervisor starts a server that was killed again, `RESTART` later. The servers in `limbo`
    crashed before they held a lease.
    """

    def __init__(
        self,
        shards: int = 2,
        f: int = 1,
        link: Link | None = None,
        *,
        handler: bool = False,
        durability: Durability = "memory",
        limbo: Collection[str] = (),
    ) -> None:
        self._limbo = limbo
        self.world = World(link)
        self.f = f
        self.shards = shards
        self._calls = 0
        handlers = (_node("fh-0", raft_port=9998),) if handler else ()
        self.config = ClusterConfig(
            name="pure",
            data_dir=Path("unused"),
            f=f,
            durability=durability,
            mms=(_node("mms-0", raft_port=9999),),
            failure_handlers=handlers,
            shards=tuple(
                ShardConfig(shard, tuple(_node(name) for name in shard_names(shard, f)))
                for shard in range(shards)
            ),
        )
        self.groups = {"mms-0": Consensus(ClusterState(), self._service, self.world, "mms-0")}
        if handler:
            self.groups["fh-0"] = Consensus(HandlerState(), self._handler, self.world, "fh-0")
        #: Restart time of each killed node.
        self._starts: dict[str, int] = {}
        for shard in range(shards):
            for index in range(f + 1):
                self._start_replica(shard, index)
        assert self.run_until(lambda: all(r.server_state == "up" for r in self.replicas()))

    @property
    def service(self) -> MembershipService:
        """The membership service."""
        node = self.groups["mms-0"].node
        assert isinstance(node, MembershipService)
        return node

    def _service(self) -> MembershipService:
        return MembershipService(
            self.config, "mms-0", pid=1, cluster=77, incarnation=self.world.now, now=self.world.now
        )

    def _handler(self) -> FailureHandler:
        return FailureHandler(self.config, "fh-0", pid=2, now=self.world.now)

    def _start_replica(self, shard: int, index: int) -> None:
        names = shard_names(shard, self.f)
        self.world.start(ReplicaConfig(
            names[index], address(names[index]).endpoint, shard, index,
            tuple(map(address, names)), (address("mms-0"),), self.config.durability, 1, Limits(),
            identity=f"disk of {names[index]}",
            handlers=tuple(address(node.name) for node in self.config.failure_handlers),
        ), limbo=names[index] in self._limbo)  # fmt: skip

    def replicas(self) -> list[Any]:
        """Return the states of all replicas, shard by shard."""
        return [node.state for node in self.world.nodes.values() if isinstance(node, Replica)]

    def state(self, name: str) -> Any:
        """Return the state of a storage server."""
        return self.world.nodes[name].state  # type: ignore[attr-defined]

    def sent(self, src: str, kind: type) -> list[Any]:
        """Return the messages of one kind that a node has sent, in order."""
        return [
            message for who, _, message in self.world.sent if who == src and type(message) is kind
        ]

    # --- failures ---

    def kill(self, name: str, *, for_ns: int = RESTART) -> None:
        """Kill a node; it restarts after a while."""
        self.world.kill(name)
        self._starts[name] = self.world.now + for_ns

    def _restart(self, name: str) -> None:
        del self._starts[name]
        if name in self.groups:
            self.groups[name].lead()
        elif name in self.world.down:
            self.world.restart(name, clean=False)

    def is_whole(self) -> bool:
        """Whether every server is up, in the view that the membership service has committed."""
        placements = self.groups["mms-0"].machine.placements
        return (
            all(
                replica.server_state == "up"
                and placements[replica.shard].state == "live"
                and placements[replica.shard].view == replica.view
                for replica in self.replicas()
            )
            and not self.world.down
        )

    # --- time ---

    def run(self, duration: int) -> None:
        """Advance the time."""
        self.run_until(lambda: False, duration)

    def run_until(self, condition: Any, within: int = 10 * S) -> bool:
        """Advance time and consensus until the condition holds."""
        world = self.world
        end = world.now + within
        while not condition():
            for name, effect in world.proposed:
                self.groups[name].propose(effect.command)
            world.proposed.clear()
            due = min([end, *self._starts.values(), *self._commits()])
            if not world.run_until(lambda: condition() or bool(world.proposed), due - world.now):
                if world.now >= end:
                    return False
                self._catch_up()
        return True

    def _commits(self) -> list[int]:
        times = [group.next_commit() for group in self.groups.values()]
        return [at for at in times if at is not None]

    def _catch_up(self) -> None:
        """Run due commits and restarts."""
        for group in self.groups.values():
            at = group.next_commit()
            if at is not None and at <= self.world.now:
                group.commit()
        for name, at in list(self._starts.items()):
            if at <= self.world.now:
                self._restart(name)

    # --- clients ---

    def client(self, name: str, chooses: Policy | None = None) -> Client:
        """Connect a client."""
        core = ClientCore(
            name.encode().ljust(16, b"."),
            [address("mms-0").endpoint],
            Preferences(chooses or policy.pin(0)),
        )
        self.world.add(name, core)
        client = Client(self, name, core)
        client.call(ConnectRequest(self.world.now + 10 * S))
        return client

    def next_call(self) -> int:
        """Return a number for a call."""
        self._calls += 1
        return self._calls


class Client:
    """A client with blocking calls in virtual time."""

    def __init__(self, cluster: PureCluster, name: str, core: ClientCore) -> None:
        self.cluster, self.name, self.core = cluster, name, core

    def begin(self, request: Any) -> int:
        """Start a call."""
        call = self.cluster.next_call()
        self.cluster.world.inject(self.name, Call(call, request))
        return call

    def end(self, call: int) -> Any:
        """Wait for the result of a call; raise its error."""
        completed = self.cluster.world.completed
        done = self.cluster.run_until(lambda: (self.name, call) in completed, 60 * S)
        assert done, "a call never ended"
        result = completed.pop((self.name, call))
        if isinstance(result, BaseException):
            raise result
        return result

    def call(self, request: Any) -> Any:
        """Start a call and wait for its result."""
        return self.end(self.begin(request))

    def deadline(self, timeout: int = 10 * S) -> int:
        """Return the deadline of a call that starts now."""
        return self.cluster.world.now + timeout

    def inserting(
        self, payloads: Sequence[bytes], after: RecordId = RID_GENESIS, timeout: int = 10 * S
    ) -> InsertRequest:
        """Return a request to insert."""
        return InsertRequest(self.deadline(timeout), list(payloads), after, None, 0)

    def insert(self, payload: bytes, after: RecordId = RID_GENESIS) -> RecordId:
        """Insert one record."""
        rids: list[RecordId] = self.call(self.inserting([payload], after))
        return rids[0]

    def read(self, rid: RecordId) -> Record:
        """Read one record."""
        record: Record = self.call(ReadRequest(self.deadline(), rid))
        return record

    def subscribe(self, start: RecordId = RID_GENESIS, *, follow: bool = True) -> int:
        """Begin a subscription."""
        number: int = self.call(SubscribeRequest(self.deadline(), start, follow))
        return number

    def fetch(self, subscription: int, timeout: int = 1 * S) -> list[Record]:
        """Return the deliveries that are due."""
        batch = self.call(FetchRequest(self.deadline(timeout), subscription, 1000))
        records: list[Record] = batch.records
        return records

    def read_all(self) -> list[Record]:
        """Read the log from its beginning to its tail."""
        subscription = self.subscribe(follow=False)
        records: list[Record] = []
        while True:
            batch = self.call(FetchRequest(NEVER, subscription, 1000))
            records += batch.records
            if batch.ended:
                return records

    def tail(self) -> RecordId:
        """Return the end of the log."""
        rid: RecordId = self.call(TailRequest(self.deadline()))
        return rid

    def trim(self, rid: RecordId) -> None:
        """Delete all earlier records."""
        self.call(TrimRequest(self.deadline(), rid))


def _node(name: str, raft_port: int | None = None) -> NodeConfig:
    host, _, port = address(name).endpoint.partition(":")
    return NodeConfig(name, host, int(port), raft_port)
