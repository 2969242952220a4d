"""A client inside a region.

`worker.py insert BOOTSTRAP SHARD SECONDS`, or `worker.py follow BOOTSTRAP SECONDS`.

Each record's payload holds the time of its insert: all regions share this machine's clock.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from collections import Counter
from typing import Any, Final

import ziplog
from ziplog import policy
from ziplog.core.units import NS_PER_MS

_CALL_S: Final = 60.0
#: Time between two inserts, so that each finds an idle path.
_PAUSE_S: Final = 0.02
_STAMP: Final = struct.Struct("<iq")


def insert(bootstrap: str, shard: int, seconds: float) -> dict[str, Any]:
    """Insert one record after the other for a time; return the latencies in ms."""
    latencies: list[float] = []
    errors: Counter[str] = Counter()
    with ziplog.connect(bootstrap, timeout=_CALL_S, policy=policy.pin(shard)) as log:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            started = time.monotonic_ns()
            try:
                log.insert_after(_STAMP.pack(shard, started))
            except ziplog.ZiplogError as error:
                errors[type(error).__name__] += 1
            else:
                latencies.append((time.monotonic_ns() - started) / NS_PER_MS)
            time.sleep(_PAUSE_S)
        counters = log.stats()
    return {"latencies_ms": latencies, "errors": errors, "stats": counters}


def follow(bootstrap: str, seconds: float) -> dict[str, Any]:
    """Subscribe for a time; return the latencies of the records by shard, in ms."""
    found: dict[int, list[float]] = {}
    with ziplog.connect(bootstrap, timeout=_CALL_S) as log:
        end = time.monotonic() + seconds
        subscription = log.subscribe(ziplog.RID_GENESIS, timeout=seconds)
        try:
            for record in subscription:
                now = time.monotonic_ns()
                shard, started = _STAMP.unpack(record.payload)
                found.setdefault(shard, []).append((now - started) / NS_PER_MS)
                if time.monotonic() > end:
                    break
        except ziplog.DeadlineError:
            pass
    return {"delivered_ms": found}


def main() -> None:
    """Do what the arguments ask for, and print the result as JSON."""
    task, bootstrap, *arguments = sys.argv[1:]
    if task == "insert":
        print(json.dumps(insert(bootstrap, int(arguments[0]), float(arguments[1]))))
    else:
        print(json.dumps(follow(bootstrap, float(arguments[0]))))


if __name__ == "__main__":
    main()
