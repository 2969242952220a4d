"""A whole cluster in a `World`: the membership service, storage servers and clients, all pure.

Consensus is a list: what the service proposes is committed after half a millisecond, in order.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mms.service import MembershipService
from mms.state import ClusterState
from shard.replica import Replica, ReplicaConfig
from tests.world import MS, MemoryStore, S, World, address, shard_names
from ziplog import policy
from ziplog.client.core import ClientCore
from ziplog.client.requests import (
    NEVER,
    ConnectRequest,
    FetchRequest,
    InsertRequest,
    ReadRequest,
    SubscribeRequest,
    TailRequest,
    TrimRequest,
)
from ziplog.config import ClusterConfig, NodeConfig, ShardConfig
from ziplog.node import Call, Committed, LeaderChanged
from ziplog.types import RID_GENESIS, Record, RecordId
from ziplog.wire import Limits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.world import Link
    from ziplog.client.requests import Policy

COMMIT = MS // 2


class PureCluster:
    """A cluster with one node of the membership service."""

    def __init__(self, shards: int = 2, f: int = 1, link: Link | None = None) -> None:
        self.world = World(link)
        self.consensus = ClusterState()
        self.f = f
        self.shards = shards
        self._calls = 0
        #: Proposed commands: when each is committed, who proposed it, what it is.
        self._commits: list[tuple[int, str, bytes]] = []
        self._start_service()
        for shard in range(shards):
            for index in range(f + 1):
                self._start_replica(shard, index)
        assert self.run_until(lambda: all(r.state == "up" for r in self.replicas()))

    def _start_service(self) -> None:
        config = ClusterConfig(
            name="pure",
            data_dir=Path("unused"),
            f=self.f,
            mms=(_node("mms-0", raft_port=9999),),
            shards=tuple(
                ShardConfig(shard, tuple(_node(name) for name in shard_names(shard, self.f)))
                for shard in range(self.shards)
            ),
        )
        self.service = MembershipService(
            config, "mms-0", pid=1, cluster=77, incarnation=1, now=self.world.now
        )
        self.world.add("mms-0", self.service)
        self.world.inject("mms-0", LeaderChanged("mms-0", is_self=True))

    def _start_replica(self, shard: int, index: int) -> None:
        names = shard_names(shard, self.f)
        own = ReplicaConfig(
            names[index], address(names[index]).endpoint, shard, index,
            tuple(map(address, names)), (address("mms-0"),), "memory", 1, Limits(),
        )  # fmt: skip
        store = MemoryStore()
        replica = Replica(own, store, None, limbo=False, incarnation=index + 1, now=self.world.now)
        self.world.add(names[index], replica, store)

    def replicas(self) -> list[Any]:
        """Return what all replicas are, shard by shard."""
        return [node._state for node in self.world.nodes.values() if isinstance(node, Replica)]

    # --- time ---

    def run(self, duration: int) -> None:
        """Let time pass."""
        self.run_until(lambda: False, duration)

    def run_until(self, condition: Any, within: int = 10 * S) -> bool:
        """Let time pass, and consensus with it, until the condition holds."""
        world = self.world
        end = world.now + within
        while not condition():
            self._commits += [(world.now + COMMIT, *what) for what in world.proposed]
            world.proposed.clear()
            due = min(self._commits[0][0] if self._commits else end, end)
            if not world.run_until(lambda: condition() or bool(world.proposed), due - world.now):
                if world.now >= end:
                    return False
                self._commit()
        return True

    def _commit(self) -> None:
        _, name, command = self._commits.pop(0)
        self.world.inject(name, Committed(command, self.consensus.apply(command)))

    # --- clients ---

    def client(self, name: str, chooses: Policy | None = None) -> Client:
        """Connect a client."""
        core = ClientCore(
            name.encode().ljust(16, b"."), [address("mms-0").endpoint], chooses or policy.pin(0)
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
    """A client's calls, each run to its end in virtual time."""

    def __init__(self, cluster: PureCluster, name: str, core: ClientCore) -> None:
        self.cluster, self.name, self.core = cluster, name, core

    def begin(self, request: Any) -> int:
        """Start a call."""
        call = self.cluster.next_call()
        self.cluster.world.inject(self.name, Call(call, request))
        return call

    def end(self, call: int) -> Any:
        """Wait for a call's end; raise what it raises."""
        completed = self.cluster.world.completed
        done = self.cluster.run_until(lambda: (self.name, call) in completed, 60 * S)
        assert done, "a call never ended"
        result = completed.pop((self.name, call))
        if isinstance(result, BaseException):
            raise result
        return result

    def call(self, request: Any) -> Any:
        """Start a call and wait for its end."""
        return self.end(self.begin(request))

    def deadline(self, timeout: int = 10 * S) -> int:
        """Return when a call of now has to end."""
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
        """Take what is due."""
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
        """Delete what is before."""
        self.call(TrimRequest(self.deadline(), rid))


def _node(name: str, raft_port: int | None = None) -> NodeConfig:
    host, _, port = address(name).endpoint.partition(":")
    return NodeConfig(name, host, int(port), raft_port)
