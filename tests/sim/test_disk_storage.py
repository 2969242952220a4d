"""The production classes for files on a simulated disk: their guarantees after any power cut.

Power cuts happen between operations and within one: the disk is copied before every relevant call,
and each copy suffers a power cut.
"""

from __future__ import annotations

import copy
import errno
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

import shard.storage.data_directory
import shard.storage.flusher
import shard.storage.segment_files
import shard.storage.segment_rewrite
import tests.unit.shard.logs
import ziplog.segments.durable_files
import ziplog.segments.segment
from shard.storage.data_directory import DataDirectory
from shard.storage.store import FullError
from tests.checkpoints import consume
from tests.integration.shard.test_segment_store_cut import CHANGES, after, check_image, grown
from tests.logged_events import captured_events
from tests.sim.disks import sync
from tests.simulator.disk import Disk, installed
from tests.unit.shard import test_segment_rewrite as repairs
from tests.unit.shard.logs import Oracle, apply, compare, compare_numbers, reopen
from ziplog.core.node import StorageChanged
from ziplog.errors import UnavailableError
from ziplog.raft import journal, pysyncobj_adapter, snapshot
from ziplog.raft.journal import Entry, Journal, JournalError
from ziplog.raft.snapshot import Snapshot
from ziplog.segments.entry_codec import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shard.storage.segment_store import SegmentStore
    from tests.simulator.filesystem import DiskPath

MODULES = (
    shard.storage.data_directory, shard.storage.segment_files, shard.storage.flusher,
    shard.storage.segment_rewrite, ziplog.segments.durable_files, ziplog.segments.segment,
    journal, pysyncobj_adapter, snapshot, tests.unit.shard.logs,
)  # fmt: skip


class Watched(Disk):
    """A disk that keeps a copy from before every call."""

    images: list[Disk] | None = None

    def _count(self, path: DiskPath | None = None) -> None:
        if self.images is not None:
            self.images.append(self.image())
        super()._count(path)

    def image(self, seed: int | None = None) -> Disk:
        """Return a copy; with a seed of its own, if given."""
        images, self.images = self.images, None
        made = copy.deepcopy(self)
        self.images = images
        if seed is not None:
            made._random = Random(seed)
        return made

    def during(self, action: Callable[[], object], cuts: int = 4) -> Iterator[Disk]:
        """Run an action; return the disks after power cuts at every moment of it."""
        self.images = []
        action()
        images, self.images = [*self.images, self.image()], None
        for image in images:
            for seed in range(cuts):
                assert isinstance(image, Watched)
                cut = image.image(seed)
                cut.power_cut()
                yield cut


@pytest.fixture(autouse=True)
def _chance() -> Iterator[None]:
    with installed(MODULES, Random(3)), captured_events():
        yield


def directory_on(disk: Disk, name: str = "d") -> DiskPath:
    """Return a directory with a synced name, as before the start of a server."""
    path = disk.path(name)
    path.mkdir()
    sync(disk.path(""))
    return path


# --- the segment store ---------------------------------------------------------------------------


def survivors(store: SegmentStore, oracle: Oracle, flushed: int) -> Oracle:
    """Return a store's entries: a prefix of the appended ones, with all flushed ones."""
    for count in range(len(oracle.entries), flushed - 1, -1):
        prefix = after(oracle, lambda log, count=count: log.entries.__delitem__(slice(count, None)))
        prefix.base_fseq, prefix.base = oracle.base_fseq, oracle.base
        known = prefix.last_fseq, prefix.mark, prefix.last_table
        if (store.last_fseq, store.mark, store.last_table()) == known:
            compare_numbers(store, prefix)
            return prefix
    pytest.fail(f"neither the {flushed} flushed nor any more of {len(oracle.entries)}")


def step_of(random: Random) -> tuple[Any, ...]:
    return random.choice(
        (
            ("place", random.randint(0, 2), [1, 2], random.randint(0, 900)),
            ("place", 0, [1], random.randint(0, 60)),
            ("skip", 0, random.randint(1, 9)),
            ("expire",),
            ("mark", random.randint(0, 9)),
            ("table", random.randint(1, 5)),
            ("view",),
        )
    )


def live(store: SegmentStore, oracle: Oracle, random: Random) -> int:
    """Append and flush, cut and reset; return the number of flushed entries."""
    flushed = len(oracle.entries)
    for _ in range(random.randint(0, 14)):
        apply(store, oracle, step_of(random))
        match random.randrange(12):
            case 0 | 1 | 2:
                assert store.flush()
                flushed = len(oracle.entries)
            case 3 | 4:
                assert store.flusher._write_out()  # without a sync
            case 5:
                apply(store, oracle, ("truncate", random.randint(0, 3)))
                assert store.flush()
                flushed = len(oracle.entries)
    if len(oracle.entries) > 40:
        apply(store, oracle, ("reset", random.randint(0, 5), random.randint(0, 5)))
        flushed = len(oracle.entries)
    return flushed


@pytest.mark.parametrize("seed", range(10))
def test_a_store_keeps_what_was_flushed_and_a_prefix_of_the_rest(seed: int) -> None:
    random = Random(seed)
    disk, oracle, flushed = Disk(random), Oracle(), 0
    directory = directory_on(disk)
    lost = 0
    for _ in range(30):
        store = reopen(directory, segment_bytes=2000, cache_bytes=1000)
        before = len(oracle.entries)
        oracle = survivors(store, oracle, flushed)
        lost += before - len(oracle.entries)
        flushed = live(store, oracle, random)
        random.choice((disk.kill, disk.power_cut, disk.power_cut))()
    assert lost, "no run lost an entry: the test tested nothing"


def test_a_store_that_was_closed_is_whole() -> None:
    random = Random(1)
    disk, oracle = Disk(random), Oracle()
    directory = directory_on(disk)
    for _ in range(20):
        store = reopen(directory, segment_bytes=2000)
        compare(store, oracle)
        live(store, oracle, random)
        assert store.close()
        disk.power_cut()


CUTS = {name: change for name, change in CHANGES.items() if name != "reset at the end"}


@pytest.mark.parametrize("name", CUTS)
def test_a_cut_of_the_log_is_all_or_nothing(name: str) -> None:
    disk = Watched(Random(7))
    directory = directory_on(disk)
    store, oracle = grown(directory)
    assert store.flush()
    changed = after(oracle, CUTS[name])
    found = {
        check_image(image.path("d"), oracle, changed, is_done=False)
        for image in disk.during(lambda: CUTS[name](store), cuts=1)
    }
    compare(store, changed)
    assert found == {True, False}
    disk.power_cut()
    assert check_image(directory, oracle, changed, is_done=True)


def damaged(seed: int) -> tuple[Watched, Oracle, set[int]]:
    """Return a disk with a flipped bit in a store, and the damaged entries."""
    disk = Watched(Random(seed))
    oracle = repairs.grown(directory_on(disk))
    disk.power_cut()
    assert disk.flip(lambda path: path.suffix == ".seg") is not None
    return disk, oracle, lost_on(disk, oracle)


def lost_on(disk: Disk, oracle: Oracle) -> set[int]:
    store = reopen(disk.path("d"), segment_bytes=repairs.SMALL)
    lost = repairs.check_numbers(store, oracle)
    disk.kill()
    return lost


def test_a_repair_is_all_or_nothing() -> None:
    repaired = 0
    for seed in range(8):
        disk, oracle, lost = damaged(seed)
        if not lost:
            continue  # it was a watermark record or a table
        repaired += 1
        store = reopen(disk.path("d"), segment_bytes=repairs.SMALL)
        hole = store.damaged_after(min(lost) - 1)
        assert hole is not None
        good = oracle.numbered[hole[0] - 1 : hole[1]]
        found = {
            frozenset(lost_on(image, oracle))
            for image in disk.during(lambda good=good, store=store: store.repair(good), cuts=2)
        }
        assert found == {frozenset(lost), frozenset()}
        disk.power_cut()
        assert lost_on(disk, oracle) == set()
    assert repaired > 3


def test_a_torn_end_that_was_flushed_is_reported() -> None:
    """A disk that lies about syncs loses entries, and the loss is reported."""
    for seed in range(20):
        disk = Watched(Random(seed))
        oracle = repairs.grown(directory_on(disk))
        assert disk.tear(lambda path: path.suffix == ".seg") is not None
        store = reopen(disk.path("d"), segment_bytes=repairs.SMALL)
        assert store.last_fseq == oracle.last_fseq
        repairs.check_numbers(store, oracle)


def test_a_full_disk_takes_up_where_it_was() -> None:
    cuts = 0
    for seed in range(40):
        random = Random(seed)
        events: list[object] = []
        disk, oracle = Disk(random), Oracle()
        directory = directory_on(disk)
        store = reopen(directory, segment_bytes=2000)
        store.flusher.set_listener(events.append)
        live(store, oracle, random)
        assert store.flush()
        flushed = len(oracle.entries)
        disk.capacity_bytes = disk.used_bytes + random.randint(0, 3 * HEADER_BYTES)
        apply(store, oracle, ("place", 0, [1], 400))
        for _ in range(5):
            apply(store, oracle, step_of(random))
        assert not store.flush()
        assert store.is_full
        assert [event.full for event in events] == [True]
        with pytest.raises(FullError):
            store.reset(oracle.last_fseq, oracle.last_gsn + 1)
        is_cut = random.random() < 1 / 2
        if is_cut:
            disk.power_cut()
            store, cuts = reopen(directory, segment_bytes=2000), cuts + 1
            oracle = survivors(store, oracle, flushed)
        disk.capacity_bytes = 1 << 30
        assert store.flush()
        assert not store.is_full
        assert events[1:] == ([] if is_cut else [StorageChanged(full=False)])
        live(store, oracle, random)
        assert store.flush()
        disk.power_cut()
        compare(reopen(directory, segment_bytes=2000), oracle)
    assert 5 < cuts < 35


def test_a_sync_that_fails_ends_the_process() -> None:
    disk = Disk(Random(1))
    reasons: list[str] = []
    store = reopen(directory_on(disk), on_halt=reasons.append)
    oracle = Oracle()
    apply(store, oracle, ("place", 0, [1], 9))
    assert store.flush()
    apply(store, oracle, ("place", 0, [1], 9))
    disk.fail_on(2, errno.EIO)  # the first is the write
    with pytest.raises(OSError, match="Input/output"):
        store.flush()
    assert len(reasons) == 1
    assert "fdatasync" in reasons[0]


# --- the data directory --------------------------------------------------------------------------


def start(disk: Disk) -> DataDirectory:
    return DataDirectory(disk.path("d"), "demo", "shard-0-0")


def test_a_data_directory_has_one_process() -> None:
    disk = Disk(Random(1))
    start(disk)
    with pytest.raises(UnavailableError, match="in use by process 1"):
        start(disk)
    disk.kill()
    start(disk)


def test_the_owner_of_a_directory_never_changes() -> None:
    disk = Watched(Random(1))
    mine: list[DataDirectory] = []
    found = {start(i).identity.server for i in disk.during(lambda: mine.append(start(disk)))}
    identity = mine[0].identity
    assert identity.server in found
    assert len(found) > 2, "before that, a directory has no owner"
    for seed in range(20):
        image = disk.image(seed)
        image.power_cut()
        assert start(image).identity == identity


def test_a_checkpoint_is_all_or_none_and_serves_one_start() -> None:
    disk = Watched(Random(1))
    state = Random(2).randbytes(3000)
    directory = start(disk)
    assert consume(directory) is None
    found = [
        consume(start(image)) for image in disk.during(lambda: directory.write_checkpoint(state))
    ]
    assert set(found) == {None, state}
    assert found[-4:] == [state] * 4, "after the write, it is present"
    disk.power_cut()
    directory = start(disk)
    taken: list[bytes | None] = []
    images = disk.during(lambda: taken.append(consume(directory)))
    found = [consume(start(image)) for image in images]
    assert taken == [state]
    assert set(found) == {None, state}
    assert found[-4:] == [None] * 4, "after the start, it is deleted"
    disk.power_cut()
    assert start(disk).was_used


# --- the consensus journal -----------------------------------------------------------------------


def open_journal(disk: Disk) -> Journal:
    return Journal(disk.path("d"))


def facts(journal: Journal) -> tuple[Any, ...]:
    return list(journal.entries), journal.term, journal.voted_for, journal.identity


def change(journal: Journal, random: Random) -> Callable[[], None]:
    """Return a random change of a journal."""
    following = journal.entries[-1].index + 1 if journal.entries else 1
    entries = [Entry(random.randbytes(random.randint(0, 900)), following + i, 1) for i in range(3)]
    count = len(journal.entries)
    return random.choice(
        (
            lambda: journal.append(entries[0]),
            lambda: journal.append(entries[0]),
            lambda: journal.extend(entries),
            lambda: journal.set_vote(journal.term + 1, random.choice((None, "a", "b"))),
            lambda: journal.keep_first(random.randint(0, count)),
            lambda: journal.drop_first(random.randint(0, count // 2)),
        )
    )


def test_a_journal_has_one_process() -> None:
    disk = Disk(Random(1))
    open_journal(disk)
    with pytest.raises(JournalError, match="another process"):
        open_journal(disk)
    disk.kill()
    open_journal(disk)


@pytest.mark.parametrize("seed", range(6))
def test_a_power_cut_does_not_take_a_new_journal_away(seed: int) -> None:
    disk = Disk(Random(seed))
    identity = open_journal(disk).identity
    disk.power_cut()
    assert open_journal(disk).identity == identity


@pytest.mark.parametrize("seed", range(6))
def test_what_a_journal_wrote_is_there_for_good(seed: int) -> None:
    """After a power cut at any time, an operation is complete or absent; complete if returned."""
    random = Random(seed)
    disk = Watched(random)
    directory_on(disk)
    journal = open_journal(disk)
    for _ in range(25):
        before = facts(journal)
        action = change(journal, random)
        cut = [facts(open_journal(image)) for image in disk.during(action, cuts=2)]
        assert all(found in (before, facts(journal)) for found in cut)
        assert cut[-2:] == [facts(journal)] * 2
        if random.random() < 1 / 3:
            expected = facts(journal)
            random.choice((disk.kill, disk.power_cut))()
            journal = open_journal(disk)
            assert facts(journal) == expected


def test_a_journal_that_could_not_be_written_ends() -> None:
    disk = Disk(Random(1))
    directory_on(disk)
    journal = open_journal(disk)
    journal.append(Entry(b"first", 1, 1))
    disk.fail_on(2)
    with pytest.raises(JournalError, match="cannot be written"):
        journal.append(Entry(b"second", 2, 1))
    with pytest.raises(JournalError, match="failed before"):
        journal.append(Entry(b"second", 2, 1))
    disk.capacity_bytes = disk.used_bytes + 9
    disk.kill()
    journal = open_journal(disk)
    with pytest.raises(JournalError, match="the disk is full"):
        journal.append(Entry(b"third", len(journal.entries) + 1, 1))


def test_what_a_journal_found_stays_though_its_former_process_had_not_synced_it() -> None:
    found = set()
    for seed in range(20):
        disk = Disk(Random(seed))
        directory_on(disk)
        journal = open_journal(disk)
        disk.fail_on(2)
        with pytest.raises(JournalError, match="cannot be written"):
            journal.append(Entry(b"written, not synced", 1, 1))
        (disk.kill, disk.power_cut)[seed % 2]()
        expected = facts(open_journal(disk))
        disk.power_cut()
        assert facts(open_journal(disk)) == expected
        found.add(len(expected[0]))
    assert found == {0, 1}


class _Machine:
    """A constant state."""

    def take_snapshot(self) -> bytes:
        return b"state" * 100


def test_a_snapshot_is_whole_once_it_has_its_name() -> None:
    """Written as by the consensus library: with the file name as a string."""
    disk = Watched(Random(4))
    directory = directory_on(disk)
    path, fresh = directory / "snapshot", directory / "snapshot.tmp"
    previous, last = (b"a", 1, 1), (b"b", 2, 1)
    writer = pysyncobj_adapter._LibrarySnapshot(_Machine())  # type: ignore[arg-type]

    def write() -> None:
        writer.write(str(path) + ".tmp", (last, previous, None))
        fresh.replace(path)
        sync(directory)

    expected = Snapshot(Entry(*previous), Entry(*last), b"state" * 100)
    paths = [image.path("d/snapshot") for image in disk.during(write)]
    read = [Snapshot.read(path) if path.exists() else None for path in paths]
    assert all(found in (None, expected) for found in read)
    assert None in read
    assert read[-4:] == [expected] * 4
    assert Snapshot.read(path) == expected
