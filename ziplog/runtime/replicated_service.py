"""The process of one node of a replicated service: its state machine, consensus, transport, driver.

Prints one line on stdout when it listens; logs to stderr. SIGTERM or SIGINT: a clean stop, exit 0.
Exit codes: 1 a port is in use, the directory is in use or damaged; 2 bad usage or cluster file;
70 it stopped because to go on would do harm (docs/protocol.md, sections 3 and 11).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import structlog

from ziplog.config import load
from ziplog.errors import ConfigError, ZiplogError
from ziplog.raft.raft import Raft
from ziplog.runtime.descriptors import raise_limit
from ziplog.runtime.driver import Driver, run_process
from ziplog.runtime.process_logging import configure, halt
from ziplog.runtime.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ziplog.config import ClusterConfig, NodeConfig
    from ziplog.core.node import Event, Node
    from ziplog.raft.state_machine import Machine


class Service(NamedTuple):
    """What is replicated."""

    #: The module that is run, and what one node of it is called.
    module: str
    noun: str
    #: Its nodes in a cluster file.
    nodes: Callable[[ClusterConfig], tuple[NodeConfig, ...]]
    #: Makes the state machine of the node of a name.
    build: Callable[[ClusterConfig, str], Node]
    #: Makes what consensus replicates.
    machine: Callable[[], Machine]


def main(service: Service, arguments: Sequence[str] | None) -> int:
    """Run a node until it is told to stop; return the exit code."""
    module = service.module
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=f"{service.noun.capitalize()}."
    )
    parser.add_argument("--config", type=Path, required=True, help="the cluster file")
    parser.add_argument("--node", required=True, help="the node's name in it")
    options = parser.parse_args(arguments)
    try:
        config = load(options.config)
        _run(service, config, _node(service, config, options.node))
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
        names = ", ".join(node.name for node in nodes) or "there is none"
        raise ConfigError("node", name, f"{service.noun}: {names}")
    return node


def _run(service: Service, config: ClusterConfig, node: NodeConfig) -> None:
    """Run `node` until SIGTERM or SIGINT.

    Raises:
        ZiplogError: it cannot start; says why and what to do.

    """
    configure(node.name)
    raise_limit()
    logging.basicConfig(level=logging.WARNING, format="level=%(levelname)s event=%(message)r")
    machine = service.build(config, node.name)
    transport = Transport(bind=node.endpoint)

    def post(event: Event) -> None:
        driver.post(event)  # made below, before consensus starts

    try:
        raft = Raft(
            node.name,
            {other.name: f"{other.host}:{other.raft_port}" for other in service.nodes(config)},
            config.data_dir / node.name,
            service.machine(),
            on_event=post,
            on_fatal=halt,
            password=config.raft_password,
        )
        driver = Driver(machine, transport, propose=raft.propose)
        try:
            raft.start()
            structlog.get_logger().info("started", endpoint=node.endpoint, pid=os.getpid())
            print(f"{service.module} {node.name} ready at {node.endpoint}", flush=True)
            run_process(driver, transport)
        finally:
            raft.stop()
    finally:
        transport.close()
    structlog.get_logger().info("stopped")
