"""Injects faults and ends them, within the failures that the system promises to survive.

A shard survives the failure of f of its servers. At level `memory` a fault of a server therefore
needs another server of its shard in service and undisturbed. At level `disk` a process may die at
any time, but damage to a disk needs an undamaged one. Once servers are lost for good, their peers
are not disturbed any more. A fault that does not fit does nothing, and the trace records it. An
operator's change is scheduled in the same way, and always fits, except for servers in a lost
region. Faults of regions: tests/sim/region_faults.
"""

from __future__ import annotations

import errno
from functools import partial
from typing import TYPE_CHECKING, Final

from mms.commands import GrantLease
from tests.sim import region_faults
from tests.sim.disks import sync
from tests.sim.plan import CHANGES, RAISE
from tests.sim.raft_world import flip_in
from tests.sim.rebuild import Loss, can_rebuild, rebuild
from tests.simulator.consensus import OrderedLog
from tests.simulator.filesystem import CAPACITY_BYTES, LATENCY_NS
from tests.simulator.kernel import MS
from tests.simulator.process import Halted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable, Iterator

    from tests.sim.cluster import SimCluster
    from tests.sim.operator import Operator
    from tests.sim.plan import Fault
    from tests.sim.workload import Client
    from tests.simulator.process import Process
    from ziplog.core.view import Lease
    from ziplog.types import Durability

#: Positions in an epoch of the leases that were granted unseen.
_AGED_EPOCH: Final = 2**10
#: Duration of a sync of a slow disk.
_SLOW_NS: Final = 200 * MS


class Faults:
    """The faults of a run, and the active ones."""

    def __init__(self, cluster: SimCluster, clients: Iterable[Client], operator: Operator) -> None:
        self.cluster: Final = cluster
        self.operator: Final = operator
        self.clients: Final = {client.process.name: client for client in clients}
        #: The end actions of active faults, by number.
        self._endings: Final[dict[int, Callable[[], None]]] = {}
        self._number = 0
        #: Number of active faults per server.
        self._afflicted: Final[dict[str, int]] = {}
        #: Suspended and offline machines: the end of another fault does not reconnect them.
        self._away: Final[set[str]] = set()
        #: Servers with a permanently damaged disk.
        self._rotten: Final[set[str]] = set()
        #: Number of injected faults.
        self.done = 0
        #: Servers with a failed disk, which may have stopped.
        self.excused: Final[set[str]] = set()
        #: Processes that had no descriptors for a while, and may have failed to start.
        self.unopened: Final[set[str]] = set()
        #: All servers of a shard may have failed at once, so the cluster may report a loss.
        self.may_lose = False

    def schedule(self, faults: Iterable[Fault]) -> None:
        """Schedule faults, relative to now."""
        for fault in faults:
            self.cluster.kernel.after(fault.at_ms * MS, partial(self._begin, fault))

    def _begin(self, fault: Fault) -> None:
        kernel = self.cluster.kernel
        is_done = self._is_there(fault) and KINDS[fault.kind](self, fault)
        kernel.record(b"fault %b %d" % (str(fault).encode(), is_done))
        kernel.trace(f"fault: {fault}{'' if is_done else ' (does not fit)'}")
        self.done += is_done

    def _is_there(self, fault: Fault) -> bool:
        """Whether the target servers of a fault were ever started."""
        return fault.kind in CHANGES or all(
            name in self.cluster.nodes for name in fault.targets if name.startswith("shard-")
        )

    def _change(self, fault: Fault) -> bool:
        """Request a change from the operator."""
        if not region_faults.can_change(self, fault):
            return False
        self.operator.request(fault)
        return True

    def heal(self) -> None:
        """End all active faults."""
        for number in list(self._endings):
            self._end(number)
        self.cluster.network.heal_all()

    def lasting(
        self, fault: Fault, ending: Callable[[], object], afflicted: Iterable[str] = ()
    ) -> bool:
        """Record a lasting fault and its targets; `ending` ends it."""
        self._number += 1
        met = [name for name in afflicted if name in self.cluster.disks]
        for name in met:
            self._afflicted[name] = self._afflicted.get(name, 0) + 1

        def end() -> None:
            for name in met:
                self._afflicted[name] -= 1
            ending()

        self._endings[self._number] = end
        self.cluster.kernel.after(fault.for_ms * MS, partial(self._end, self._number))
        return True

    def _end(self, number: int) -> None:
        ending = self._endings.pop(number, None)
        if ending is not None:
            ending()

    # --- the promised tolerance ---

    def may_fail(self, name: str) -> bool:
        """Whether another, undisturbed server of the shard has all acknowledged records."""
        keeps_nothing = name not in self.cluster.disks
        if keeps_nothing or (self.is_at_disk and not self.cluster.has_lost_peers(name)):
            return True
        return self.has_good_peer(name)

    @property
    def is_at_disk(self) -> bool:
        """Whether every server has the level `disk` throughout."""
        return self.cluster.plan.durability == "disk" and not self.cluster.levels

    def has_good_peer(self, name: str, but: Container[str] = ()) -> bool:
        """Whether another server of the shard, not in `but`, is in service and undisturbed."""
        return any(
            self.cluster.is_in_service(peer)
            and not self._afflicted.get(peer)
            and peer not in self._rotten
            and peer not in but
            for peer in self.cluster.peers(name)
        )

    def _has_copy(self, name: str) -> bool:
        """Whether another server has all of this server's entries on disk."""
        own = self.cluster.state_of(name)
        peers = (self.cluster.state_of(peer) for peer in self.cluster.peers(name))
        return own is not None and any(
            peer is not None and peer.store.flushed_fseq >= own.store.last_fseq for peer in peers
        )

    # --- processes ---

    def _kill(self, fault: Fault) -> bool:
        (name,) = fault.targets
        if not self.cluster.nodes[name].is_up or not self.may_fail(name):
            return False
        self.cluster.nodes[name].kill()
        return True

    def _power(self, fault: Fault) -> bool:
        """Kill a server, and lose its machine's unsynced data."""
        if not self._kill(fault):
            return False
        self.cluster.disks[fault.targets[0]].power_cut()
        return True

    def _power_all(self, _fault: Fault) -> bool:
        """Cut the power of all machines."""
        if self.cluster.lost:
            return False
        self.may_lose = True
        self.cut_power(self.cluster.nodes)
        return True

    def cut_power(self, names: Collection[str]) -> None:
        """Cut the power of the machines of these nodes; the supervisor starts them again."""
        for name in names:
            if self.cluster.nodes[name].is_up:
                self.cluster.nodes[name].kill()
        disks = (*self.cluster.disks.items(), *self.cluster.service_disks.items())
        for disk in [disk for name, disk in disks if name in names]:
            disk.power_cut()

    def stop(self, fault: Fault) -> bool:
        """Stop a server cleanly, as for a new release; a frozen one counts as failed."""
        (name,) = fault.targets
        server, process = self.cluster.server(name), self.cluster.nodes[name]
        if server is None or process.is_paused or not self.may_fail(name):
            return False
        self.may_lose |= server.replica.state.server_state == "frozen"
        process.from_inside(server.stop)
        if process.is_up:
            process.kill()
        return True

    def _pause(self, fault: Fault) -> bool:
        """Pause a process (SIGSTOP): frames to it wait."""
        (name,) = fault.targets
        process = self._process(name)
        if process is None or not process.is_up or process.is_paused or not self.may_fail(name):
            return False
        process.pause()
        return self.lasting(fault, process.resume, [name])

    def _suspend(self, fault: Fault) -> bool:
        """Suspend a machine: its process is paused, and frames to it are lost."""
        is_away = fault.targets[0] in self._away
        return not is_away and self._pause(fault) and self._take_offline(fault)

    def _offline(self, fault: Fault) -> bool:
        """Lose all frames to and from a client, which continues to run."""
        (name,) = fault.targets
        return name in self.clients and name not in self._away and self._take_offline(fault)

    def _take_offline(self, fault: Fault) -> bool:
        (name,) = fault.targets
        self._away.add(name)
        if name not in self.cluster.disks:
            self.excused.add(name)  # a coordinator that starts without the log gives up
        links = _links_around(name, [*self.cluster.nodes, *self.clients])
        for link in links:
            self.cluster.network.cut(*link)

        def end() -> None:
            self._away.discard(name)
            for link in links:
                if not self._away.intersection(link):
                    self.cluster.network.heal(*link)

        return self.lasting(fault, end)

    def _process(self, name: str) -> Process | None:
        """Return a server's, node's or client's process."""
        client = self.clients.get(name)
        return client.process if client is not None else self.cluster.nodes.get(name)

    def _skew(self, fault: Fault) -> bool:
        process = self.cluster.nodes[fault.targets[0]]
        process.skew(1.0 + fault.amount / 1000)
        return self.lasting(fault, partial(process.skew, 1.0))

    def _kill_node(self, fault: Fault) -> bool:
        """Kill a service's node, with its machine."""
        (name,) = fault.targets
        if not self.cluster.nodes[name].is_up:
            return False
        self.cluster.nodes[name].kill()
        self.cluster.service_disks[name].power_cut()
        return True

    def _age(self, fault: Fault) -> bool:
        """Kill all nodes of the membership service, and grant many leases meanwhile.

        Each lease differs from the one before it, so the history has as many runs.
        """
        group = self.cluster.mms
        state = self.cluster.state
        last = state.last
        is_whole = last is not None and all(
            placement.state == "live" for placement in state.placements.values()
        )
        if not isinstance(group, OrderedLog) or not is_whole:
            return False
        for node in self.cluster.config.mms:
            self.cluster.nodes[node.name].kill()
        group.commit_unseen(_leases_after(last, fault.amount))
        return True

    def _set_level(self, fault: Fault) -> bool:
        """Change the durability level in a server's cluster file."""
        level: Durability = "disk" if fault.amount == RAISE else "memory"
        self.cluster.set_level(fault.targets[0], level)
        return True

    def _rebuild(self, fault: Fault) -> bool:
        """Stop all nodes, lose the membership service's state, and rebuild it from the servers."""
        loss = Loss.of(fault.amount)
        has_model = isinstance(self.cluster.mms, OrderedLog)
        if self.cluster.lost or not has_model or not can_rebuild(self.cluster.state):
            return False
        self.heal()
        servers = map(self.cluster.state_of, self.cluster.disks)
        has_frozen = any(
            server is not None and server.server_state == "frozen" for server in servers
        )
        self.may_lose |= loss.kills or loss.handlers or loss.power or has_frozen
        for shard in rebuild(self.cluster, loss, self._rotten):
            self.operator.add_again(shard)
        return True

    def _kill_client(self, fault: Fault) -> bool:
        client = self.clients.get(fault.targets[0])
        if client is None or not client.process.is_up:
            return False
        client.kill()
        return True

    # --- the network ---

    def _cut(self, fault: Fault) -> bool:
        return self._disturb_links(fault, self.cluster.network.cut)

    def _clog(self, fault: Fault) -> bool:
        return self._disturb_links(fault, self.cluster.network.clog)

    def _disturb_links(self, fault: Fault, disturb: Callable[[str, str], None]) -> bool:
        links = list(zip(fault.targets[::2], fault.targets[1::2], strict=True))
        # A server that another server or the handler does not see may be replaced.
        judges = {*self.cluster.disks, *self.cluster.handlers.names}
        met = {name for link in links if judges.issuperset(link) for name in link}
        return self.disturb(fault, links, disturb, met)

    def _isolate(self, fault: Fault) -> bool:
        """Cut a server or node from all others, except clients and the supervisor."""
        (name,) = fault.targets
        links = _links_around(name, self.cluster.nodes)
        return self.disturb(fault, links, self.cluster.network.cut, {name})

    def disturb(
        self,
        fault: Fault,
        links: list[tuple[str, str]],
        disturb: Callable[[str, str], None],
        met: set[str],
        then: Callable[[], object] = lambda: None,
    ) -> bool:
        servers = sorted(name for name in met if name in self.cluster.disks)
        if not all(self.may_fail(name) for name in servers):
            return False
        for link in links:
            disturb(*link)

        def heal() -> None:
            for link in links:
                if not self._away.intersection(link):
                    self.cluster.network.heal(*link)
            then()

        return self.lasting(fault, heal, servers)

    def _lead(self, fault: Fault) -> bool:
        """Cut a service's leader from its other nodes."""
        group = self.cluster.mms if fault.kind == "lead-mms" else self.cluster.handlers
        leader = group.leader
        if not leader:
            return False
        if isinstance(group, OrderedLog):
            group.isolate(leader)
            return self.lasting(fault, partial(group.rejoin, leader))
        links = _links_around(leader, group.names)
        return self.disturb(fault, links, self.cluster.network.cut, set())

    # --- disks ---

    def _slow_disk(self, fault: Fault) -> bool:
        (name,) = fault.targets
        disk = self.cluster.disks[name]
        if not self.may_fail(name):
            return False
        disk.latency_ns = _SLOW_NS
        return self.lasting(fault, lambda: setattr(disk, "latency_ns", LATENCY_NS), [name])

    def _full_disk(self, fault: Fault) -> bool:
        (name,) = fault.targets
        disk = self.cluster.disks[name]
        if not self.may_fail(name):
            return False
        self.excused.add(name)
        disk.capacity_bytes = 0
        return self.lasting(fault, lambda: setattr(disk, "capacity_bytes", CAPACITY_BYTES), [name])

    def _no_descriptors(self, fault: Fault) -> bool:
        """Refuse opens of all replicas of a shard, or of one process.

        This fault only delays: no server may stop, and no other server need be undisturbed.
        """
        cluster = self.cluster
        disks = [cluster.disks.get(name) or cluster.service_disks[name] for name in fault.targets]
        self.unopened.update(fault.targets)
        for disk in disks:
            disk.refuses_opens = errno.EMFILE

        def end() -> None:
            for disk in disks:
                disk.refuses_opens = 0

        return self.lasting(fault, end, fault.targets)

    def _fail_disk(self, fault: Fault) -> bool:
        """Make one of the next calls of a server's disk fail."""
        return self._disturb_disk(fault, errno.EIO, lambda _process: None)

    def _crash(self, fault: Fault) -> bool:
        """Stop a server's machine during one of its next disk calls."""
        disk = self.cluster.disks[fault.targets[0]]
        return self._disturb_disk(
            fault, Halted("its machine stops"), lambda _process: disk.power_cut()
        )

    def _disturb_disk(
        self, fault: Fault, error: int | BaseException, then: Callable[[Process], object]
    ) -> bool:
        (name,) = fault.targets
        process, disk = self.cluster.nodes[name], self.cluster.disks[name]
        if not process.is_up or not self.may_fail(name):
            return False
        self.excused.add(name)
        disk.fail_on(fault.amount, error)
        process.on_halt = then

        def end() -> None:
            disk.clear_failures()
            process.on_halt = lambda _process: None

        return self.lasting(fault, end, [name])

    def _rot(self, fault: Fault) -> bool:
        """Flip a bit on a server's disk."""
        (name,) = fault.targets
        is_alone = any(peer in self._rotten for peer in self.cluster.peers(name))
        if is_alone or not self.has_good_peer(name) or not self._has_copy(name):
            return False
        flipped = self.cluster.disks[name].flip(lambda path: path.name.endswith(".seg"))
        if flipped is None:
            return False
        self._rotten.add(name)
        return True

    def _rot_node(self, fault: Fault) -> bool:
        """Kill a service's node, flip a bit in its files, and start it again.

        If it refuses to start, it gets an empty directory; a single node gets a copy instead. An
        empty directory needs all other nodes up and voting.
        """
        (name,) = fault.targets
        process, disk = self.cluster.nodes[name], self.cluster.service_disks[name]
        group = self.cluster.mms if fault.kind == "rot-mms" else self.cluster.handlers
        if isinstance(group, OrderedLog) or not process.is_up or process.is_paused:
            return False
        if disk.refuses_opens:
            return False
        statuses = map(group.status, group.names)
        if not all(status is not None and status.is_voter for status in statuses):
            return False
        process.kill()
        directory = disk.path("consensus")
        before = {path: path.read_bytes() for path in directory.iterdir()}
        flip_in(directory, self.cluster.kernel.random)
        process.start()
        if not process.is_up:
            assert "damaged" in process.halts.pop(), "it stopped for another reason"
            for path in before:
                path.unlink()
            if len(group.names) == 1:
                for path, content in before.items():
                    path.write_bytes(content)
                    sync(path)
            sync(directory)
        return True


def _leases_after(last: Lease, count: int) -> Iterator[bytes]:
    """Yield the commands that grant `count` leases, each different from the one before it."""
    for _ in range(count):
        epoch_ms = 7 if last.epoch_ms != 7 else 8
        last = last.following(epochs=16, epoch_size=_AGED_EPOCH, epoch_ms=epoch_ms)
        yield GrantLease(last, []).encode()


def _links_around(name: str, nodes: Iterable[str]) -> list[tuple[str, str]]:
    """Return the links between one node and the others, both ways."""
    others = [node for node in nodes if node != name]
    return [pair for other in others for pair in ((name, other), (other, name))]


#: The method of each kind of fault; it returns whether the fault fitted.
KINDS: Final[dict[str, Callable[[Faults, Fault], bool]]] = {
    "kill": Faults._kill,
    "stop": Faults.stop,
    "power": Faults._power,
    "power-all": Faults._power_all,
    "pause": Faults._pause,
    "suspend": Faults._suspend,
    "offline": Faults._offline,
    "skew": Faults._skew,
    "kill-mms": Faults._kill_node,
    "kill-fh": Faults._kill_node,
    "kill-client": Faults._kill_client,
    "age": Faults._age,
    "rebuild": Faults._rebuild,
    "set-level": Faults._set_level,
    "cut": Faults._cut,
    "clog": Faults._clog,
    "isolate": Faults._isolate,
    "rot-mms": Faults._rot_node,
    "rot-fh": Faults._rot_node,
    "lead-mms": Faults._lead,
    "lead-fh": Faults._lead,
    **region_faults.KINDS,
    "slow-disk": Faults._slow_disk,
    "full-disk": Faults._full_disk,
    "fail-disk": Faults._fail_disk,
    "no-descriptors": Faults._no_descriptors,
    "crash": Faults._crash,
    "rot": Faults._rot,
    **dict.fromkeys(CHANGES, Faults._change),
}
