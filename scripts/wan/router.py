"""The router between the regions: a process that holds all TUN descriptors.

`router.py COUNT SEED` makes COUNT namespaces and writes a line. Each line that it reads is a
request: `{"path": [source, target, {fields of Path}]}`, or `{}`. It answers each with what it
has carried, and ends with its input. Its own processor time is in the answer: a router that needs
more than half a core falsifies what is measured.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from dataclasses import asdict
from pathlib import Path as FilePath
from random import Random
from typing import Any, Final

sys.path.insert(0, str(FilePath(__file__).resolve().parents[1]))

from wan import namespaces
from wan.delay_queue import DelayQueue, Path

_NS_PER_S: Final = 1_000_000_000
_IPV4: Final = 4
#: Packets that are read from a device before those that are due are written.
_BURST: Final = 32
#: A sleep overruns by about this time; the loop turns meanwhile.
_REST_NS: Final = 50_000


class Router:
    """Reads packets of all regions, and writes each when it is due."""

    def __init__(self, count: int, seed: int) -> None:
        self._count: Final = count
        self._tuns: Final = [namespaces.create(region) for region in range(count)]
        self._queue: Final = DelayQueue(count, Random(seed))  # noqa: S311 - no secret
        #: Packets that a device did not take.
        self._refused = 0

    def run(self) -> None:
        """Route until the input ends."""
        control = sys.stdin.fileno()
        descriptors = [control, *self._tuns]
        while True:
            ready, _, _ = select.select(descriptors, [], [], self._timeout())
            for descriptor in ready:
                if descriptor != control:
                    self._read(descriptor)
                elif not self._serve(sys.stdin.readline()):
                    return
            self._write(time.monotonic_ns())

    def _timeout(self) -> float | None:
        due = self._queue.next_due()
        if due is None:
            return None
        return max(due - time.monotonic_ns() - _REST_NS, 0) / _NS_PER_S

    def _read(self, tun: int) -> None:
        source = self._tuns.index(tun)
        for _ in range(_BURST):
            try:
                packet = os.read(tun, namespaces.MTU)
            except BlockingIOError:
                return
            # Others are IPv6, of the kernel's own: no region has such an address.
            if packet[0] >> 4 == _IPV4 and packet[18] < self._count:
                self._queue.push(time.monotonic_ns(), source, packet[18], packet)

    def _write(self, now: int) -> None:
        for target, packet in self._queue.pop_due(now):
            try:
                os.write(self._tuns[target], packet)
            except OSError:
                self._refused += 1

    def _serve(self, line: str) -> bool:
        if not line:
            return False
        request: dict[str, Any] = json.loads(line)
        if "path" in request:
            source, target, fields = request["path"]
            self._queue.set_path(source, target, Path(**fields))
        regions = range(self._count)
        used = os.times()
        answer = {
            "cpu_s": used.user + used.system,
            "refused": self._refused,
            "paths": [[asdict(self._queue.counters(a, b)) for b in regions] for a in regions],
        }
        print(json.dumps(answer), flush=True)
        return True


def main() -> None:
    """Run a router."""
    router = Router(int(sys.argv[1]), int(sys.argv[2]))
    print("{}", flush=True)
    router.run()


if __name__ == "__main__":
    main()
