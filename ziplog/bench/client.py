"""Measuring process: inserts single records, or follows the log of an inserting process.

`insert` measures each call. `tail` measures the time from the begin of an insert in another process
of this machine to the record's delivery here; the payload has that time and the run's number.
"""

from __future__ import annotations

import argparse
import secrets
import struct
import sys
import time
from typing import TYPE_CHECKING, Final

import msgspec

import ziplog
from ziplog.bench.measured import Histogram, Measured
from ziplog.core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The run's number, and when the insert began (on this machine's monotonic clock).
_HEAD: Final = struct.Struct("<QQ")
#: Number of inserts before the measurement.
_WARM_UP: Final = 50
#: Time without a record after which a tail gives up.
_SILENCE_S: Final = 30.0


def insert(log: ziplog.Log, size: int, seconds: float, run: int) -> Measured:
    """Insert records of a size, one after the other, and measure each call."""
    padding = secrets.token_bytes(size)[_HEAD.size :]
    for _ in range(_WARM_UP):
        log.insert_after(padding)
    before, histogram = log.stats(), Histogram()
    began = now = time.monotonic_ns()
    count, until = 0, began + int(seconds * NS_PER_S)
    while now < until:
        payload = (_HEAD.pack(run, now) + padding)[:size]
        log.insert_after(payload)
        then, now = now, time.monotonic_ns()
        histogram.record(now - then)
        count += 1
    after = log.stats()
    return Measured(
        "insert", count, (now - began) / NS_PER_S, 0.0, dict(histogram.counts),
        after["fast_path"] - before["fast_path"], after["slow_path"] - before["slow_path"],
    )  # fmt: skip


def tail(log: ziplog.Log, seconds: float, run: int) -> Measured:
    """Follow the log, and measure the age of each record of the run at its delivery."""
    histogram = Histogram()
    began = now = count = 0
    with log.subscribe(ziplog.RID_RECENT, timeout=_SILENCE_S) as subscription:
        for record in subscription:
            if len(record.payload) < _HEAD.size:
                continue
            of, inserted = _HEAD.unpack_from(record.payload)
            if of != run:
                continue
            now = time.monotonic_ns()
            began = began or now
            histogram.record(now - inserted)
            count += 1
            if now - began >= seconds * NS_PER_S:
                break
    return Measured("tail", count, (now - began) / NS_PER_S, 0.0, dict(histogram.counts))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure as the arguments say, and print the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("operation", choices=("insert", "tail"))
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--size", type=int, default=0)
    parser.add_argument("--run", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        with ziplog.connect(options.bootstrap, timeout=options.timeout) as log:
            if options.operation == "insert":
                found = insert(log, options.size, options.seconds, options.run)
            else:
                found = tail(log, options.seconds, options.run)
    except ziplog.ZiplogError as error:
        sys.exit(f"{error}")
    sys.stdout.buffer.write(msgspec.json.encode([found]) + b"\n")


if __name__ == "__main__":
    main()
