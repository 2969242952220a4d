"""The ordering layer: one node, as a process of its own, and a group of such processes.

    python -m scalog.layer NAME=HOST:PORT:RAFT_PORT[,...] --name NAME --log ENDPOINTS ...

The leader follows the frontiers of all shards, and proposes cuts to the other nodes. The files of
consensus are in memory (/dev/shm): a disk's sync would take longer than all messages, and the
thesis, too, writes to disks asynchronously (T 4.4).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import psutil

from scalog.messages import Follow, decode
from scalog.ordering import Cuts, Ordering, Reported
from scalog.tracker import Tracker
from ziplog.core.node import BatchEnd, Committed, LeaderChanged, Received, Restored, Send, Wakeup
from ziplog.deploy.new_shard import free_ports
from ziplog.raft.raft import Raft
from ziplog.runtime.driver import Driver
from ziplog.runtime.process import run_process
from ziplog.runtime.process_logging import configure, halt
from ziplog.runtime.transport import Transport
from ziplog.wire import encode

if TYPE_CHECKING:
    from ziplog.core.node import Effect, Event

_HOST: Final = "127.0.0.1"
_MEMORY: Final = "/dev/shm"  # noqa: S108 - a folder of its own is made in it
_SCRIPTS: Final = Path(__file__).resolve().parents[1]


class LayerNode:
    """One node of the layer: ordering, and the tracker while it leads."""

    def __init__(self, ordering: Ordering, tracker: Tracker) -> None:
        """Combine them."""
        self._ordering: Final = ordering
        self._tracker: Final = tracker

    def step(self, event: Event, now: int) -> list[Effect]:
        """Handle one event; see `ziplog.core.node`."""
        ordering, tracker = self._ordering, self._tracker
        match event:
            case Received(message=Follow()) | Committed() | Restored():
                return ordering.step(event, now)
            case LeaderChanged():
                effects = ordering.step(event, now)
                return effects + (tracker.start(now) if event.is_self else tracker.stop())
            case Received():
                return tracker.step(event, now)
            case BatchEnd() | Wakeup():
                effects = tracker.step(event, now)
                return effects + ordering.step(Reported(tracker.pop()), now)
        return []

    def close(self) -> list[Effect]:
        """Close the streams at the servers."""
        return self._tracker.stop()

    def next_wakeup(self) -> int | None:
        """Return when this node wants a `Wakeup`."""
        due = (self._ordering.next_wakeup(), self._tracker.next_wakeup())
        return min((at for at in due if at is not None), default=None)

    def check(self) -> None:
        """Assert the invariants."""
        self._ordering.check()
        self._tracker.check()


def main() -> None:
    """Run a node until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("nodes", help="all nodes of the layer")
    parser.add_argument("--name", required=True, help="this node")
    parser.add_argument("--log", required=True, help="membership nodes of the log")
    parser.add_argument("--directory", type=Path, required=True, help="for consensus")
    parser.add_argument("--t-ord-us", type=int, required=True, help="between two cuts")
    options = parser.parse_args()
    configure(options.name)
    nodes = {
        name: address.split(":")
        for name, address in (node.split("=") for node in options.nodes.split(","))
    }
    host, port, _ = nodes[options.name]
    with contextlib.closing(Transport(bind=f"{host}:{port}")) as transport:

        def post(event: Event) -> None:
            driver.post(event)  # created below, before Raft starts

        raft = Raft(
            options.name,
            {name: f"{host}:{port}" for name, (host, _, port) in nodes.items()},
            options.directory,
            Cuts(),
            on_event=post,
            on_fatal=halt,
        )
        tracker = Tracker(os.urandom(16), options.log.split(","))
        node = LayerNode(Ordering(options.t_ord_us * 1000), tracker)
        driver = Driver(node, transport, propose=raft.propose, decode=decode)
        raft.start()
        print("ready", flush=True)
        run_process(driver, transport)
        raft.stop()
        for effect in node.close():
            if isinstance(effect, Send):
                transport.send(effect.dst, encode(effect.message))


class Layer:
    """The processes of a layer, in a `with` block."""

    def __init__(self, log: str, nodes: int, t_ord_ms: float) -> None:
        """Prepare `nodes` processes for the log at `log`."""
        ports = list(free_ports(2 * nodes, _HOST))
        self._names: Final = [f"scalog-{number}" for number in range(nodes)]
        #: "host:port" of each node.
        self.endpoints: Final = [f"{_HOST}:{port}" for port in ports[:nodes]]
        self._arguments: Final = [
            ",".join(
                f"{name}={endpoint}:{port}"
                for name, endpoint, port in zip(
                    self._names, self.endpoints, ports[nodes:], strict=True
                )
            ),
            *("--log", log, "--t-ord-us", str(round(t_ord_ms * 1000))),
        ]
        self._processes: Final[list[subprocess.Popen[bytes]]] = []
        self._closing: Final = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as opened:
            folder = opened.enter_context(
                tempfile.TemporaryDirectory(prefix="ziplog-scalog-", dir=_MEMORY)
            )
            for name in self._names:
                command = [
                    *(sys.executable, "-m", "scalog.layer", *self._arguments, "--name", name),
                    *("--directory", f"{folder}/{name}"),
                ]
                process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=_SCRIPTS)
                opened.callback(_stop, process)
                self._processes.append(process)
            for process in self._processes:
                assert process.stdout is not None
                if not process.stdout.readline():
                    raise RuntimeError("a node of the ordering layer did not start")
            self._closing.push(opened.pop_all())
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    @property
    def processes(self) -> list[psutil.Process]:
        """The processes, for their CPU time."""
        return [psutil.Process(process.pid) for process in self._processes]

    def kill(self, endpoint: str) -> None:
        """Kill the node at an endpoint."""
        self._processes[self.endpoints.index(endpoint)].kill()


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.communicate()


if __name__ == "__main__":
    main()
