"""The process of one membership node: `python -m mms --config FILE --node NAME`.

See `ziplog.runtime.replicated_service` for what it prints and its exit codes.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from mms.rebuild import plan
from mms.service import MembershipService
from mms.state import ClusterState
from ziplog.config import load
from ziplog.core.holdings import Holdings
from ziplog.errors import ZiplogError
from ziplog.runtime import replicated_service
from ziplog.runtime.clock import now_ns, wall_offset_ns
from ziplog.segments.durable_files import free_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.config import ClusterConfig
    from ziplog.core.wire_use import WireUse


def _build(
    config: ClusterConfig, name: str, publisher: str, wire_use: WireUse
) -> MembershipService:
    return MembershipService(
        config,
        name,
        pid=os.getpid(),
        cluster=1 + secrets.randbelow(2**63 - 1),
        incarnation=secrets.randbits(63),
        now=now_ns(),
        publisher=publisher,
        wire_use=wire_use,
        wall_offset_ns=wall_offset_ns,
        free_bytes=partial(free_bytes, config.data_dir / name),
    )


_SERVICE: Final = replicated_service.Service(
    module="mms",
    noun="a membership node",
    role="membership",
    nodes=lambda config: config.mms,
    build=_build,
    machine=ClusterState,
    publishes=True,
)


def _rebuild(arguments: Sequence[str]) -> int:
    """Read `Holdings` from stdin, and write a `RebuildPlan` to stdout; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m mms")
    parser.add_argument("--config", type=Path, required=True, help="the cluster file")
    parser.add_argument("--rebuild", action="store_true", help="plan a rebuild")
    options = parser.parse_args(arguments)
    try:
        found = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Holdings)
        sys.stdout.buffer.write(msgspec.msgpack.encode(plan(load(options.config), found)))
    except ZiplogError as error:
        print(f"mms: {error}", file=sys.stderr)
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a membership node until it receives a stop signal; return the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if "--rebuild" in given:
        return _rebuild(given)
    return replicated_service.main(_SERVICE, arguments)


if __name__ == "__main__":
    sys.exit(main())
