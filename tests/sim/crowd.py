"""Overload: a shard's goodput with many clients at slow servers.

In a simulation a step takes no time. Here a storage server takes a fixed time for every received
insert, copies too, so a queue forms, as on real machines. Each client has one or several open
inserts. No server fails and no frame is lost: the load alone causes every copy and every new view.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tests.sim.cluster import SimCluster
from tests.sim.plan import draw
from tests.sim.simulated import simulated
from tests.simulator.kernel import US, Kernel, S
from tests.simulator.network import Conditions
from ziplog.client.common.requests import ConnectRequest, InsertRequest
from ziplog.core.node import Received
from ziplog.core.units import NEVER
from ziplog.types import RID_GENESIS
from ziplog.wire import Insert

if TYPE_CHECKING:
    from shard.replica import Replica
    from tests.simulator.process import Process
    from ziplog.core.node import Effect, Event
    from ziplog.wire import InsertAck

_LINKS: Final = Conditions(delay_ns=(40 * US, 60 * US))


class SlowNode:
    """A node that takes a fixed time for every received insert."""

    def __init__(self, node: Replica, process: Process, insert_ns: int) -> None:
        self._node, self._process, self._insert_ns = node, process, insert_ns
        self.next_wakeup = node.next_wakeup
        self.messages = node.plain_inserts.messages
        self.receive = node.plain_inserts.receive
        self.end_batch = node.plain_inserts.end_batch
        self.pop_effects = node.plain_inserts.pop_effects

    @property
    def has_effects(self) -> bool:
        return self._node.plain_inserts.has_effects

    def step(self, event: Event, now: int) -> list[Effect]:
        if type(event) is Received and type(event.message) is Insert:
            self._process.spend(self._insert_ns)
        return self._node.step(event, now)

    def insert(self, route: bytes, message: Insert, now: int) -> InsertAck | None:
        ack = self._node.plain_inserts.insert(route, message, now)
        if ack is not None:
            self._process.spend(self._insert_ns)
        return ack

    def check(self) -> None:
        """Do nothing: a check would cost more than all steps together."""


class Load(NamedTuple):
    """The result of a load."""

    #: Inserts per second in the load's second half.
    per_s: float
    inserts: int
    copies: int
    #: The number of new views.
    new_views: int


class Crowd:
    """Clients, each with `depth` open inserts."""

    def __init__(self, cluster: SimCluster, clients: int, depth: int) -> None:
        self._kernel: Final = cluster.kernel
        self._depth: Final = depth
        #: Completion time of each insert.
        self.done: list[int] = []
        self.clients: Final = [cluster.client(f"client-{number}") for number in range(clients)]
        for client in self.clients:
            client.start()
            self._program(client).check = lambda: None
            self._program(client).call(ConnectRequest(NEVER), self._begin(client))

    def _program(self, client: Process) -> Any:
        return client.program

    def _begin(self, client: Process) -> Any:
        return lambda _limits: [self._insert(client) for _ in range(self._depth)]

    def _insert(self, client: Process) -> None:
        def inserted(_rids: object) -> None:
            self.done.append(self._kernel.now)
            self._insert(client)

        request = InsertRequest(NEVER, [b"x" * 100], RID_GENESIS, None, 0)
        self._program(client).call(request, inserted)

    @property
    def copies(self) -> int:
        return sum(self._program(one).engine.core.counters.retries for one in self.clients)


def load(clients: int, *, insert_us: int, seconds: int, depth: int = 1, shards: int = 1) -> Load:
    """Run a number of inserting clients for a duration, at servers with a time per insert."""
    plan = draw(1)._replace(
        shards=shards, f=1, durability="memory", mms=1, handlers=1, faults=(),
        naps=False, is_raft_real=False, conditions=_LINKS,
    )  # fmt: skip
    kernel = Kernel(7)
    with simulated(kernel):
        cluster = SimCluster(kernel, plan)
        cluster.begin()
        before = _views(cluster)
        for name in cluster.disks:
            server: Any = cluster.server(name)
            node = SlowNode(server.replica, cluster.nodes[name], insert_us * US)
            server.driver._node = server.driver._insert_path = node
            server.check = node.check
            cluster.nodes[name].is_one_at_a_time = True
        crowd = Crowd(cluster, clients, depth)
        begin = kernel.now
        kernel.run(seconds * S)
        late = [at for at in crowd.done if at >= begin + seconds * S // 2]
        return Load(
            len(late) * 2 / seconds, len(crowd.done), crowd.copies, _views(cluster) - before
        )


def _views(cluster: SimCluster) -> int:
    return sum(placement.view for placement in cluster.state.placements.values())
