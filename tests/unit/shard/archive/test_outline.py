"""Outline of a range: the store's estimate of its bytes, and the replica's answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.memory_store import MemoryStore
from tests.properties import examples
from tests.unit.shard.archive.logs import end_of, fill, log, open_store
from tests.world import CLUSTER, MS, calm_world, first_lease, insert, probe
from ziplog import wire
from ziplog.core.entries import Place, Skip
from ziplog.core.node import ArchiveOpened

if TYPE_CHECKING:
    from pathlib import Path

    from ziplog.wire import Step

ENTRIES = log(200)
END = end_of(ENTRIES)


def check(steps: list[Step], start: int, stop: int, most: int) -> None:
    """Check that stretches increase within the range, up to its end or the log's."""
    stops = [step.stop for step in steps]
    assert stops == sorted(set(stops))
    assert all(start < end <= stop for end in stops)
    assert all(step.size > 0 for step in steps)
    assert len(steps) <= most
    if start < min(stop, END):
        assert stops[-1] == min(stop, END)
    else:
        assert steps == []
    ends = {end_of([e]) for e in ENTRIES if isinstance(e.decision, Place | Skip)}
    assert set(stops) <= ends | {stop}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("ziplog.segments.segment.BLOCK_BYTES", 600)
    store = open_store(tmp_path / "segments", segment_bytes=5_000)
    fill(store, ENTRIES)
    yield store
    store.close()


@examples(80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 1500),
    st.one_of(st.integers(1, 1500), st.just(2**63 - 1)),
    st.sampled_from([4, 50, 4096]),
)
def test_any_range(
    store: Any, monkeypatch: pytest.MonkeyPatch, start: int, stop: int, most: int
) -> None:
    stop = max(stop, start + 1)
    with monkeypatch.context() as patch:
        patch.setattr("shard.storage.segment_reader.MAX_STEPS", most)
        check(store.outline(start, stop), start, stop, most)
        memory = MemoryStore()
        for entry in ENTRIES:
            memory.append(entry)
        patch.setattr("ziplog.wire.MAX_STEPS", most)
        check(memory.outline(start, stop), start, stop, most)


def test_sizes_add_up_and_are_about_equal(store: Any) -> None:
    steps = store.outline(1, END)
    assert sum(step.size for step in steps) == sum(s.size for s in store._segments)
    assert len(steps) > 30
    # Blocks of about 600 bytes: plus an entry, or the ends of a segment.
    assert all(step.size < 2_000 for step in steps)
    # A part of the range has about the same part of the size.
    part = store.outline(END // 4, END // 2)
    assert sum(step.size for step in part) == pytest.approx(sum(s.size for s in steps) / 4, rel=0.2)


def test_what_is_not_flushed_counts(tmp_path: Path) -> None:
    store = open_store(tmp_path / "other")
    for entry in ENTRIES[:3]:
        store.append(entry)
    (step,) = store.outline(1, 2**60)
    assert step.stop == end_of(ENTRIES[:3])
    store.close()


@pytest.mark.parametrize("count", range(1, 13))
def test_marks_behind_the_last_block_are_no_stretch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr("ziplog.segments.segment.BLOCK_BYTES", 600)
    store = open_store(tmp_path / "marked", segment_bytes=10_000)
    fill(store, ENTRIES[:count])
    steps = store.outline(1, 2**60)
    assert [step.stop for step in steps] == sorted({step.stop for step in steps})
    assert steps[-1].stop == end_of(ENTRIES[:count])
    assert sum(step.size for step in steps) == sum(s.size for s in store._segments)
    store.close()


def test_every_replica_answers_with_what_it_stores_and_its_archive() -> None:
    world = calm_world(lease=first_lease(1, epoch_ms=10_000))
    for seq in (1, 2, 3):
        message = insert(seq, size=1000)
        for server in (0, 1):
            world.send("c", f"shard-0-{server}", message)
        world.run(2 * MS)
    ports = {"shard-0-0": 0, "shard-0-1": 40_000}
    world.nodes["shard-0-1"].step(ArchiveOpened(40_000), world.now)

    def ask(name: str, cluster: int = CLUSTER, stop: int = 2**62) -> list[wire.Outlined]:
        before = len(probe(world).of(wire.Outlined))
        world.send("c", name, wire.Outline(cluster, 0, 1, 9, 1, stop))
        world.run(2 * MS)
        return probe(world).of(wire.Outlined)[before:]

    for name, port in ports.items():
        (answer,) = ask(name)
        assert (answer.request, answer.trim, answer.archive_port) == (9, 0, port)
        assert 3000 < sum(step.size for step in answer.steps) < 4000
        assert answer.server == int(name[-1])
        assert world.nodes[name].state.store.sealed_below == 2**62
        (part,) = ask(name, stop=2)
        assert [step.stop for step in part.steps] == [2]
        assert ask(name, cluster=CLUSTER + 1) == []
    world.nodes["shard-0-1"].step(ArchiveOpened(0), world.now)
    assert ask("shard-0-1")[0].archive_port == 0


def test_of_a_single_position_only_its_block_counts(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shard.storage.segment_reader.MAX_STEPS", 2)
    for gsn in range(1, END, 7):
        (step,) = store.outline(gsn, gsn + 1)
        assert step.size < 1_500
