"""The applications of examples/speculation have the same output three ways.

They read by a subscription, by a speculation, and behind an ordering layer (scripts/scalog).
"""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from scalog import gated
from scalog.layer import Layer
from speculation import fraud, intrusion, trading
from speculation.application import WAYS, Application, Former, Table
from speculation.command import feed, is_end

from ziplog import RID_GENESIS, Record, RecordId
from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.timeout(300)

APPLICATIONS: dict[str, tuple[Callable[[], Application], Any]] = {
    "intrusion": (lambda: intrusion.Intrusion(compute_ms=0), intrusion.records),
    "fraud": (lambda: fraud.Fraud(compute_ms=0), fraud.records),
    "trading": (lambda: trading.Trading(compute_ms=0), trading.records),
}
COUNT = 3000


@pytest.fixture
def cluster(tmp_path: Any) -> Iterator[Cluster]:
    with Cluster(tmp_path, shards=2) as running:
        yield running


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "fraud" else pytest.mark.nightly)
        for name in APPLICATIONS
    ],
)
def test_output_is_the_same_while_a_primary_dies(cluster: Cluster, name: str) -> None:
    application, records = APPLICATIONS[name]
    runs = {way: application() for way in (*WAYS, "gate")}
    with cluster.connect() as writer, cluster.connect() as reader:
        following = threading.Thread(
            target=WAYS["speculate"], args=(reader, runs["speculate"], RID_GENESIS, is_end)
        )
        following.start()
        given = list(records(COUNT, 1))
        feed_part(writer, given[: COUNT // 2])
        cluster.kill("shard-0-0")
        feed(writer, given[COUNT // 2 :], (0, 1))
        following.join()
        WAYS["subscribe"](reader, runs["subscribe"], RID_GENESIS, is_end)
    with (
        Layer(cluster.endpoint, 1, 1.0) as layer,
        gated.installed(layer.endpoints),
        cluster.connect() as reader,
    ):
        WAYS["subscribe"](reader, runs["gate"], RID_GENESIS, is_end)
    assert len(runs["subscribe"].outputs) > 2, "there is something to compare"
    for run in runs.values():
        assert run.outputs == runs["subscribe"].outputs
        assert run.table.dump() == runs["subscribe"].table.dump()


def feed_part(writer: Any, given: list[tuple[bytes, int | None]]) -> None:
    for payload, key in given:
        writer.insert_after(payload, shard=None if key is None else key % 2)


@pytest.mark.parametrize("name", APPLICATIONS)
def test_undo_restores_the_database_byte_for_byte(name: str) -> None:
    application, given = APPLICATIONS[name]
    made = application()
    records = [
        Record(RecordId(gsn, 0), payload, None, 0, 0)
        for gsn, (payload, _) in enumerate(given(COUNT, 2), 1)
    ]
    chance = random.Random(3)
    dumps, done = [made.table.dump()], []
    for start in range(0, COUNT, 100):
        done.append(
            list(zip(batch := records[start : start + 100], made.apply(batch), strict=True))
        )
        dumps.append(made.table.dump())
        for _ in range(min(chance.randrange(3), len(done))):
            for record, effect in reversed(done.pop()):
                made.undo(record, effect)
            dumps.pop()
            assert made.table.dump() == dumps[-1]
    while done:
        for record, effect in reversed(done.pop()):
            made.undo(record, effect)
    assert made.table.dump() == dumps[0]


def test_a_batch_that_cannot_be_read_changes_nothing() -> None:
    made = trading.Trading(compute_ms=0)
    before = made.table.dump()
    payloads = [payload for payload, _ in trading.records(50, 4)] + [b"no price"]
    records = [Record(RecordId(n, 0), text, None, 0, 0) for n, text in enumerate(payloads, 1)]
    with pytest.raises(msgspec.MsgspecError):
        made.apply(records)
    assert made.table.dump() == before


def test_a_write_reports_what_it_replaced() -> None:
    table = Table("a", "b")
    assert table.put(1, 2, 0.5) == Former(1, None)
    assert table.put(1, 3, 0.25) == Former(1, (2, 0.5))
    assert table.get(1) == (3, 0.25)
