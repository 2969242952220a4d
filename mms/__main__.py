"""The process of one membership node: `python -m mms --config FILE --node NAME`.

See `ziplog.runtime.replicated_service` for what it prints and its exit codes.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from typing import TYPE_CHECKING, Final

from mms.service import MembershipService
from mms.state import ClusterState
from ziplog.runtime import replicated_service
from ziplog.runtime.clock import now_ns

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
        wall_ns=time.time_ns() - now_ns(),
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a membership node until it receives a stop signal; return the exit code."""
    return replicated_service.main(_SERVICE, arguments)


if __name__ == "__main__":
    sys.exit(main())
