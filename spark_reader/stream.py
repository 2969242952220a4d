"""`spark.readStream`: the log as a micro-batch source (docs/spark.md, section 2).

Rule: the reader opens a session only when it needs one, because Spark creates readers in several
processes and sends them to tasks. `spark_reader.admission` sizes the micro-batches.
Invariant: offsets never decrease, and never exceed the end of the log at the time of the request.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    SupportsTriggerAvailableNow,
)

from spark_reader import admission
from spark_reader.clean_errors import without_traceback
from spark_reader.reading import require_cluster
from spark_reader.sources import source_of
from spark_reader.tasks import Share, plan_tasks, read_task

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import InputPartition

    from spark_reader.options import Options
    from spark_reader.planning import Piece
    from spark_reader.reading import Session
    from spark_reader.schema import Field
    from ziplog.errors import ZiplogError

#: Minimum interval between requests for the tail, in seconds; Spark polls about 80 times a second.
_LATEST_INTERVAL_S: Final = 0.05
#: Maximum number of attempts to shorten a range to the byte limit.
_MAX_ROUNDS: Final = 4


class ZiplogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Stream reader: plans and reads micro-batches."""

    def __init__(self, options: Options, fields: Sequence[Field]) -> None:
        self._options: Final = options
        self._fields: Final = tuple(fields)
        self._session: Session | None = None
        self._initial: int | None = None
        #: The end of the run (Trigger.AvailableNow).
        self._target: int | None = None
        self._latest = 0
        self._latest_at = -1.0

    @without_traceback
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  Spark's name
        """Return the start of a query without a checkpoint; repeated calls return the same."""
        session = self._open_session()
        if self._initial is None:
            if self._options.starts_at_latest:
                self._initial = session.latest_decided()
            else:
                self._initial = session.pin().start
        return admission.offset(self._initial, cluster=session.cluster_id())

    @without_traceback
    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the size limit of a micro-batch."""
        limit = self._options.max_bytes_per_batch
        return ReadAllAvailable() if limit is None else ReadMaxBytes(limit)

    @without_traceback
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """End this run at the current end of the log."""
        self._target = self._open_session().latest()

    @without_traceback
    def latestOffset(  # noqa: N802
        self, start: dict[str, Any], limit: ReadLimit
    ) -> dict[str, Any]:
        """Return the end of the next micro-batch with its plan; `start`: no new rows."""
        begin = admission.position(start)
        session = self._session_of(start)
        end = self._end(begin)
        if end <= begin:
            return start
        max_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        stop, pieces = self._admit(begin, end, max_bytes)
        return admission.offset(stop, plan_tasks(self._options, pieces), session.cluster_id())

    def _end(self, begin: int) -> int:
        """Return an end of the log that is later than `begin`, or else the present one.

        `processAllAvailable` requires this: it ends when a response contains nothing new.
        """
        if self._target is not None:
            return self._target
        wait_s = self._latest_at + _LATEST_INTERVAL_S - time.monotonic()
        if wait_s > 0 and self._latest <= begin:
            time.sleep(wait_s)
        if wait_s <= 0 or self._latest <= begin:
            self._latest = max(self._latest, self._open_session().latest())
            self._latest_at = time.monotonic()
        return self._latest

    def _admit(self, start: int, stop: int, max_bytes: int | None) -> tuple[int, list[Piece]]:
        session = self._open_session()
        pieces = session.pieces_of(start, stop)
        for _ in range(_MAX_ROUNDS if max_bytes is not None else 0):
            assert max_bytes is not None
            if not pieces:
                # The whole range was trimmed meanwhile, and `failOnDataLoss` is false.
                break
            end = admission.admissible_stop(pieces, max_bytes)
            if end == stop:
                break
            stop, pieces = end, session.pieces_of(start, end)
        return stop, pieces

    @without_traceback
    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the last known end of the log, for the query's progress report."""
        return admission.offset(self._latest) if self._latest else None

    @without_traceback
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Share]:
        """Return the plan of a micro-batch, which its end offset contains."""
        if start == end:
            return []
        # The plan also defines the start. A query that starts at `latest`, and that is restarted
        # during its first micro-batch, gets another start offset.
        session = self._session_of(end)
        source, topic = session.for_tasks(), session.topic()
        return [
            Share(task_index, pieces, source, topic)
            for task_index, pieces in enumerate(admission.tasks(end))
        ]

    @without_traceback
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the share of one task, in batches."""
        yield from read_task(self._options, self._fields, partition)

    def stop(self) -> None:
        """Close the session."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _session_of(self, offset: dict[str, Any]) -> Session:
        """Return the session; refuse an offset of another cluster."""
        session = self._open_session()
        require_cluster("checkpoint", admission.cluster(offset), session.cluster_id())
        return session

    def _open_session(self) -> Session:
        if self._session is None:
            self._session = source_of(self._options).open()
        return self._session


class RefusedStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader of a stream with invalid options or columns; each request of Spark raises the error.

    Spark 4.3 hides an error of `streamReader` behind an UnboundLocalError: it then stops a reader
    that it does not have.
    """

    def __init__(self, error: ZiplogError) -> None:
        self._error: Final = error

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Refuse."""
        self._refuse()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Refuse."""
        self._refuse()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Refuse."""
        self._refuse()

    def latestOffset(  # noqa: N802
        self, _start: dict[str, Any], _limit: ReadLimit
    ) -> dict[str, Any]:
        """Refuse."""
        self._refuse()

    def partitions(self, _start: dict[str, Any], _end: dict[str, Any]) -> list[InputPartition]:
        """Refuse."""
        self._refuse()

    def read(self, _partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Refuse."""
        self._refuse()

    @without_traceback
    def _refuse(self) -> NoReturn:
        raise self._error
