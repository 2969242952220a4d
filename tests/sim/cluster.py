"""A complete cluster in virtual time: servers, services, a supervisor, and clients.

Every storage server has its own machine and disk. As in production, the supervisor restarts dead
nodes. The cluster's state can be queried here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from failure_handler.state import HandlerState
from mms.state import ClusterState
from tests.sim import programs
from tests.sim.plan import server_name
from tests.simulator.consensus import OrderedLog
from tests.simulator.disk import Disk
from tests.simulator.kernel import S
from tests.simulator.network import Network
from tests.simulator.process import Process
from tests.simulator.raft import RaftGroup
from ziplog.client.common.requests import Preferences
from ziplog.config import ClusterConfig, NodeConfig, ShardConfig
from ziplog.core.nearness import NearestPolicy
from ziplog.core.node import LevelRequested
from ziplog.core.wire_use import Release
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shard.replica import Replica
    from shard.state.replica_state import ReplicaState
    from tests.sim.plan import Plan
    from tests.simulator.kernel import Kernel
    from ziplog.raft.state_machine import Machine
    from ziplog.types import Durability

_MIB: Final = 1024 * 1024
#: Session expiry in runs with clients that are silent for long.
SHORT_SESSION_S: Final = 10
#: Time within which an undisturbed cluster is whole.
_BEGIN_NS: Final = 60 * S


class SimCluster:
    """The processes, machines and network of a cluster.

    Args:
        kernel: virtual time.
        plan: the cluster's size and network.
        config: the cluster file; None: the plan's (`config_of`), with defaults.

    """

    def __init__(self, kernel: Kernel, plan: Plan, config: ClusterConfig | None = None) -> None:
        self.kernel: Final = kernel
        self.plan: Final = plan
        self.network: Final = Network(kernel)
        self.network.queues = plan.queues
        #: The regions with slow links, each as often as it is made slow.
        self.slow_regions: Final[list[str]] = []
        if plan.regions is not None:
            self.network.delay_of = partial(plan.regions.slowed_ns, slow=self.slow_regions)
            self.network.loss_of = partial(plan.regions.loss, slow=self.slow_regions)
        #: The nodes that are lost for good.
        self.lost: Final[set[str]] = set()
        #: Returns the release that a node runs from its next start on, by its name.
        self.release_of: Callable[[str], Release] = lambda _name: Release()
        #: The cluster file. A process knows its content of the time when it was started.
        self.config = config or config_of(plan)
        #: The durability levels in the cluster files of storage servers that differ from `config`.
        self.levels: Final[dict[str, Durability]] = {}
        #: A server was requested to change to `memory`.
        self.has_weakened = False
        self.disks: Final = {name: Disk(kernel.random) for name in plan.servers}
        #: The disks of the services' nodes; empty with simulated consensus.
        self.service_disks: Final = {
            node.name: Disk(kernel.random)
            for node in (*self.config.mms, *self.config.failure_handlers)
        }
        self.mms: Final = self._group(self.config.mms, ClusterState)
        self.handlers: Final = self._group(self.config.failure_handlers, HandlerState)
        #: All processes that the supervisor keeps alive.
        self.nodes: Final[dict[str, Process]] = {}
        for node in self.config.mms:
            disk = self.service_disks[node.name]
            self._add(
                node,
                programs.membership_node(lambda: self.config, self.mms, disk, self._release_of),
            )
        for node in self.config.failure_handlers:
            disk = self.service_disks[node.name]
            self._add(
                node,
                programs.handler_node(lambda: self.config, self.handlers, disk, self._release_of),
            )
        for shard in self.config.shards:
            for node in shard.replicas:
                self._add(node, self._start_server)
        self._host: Final = Process(self.network, "host", None, self._start_host)

    def _group(
        self, nodes: Sequence[NodeConfig], build: Callable[[], Machine]
    ) -> OrderedLog | RaftGroup:
        names = [node.name for node in nodes]
        if not self.plan.is_raft_real:
            return OrderedLog(self.kernel, names, build)
        return RaftGroup(
            self.network, names, build,
            {name: self.service_disks[name].path("consensus") for name in names},
            sync_ns=lambda name: self.service_disks[name].sync_ns(),
            on_fatal=lambda name, reason: self.nodes[name].stop_itself(reason),
        )  # fmt: skip

    def _add(self, node: NodeConfig, start: programs.Start) -> None:
        disks = self.disks if node.name in self.disks else self.service_disks
        start = programs.on_disk(lambda: disks[node.name], start)
        self.nodes[node.name] = Process(self.network, node.name, node.endpoint, start)

    def _start_server(self, process: Process) -> programs.StorageServer:
        name, config = process.name, self.config
        config = replace(config, durability=self.levels.get(name, config.durability))
        return programs.StorageServer(process, config, self.disks[name], self._release_of(name))

    def _release_of(self, name: str) -> Release:
        return self.release_of(name)

    def _start_host(self, process: Process) -> programs.SupervisorThread:
        return programs.SupervisorThread(process, self.config, self.nodes, self.lost)

    def begin(self) -> None:
        """Start everything; return when the cluster is whole."""
        for process in self.nodes.values():
            process.start()
        self._host.start()
        assert self.kernel.run_until(self.is_whole, _BEGIN_NS), self.states()
        self.network.conditions = self.plan.conditions

    def servers_to_add(self, shard: int) -> tuple[NodeConfig, ...]:
        """Return the servers of a shard that the cluster file does not have, the primary first."""
        port = 1 + max(node.port for node in self.config.nodes)
        names = [server_name(shard, i) for i in range(self.config.f + 1)]
        return tuple(
            NodeConfig(name, "127.0.0.1", port + i, region=_region(self.plan, name))
            for i, name in enumerate(names)
        )

    def is_too_narrow(self, shard: int) -> bool:
        """Whether a shard that the cluster file does not have spans too few regions for it."""
        known = {one.id for one in self.config.shards}
        spanned = {node.region for node in self.servers_to_add(shard)}
        return shard not in known and len(spanned) < self.config.required_regions

    def add_servers(self, shard: int) -> tuple[NodeConfig, ...]:
        """Add a shard to the cluster file and start its servers, unless it exists.

        Returns:
            Its servers, the primary first. The membership service does not know a new shard yet.

        """
        known = next((one for one in self.config.shards if one.id == shard), None)
        if known is not None:
            return known.replicas
        servers = self.servers_to_add(shard)
        shards = (*self.config.shards, ShardConfig(shard, servers))
        self.config = replace(self.config, shards=shards)
        for node in servers:
            self.disks[node.name] = Disk(self.kernel.random)
            self._add(node, self._start_server)
            self.nodes[node.name].start()
        return servers

    def relabel(self, name: str, region: str) -> bool:
        """Change a storage server's region in the cluster file; it reads that at its next start.

        Returns False, without a change, if the file would be refused, or would require another
        number of regions.
        """
        shards = tuple(
            replace(
                shard,
                replicas=tuple(
                    replace(node, region=region) if node.name == name else node
                    for node in shard.replicas
                ),
            )
            for shard in self.config.shards
        )
        try:
            config = replace(self.config, shards=shards)
        except ConfigError:
            return False
        if config.required_regions != self.config.required_regions:
            return False
        self.config = config
        return True

    def set_level(self, name: str, level: Durability) -> None:
        """Change the durability level in the cluster file of a storage server."""
        self.levels[name] = level
        self.has_weakened |= level == "memory"
        server = self.server(name)
        if server is not None:
            server.driver.post(LevelRequested(level))

    def lose_disk(self, name: str) -> None:
        """Kill a storage server with its machine; the supervisor starts it on an empty disk."""
        self.nodes[name].kill()
        self.disks[name] = Disk(self.kernel.random)

    # --- loss for good ---

    def lose(self, names: Iterable[str]) -> None:
        """Kill nodes for good, with their machines."""
        self.lost.update(names)
        for name in names:
            if self.nodes[name].is_up:
                self.nodes[name].kill()

    @property
    def lost_regions(self) -> set[str]:
        """The regions that are lost for good."""
        return {self.plan.regions.of(name) for name in self.lost} if self.plan.regions else set()

    def has_lost_peers(self, name: str) -> bool:
        """Whether another server of a server's shard is lost for good."""
        return not self.lost.isdisjoint(self.peers(name))

    def has_lost_servers(self, shard: int) -> bool:
        """Whether a server of a shard is lost for good."""
        servers = self.lost & self.disks.keys()
        return any(self.config.shard_of(name)[0].id == shard for name in servers)

    # --- clients ---

    def client(self, name: str) -> Process:
        """Return a client's process, which is not started yet.

        It selects shards at random; in a plan with regions perhaps only near ones.
        """
        return Process(self.network, name, None, self._start_client)

    def _start_client(self, process: Process) -> programs.ClientProgram:
        endpoints = [node.endpoint for node in self.config.mms]
        regions = self.plan.regions
        region = "" if regions is None else regions.of(process.name)
        is_near = regions is not None and regions.is_near
        policy = NearestPolicy(self.choose) if is_near else self.choose
        return programs.log_client(process, endpoints, Preferences(policy, region))

    def choose(self, _payload: bytes, _key: bytes | None, live: Sequence[int]) -> int:
        """Select a live shard at random."""
        return self.kernel.random.choice(sorted(live))

    # --- queries ---

    def server(self, name: str) -> programs.StorageServer | None:
        """Return a storage server, if it runs."""
        program = self.nodes[name].program
        return program if isinstance(program, programs.StorageServer) else None

    def replica(self, name: str) -> Replica | None:
        """Return the replica of a storage server, if it runs."""
        server = self.server(name)
        return server.replica if server is not None else None

    def state_of(self, name: str) -> ReplicaState | None:
        """Return a storage server's state, if it runs; read-only."""
        replica = self.replica(name)
        return replica.state if replica is not None else None

    def peers(self, name: str) -> list[str]:
        """Return the other servers of a server's shard."""
        shard = self.config.shard_of(name)[0]
        return [node.name for node in shard.replicas if node.name != name]

    def is_in_service(self, name: str) -> bool:
        """Whether a server is in service in the newest known view of its shard."""
        own = self.state_of(name)
        if own is None or own.server_state != "up" or self.nodes[name].is_paused:
            return False
        placement = self.state.placements.get(own.shard)
        peers = [state for peer in self.peers(name) if (state := self.state_of(peer)) is not None]
        newest = max([placement.view if placement else 0, *(peer.view for peer in peers)])
        return own.view >= newest

    @property
    def state(self) -> ClusterState:
        """The committed state of the membership service."""
        machine = self.mms.machine
        assert isinstance(machine, ClusterState)
        return machine

    def is_whole(self) -> bool:
        """Whether every server is up, in the view that the membership service committed.

        Also, no shard is joining or leaving. A shard that lost a server for good is recovered
        without it.
        """
        placements = self.state.placements
        for name, process in self.nodes.items():
            if name in self.lost:
                continue
            if not process.is_up or process.is_paused:
                return False
            own = self.state_of(name)
            if own is None:  # a service's node
                continue
            placement = placements.get(own.shard)
            if self.has_lost_peers(name):
                is_member = placement is not None and placement.state != "joining"
                if is_member and own.server_state != "joined":
                    return False
                continue
            if (
                placement is None
                or own.server_state != "up"
                or placement.state not in {"live", "finalized"}
                or placement.view != own.view
            ):
                return False
        return bool(self.mms.leader) and bool(self.handlers.leader)

    def states(self) -> str:
        """Return a description of all states, for messages about a cluster that is not whole."""
        rows = []
        for name, process in self.nodes.items():
            own = self.state_of(name)
            what = (
                "lost"
                if name in self.lost
                else "down"
                if not process.is_up
                else "paused"
                if process.is_paused
                else "runs"
            )
            if own is not None:
                what += f" {own.server_state} view={own.view} last={own.store.last_fseq}"
            rows.append(f"{name}: {what}")
        rows += [
            f"shard {p.shard}: {p.state} view={p.view}" for p in self.state.placements.values()
        ]
        rows += [f"leaders: {self.mms.leader or 'none'}, {self.handlers.leader or 'none'}"]
        return "; ".join(rows)


def config_of(plan: Plan) -> ClusterConfig:
    """Return the cluster file of a plan."""
    ports = iter(range(20_000, 30_000))

    def node(name: str, *, is_replicated: bool = False) -> NodeConfig:
        port = next(ports)
        raft_port = 30_000 + port if is_replicated else None
        return NodeConfig(name, "127.0.0.1", port, raft_port, region=_region(plan, name))

    return ClusterConfig(
        name="simulated",
        data_dir=Path("simulated"),
        f=plan.f,
        durability=plan.durability,
        session_timeout_s=SHORT_SESSION_S if plan.forgets_soon else 900,
        min_regions=0 if plan.regions is None else plan.regions.min_regions,
        rtt_ms=0 if plan.regions is None else plan.regions.rtt_ms(plan.conditions),
        mms=tuple(node(f"mms-{i}", is_replicated=True) for i in range(plan.mms)),
        failure_handlers=tuple(node(f"fh-{i}", is_replicated=True) for i in range(plan.handlers)),
        shards=tuple(
            ShardConfig(shard, tuple(node(server_name(shard, i)) for i in range(plan.f + 1)))
            for shard in range(plan.shards)
        ),
    )


def _region(plan: Plan, name: str) -> str | None:
    """Return the region of a node in the cluster file."""
    return plan.regions.of(name) if plan.regions is not None else None
