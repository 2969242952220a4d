"""Parts that the demo's processes share: files of events, a multiset checksum, progress reports.

A process reports by writing JSON, one document a line, to its stdout: regularly `{"done": n}`, and
its result as the last line.
"""

from __future__ import annotations

import sys
import time
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_REPORT_EVERY_S: Final = 0.2
_MASK: Final = 2**64 - 1


class Progress(msgspec.Struct, tag="progress"):
    """The number of records that are done."""

    done: int


class Inserted(msgspec.Struct, tag="inserted"):
    """The result of an inserter process."""

    records: int
    checksum: int
    #: Its last rid, as text.
    last: str
    fast_path: int
    slow_path: int
    retries: int
    #: The latency of each single insert; empty for an inserter of batches.
    latencies_us: list[float] = []


class Delivered(msgspec.Struct, tag="delivered"):
    """The result of the subscriber process."""

    records: int
    checksum: int
    aircraft: int
    first: str
    last: str
    #: The first fault, or "".
    fault: str


Report = Progress | Inserted | Delivered


class Reporter:
    """Writes a process's progress, at a limited rate, and its result."""

    def __init__(self) -> None:
        self._next: float = 0.0

    def progress(self, done: int) -> None:
        """Report the number of records that are done, unless the last report is recent."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _REPORT_EVERY_S
            self.result(Progress(done))

    def result(self, report: Report) -> None:
        """Write a report at once."""
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
        sys.stdout.flush()


def checksum(payloads: Iterable[bytes], so_far: int = 0) -> int:
    """Return a 64-bit sum that distinguishes multisets of payloads, in any order."""
    for payload in payloads:
        so_far += int.from_bytes(blake2b(payload, digest_size=8).digest(), "little")
    return so_far & _MASK


def lines(path: Path) -> Iterator[bytes]:
    """Yield the payloads of a file of events."""
    with path.open("rb") as file:
        for line in file:
            yield line[:-1]
