"""The process of one coordinator: `python -m logdb [--bootstrap HOST:PORT] [--port PORT]`.

It logs to stderr: `listening`, then the progress of the replay, then `ready`, which it also prints
to stdout. SIGTERM or SIGINT stops it cleanly, with exit code 0. Other exit codes: 1 the port is in
use, or the log cannot be reached or replayed; 2 bad usage; 70 an invariant is violated. The process
stores nothing on disk and can be restarted on any machine (docs/logdb.md, section 15).
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from logdb import defaults
from logdb.coordinator.node import CoordinatorNode
from logdb.coordinator.progress import Replay
from logdb.embedded import (
    bind_address,
    coordinator_info,
    coordinator_reporter,
    coordinator_settings,
)
from logdb.wire import decode
from ziplog import event_log
from ziplog.client import arguments, placement_arguments
from ziplog.config_tables import LogConfig
from ziplog.defaults import VARIABLE, bootstrap
from ziplog.errors import ConfigError, ZiplogError
from ziplog.runtime.clock import now_ns
from ziplog.runtime.descriptors import raise_limit
from ziplog.runtime.driver import Driver
from ziplog.runtime.process import require_assertions, run_process
from ziplog.runtime.process_logging import configure, halt
from ziplog.runtime.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments_given: Sequence[str] | None = None) -> int:
    """Run a coordinator until SIGTERM or SIGINT; return the exit code."""
    options = _parser().parse_args(arguments_given)
    try:
        run(options)
    except ConfigError as error:
        print(f"logdb: {error}", file=sys.stderr)
        return 2
    except ZiplogError as error:
        print(f"logdb: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m logdb",
        description="Run a coordinator of LogDB, the transactional key-value database on Ziplog.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--bootstrap", default=bootstrap(),
        metavar="HOST:PORT[,...]",
        help=f"the log's membership nodes; or set {VARIABLE}",
    )  # fmt: skip
    add("--region", help="the coordinator's region, so that it reads near; or set ZIPLOG_REGION")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=defaults.PORT, help="port to listen on; 0: any free port")
    add(
        "--insecure",
        action="store_true",
        help="allow other machines to reach it, and all data",
    )
    add(
        "--no-checkpoints",
        action="store_true",
        help="leave checkpoints and trims to other coordinators",
    )
    add(
        "--checkpoint-every", type=int, default=100_000, metavar="N",
        help="records between two checkpoints; at least as many as there are keys",
    )  # fmt: skip
    add("--cache-mb", type=int, default=64, metavar="MB", help="size of the cache of small values")
    add("--log-level", default=LogConfig.level, help="debug, info, warning or error")
    add("--log-format", default=LogConfig.format, help="logfmt or json")
    add(
        "--connect-timeout", type=float, default=arguments.DEFAULT_TIMEOUT_S, metavar="S",
        help="timeout for reaching the log, in seconds",
    )  # fmt: skip
    return parser


def run(options: argparse.Namespace) -> None:
    """Run a coordinator until SIGTERM or SIGINT.

    Raises:
        ZiplogError: the coordinator cannot start, or cannot replay the log.

    """
    require_assertions()
    bind = bind_address(options.host, options.port, insecure=options.insecure, are_options=True)
    configure(f"logdb@{bind}", LogConfig(level=options.log_level, format=options.log_format))
    raise_limit()
    endpoints = arguments.endpoints(options.bootstrap)
    chosen = coordinator_settings(
        checkpoints=not options.no_checkpoints,
        checkpoint_every=options.checkpoint_every,
        cache_mb=options.cache_mb,
        connect_timeout=options.connect_timeout,
        are_options=True,
    )
    here = placement_arguments.preferences(None, options.region, None)
    transport = Transport(bind=bind)
    try:
        endpoint = transport.endpoint
        node = CoordinatorNode(
            os.urandom(16),
            endpoints,
            here.policy,
            now=now_ns(),
            endpoint=endpoint or bind,
            settings=chosen,
            region=here.region,
        )
        replay = Replay(node.tailer, node.endpoint, ",".join(endpoints))
        node.on_ready = replay.ready
        driver = Driver(
            node,
            transport,
            decode=decode,
            describe=coordinator_info(node, endpoint or bind, endpoints),
            report=coordinator_reporter(node, transport),
            # A log that cannot be replayed is an operational error: it is reported in one line
            # below.
            on_halt=lambda reason, state: None if node.failure else halt(reason, state),
        )
        event_log.info("listening", endpoint=endpoint, pid=os.getpid())
        with replay:
            run_process(driver, transport)
        if node.failure is not None:
            raise node.failure
    finally:
        transport.close()
    event_log.info("stopped")


if __name__ == "__main__":
    sys.exit(main())
