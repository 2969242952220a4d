"""Programs of a simulated cluster's processes: production classes, assembled as in `__main__`.

They run on a simulated disk, network and consensus.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from failure_handler.service import FailureHandler
from mms.service import MembershipService
from shard.__main__ import replica_config
from shard.replica import Replica
from shard.storage.data_directory import DataDirectory
from shard.storage.segment_store import SegmentStore
from tests.simulator.kernel import MS
from ziplog.client.client_node import ClientCore
from ziplog.client.engines.engine import Engine
from ziplog.core.wire_use import Release, WireUse
from ziplog.deploy.restart_policy import Death, RestartPolicy
from ziplog.deploy.restart_policy import Process as Seen
from ziplog.runtime import level_file, wire_file
from ziplog.runtime.driver import Driver
from ziplog.runtime.node_info import node_info
from ziplog.wire import Orders, OrdersQuery, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from tests.simulator.disk import Disk
    from tests.simulator.process import Process, Program
    from ziplog.client.common.requests import Preferences, Request
    from ziplog.client.engines.engine import Core
    from ziplog.config import ClusterConfig
    from ziplog.core.node import Event
    from ziplog.wire.node_info import Role

    #: Creates a process's program.
    Start = Callable[[Process], Program]

#: Small files and caches, so that a short run creates, reads and cuts many.
SEGMENT_BYTES: Final = 16 * 1024
CACHE_BYTES: Final = 8 * 1024
RESERVE_BYTES: Final = 64 * 1024
#: Intervals between a supervisor's checks of its processes, and of the failure handlers.
_LOOK_NS: Final = 100 * MS


def on_disk(disk: Callable[[], Disk], start: Start) -> Start:
    """Return a starter of a program with a disk; it releases the disk if the start fails."""

    def start_or_end(process: Process) -> Program:
        try:
            return start(process)
        except BaseException:
            disk().kill()
            raise

    return start_or_end


class TimedStore:
    """A server's store whose `flush` takes the disk's time before the step goes on."""

    def __init__(self, store: SegmentStore, process: Process, disk: Disk) -> None:
        self._store, self._process, self._disk = store, process, disk
        self.append: Final = store.append
        self.flush_in_background: Final = store.flush_in_background

    @property
    def last_fseq(self) -> int:
        """The last appended entry."""
        return self._store.last_fseq

    def flush(self) -> bool:
        """Flush, and spend the time of the syncs."""
        is_done = self._store.flush()
        self._process.spend(self._disk.sync_ns())
        return is_done


class StorageServer:
    """The program of `python -m shard`; the kernel schedules the flusher's work."""

    def __init__(
        self, process: Process, config: ClusterConfig, disk: Disk, release: Release
    ) -> None:
        self._process: Final = process
        self._disk: Final = disk
        identity = replica_config(config, process.name)
        wire = wire_file.read(disk.path(process.name), release)
        directory = DataDirectory(disk.path(process.name), config.name, process.name)
        identity = msgspec.structs.replace(
            identity, identity=directory.identity.server, pid=process.starts,
            release=release, wire=wire, recorded_level=level_file.read(directory.path),
        )  # fmt: skip
        is_at_memory = identity.durability == identity.recorded_level == "memory"
        self.store: Final = SegmentStore.open(
            directory.segments,
            flush_interval_ms=config.flush_interval_ms,
            in_background=is_at_memory,
            segment_bytes=SEGMENT_BYTES,
            cache_bytes=CACHE_BYTES,
            reserve_bytes=RESERVE_BYTES,
            on_halt=process.halt,
        )
        checkpoint = directory.read_checkpoint()
        limbo = directory.was_used and checkpoint is None
        self.replica: Final = Replica(
            identity, self.store, checkpoint, limbo=limbo,
            incarnation=process.kernel.random.getrandbits(63), now=process.clock(),
        )  # fmt: skip
        assert process.transport is not None
        process.is_one_at_a_time |= disk.delays_frames
        store = TimedStore(self.store, process, disk) if disk.delays_frames else self.store
        self.driver: Final = Driver(
            self.replica, process.transport, store=store,  # type: ignore[arg-type]
            insert_path=self.replica.plain_inserts,
            store_delay_ns=config.flush_interval_ms * MS // 5,
            flush_before_send=not is_at_memory, clock=process.clock, on_halt=process.halt,
            receive_publications=process.transport.receive_publications,
            record_wire=partial(wire_file.record, directory.path),
            record_level=partial(level_file.record, directory.path),
        )  # fmt: skip
        self.store.flusher.set_listener(self.driver.post)
        directory.delete_checkpoint()
        self._directory: Final = directory
        self._interval_ns: Final = config.flush_interval_ms * MS * 4 // 5
        self._is_tending = False
        self._schedule_flush()
        process.spend(disk.sync_ns())

    def turn(self) -> None:
        self.driver.run_once()
        self._process.spend(self._disk.sync_ns())
        if not self._is_tending and (self.store.backlog_bytes or self.store.is_full):
            self._schedule_flush()

    def _schedule_flush(self) -> None:
        """Schedule the flusher, as its thread does at level `memory`."""
        self._is_tending = True
        self._process.kernel.after(self._interval_ns + self._disk.sync_ns(), self._flush)

    def _flush(self) -> None:
        process = self._process
        if process.program is not self:
            return
        if process.is_paused:
            self._schedule_flush()
            return
        self._is_tending = False
        process.from_inside(self.store.flusher.flush_and_report)
        if process.program is self and (self.store.backlog_bytes or self.store.is_full):
            self._schedule_flush()

    def stop(self) -> None:
        """Stop cleanly, as on SIGTERM: flush, and write a checkpoint.

        If the disk refuses it, the process ends without one (`shard.__main__._leave`).
        """
        self.driver.store_waiting_entries()
        checkpoint = self.replica.checkpoint()
        if self.store.close():
            with suppress(OSError):
                self._directory.write_checkpoint(checkpoint)

    def check(self) -> None:
        self.replica.check()

    def end(self) -> None:
        self._disk.kill()


class ServiceNode:
    """The program of `python -m mms` and `python -m failure_handler`, on a given consensus."""

    def __init__(
        self,
        process: Process,
        node: MembershipService | FailureHandler,
        group: Any,
        disk: Disk,
        role: Role,
    ) -> None:
        self.node: Final = node
        self._group, self._name, self._disk = group, process.name, disk
        # Consensus may report an event immediately, before the driver exists.
        early: list[Event] = []
        self._post: Callable[[Event], None] = early.append
        member = group.join(process.name, self._report)
        assert process.transport is not None
        self.driver: Final = Driver(
            node, process.transport,  # type: ignore[arg-type]
            propose=member.propose, clock=process.clock, on_halt=process.halt,
            publish=process.transport.publish,
            describe=lambda request: node_info(
                node.config, role, node.name, node.cluster, request, node.wire_use
            ),
            record_wire=partial(wire_file.record, disk.path(process.name)),
        )  # fmt: skip
        self._post = self.driver.post
        for event in early:
            self._post(event)

    def _report(self, event: Event) -> None:
        self._post(event)

    def turn(self) -> None:
        self.driver.run_once()

    def check(self) -> None:
        self.node.check()

    def end(self) -> None:
        self._group.leave(self._name)
        self._disk.kill()


def _wire_use(process: Process, disk: Disk, release: Release) -> WireUse:
    directory = disk.path(process.name)
    directory.mkdir(exist_ok=True)
    return WireUse(release, wire_file.read(directory, release))


def membership_node(
    config: Callable[[], ClusterConfig],
    group: Any,
    disk: Disk,
    release_of: Callable[[str], Release],
) -> Start:
    """Return a starter of a membership service node; it reads the cluster file at each start."""

    def start(process: Process) -> ServiceNode:
        random = process.kernel.random
        node = MembershipService(
            config(), process.name, pid=1, cluster=1 + random.getrandbits(62),
            incarnation=random.getrandbits(63), now=process.clock(),
            publisher=process.endpoint or "",
            wire_use=_wire_use(process, disk, release_of(process.name)),
        )  # fmt: skip
        return ServiceNode(process, node, group, disk, "membership")

    return start


def handler_node(
    config: Callable[[], ClusterConfig],
    group: Any,
    disk: Disk,
    release_of: Callable[[str], Release],
) -> Start:
    """Return a starter of a failure handler node; it reads the cluster file at each start."""

    def start(process: Process) -> ServiceNode:
        wire_use = _wire_use(process, disk, release_of(process.name))
        node = FailureHandler(config(), process.name, pid=1, now=process.clock(), wire_use=wire_use)
        return ServiceNode(process, node, group, disk, "handler")

    return start


class ClientProgram:
    """The program of a client's process below its façade: one engine.

    Args:
        process: its process.
        core: the client's state machine.
        decode: decodes frames; layers above the log have further messages.

    """

    def __init__(
        self, process: Process, core: Core, decode: Callable[[bytes], Any] = decode
    ) -> None:
        self._process: Final = process
        self._answers: Final[dict[int, Callable[[Any], None]]] = {}
        self._calls = 0
        transport = process.transport
        assert transport is not None
        self.engine: Final = Engine(
            core,
            self._answer,
            self._fail,
            decode=decode,
            transport=transport,  # type: ignore[arg-type]
            clock=process.clock,
        )  # fmt: skip

    def call(self, request: Request, on_answer: Callable[[Any], None]) -> None:
        """Start a call; `on_answer` receives its result or exception."""
        self._calls += 1
        self._answers[self._calls] = on_answer
        self.engine.submit(self._calls, request)
        self._process.wake()

    def _answer(self, call: int, result: Any) -> None:
        on_answer = self._answers.pop(call, None)
        if on_answer is not None:
            on_answer(result)

    def _fail(self, error: Exception) -> None:
        raise AssertionError("no simulation has two clusters") from error

    def turn(self) -> None:
        engine = self.engine
        while (received := engine.transport.receive()) is not None:
            engine.handle(*received)
        engine.transport.wait(engine.end_batch())

    def check(self) -> None:
        self.engine.core.check()

    def end(self) -> None:
        self._answers.clear()


def log_client(
    process: Process, endpoints: Sequence[str], preferences: Preferences
) -> ClientProgram:
    """Return the program of a client of the log."""
    return ClientProgram(
        process, ClientCore(process.kernel.random.randbytes(16), endpoints, preferences)
    )


class SupervisorThread:
    """The program of the supervisor (ziplog/deploy/supervisor_thread.py): restarts and kills.

    `nodes` may grow: the caller that adds a node starts it. Nodes in `lost` are left alone.
    """

    def __init__(
        self,
        process: Process,
        config: ClusterConfig,
        nodes: Mapping[str, Process],
        lost: Collection[str],
    ) -> None:
        self._process, self._nodes, self._lost = process, nodes, lost
        self._restart_policy: Final = RestartPolicy()
        self._handlers: Final = [node.name.encode() for node in config.failure_handlers]
        self._started: Final = dict.fromkeys(nodes, process.clock())
        self._request = 0
        self._ask_at = 0
        assert process.transport is not None
        self._transport: Final = process.transport
        for node in config.failure_handlers:
            self._transport.connect(node.name.encode(), node.endpoint)

    def turn(self) -> None:
        while (received := self._transport.receive()) is not None:
            message = decode(received[1])
            if isinstance(message, Orders) and message.request == self._request:
                self._kill_named(message)
        for found in self._restart_policy.check_processes(
            self._node_states(), self._process.clock()
        ):
            if not isinstance(found, Death):
                self._start(found.node)
        now = self._process.clock()
        if now >= self._ask_at:
            self._ask_at = now + _LOOK_NS
            self._request += 1
            query = encode(OrdersQuery(0, self._request))
            for handler in self._handlers:
                self._transport.send(handler, query)
        self._transport.wait(self._ask_at - now)

    def _node_states(self) -> dict[str, Seen]:
        now = self._process.clock()
        return {
            name: Seen(self._started.setdefault(name, now), not node.is_up)
            for name, node in self._nodes.items()
            if name not in self._lost
        }

    def _start(self, name: str) -> None:
        self._started[name] = self._process.clock()
        self._nodes[name].start()

    def _kill_named(self, message: Orders) -> None:
        named = {order.node for order in message.orders}
        for name in self._restart_policy.on_unreachable(
            named, self._node_states(), self._process.clock()
        ):
            self._process.kernel.trace(f"{name} is replaced")
            self._nodes[name].kill()
            self._start(name)

    def check(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""
