"""Watermark records hold the leases and placements that a rebuild needs (protocol, section 16)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from shard import holdings
from shard.storage.data_directory import DataDirectory
from shard.storage.segment_store import SegmentStore
from tests.memory_store import MemoryStore
from tests.unit.shard.draining import (
    BACKUP,
    LEASE,
    PRIMARY,
    WITHOUT,
    announce,
    last_beat,
    replica,
    send,
    start,
)
from tests.world import CLUSTER, MS, S, insert, placements
from ziplog import wire
from ziplog.core.entries import Place
from ziplog.core.view import MAX_UNRECORDED, NO_DIGEST, Lease, LeaseRun, Member, run_of
from ziplog.errors import UnavailableError
from ziplog.runtime import level_file
from ziplog.segments.entry import Entry, WatermarkRecord

if TYPE_CHECKING:
    from pathlib import Path

    from tests.world import World

NEXT = LEASE.following()
BOTH = (Member(0, 1, 1), Member(1, 1, 1))


def marks(world: World, name: str) -> list[WatermarkRecord]:
    return [
        entry.decision
        for entry in store(world, name).history
        if isinstance(entry.decision, WatermarkRecord)
    ]


def store(world: World, name: str) -> MemoryStore:
    found = replica(world, name).state.store
    assert isinstance(found, MemoryStore)
    return found


def recorded(world: World, name: str) -> list[int]:
    """Return the last numbers of the recorded runs, in the order of the records."""
    return [run.last.number for mark in marks(world, name) for run in mark.leases]


@pytest.mark.parametrize("name", [PRIMARY, BACKUP])
def test_lease_and_placement_are_recorded_before_the_first_entry_of_the_lease(name: str) -> None:
    world = start()
    send(world, insert(1), run=20 * MS)
    first, *_ = store(world, name).history
    assert isinstance(first.decision, WatermarkRecord)
    assert first.decision.leases == [run_of(LEASE)]
    assert first.decision.placement is not None
    assert first.decision.placement.state == "live"
    announce(world, "live", NEXT)
    send(world, insert(2, after=NEXT.base), run=20 * MS)
    history = store(world, name).history
    record = next(
        i for i, e in enumerate(history)
        if isinstance(e.decision, WatermarkRecord) and e.decision.lease == NEXT.number
    )  # fmt: skip
    place = next(
        i for i, e in enumerate(history)
        if isinstance(e.decision, Place) and e.decision.gsns[0] >= NEXT.base
    )  # fmt: skip
    assert record < place


def test_each_lease_is_recorded_once() -> None:
    world = start()
    announce(world, "live", NEXT, run=S)
    announce(world, "live", run=S)
    assert recorded(world, PRIMARY) == [1, 2]


def test_removal_and_its_limit_are_recorded() -> None:
    world = start()
    announce(world, "leaving")
    assert marks(world, PRIMARY)[-1].placement is not None
    assert marks(world, PRIMARY)[-1].placement.state == "leaving"  # type: ignore[union-attr]
    replica(world, PRIMARY).state.clock.left_at = LEASE.stop
    announce(world, "leaving", WITHOUT)
    assert marks(world, PRIMARY)[-1].limit == LEASE.stop


def test_lease_far_above_the_last_one_on_disk_is_recorded_before_it_is_held() -> None:
    world = start()
    far = replace(NEXT, number=1 + MAX_UNRECORDED + 1)
    runs = LeaseRun(NEXT, MAX_UNRECORDED + 1, far)
    store(world, PRIMARY).backlog_bytes = 1  # nothing is flushed
    announce_runs(world, runs)
    assert last_held(world) == 1
    assert marks(world, PRIMARY)[-1].lease == far.number
    announce_runs(world, runs)
    assert last_held(world) == 1, "the record is not on the disk"
    store(world, PRIMARY).backlog_bytes = 0
    announce_runs(world, runs)
    assert last_held(world) == far.number
    world.run(2 * S)
    assert last_beat(world, PRIMARY).lease == far.number


def announce_runs(world: World, *runs: LeaseRun) -> None:
    message = wire.LeaseAnnounced(CLUSTER, list(runs), 0, placements(2, 1), 0)
    world.send("mms-0", PRIMARY, message, reply=True)
    world.run(5 * MS)


def last_held(world: World) -> int:
    last = replica(world, PRIMARY).state.clock.last
    assert last is not None
    return last.number


# --- files ---


def mark(frontier: int, *leases: Lease) -> Entry:
    runs = [run_of(lease) for lease in leases]
    number = runs[-1].last.number if runs else 0
    record = WatermarkRecord(CLUSTER, 0, frontier, 0, number, NO_DIGEST, runs)
    return Entry(0, 1, record)


def place(fseq: int, gsn: int) -> Entry:
    return Entry(fseq, 1, Place(b"c" * 16, fseq, 1, 0, [gsn], 0, b"x" * 200))


def written(directory: Path, *entries: Entry, segment_bytes: int = 1 << 20) -> SegmentStore:
    opened = SegmentStore.open(directory / "segments", segment_bytes=segment_bytes)
    for entry in entries:
        opened.append(entry)
    assert opened.close()
    return opened


def test_each_file_begins_with_the_leases_above_the_frontier(tmp_path: Path) -> None:
    """So a trim that deletes the first files deletes no lease that is needed."""
    server = DataDirectory(tmp_path / "shard-0-0", "c", "shard-0-0")
    third = NEXT.following(BOTH[:1])
    opened = SegmentStore.open(server.segments, segment_bytes=400)
    opened.append(mark(1, LEASE))
    opened.append(mark(LEASE.stop, NEXT, third))
    opened.append(mark(LEASE.stop))
    for number in range(1, 8):
        opened.append(place(number, NEXT.base + number))
    opened.append(mark(NEXT.base))
    opened.trim(NEXT.base + 5)
    assert opened.close()
    server.close()
    found = holdings.read(tmp_path / "shard-0-0", "c", "shard-0-0", wire=1)
    names = [path.name for path in (tmp_path / "shard-0-0" / "segments").glob("*.seg")]
    assert not any(name.startswith("00000001-") for name in names)
    assert [run.last.number for run in found.runs] == [2, 3]


def test_holdings_describe_a_crashed_server(tmp_path: Path) -> None:
    path = tmp_path / "shard-0-0"
    server = DataDirectory(path, "c", "shard-0-0")
    server.delete_checkpoint()
    written(path, mark(1, LEASE), place(1, 3), place(2, 5), mark(4, NEXT))
    with pytest.raises(UnavailableError, match="in use by process"):
        holdings.read(path, "c", "shard-0-0", wire=1)
    server.close()
    found = holdings.read(path, "c", "shard-0-0", wire=2)
    assert (found.wire, found.level) == (2, "memory")
    assert (found.view, found.last_view, found.lease) == (0, 1, 2)
    assert (found.end, found.records_end, found.cluster) == (6, 6, CLUSTER)
    assert [run.count for run in found.runs] == [2]
    level_file.record(path, "disk")
    assert holdings.read(path, "c", "shard-0-0", wire=1).level == "disk"


def test_missing_directory_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="there is no data directory"):
        holdings.read(tmp_path / "shard-0-0", "c", "shard-0-0", wire=1)
    assert not list(tmp_path.iterdir())
