"""Pipeline run from end to end: the feed, the log, Spark's answers, the stream that is killed.

Rule: expected answers are computed from the file of flights only, independently of all results.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from metrics.setup import Progress
from metrics.spark import session

from spark_pipeline import answers, feed, live, load, queries
from ziplog.demo import flights
from ziplog.local import Cluster

if TYPE_CHECKING:
    from pathlib import Path

    from spark_pipeline.answers import Rows
    from ziplog.demo.flights import Event

#: Events that are cut by key at once: some six days.
_STRETCH: Final = 16_384
#: Approximate number of micro-batches, and the one (from 0) in which the stream is killed.
_BATCHES: Final = 10
_KILLED_IN: Final = 4
#: The questions to the whole table, in the order in which they are asked.
_QUESTIONS: Final = ("delays", "sessions", "lost_legs", "anomalies", "totals")


class Plan(NamedTuple):
    """Settings of a run."""

    events: int
    shards: int = 2
    f: int = 1
    clients: int = 2
    cores: int = 2
    held_back: int = 1000
    seed: int = 1


class Answered(NamedTuple):
    """One question's answer."""

    rows: Rows
    #: The difference from the expected answer, or "".
    fault: str
    #: Seconds that Spark took, reading the log included; and plain Python.
    spark_s: float
    python_s: float


class Streamed(NamedTuple):
    """Result of the stream."""

    killed: live.Killed
    #: Start times of the first and the second process.
    began: tuple[float, float]
    #: (seconds since 1970, events) after each micro-batch.
    steps: list[tuple[float, int]]
    fault: str


class Outcome(NamedTuple):
    """Result of a run."""

    plan: Plan
    payload_bytes: int
    insert_s: float
    answers: dict[str, Answered]
    streamed: Streamed

    @property
    def is_equal(self) -> bool:
        """Whether every answer equals the expected one."""
        return not any(
            [self.streamed.fault, *(answered.fault for answered in self.answers.values())]
        )


def run(directory: Path, plan: Plan) -> Outcome:
    """Run the pipeline in an empty directory.

    Raises:
        UnavailableError: the flights, pyspark or Java are not installed.
        RuntimeError: the stream failed or was not where it had to be.

    """
    progress = Progress("pipeline", len(_QUESTIONS) + 5)
    in_time = flights.events(flights.read(), plan.events)
    events = list(feed.held_back(in_time, plan.held_back, plan.seed))
    progress.step("feed")
    with Cluster(directory / "cluster", shards=plan.shards, f=plan.f, name="flights") as cluster:
        batches = list(feed.batches(events, _STRETCH))
        payload_bytes = sum(len(payload) for batch in batches for payload in batch.payloads)
        began = time.monotonic()
        load.insert(cluster.endpoint, batches, plan.clients)
        insert_s = time.monotonic() - began
        progress.step("inserts")
        answered = run_queries(cluster.endpoint, events, plan.cores, progress)
        expected = answers.totals(events)
        streamed = stream(cluster.endpoint, directory, payload_bytes, expected, progress)
    return Outcome(plan, payload_bytes, insert_s, answered, streamed)


def run_queries(
    bootstrap: str, events: list[Event], cores: int, progress: Progress
) -> dict[str, Answered]:
    """Run all Spark queries and compare; each reads the log again, up to one fixed end."""
    found: dict[str, Answered] = {}
    with session("flights", cores) as spark:
        records = (
            spark.read.format("ziplog")
            .schema(queries.COLUMNS)
            .option("ziplog.bootstrap.servers", bootstrap)
            .load()
        )
        table = queries.parsed(records)
        for name in ("keys", *_QUESTIONS):
            began = time.monotonic()
            query = getattr(queries, name)(records if name == "keys" else table)
            rows = queries.rows(query)
            answered = time.monotonic()
            expected = getattr(answers, name)(events)
            python_s = time.monotonic() - answered
            fault = answers.difference(expected, rows)
            found[name] = Answered(rows, fault, answered - began, python_s)
            progress.step(f"query {name}")
    return found


def stream(
    bootstrap: str, directory: Path, payload_bytes: int, expected: Rows, progress: Progress
) -> Streamed:
    """Start a stream, kill it in a micro-batch, and let another one continue to the end."""
    place = directory / "stream"
    place.mkdir()
    batch_bytes = str(payload_bytes // _BATCHES)
    began = time.time()
    with live.Stream(bootstrap, place, batch_bytes) as process:
        killed = process.kill_after_start(_KILLED_IN)
    progress.step("stream until it is killed")
    again = time.time()
    with live.Stream(bootstrap, place, batch_bytes) as process:
        process.wait()
    progress.step("stream to the end")
    found = live.answers(place)
    steps = [(answer.at, answer.events) for answer in found]
    fault = answers.difference(expected, live.final(place))
    return Streamed(killed, (began, again), steps, fault)
