"""Workload: clients that use a cluster and record a history for check_history.py.

    python scripts/workload.py --bootstrap 127.0.0.1:7400 --history DIR --seconds 20

Each client and each subscriber is a separate process with its own history file (docs/history.md);
they use the public API only. At the end a new subscriber reads the whole log, and some records once
more by position. Exit codes: 0 done, 1 the log cannot be read at the end, or one of the processes
ended by an error, 2 bad usage.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fault_injection.options import count, count_or_zero, not_negative, positive, share

import ziplog
from tests.history.clients import OPERATIONS, LogPlan
from tests.history.payloads import MIN_BYTES
from tests.history.workload import Workload, read_all

if TYPE_CHECKING:
    from collections.abc import Sequence

_MIX: Final = "insert=60,nowait=15,batch=5,read=12,scan=2,tail=3,sync=3"


def mix(text: str) -> dict[str, int]:
    """Read "name=weight,..."; raises ValueError."""
    found = {}
    for part in text.split(","):
        name, _, weight = part.partition("=")
        if name not in OPERATIONS:
            raise ValueError(f"{name!r} is none of {', '.join(OPERATIONS)}")
        found[name] = count_or_zero(weight)
    if not any(found.values()):
        raise ValueError("all weights are 0")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments say; return the exit code."""
    parser = argparse.ArgumentParser(
        description="Run a workload on a cluster and record its history."
    )
    parser.add_argument("--bootstrap", required=True, help="host:port of the membership service")
    parser.add_argument("--history", required=True, type=Path, help="a directory for the history")
    parser.add_argument("--clients", type=count_or_zero, default=4)
    parser.add_argument("--subscribers", type=count_or_zero, default=2)
    parser.add_argument("--seconds", type=not_negative, default=20.0)
    parser.add_argument(
        "--operations", type=count, help="of each client; ends earlier than --seconds"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mix", type=mix, default=mix(_MIX), help=f"weights, as {_MIX}")
    parser.add_argument(
        "--appends", type=share, default=0.0, metavar="SHARE", help="of the inserts: 0.0 to 1.0"
    )
    parser.add_argument("--payload", type=int, default=100, help=f"bytes, from {MIN_BYTES}")
    parser.add_argument(
        "--rate", type=not_negative, default=0.0, help="operations a second, each client"
    )
    parser.add_argument(
        "--timeout", type=positive, default=5.0, help="deadline of a call, in seconds"
    )
    parser.add_argument("--chains", action="store_true", help="insert after a record seen before")
    parser.add_argument("--no-final", action="store_true", help="do not read the log at the end")
    options = parser.parse_args(arguments)
    if options.payload < MIN_BYTES:
        parser.error(f"--payload is {options.payload}; it must be {MIN_BYTES} or more")
    plan = LogPlan(
        bootstrap=options.bootstrap,
        directory=str(options.history),
        seed=options.seed,
        mix=options.mix,
        payload_bytes=options.payload,
        chains=options.chains,
        appends=options.appends,
        rate_per_s=options.rate,
        timeout_s=options.timeout,
        operations=options.operations or 0,
    )
    with Workload(plan, options.clients, options.subscribers) as workload:
        end = time.monotonic() + options.seconds
        while time.monotonic() < end and workload.clients.running():
            time.sleep(0.1)
            workload.note_losses()
    for name in workload.crashed:
        print(f"workload: ended by an error: {name}", file=sys.stderr)
    if not options.no_final:
        try:
            records = read_all(plan)
        except ziplog.ZiplogError as error:
            print(f"workload: the log cannot be read at the end: {error}", file=sys.stderr)
            return 1
        print(f"{records} records in the log")
    return 1 if workload.crashed else 0


if __name__ == "__main__":
    sys.exit(main())
