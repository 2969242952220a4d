"""The process of one failure handler: `python -m failure_handler --config FILE --node NAME`.

See `ziplog.runtime.replicated_service` for what it prints and its exit codes.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from failure_handler.holdings import holdings
from failure_handler.service import FailureHandler
from failure_handler.state import HandlerState
from ziplog.runtime import replicated_service
from ziplog.runtime.clock import now_ns
from ziplog.segments.durable_files import free_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.config import ClusterConfig
    from ziplog.core.wire_use import WireUse
    from ziplog.raft.offline import LogEnd
    from ziplog.raft.state_machine import Machine


def _build(config: ClusterConfig, name: str, _publisher: str, wire_use: WireUse) -> FailureHandler:
    return FailureHandler(
        config,
        name,
        pid=os.getpid(),
        now=now_ns(),
        wire_use=wire_use,
        free_bytes=partial(free_bytes, config.data_dir / name),
    )


def _holdings(name: str, machine: Machine, end: LogEnd) -> bytes:
    assert isinstance(machine, HandlerState)
    return msgspec.msgpack.encode(holdings(name, machine, end.term, end.last))


_SERVICE: Final = replicated_service.Service(
    module="failure_handler",
    noun="a failure handler",
    role="handler",
    nodes=lambda config: config.failure_handlers,
    build=_build,
    machine=HandlerState,
    holdings=_holdings,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a failure handler until it receives a stop signal; return the exit code."""
    return replicated_service.main(_SERVICE, arguments)


if __name__ == "__main__":
    sys.exit(main())
