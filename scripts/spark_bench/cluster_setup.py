"""Cluster of a bulk read benchmark: filled by a few client processes, with its blocks built.

Rule: values are random bytes, which do not compress, or words, which Parquet compresses by half;
each process has its own seed. The setup waits until every sealed segment has its blocks, so results
do not depend on the speed of the archives. The files are copies from a clean stop of the cluster;
afterwards it runs again, with other files.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from metrics.workers import Workers

import ziplog
from ziplog import policy
from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

#: Insert rows in batches, or one per call.
How = Literal["many", "single"]
#: Content of a value.
Content = Literal["random", "words"]

PROCESSES: Final = 2
#: One call of `insert_many`, and what comes of one draw of bytes.
_CALL_BYTES: Final = 4 << 20
_TIMEOUT_S: Final = 120.0
_POLL_S: Final = 0.1
#: Archives build blocks only while the machine is idle.
_ROWS_S: Final = 600.0
#: Vocabulary size, and size in bytes of the text from which values of words are cut.
_WORDS: Final = 1000
_TEXT_BYTES: Final = 1 << 20


class Shape(NamedTuple):
    """Shape of the log."""

    rows: int
    #: Bytes of a value.
    size: int
    shards: int = 1
    f: int = 0
    how: How = "many"
    content: Content = "random"


class BenchSetup(NamedTuple):
    """The running cluster and its files."""

    shape: Shape
    cluster: Cluster
    #: Copy of the data directory of the stopped cluster.
    files: Path
    #: Segments of all shards (of one server each), and how many of them have rows.
    segments: int
    sealed: int
    #: Bytes of all files of these segments.
    segment_bytes: int
    insert_s: float

    @property
    def parquet(self) -> Path:
        """The directory for the same rows as Parquet."""
        return self.files.parent / "parquet"


@contextmanager
def bench_setup(shape: Shape) -> Iterator[BenchSetup]:
    """Run a cluster with the rows of a shape.

    Raises:
        RuntimeError: an archive does not build its blocks.

    """
    with tempfile.TemporaryDirectory(prefix="ziplog-bulk-") as folder:
        directory, files = Path(folder) / "log", Path(folder) / "files"
        with Cluster(directory, shards=shape.shards, f=shape.f, name="bench") as cluster:
            began = time.monotonic()
            fill(cluster.endpoint, shape)
            insert_s = time.monotonic() - began
            await_rows(directory)
        shutil.copytree(directory, files, copy_function=_link_sealed)
        with Cluster(directory) as cluster:
            primaries = [
                files / shard.replicas[0].name / "segments" for shard in cluster.config.shards
            ]
            sealed = sum(len(list(place.glob("*.rows"))) for place in primaries)
            segments = sum(len(list(place.glob("*.seg"))) for place in primaries)
            size = sum(path.stat().st_size for place in primaries for path in place.iterdir())
            yield BenchSetup(shape, cluster, files, segments, sealed, size, insert_s)


def _link_sealed(source: str, target: str) -> None:
    """Copy a file; link files that never change."""
    if Path(source).with_suffix(".rows").exists():
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def fill(bootstrap: str, shape: Shape) -> None:
    """Insert the rows, from a few processes, round robin over all shards."""
    share, rest = divmod(shape.rows, PROCESSES)
    shares = [shape._replace(rows=share + (number < rest)) for number in range(PROCESSES)]
    plans = [(bootstrap, own, number) for number, own in enumerate(shares)]
    with Workers(_insert, plans) as workers:
        workers.receive()


def await_rows(directory: Path) -> None:
    """Wait until every segment of every server but the last has its rows."""
    until = time.monotonic() + _ROWS_S
    while missing := without_rows(directory):
        if time.monotonic() > until:
            raise RuntimeError(f"no rows of {missing[0]} after {_ROWS_S:g} s")
        time.sleep(_POLL_S)


def without_rows(directory: Path) -> list[Path]:
    """Return the segments that have no rows and should have them."""
    return [
        segment
        for place in directory.glob("*/segments")
        for segment in sorted(place.glob("*.seg"))[:-1]
        if not segment.with_suffix(".rows").exists()
    ]


def _insert(bootstrap: str, shape: Shape, seed: int, pipe: Connection) -> None:
    """Insert the rows of a shape (in a client process)."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    call = max(1, _CALL_BYTES // shape.size)
    with ziplog.connect(bootstrap, policy=policy.round_robin(), timeout=_TIMEOUT_S) as log:
        for begin in range(0, shape.rows, call):
            drawn = values(rng, min(call, shape.rows - begin), shape.size, shape.content)
            if shape.how == "many":
                log.insert_many(drawn)
            else:
                for value in drawn:
                    log.insert_nowait(value)
                log.flush()
    pipe.send("done")


def values(rng: random.Random, count: int, size: int, content: Content) -> list[bytes]:
    """Draw `count` values of `size` bytes."""
    if content == "random":
        data = rng.randbytes(count * size)
        return [data[at : at + size] for at in range(0, len(data), size)]
    words = [rng.randbytes(rng.randrange(1, 5)).hex().encode() for _ in range(_WORDS)]
    data = b" ".join(rng.choices(words, k=_TEXT_BYTES // 4))[:_TEXT_BYTES]
    begins = (rng.randrange(len(data) - size) for _ in range(count))
    return [data[at : at + size] for at in begins]
