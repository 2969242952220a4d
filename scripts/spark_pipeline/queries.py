"""Spark queries of the pipeline, on a table of events.

Each function takes the DataFrame of `parsed`, and returns one with the fields of the rows in
`spark_pipeline.answers` as columns. `offset` is the position in the log's total order, so windows
are ordered by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from spark_pipeline.answers import GAP_MINUTES, LATE_MINUTES, ZONE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, WindowSpec

    from spark_pipeline.answers import Rows

#: The projection of the load.
COLUMNS: Final = "offset bigint, partition int, key string, value string"
_EVENT: Final = (
    "event string, time string, aircraft string, leg bigint, flight string,"
    " origin string, dest string, delay bigint"
)


def parsed(records: DataFrame) -> DataFrame:
    """Return the events of a table with the columns `offset` and `value`."""
    fields = F.from_json("value", _EVENT).alias("of")
    seconds = F.unix_timestamp(F.to_timestamp("time", "yyyy-MM-dd'T'HH:mmX"))
    planned = F.timestamp_seconds((F.col("minute") - F.coalesce("delay", F.lit(0))) * 60)
    return (
        records.select("offset", fields)
        .select("offset", "of.*")
        .withColumn("minute", F.floor(seconds / 60))
        .withColumn("carrier", F.substring("flight", 1, 2))
        .withColumn("hour", F.hour(F.from_utc_timestamp(planned, ZONE)))
    )


def keys(records: DataFrame) -> DataFrame:
    """Ask of the records how many each key has, and in how many shards."""
    shards = F.countDistinct("partition")
    return records.groupBy("key").agg(F.count("*").alias("records"), shards.alias("shards"))


def delays(events: DataFrame) -> DataFrame:
    """Ask for the delays of each carrier and planned hour."""
    late = F.sum((F.col("delay") > LATE_MINUTES).cast("bigint"))
    return (
        events.where("event = 'departed'")
        .groupBy("carrier", "hour")
        .agg(
            F.count("*").alias("departed"),
            F.sum("delay").alias("minutes"),
            late.alias("late"),
            F.expr("percentile_disc(0.5) WITHIN GROUP (ORDER BY delay)").cast("bigint"),
            F.expr("percentile_disc(0.9) WITHIN GROUP (ORDER BY delay)").cast("bigint"),
            F.max("delay").alias("worst"),
        )
    )


def sessions(events: DataFrame, gap: int = GAP_MINUTES) -> DataFrame:
    """Return each aircraft's runs of events without a gap of more than `gap` minutes."""
    legs = Window.partitionBy("aircraft").orderBy("leg")
    begins = F.col("minute") - F.lag("minute").over(legs) > gap
    return (
        events.withColumn("begins", F.coalesce(begins, F.lit(False)).cast("int"))
        .withColumn("session", F.sum("begins").over(legs))
        .groupBy("aircraft", "session")
        .agg(
            F.min("leg").alias("first_leg"),
            F.max("leg").alias("last_leg"),
            F.min_by("minute", "leg").alias("begins"),
            F.max_by("minute", "leg").alias("ends"),
            F.sum((F.col("event") == "departed").cast("bigint")).alias("departures"),
        )
        .drop("session")
    )


def lost_legs(events: DataFrame) -> DataFrame:
    """Ask how often aircraft left from another airport than they had arrived at."""
    return (
        _with_last_move(events)
        .where("event = 'departed' AND last.event = 'arrived' AND last.dest <> origin")
        .groupBy(F.col("last.dest").alias("arrived"), F.col("origin").alias("departed"))
        .agg(F.count("*").alias("times"))
    )


def anomalies(events: DataFrame) -> DataFrame:
    """Ask for what cannot be, going by the order of the log."""
    departed = F.coalesce(F.col("last.event") == "departed", F.lit(False))
    same = F.coalesce(F.col("last.flight") == F.col("flight"), F.lit(False))
    kinds = F.array(
        F.when(F.col("leg") < F.max("leg").over(_before()), "late"),
        F.when((F.col("event") == "departed") & departed, "no arrival"),
        F.when((F.col("event") == "arrived") & ~(departed & same), "no departure"),
    )
    judged = _with_last_move(events).withColumn("kinds", F.array_compact(kinds))
    return judged.select(F.explode("kinds").alias("kind"), "aircraft", "leg")


def _with_last_move(events: DataFrame) -> DataFrame:
    """Return the events, each with its aircraft's last departure or arrival before it."""
    is_move = F.col("event").isin("departed", "arrived")
    move = F.when(is_move, F.struct("event", "flight", "dest"))
    return events.withColumn("last", F.last(move, ignorenulls=True).over(_before()))


def _before() -> WindowSpec:
    """Return the window of all earlier events of the aircraft, in log order."""
    in_the_log = Window.partitionBy("aircraft").orderBy("offset")
    return in_the_log.rowsBetween(Window.unboundedPreceding, -1)


def totals(events: DataFrame) -> DataFrame:
    """Return the sums over all events; a stream can compute them too."""
    return events.groupBy("event", "carrier", "hour").agg(
        F.count("*").alias("events"),
        F.sum("leg").alias("legs"),
        F.sum(F.coalesce("delay", F.lit(0))).alias("minutes"),
    )


def rows(answer: DataFrame) -> Rows:
    """Run a query and return its rows in order."""
    table = answer.toArrow()
    columns: list[Any] = [column.to_pylist() for column in table.columns]
    return sorted(zip(*columns, strict=True))
