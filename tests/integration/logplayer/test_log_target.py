"""Mirrors between two clusters of real processes: deaths, zombies, a shard that is removed."""

from __future__ import annotations

import itertools
import signal
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest

import logplayer
from logplayer import targets
from logplayer.targets.mirror_mark import Mark
from tests.integration.logplayer.playing import LEASE_S, Process, insert
from tests.unit.ziplog.cli.fakes import run
from tests.waiting import wait_until
from ziplog.errors import ConfigError
from ziplog.local import Cluster
from ziplog.types import RID_GENESIS, RID_RECENT, RecordId

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import ziplog

pytestmark = pytest.mark.timeout(300)

Row = tuple[bytes | None, bytes]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster of the mirrors."""
    with Cluster(tmp_path_factory.mktemp("mirrors") / "log", shards=2) as running:
        yield running


@pytest.fixture
def mirror(other: Cluster) -> Iterator[ziplog.Log]:
    with other.connect(timeout=60.0) as client:
        yield client


def tail(log: ziplog.Log) -> RecordId:
    """Return the position after the last record."""
    return RecordId(log.check_tail().gsn + 1, 0)


def rows(log: ziplog.Log, start: RecordId) -> list[Row]:
    """Return what a reader gets from a position on."""
    with log.subscribe(start, follow=False, known_rows=True) as records:
        return [(record.key, record.payload) for record in records]


def write_file(
    path: Path, log: ziplog.Log, mirror: ziplog.Log, name: str, start: RecordId, more: str = ""
) -> Path:
    """Write the file of a player with a mirror."""
    file = path / f"{name}.toml"
    file.write_text(f"""\
[player]
name = "{name}"
bootstrap = "{",".join(log.endpoints)}"
start = "{start}"
lease_s = {LEASE_S}
commit_ms = 300
idle_ms = 200
[[target]]
name = "copy"
kind = "log"
bootstrap = "{",".join(mirror.endpoints)}"
timeout_s = 10
batch_records = 64
{more}
""")
    return file


def wait_for_copy(log: ziplog.Log, mirror: ziplog.Log, start: RecordId, begin: RecordId) -> None:
    """Wait until the mirror has what the log has, and compare them."""
    expected = rows(log, start)
    wait_for(mirror, begin, len(expected))
    assert rows(mirror, begin) == expected


def wait_for(mirror: ziplog.Log, begin: RecordId, count: int) -> None:
    """Wait until the mirror has a number of records."""
    # A subscription that follows: reading it again and again would take long.
    with mirror.subscribe(begin, known_rows=True) as records:
        for _ in range(count):
            assert records.fetch(1, timeout=60), "not within 60 s"


class Inserts:
    """A thread that inserts records, until it is stopped."""

    def __init__(self, log: ziplog.Log) -> None:
        self._log, self._stop = log, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            insert(self._log, 40)


def test_mirror_has_keys_payloads_and_the_order(log: ziplog.Log, mirror: ziplog.Log) -> None:
    start, begin = tail(log), tail(mirror)
    insert(log, 500)
    copy = targets.log("copy", mirror.endpoints, batch_records=100)
    for _ in range(2):  # The second process continues where the first one has ended.
        with logplayer.Player(log, "order", [copy], start=start, lease_s=LEASE_S) as player:
            player.wait_until(insert(log, 300)[-1], timeout=60)
            assert rows(mirror, begin) == rows(log, start)
            assert player.status()["tasks"][0]["retries"] == 0


def test_envelope_and_order_of_keys(log: ziplog.Log, mirror: ziplog.Log) -> None:
    start, begin = tail(log), tail(mirror)
    insert(log, 300)
    copy = targets.log("copy", mirror.endpoints, order="key", partitions=3, envelope=True)
    with logplayer.Player(log, "keys", [copy], start=start, lease_s=LEASE_S) as player:
        player.wait_until(insert(log, 100)[-1], timeout=60)
    with mirror.subscribe(begin, follow=False) as records:
        found = [(one.key, msgspec.msgpack.decode(one.payload), one.rid.shard) for one in records]
    assert {shard for *_, shard in found} == {0, 1}
    with log.subscribe(start, follow=False) as records:
        expected = [
            (one.key, [one.rid.gsn, one.rid.shard, one.epoch, one.timestamp_us, one.payload])
            for one in records
        ]
    for key in {key for key, _ in expected}:
        assert [one[1] for one in found if one[0] == key] == [
            one[1] for one in expected if one[0] == key
        ]


def test_deaths_and_suspensions_of_owners(
    log: ziplog.Log, mirror: ziplog.Log, tmp_path: Path
) -> None:
    start, begin = tail(log), tail(mirror)
    file = write_file(tmp_path, log, mirror, "deaths", start)
    with Inserts(log):
        for _ in range(3):
            had = len(rows(mirror, begin))
            with Process(file) as process:
                process.ready()
                wait_for(mirror, begin, had + 100)
                process.send(signal.SIGKILL)
        with Process(file) as first, Process(file) as second:
            first.ready()
            second.ready()

            def owner() -> str:
                (cursor,) = log.cursors("deaths/copy/0")
                return cursor.owner.split(":")[1] if cursor.owner else ""

            wait_until(lambda: owner() in {str(first.pid), str(second.pid)}, "one owns it", 60)
            former = first if owner() == str(first.pid) else second
            latter = second if former is first else first
            had = len(rows(mirror, begin))
            wait_for(mirror, begin, had + 100)
            former.send(signal.SIGSTOP)
            wait_until(lambda: owner() == str(latter.pid), "the other takes over", 60)
            had = len(rows(mirror, begin))
            wait_for(mirror, begin, had + 100)
            former.send(signal.SIGCONT)
            had = len(rows(mirror, begin))
            wait_for(mirror, begin, had + 100)
            former.send(signal.SIGKILL)
            assert latter.stop()[0] == 0
    with Process(file) as process:
        process.ready()
        wait_for_copy(log, mirror, start, begin)
        assert process.stop()[0] == 0


def test_mirrors_in_both_directions(log: ziplog.Log, mirror: ziplog.Log, tmp_path: Path) -> None:
    """Each log gets the other one's records once, and none of its own back; with a death."""
    sides, starts = (log, mirror), (tail(log), tail(mirror))
    files = []
    for source, target, start, name in zip(
        sides, sides[::-1], starts, ("there", "back"), strict=True
    ):
        other_name = "back" if name == "there" else "there"
        named = f"{target.cluster()['cluster_id']}/{other_name}/copy"
        files.append(write_file(tmp_path, source, target, name, start, f'not_from = ["{named}"]'))
    expected: list[bytes] = []

    def insert_at_both(count: int) -> None:
        for number, side in enumerate(sides):
            payloads = [b"%d: %d" % (number, len(expected) + index) for index in range(count)]
            side.insert_many(payloads, keys=[b"key"] * count)
            expected.extend(payloads)

    def wait_for_all() -> None:
        for side, start in zip(sides, starts, strict=True):
            wait_for(side, start, len(expected))

    with Process(files[0]) as first, Process(files[1]) as second:
        first.ready()
        second.ready()
        insert_at_both(300)
        wait_for_all()
        insert_at_both(300)
        first.send(signal.SIGKILL)
        insert_at_both(300)
        with Process(files[0]) as third:
            third.ready()
            insert_at_both(300)
            wait_for_all()
            for side, name in zip(sides, ("there", "back"), strict=True):
                last = side.check_tail()
                # A step without records passes rows that are left out.
                wait_until(
                    lambda side=side, name=name, last=last: (  # type: ignore[misc]
                        side.cursors(f"{name}/copy/0")[0].position > last
                    ),
                    "the mirror has looked at all records",
                    60,
                )
            assert third.stop()[0] == 0
        assert second.stop()[0] == 0
    for number, (side, start) in enumerate(zip(sides, starts, strict=True)):
        found = [payload for _, payload in rows(side, start)]
        assert sorted(found) == sorted(expected)
        for origin in (0, 1):
            of_one = [one for one in found if one.startswith(b"%d:" % origin)]
            assert number == origin or of_one == [
                payload for _, payload in rows(sides[origin], starts[origin])
                if payload.startswith(b"%d:" % origin)
            ]  # fmt: skip


@pytest.mark.nightly
def test_shard_of_the_mirror_is_removed_under_way(
    log: ziplog.Log, other: Cluster, mirror: ziplog.Log, tmp_path: Path
) -> None:
    """With a death while the shard leaves; the next owner finds where the rows end."""
    start, begin = tail(log), tail(mirror)
    shard = other.add_shard()
    file = write_file(tmp_path, log, mirror, "removal", start, f"shard = {shard}")
    with Inserts(log), Process(file) as first:
        first.ready()
        wait_for(mirror, begin, 100)
        remover = threading.Thread(target=lambda: other.remove_shard(shard))
        remover.start()
        wait_until(
            lambda: (
                {one["id"]: one["state"] for one in mirror.cluster()["shards"]}[shard]
                in {"leaving", "finalized"}
            ),
            "the shard leaves",
            60,
        )
        first.send(signal.SIGKILL)
        remover.join()
    with Inserts(log), Process(file) as second:
        second.ready()
        had = len(rows(mirror, begin))
        wait_for(mirror, begin, had + 100)
    with Process(file) as third:
        third.ready()
        wait_for_copy(log, mirror, start, begin)
        assert third.stop()[0] == 0
    with mirror.subscribe(begin, follow=False) as records:
        shards = [record.rid.shard for record in records]
    assert shards[0] == shard
    assert shards[-1] != shard
    assert sum(one != next_one for one, next_one in itertools.pairwise(shards)) == 1


@pytest.mark.nightly
def test_shard_of_one_partition_is_removed(
    log: ziplog.Log, other: Cluster, mirror: ziplog.Log, tmp_path: Path
) -> None:
    """Only its task moves; each key keeps its order, with a death of the owner of all tasks."""
    shard = other.add_shard()
    start, begin = tail(log), tail(mirror)
    more = 'order = "key"\npartitions = 3'
    file = write_file(tmp_path, log, mirror, "parts", start, more)

    def shards() -> list[int]:
        """Return the shards of the partitions, by their marks."""
        found = sorted(log.cursors("parts/copy/*"), key=lambda one: one.name)
        return [msgspec.msgpack.decode(one.mark, type=Mark).shard for one in found if one.mark]

    def wait_for_progress() -> None:
        had = len(rows(mirror, begin))
        wait_for(mirror, begin, had + 200)

    with Inserts(log):
        with Process(file) as first:
            first.ready()
            wait_for_progress()
            wait_until(lambda: len(shards()) == 3, "all have a mark", 30)
            before = shards()
            assert len(set(before)) == 3
            remover = threading.Thread(target=lambda: other.remove_shard(shard))
            remover.start()
            wait_for_progress()
            first.send(signal.SIGKILL)
            remover.join()
        with Process(file) as second:
            second.ready()
            wait_until(lambda: shard not in shards(), "its task has another shard", 60)
            wait_for_progress()
            assert second.stop()[0] == 0
        moved = before.index(shard)
        after = shards()
        assert [one for index, one in enumerate(after) if index != moved] == [
            one for index, one in enumerate(before) if index != moved
        ]
    with Process(file) as third:
        third.ready()
        expected = rows(log, start)
        wait_for(mirror, begin, len(expected))
        assert third.stop()[0] == 0
    found = rows(mirror, begin)
    assert len(found) == len(expected)
    for key in {key for key, _ in expected}:
        assert [one for one in found if one[0] == key] == [one for one in expected if one[0] == key]


def test_the_log_itself_is_refused_as_its_mirror(
    log: ziplog.Log, mirror: ziplog.Log, tmp_path: Path
) -> None:
    """By `check`, by `start`, and by the task that cannot reach it before."""
    away = targets.log("away", "127.0.0.1:9")
    same = targets.log("same", log.endpoints)
    problem = "the target same is the log that it would mirror, cluster [0-9a-f]{32}: set its"
    with pytest.raises(ConfigError, match=problem):
        logplayer.Player(log, "itself", [same, away], lease_s=LEASE_S).start()
    assert log.cursors("itself/*") == []
    file = write_file(tmp_path, log, log, "itself", tail(log))
    checked = run("player", "check", str(file))
    assert (checked.exit_code, "the target copy is the log that it" in checked.stderr) == (2, True)
    file = write_file(tmp_path, log, mirror, "itself", tail(log))
    assert run("player", "check", str(file)).exit_code == 0
    with logplayer.Player(log, "absent", [away], lease_s=LEASE_S) as player:
        wait_until(lambda: player.status()["tasks"][0]["last_error"] != "", "it is tried", 30)


def test_seek_of_a_mirror_is_refused(log: ziplog.Log, mirror: ziplog.Log) -> None:
    start = tail(log)
    rid = insert(log, 5)[-1]
    copy = targets.log("copy", mirror.endpoints)
    with logplayer.Player(log, "refused", [copy], start=start, lease_s=LEASE_S) as player:

        def error() -> str:
            (found,) = player.status()["tasks"]
            return str(found["last_error"]) if found["state"] == "failed" else ""

        wait_until(lambda: log.cursors("refused/copy/0")[0].position > rid, "it is copied", 30)
        for position in (RID_GENESIS, RID_RECENT, rid):
            with pytest.raises(ConfigError, match="ziplog cursor create refused/copy/0 --start"):
                player.seek("copy", position)
        assert player.status()["tasks"][0]["state"] != "failed"
        log.seek_cursor("refused/copy/0", RID_GENESIS)
        wait_until(lambda: "was sought" in error(), "the seek is refused", 30)
        assert "ziplog cursor delete refused/copy/0" in error()
    with pytest.raises(ConfigError, match="partitions is 2"):
        targets.log("copy", mirror.endpoints, partitions=2)
