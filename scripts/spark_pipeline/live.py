"""Streaming half of the pipeline: running sums, a stream that is killed, and its continuation.

Rule: the answer of a micro-batch replaces an earlier one with its number, so a repeated micro-batch
changes nothing. A stream is killed (SIGKILL, its JVM too) once it has planned a micro-batch: Spark
writes `offsets/N` in the checkpoint before the batch, and `commits/N` after it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import psutil

from spark_pipeline import queries

if TYPE_CHECKING:
    from typing import Self

    from pyspark.sql import DataFrame, SparkSession

    from spark_pipeline.answers import Rows

_SCRIPT: Final = Path(__file__).resolve().parents[1] / "delay_stream.py"
_POLL_S: Final = 0.005
#: Timeout for the progress of a stream, in seconds.
_TIMEOUT_S: Final = 300.0


class Answer(msgspec.Struct):
    """The answer of a stream after a micro-batch."""

    batch: int
    #: Seconds since 1970.
    at: float
    #: As in `spark_pipeline.answers.totals`.
    rows: list[tuple[str, str, int, int, int, int]]

    @property
    def events(self) -> int:
        """The number of events in it."""
        return sum(row[3] for row in self.rows)


class Killed(NamedTuple):
    """A killed stream."""

    #: The first micro-batch that the killed stream had not committed.
    batch: int
    #: Seconds since 1970.
    at: float


def follow(spark: SparkSession, bootstrap: str, directory: Path, batch_bytes: str) -> None:
    """Read from the checkpoint to the current end of the log, and write each answer to a file."""
    records = (
        spark.readStream.format("ziplog")
        .schema(queries.COLUMNS)
        .option("ziplog.bootstrap.servers", bootstrap)
        .option("maxBytesPerBatch", batch_bytes)
        .load()
    )

    def store(answer: DataFrame, batch: int) -> None:
        found = Answer(batch, time.time(), queries.rows(answer))
        path = directory / f"answer-{batch}.json"
        path.with_suffix(".new").write_bytes(msgspec.json.encode(found))
        path.with_suffix(".new").rename(path)

    query = (
        queries.totals(queries.parsed(records))
        .writeStream.outputMode("complete")
        .foreachBatch(store)
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def answers(directory: Path) -> list[Answer]:
    """Return the answers so far, in the order of the micro-batches."""
    paths = directory.glob("answer-*.json")
    found = [msgspec.json.decode(path.read_bytes(), type=Answer) for path in paths]
    return sorted(found, key=lambda answer: answer.batch)


def final(directory: Path) -> Rows:
    """Return the rows of the last answer."""
    return sorted(answers(directory)[-1].rows)


class Stream:
    """`scripts/delay_stream.py` as a process, from `with` on."""

    def __init__(self, bootstrap: str, directory: Path, batch_bytes: str) -> None:
        """Start the process.

        Args:
            bootstrap: the membership service.
            directory: an existing directory, with or without the checkpoint of an earlier stream.
            batch_bytes: the approximate size of a micro-batch.

        """
        self._checkpoint: Final = directory / "checkpoint"
        self._log: Final = directory / "stream.log"
        command = [sys.executable, str(_SCRIPT), bootstrap, str(directory)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--batch-bytes", batch_bytes],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End what still runs of it."""
        self._kill()

    def kill_after_start(self, batch: int) -> Killed:
        """Kill the process once micro-batch `batch` (from 0) or a later one has started.

        Raises:
            RuntimeError: the process ended before that, or the timeout passed.

        """
        until = time.monotonic() + _TIMEOUT_S
        while self._last("offsets") < batch:
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"micro-batch {batch} did not start; see {self._log}")
            time.sleep(_POLL_S)
        self._kill()
        # It may have committed that micro-batch before it was dead.
        return Killed(self._last("commits") + 1, time.time())

    def wait(self) -> None:
        """Wait until it has ended.

        Raises:
            RuntimeError: it failed.

        """
        if self._process.wait(_TIMEOUT_S) != 0:
            raise RuntimeError(f"the stream failed; see {self._log}")

    def _last(self, name: str) -> int:
        """Return the last micro-batch that is in a directory of the checkpoint, or -1."""
        names = (path.name for path in (self._checkpoint / name).glob("*"))
        return max((int(name) for name in names if name.isdecimal()), default=-1)

    def _kill(self) -> None:
        if self._process.poll() is not None:
            return
        own = psutil.Process(self._process.pid)
        family = [own, *own.children(recursive=True)]
        for process in family:
            # A child may end by itself, or with its parent, before its turn.
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(family[1:])
