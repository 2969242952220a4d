"""Bulk read benchmarks: computations and waits, without any process."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from spark_bench import cluster_setup, reading
from spark_bench.cluster_setup import Shape

if TYPE_CHECKING:
    from pathlib import Path


def test_only_sealed_segments_are_awaited(tmp_path: Path) -> None:
    for server, segments in (("shard-0-0", 3), ("shard-1-0", 1), ("mms-0", 0)):
        place = tmp_path / server / "segments"
        place.mkdir(parents=True)
        for number in range(segments):
            (place / f"{number:020}.seg").touch()
    first, second = sorted((tmp_path / "shard-0-0" / "segments").glob("*.seg"))[:2]
    first.with_suffix(".rows").touch()
    assert cluster_setup.without_rows(tmp_path) == [second]
    second.with_suffix(".rows").touch()
    cluster_setup.await_rows(tmp_path)


def test_missing_blocks_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "shard-0-0" / "segments"
    place.mkdir(parents=True)
    for number in range(2):
        (place / f"{number}.seg").touch()
    monkeypatch.setattr(cluster_setup, "_ROWS_S", 0.0)
    with pytest.raises(RuntimeError, match=r"no rows of .*0\.seg after 0 s"):
        cluster_setup.await_rows(tmp_path)


def test_ratios_are_of_rounds_and_not_of_medians() -> None:
    # The machine is three times slower in the second round: for both.
    seconds = {"parquet": [1.0, 3.0, 1.0], "servers": [2.0, 6.0, 2.0], "files": [0.5, 1.5, 4.0]}
    found = reading.summary(100, seconds)
    assert found["parquet"] == {"rows_per_s": 100, "to_parquet": 1}
    assert found["servers"] == {"rows_per_s": 50, "to_parquet": 0.5}
    assert found["files"]["to_parquet"] == 2


def test_measurements_scale() -> None:
    whole, tenth = (list(reading.all_shapes(scale)) for scale in (1.0, 0.1))
    assert {shape.shards for shape in whole} == {1, 2, 4}
    kinds = {
        (4096, "many", "random"), (100, "many", "random"), (100, "many", "words"),
        (100, "single", "random"),
    }  # fmt: skip
    assert {(shape.size, shape.how, shape.content) for shape in whole} == kinds
    assert min(shape.rows * shape.size for shape in whole) < 64 << 20, "less than a segment"
    assert [shape.rows // 10 for shape in whole] == [shape.rows for shape in tenth]
    assert max(shape.rows * shape.size for shape in whole) == 512 << 20


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "100 B, 2 shards"),
        ({"shards": 1, "how": "single"}, "100 B, 1 shard, one a call"),
        ({"shards": 1, "content": "words"}, "100 B, 1 shard, words"),
        ({"sealed": 0}, "100 B, not sealed"),
    ],
)
def test_a_point_is_named_by_its_differences(fields: dict[str, Any], name: str) -> None:
    point = Shape(10, 100, shards=2)._asdict() | {"sealed": 1, "segments": 2} | fields
    assert reading.label(point) == name


def test_values_of_words_are_half_as_long_when_compressed_and_random_ones_are_not() -> None:
    lengths = {}
    for content in ("random", "words"):
        drawn = cluster_setup.values(random.Random(1), 200, 4096, content)
        assert {len(value) for value in drawn} == {4096}
        assert len(set(drawn)) == 200
        lengths[content] = len(pa.compress(b"".join(drawn), codec="snappy"))
    assert lengths["random"] > 200 * 4096
    assert 0.4 < lengths["words"] / (200 * 4096) < 0.6
