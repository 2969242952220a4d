"""The process of one node of a replicated service: builds node, Raft, transport and driver.

Prints one line on stdout when it listens; logs to stderr. SIGTERM or SIGINT: a clean stop, exit 0.
Exit codes: 1 a port is in use, or the directory is in use or damaged; 2 bad usage or cluster file;
70 the process could not continue safely (docs/protocol.md, sections 3 and 11).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ziplog import event_log
from ziplog.config import load
from ziplog.core.node import LevelRequested, Node
from ziplog.core.wire_use import WireUse
from ziplog.errors import ConfigError, ZiplogError
from ziplog.raft.connections import Introduction
from ziplog.raft.offline import read_state
from ziplog.raft.raft import Raft
from ziplog.runtime import wire_file
from ziplog.runtime.connection import GREETING, pack_length
from ziplog.runtime.descriptors import raise_limit
from ziplog.runtime.driver import Driver
from ziplog.runtime.metrics import Reporter
from ziplog.runtime.node_info import node_info, this_release
from ziplog.runtime.process import require_assertions, run_process
from ziplog.runtime.process_logging import configure, halt
from ziplog.runtime.publications import Publisher
from ziplog.runtime.settings_reload import SettingsReload
from ziplog.runtime.transport import Transport
from ziplog.segments.durable_files import free_bytes
from ziplog.wire import Durations, Value, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ziplog.config import ClusterConfig, NodeConfig
    from ziplog.core.histogram import Histogram
    from ziplog.core.node import Event
    from ziplog.raft.offline import LogEnd
    from ziplog.raft.state_machine import Machine
    from ziplog.wire.node_info import Role


class CountingNode(Node, Protocol):
    """A node that knows its cluster, and counts what it does."""

    @property
    def commit_durations(self) -> Histogram:
        """The times from the proposal of a command to its commit."""
        ...

    @property
    def cluster(self) -> int:
        """The cluster's number; 0 while it is unknown."""
        ...

    @property
    def wire_use(self) -> WireUse:
        """The wire version in use."""
        ...

    def metrics(self) -> tuple[list[Value], list[Durations]]:
        """Return what the service counts beside its commits."""
        ...


class Service(NamedTuple):
    """A replicated service: the membership service or the failure handler."""

    #: Its module (`python -m`), the noun for one of its nodes, and their role.
    module: str
    noun: str
    role: Role
    #: Returns its nodes in a cluster file.
    nodes: Callable[[ClusterConfig], tuple[NodeConfig, ...]]
    #: Creates the node with a name, whose process publishes at an endpoint ("": nowhere), with its
    #: release and wire version.
    build: Callable[[ClusterConfig, str, str, WireUse], CountingNode]
    #: Creates the state machine that Raft replicates.
    machine: Callable[[], Machine]
    #: Its nodes publish.
    publishes: bool = False
    #: Encodes what a node's log holds: its name, the state, and the log's end. None: not asked for.
    holdings: Callable[[str, Machine, LogEnd], bytes] | None = None


def main(service: Service, arguments: Sequence[str] | None) -> int:
    """Run a node until a stop signal; return the exit code."""
    module = service.module
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=f"{service.noun.capitalize()}."
    )
    parser.add_argument("--config", type=Path, required=True, help="the cluster file")
    parser.add_argument("--node", required=True, help="the node's name in it")
    if service.holdings is not None:
        parser.add_argument("--holdings", action="store_true", help="write what it holds; then end")
    options = parser.parse_args(arguments)
    try:
        config = load(options.config)
        node = _node(service, config, options.node)
        if service.holdings is not None and options.holdings:
            sys.stdout.buffer.write(_holdings(service, service.holdings, config, node))
        else:
            _run(service, options.config, config, node)
    except ConfigError as error:
        print(f"{module}: {error}", file=sys.stderr)
        return 2
    except (ZiplogError, OSError) as error:
        print(f"{module}: {options.node}: {error}", file=sys.stderr)
        return 1
    return 0


def _node(service: Service, config: ClusterConfig, name: str) -> NodeConfig:
    node, nodes = config.node(name), service.nodes(config)
    if node not in nodes:
        names = ", ".join(node.name for node in nodes) or "none in the file"
        raise ConfigError("node", name, f"{service.noun} ({names})")
    return node


def _holdings(
    service: Service,
    encode: Callable[[str, Machine, LogEnd], bytes],
    config: ClusterConfig,
    node: NodeConfig,
) -> bytes:
    """Return what the directory of a stopped node holds."""
    machine = service.machine()
    wire_file.read(config.data_dir / node.name, this_release())
    end = read_state(config.data_dir / node.name, machine)
    return encode(node.name, machine, end)


def _run(service: Service, path: Path, config: ClusterConfig, node: NodeConfig) -> None:
    """Run `node` until SIGTERM or SIGINT.

    Raises:
        ZiplogError: it cannot start; the text gives the reason and the remedy.

    """
    require_assertions()
    configure(node.name, config.log)
    settings = SettingsReload(path, config, node.name)
    raise_limit()
    directory, release = config.data_dir / node.name, this_release()
    wire_use = WireUse(release, wire_file.read(directory, release))
    with contextlib.ExitStack() as opened:
        transport = opened.enter_context(contextlib.closing(Transport(bind=node.bind)))
        publisher = None
        if service.publishes:
            publisher = Publisher(node.host, node.advertise_host)
            opened.callback(publisher.close)

        def post(event: Event) -> None:
            driver.post(event)  # created below, before Raft starts

        def introduce() -> bytes:
            info = node_info(config, "consensus", node.name, machine.cluster, 0, wire_use)
            frame = encode(info)
            return GREETING + pack_length(len(frame)) + frame

        raft = Raft(
            node.name,
            {other.name: other.raft_endpoint for other in service.nodes(config)},
            directory,
            service.machine(),
            bind=f"{node.host}:{node.raft_port}",
            rtt_ms=config.rtt_ms,
            on_event=post,
            on_fatal=halt,
            password=config.raft_password,
            introduction=Introduction(GREETING, introduce),
        )
        opened.callback(raft.stop)
        endpoint = publisher.endpoint if publisher is not None else ""
        machine = service.build(config, node.name, endpoint, wire_use)
        driver = Driver(
            machine,
            transport,
            describe=lambda request: node_info(
                config,
                service.role,
                node.name,
                machine.cluster,
                request,
                wire_use,
                free_bytes(directory),
            ),
            record_wire=lambda wire: wire_file.record(directory, wire),
            report=Reporter(
                transport,
                lambda _driver, _now: _metrics(service, raft, machine),
                lambda: machine.cluster,
            ),
            propose=raft.propose,
            publish=publisher.publish if publisher is not None else None,
        )
        raft.start()
        settings.start(lambda new: driver.post(LevelRequested(new.durability)))
        opened.callback(settings.stop)
        event_log.info("started", endpoint=node.endpoint, pid=os.getpid(), version=release.version)
        print(f"{service.module} {node.name} ready at {node.endpoint}", flush=True)
        run_process(driver, transport)
    event_log.info("stopped")


def _metrics(
    service: Service, raft: Raft, node: CountingNode
) -> tuple[list[Value], list[Durations]]:
    status, labels = raft.status(), {"group": service.module}
    values, durations = node.metrics()
    return (
        [
            Value("ziplog_raft_leader", int(status.is_leader), labels),
            Value("ziplog_raft_term", status.term, labels),
            Value("ziplog_raft_applied_index", status.applied, labels),
            Value("ziplog_raft_journal_bytes", raft.journal_bytes, labels),
            *values,
        ],
        [
            Durations.of("ziplog_raft_commit_duration_seconds", node.commit_durations, labels),
            *durations,
        ],
    )
