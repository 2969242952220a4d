"""What the processes of a simulated database run: the production classes, as their `__main__` and
their façades put them together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logdb.client.core import DatabaseCore
from logdb.coordinator.node import CoordinatorNode, Settings
from logdb.wire import decode
from tests.sim.programs import ClientProgram
from tests.simulator.kernel import S
from tests.simulator.process import Process
from ziplog.runtime.driver import Driver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.sim.cluster import SimCluster
    from tests.sim.plan import Database

#: A coordinator waits so long for the log when it starts, and is started again.
_CONNECT_NS: Final = 10 * S
_FIRST_PORT: Final = 7500


class CoordinatorProgram:
    """The program of `python -m logdb`."""

    def __init__(self, process: Process, cluster: SimCluster, settings: Settings) -> None:
        transport = process.transport
        assert transport is not None
        self.node: Final = CoordinatorNode(
            process.kernel.random.randbytes(16),
            [node.endpoint for node in cluster.config.mms],
            cluster.choose,
            now=process.clock(),
            endpoint=process.endpoint or "",
            settings=settings,
        )
        self._driver: Final = Driver(
            self.node, transport, decode=decode,  # type: ignore[arg-type]
            clock=process.clock, on_halt=process.halt,
        )  # fmt: skip

    def turn(self) -> None:
        self._driver.run_once()

    def check(self) -> None:
        self.node.check()

    def end(self) -> None:
        """Do nothing: all that it had is gone."""


def endpoint(name: str) -> str:
    """Return where a coordinator listens."""
    return f"127.0.0.1:{_FIRST_PORT + int(name.rpartition('-')[2])}"


def add_coordinator(
    cluster: SimCluster, name: str, database: Database, *, checkpoints: bool = True
) -> Process:
    """Start a coordinator; whatever ends it, the supervisor starts it again."""
    settings = Settings(
        checkpoints=checkpoints,
        checkpoint_every=database.checkpoint_every,
        cache_bytes=database.cache_bytes,
        connect_ns=_CONNECT_NS,
    )

    def start(process: Process) -> CoordinatorProgram:
        return CoordinatorProgram(process, cluster, settings)

    process = Process(cluster.network, name, endpoint(name), start)
    cluster.nodes[name] = process
    process.start()
    return process


def node_of(process: Process) -> CoordinatorNode | None:
    """Return the coordinator that a process runs; None: it does not run."""
    program = process.program
    return program.node if isinstance(program, CoordinatorProgram) else None


def add_client(cluster: SimCluster, name: str, coordinators: Sequence[str]) -> Process:
    """Return a process of a client of these coordinators; it is not started yet."""

    def start(process: Process) -> ClientProgram:
        random = process.kernel.random
        known = random.sample([endpoint(each) for each in coordinators], len(coordinators))
        core = DatabaseCore(random.randbytes(24), known, cluster.choose)
        return ClientProgram(process, core, decode)

    return Process(cluster.network, name, None, start)
