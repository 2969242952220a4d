"""Cluster of a measurement, in a temporary folder, and the progress of long ones."""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def cluster(shards: int = 1, f: int = 1, **options: Any) -> Iterator[Cluster]:
    """Run a cluster in a temporary folder; `options`: further ones of `Cluster`."""
    with (
        tempfile.TemporaryDirectory(prefix="ziplog-bench-") as folder,
        Cluster(f"{folder}/log", shards=shards, f=f, **options) as running,
    ):
        yield running


def progress(what: Any, name: str) -> Iterator[Any]:
    """Go through `what` (or a range) with a progress bar on a terminal."""
    from rich.progress import track  # noqa: PLC0415  only a terminal needs it

    items = list(range(what)) if isinstance(what, int) else what
    return iter(track(items, name, disable=not sys.stderr.isatty(), transient=True))


class Progress:
    """Progress on stderr, with an estimate of the remaining time."""

    def __init__(self, name: str, steps: int, seconds: float) -> None:
        """Report the beginning; `seconds`: about how long it will take."""
        self._name, self._steps, self._done = name, steps, 0
        self._began = time.monotonic()
        self.report(f"{steps} steps, about {_minutes(seconds)}")

    def step(self, text: str) -> None:
        """Report that one more step is done."""
        self._done += 1
        passed = time.monotonic() - self._began
        left = passed / self._done * (self._steps - self._done)
        self.report(f"{self._done}/{self._steps} {text}; about {_minutes(left)} left")

    def report(self, text: str) -> None:
        """Report something else."""
        print(f"{self._name}: {text}", file=sys.stderr, flush=True)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"
