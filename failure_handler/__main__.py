"""A failure handler's process: `python -m failure_handler --config cluster.toml --node NAME`.

Prints one line on stdout when it listens; logs to stderr. SIGTERM or SIGINT: a clean stop, exit 0.
Exit codes: 1 a port is in use, the directory is in use or damaged; 2 bad usage or cluster file;
70 it stopped because to go on would do harm (docs/protocol.md, section 11).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from failure_handler.service import FailureHandler
from failure_handler.state import HandlerState
from ziplog.config import load
from ziplog.errors import ConfigError, ZiplogError
from ziplog.runtime.driver import Driver, run_process
from ziplog.runtime.raft import Raft
from ziplog.runtime.tracing import configure, halt
from ziplog.runtime.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.config import ClusterConfig, NodeConfig
    from ziplog.node import Event


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a failure handler until it is told to stop; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m failure_handler", description="A failure handler."
    )
    parser.add_argument("--config", type=Path, required=True, help="the cluster file")
    parser.add_argument("--node", required=True, help="the node's name in it")
    options = parser.parse_args(arguments)
    try:
        config = load(options.config)
        run(config, _node(config, options.node))
    except ConfigError as error:
        print(f"failure_handler: {error}", file=sys.stderr)
        return 2
    except ZiplogError as error:
        print(f"failure_handler: {options.node}: {error}", file=sys.stderr)
        return 1
    return 0


def _node(config: ClusterConfig, name: str) -> NodeConfig:
    node = config.node(name)
    if node not in config.failure_handlers:
        names = ", ".join(node.name for node in config.failure_handlers) or "there is none"
        raise ConfigError("node", name, f"a failure handler: {names}")
    return node


def run(config: ClusterConfig, node: NodeConfig) -> None:
    """Run `node` until SIGTERM or SIGINT.

    Raises:
        ZiplogError: it cannot start; says why and what to do.

    """
    configure(node.name)
    logging.basicConfig(level=logging.WARNING, format="level=%(levelname)s event=%(message)r")
    handler = FailureHandler(config, node.name, pid=os.getpid(), now=time.monotonic_ns())
    transport = Transport(bind=node.endpoint)

    def post(event: Event) -> None:
        driver.post(event)  # made below, before consensus starts

    try:
        raft = Raft(
            node.name,
            {other.name: f"{other.host}:{other.raft_port}" for other in config.failure_handlers},
            config.data_dir / node.name,
            HandlerState(),
            on_event=post,
            on_fatal=halt,
            password=config.raft_password,
        )
        driver = Driver(handler, transport, propose=raft.propose)
        try:
            raft.start()
            structlog.get_logger().info("started", endpoint=node.endpoint, pid=os.getpid())
            print(f"failure_handler {node.name} ready at {node.endpoint}", flush=True)
            run_process(driver, transport)
        finally:
            raft.stop()
    finally:
        transport.close()
    structlog.get_logger().info("stopped")


if __name__ == "__main__":
    sys.exit(main())
