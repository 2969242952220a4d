"""Cluster of a measurement, in a temporary folder, and the progress of long ones."""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@contextmanager
def cluster(shards: int = 1, **options: Any) -> Iterator[Cluster]:
    """Run a cluster in a temporary folder; `options`: further ones of `Cluster`."""
    with (
        tempfile.TemporaryDirectory(prefix="ziplog-bench-") as folder,
        Cluster(f"{folder}/log", shards=shards, **options) as running,
    ):
        yield running


class Progress:
    """Progress on stderr, with an estimate of the remaining time."""

    def __init__(self, name: str, steps: int) -> None:
        """Begin; `steps`: their number."""
        self._name, self._steps, self._done = name, steps, 0
        self._began = time.monotonic()

    def step(self, text: str) -> None:
        """Report that one more step is done."""
        self._done += 1
        passed = time.monotonic() - self._began
        left = passed / self._done * (self._steps - self._done)
        duration = f"{left / 60:.1f} min" if left >= 60 else f"{left:.0f} s"
        self.report(f"{self._done}/{self._steps} {text}; about {duration} left")

    def report(self, text: str) -> None:
        """Report something else."""
        print(f"{self._name}: {text}", file=sys.stderr, flush=True)


def progress(items: Sequence[Any], name: str) -> Iterator[Any]:
    """Go through items, and report each when it is done."""
    steps = Progress(name, len(items))
    for item in items:
        yield item
        steps.step(str(item))
