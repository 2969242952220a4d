"""Writer of a DataFrame without Spark: the shards that it sends to the tasks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from pyspark.sql.types import StructType

from spark_reader import writer
from spark_reader.options import SERVERS
from spark_reader.writer import ZiplogStreamWriter, ZiplogWriter
from ziplog.errors import ConfigError

COLUMNS = StructType().add("value", "binary")


class FakeLog:
    """Shard 1 recovers from the failure of a server."""

    def cluster(self) -> dict[str, Any]:
        states = {0: "live", 1: "recovering", 2: "left"}
        return {"cluster": "c", "shards": [{"id": at, "state": s} for at, s in states.items()]}


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer.ziplog, "connect", lambda *_, **__: nullcontext(FakeLog()))


def shards(kind: type[ZiplogWriter | ZiplogStreamWriter], **options: str) -> tuple[int, ...]:
    options |= {SERVERS: "127.0.0.1:7400"}
    return kind(options, COLUMNS, overwrite=False)._job._shards


def test_only_writes_that_may_be_repeated_use_absent_shards() -> None:
    assert shards(ZiplogWriter) == (0,)
    assert shards(ZiplogWriter, queryId="q", batchId="0") == (0, 1)
    assert shards(ZiplogStreamWriter) == (0, 1)


def test_a_write_waits_for_the_shard_that_the_policy_names() -> None:
    assert shards(ZiplogWriter, policy="1") == (0, 1)
    with pytest.raises(ConfigError, match="policy is 2; it must be a shard that takes records"):
        shards(ZiplogWriter, policy="2")
