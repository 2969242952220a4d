"""Process that inserts a file of events, each after its aircraft's former event.

In batches: a batch goes after the latest of its events' predecessors, and keeps the order of its
own events. The next batch is sent when it is done, so every predecessor has its rid by then. Or one
by one: each event goes after its own predecessor, and every call is timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

import ziplog
from ziplog.demo.flights import Event
from ziplog.demo.parts import Inserted, Reporter, checksum, lines

_TIMEOUT_S: Final = 60.0
_decode: Final = msgspec.json.Decoder(Event).decode


def insert_batches(log: ziplog.Log, path: Path, batch: int, reporter: Reporter) -> Inserted:
    """Insert the events of a file, `batch` at a time."""
    latest: dict[str, ziplog.RecordId] = {}
    last, total, done = ziplog.RID_GENESIS, 0, 0
    payloads = lines(path)
    while chunk := list(islice(payloads, batch)):
        aircraft = [_decode(payload).aircraft for payload in chunk]
        after = max(latest.get(name, ziplog.RID_GENESIS) for name in aircraft)
        rids = log.insert_many(chunk, after)
        latest.update(zip(aircraft, rids, strict=True))
        total, last, done = checksum(chunk, total), rids[-1], done + len(chunk)
        reporter.progress(done)
    return _result(log, done, total, last)


def insert_singly(
    log: ziplog.Log, path: Path, after: ziplog.RecordId, reporter: Reporter
) -> Inserted:
    """Insert the events of a file one by one; `after` replaces predecessors not in the file."""
    latest: dict[str, ziplog.RecordId] = {}
    last, total, done = after, 0, 0
    latencies_us: list[float] = []
    for payload in lines(path):
        name = _decode(payload).aircraft
        began = time.perf_counter_ns()
        last = log.insert_after(payload, latest.get(name, after), key=name)
        latencies_us.append((time.perf_counter_ns() - began) / 1000)
        latest[name] = last
        total, done = checksum([payload], total), done + 1
        reporter.progress(done)
    return msgspec.structs.replace(_result(log, done, total, last), latencies_us=latencies_us)


def _result(log: ziplog.Log, records: int, total: int, last: ziplog.RecordId) -> Inserted:
    stats = log.stats()
    return Inserted(
        records=records,
        checksum=total,
        last=str(last),
        fast_path=stats["fast_path"],
        slow_path=stats["slow_path"],
        retries=stats["retries"],
    )


def main() -> None:
    """Insert the file that the arguments name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=0, help="0: one by one")
    parser.add_argument("--after", default="genesis")
    arguments = parser.parse_args()
    reporter = Reporter()
    try:
        with ziplog.connect(arguments.bootstrap, timeout=_TIMEOUT_S) as log:
            if arguments.batch:
                result = insert_batches(log, arguments.file, arguments.batch, reporter)
            else:
                after = ziplog.RecordId.parse(arguments.after)
                result = insert_singly(log, arguments.file, after, reporter)
            reporter.result(result)
    except ziplog.ZiplogError as error:
        sys.exit(f"inserter: {error}")


if __name__ == "__main__":
    main()
