"""File source: the readable records of a cluster's files, while servers run and after."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from spark_reader import file_source
from spark_reader.options import parse
from spark_reader.projection import projection_of
from spark_reader.ranges import read_range
from spark_reader.schema import DEFAULT
from spark_reader.sources import source_of
from spark_reader.stream import ZiplogStreamReader
from tests.unit.spark_reader.logs import Key, as_key, as_sent, fill, small_cluster, subscribed
from tests.waiting import wait_until
from ziplog import RecordId, policy
from ziplog.errors import ConfigError, TrimmedError, UnavailableError
from ziplog.local import Cluster
from ziplog.segments.directory import SegmentDirectory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ziplog import Log

Files = tuple[Path, list[Key], list[Key], int]


def all_rows(cluster: Cluster) -> list[Key]:
    return [as_key(record) for record in subscribed(cluster)]


def run_ahead(log: Log, path: Path) -> tuple[list[Key], int]:
    """Insert records at shard 1 until a load ends before one of them that is stable.

    Returns the records, and where that load ended.
    """
    ahead: list[Key] = []
    ends: list[int] = []
    log.set_policy(policy.pin(1))

    def is_ahead() -> bool:
        ahead.append(as_key(log.read_record(log.insert_after(b"ahead"))))
        ends.append(pinned(path))
        return any(ends[-1] <= row[0] < end_of(path, 1) for row in ahead)

    wait_until(is_ahead, "no shard went ahead of the other")
    return ahead, ends[-1]


def end_of(path: Path, shard: int) -> int:
    servers = (f"shard-{shard}-{server}" for server in (0, 1))
    return max(SegmentDirectory(path / name / "segments").stable_end for name in servers)


def rows(path: Path, **options: Any) -> list[Key]:
    """Return the rows of a load of the directory, in the order of the log."""
    asked = {"path": str(path)} | {name: str(value) for name, value in options.items()}
    return sorted(
        (row["offset"], row["partition"], row["value"], row["key"], row["epoch"])
        for batch in read_range(asked)
        for row in batch.to_pylist()
    )


def pinned(path: Path) -> int:
    with source_of(parse({"path": str(path)})).open() as session:
        return session.pin().stop


@pytest.fixture(scope="module")
def log_files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A stopped cluster's directory, its records, those read of it before, and up to where."""
    path = tmp_path_factory.mktemp("files") / "log"
    with small_cluster(path) as cluster, cluster.connect() as log:
        fill(cluster, 400)
        everything = all_rows(cluster)
        half = everything[len(everything) // 2][0]
        # Watermarks are written some time after the records that they cover.
        wait_until(lambda: pinned(path) > half, "no server recorded its watermark")
        ahead, end = run_ahead(log, path)
        everything += ahead
        return path, everything, rows(path, endingOffsets=end), end


def test_while_servers_run_only_positions_complete_in_all_shards_are_read(
    log_files: Files,
) -> None:
    path, everything, before, end = log_files
    assert before == [row for row in everything if row[0] < end]
    assert len(everything) // 2 <= len(before) < len(everything)
    assert rows(path, endingOffsets=end) == before


def test_a_stopped_cluster_is_read_completely(
    log_files: Files,
) -> None:
    path, everything, _, _ = log_files
    assert rows(path) == everything


def test_after_a_stop_no_shard_waits_for_another(log_files: Files, tmp_path: Path) -> None:
    path, everything, _, _ = log_files
    copy = tmp_path / "log"
    shutil.copytree(path, copy)
    for server in ("shard-0-0", "shard-0-1"):
        for file in (copy / server / "segments").iterdir():
            file.unlink()
    assert rows(copy) == [row for row in everything if row[1] == 1]


def test_after_a_crash_of_every_server_a_shard_may_hold_more_than_its_files_show(
    log_files: Files, tmp_path: Path
) -> None:
    path, everything, _, _ = log_files
    copy = tmp_path / "log"
    shutil.copytree(path, copy)
    # The state after a crash; a clean stop of one replica shows all records of the shard.
    for server in ("shard-0-0", "shard-0-1"):
        for file in (copy / server / "segments").iterdir():
            file.unlink()
    (copy / "shard-0-0" / "checkpoint").unlink()
    assert rows(copy) == [row for row in everything if row[1] == 1]
    (copy / "shard-0-1" / "checkpoint").unlink()
    known = end_of(copy, 0)
    assert rows(copy) == []
    with pytest.raises(ConfigError, match=f"at most {known}, the end of the files of all shards"):
        rows(copy, endingOffsets=known + 1)


def test_one_servers_directory_gives_its_shard(log_files: Files, tmp_path: Path) -> None:
    path, everything, _, _ = log_files
    mine = [row for row in everything if row[1] == 1]
    assert rows(path / "shard-1-0") == mine
    # Without the cluster file, the default name contains the shard.
    away = tmp_path / "copy"
    shutil.copytree(path / "shard-1-1", away)
    assert rows(away) == mine


def test_ranges_and_epochs(log_files: Files) -> None:
    path, everything, _, _ = log_files
    start, stop = everything[100][0], everything[-100][0]
    assert rows(path, startingOffsets=start, endingOffsets=stop) == everything[100:-100]
    epochs = sorted({row[4] for row in everything})
    first, last = epochs[0], epochs[-2]
    assert rows(path, startingEpoch=first, endingEpoch=last) == [
        row for row in everything if first <= row[4] <= last
    ]
    with source_of(parse({"path": str(path), "endingEpoch": str(last)})).open() as session:
        narrow = session.pin()
    assert narrow.start == 1
    assert narrow.stop == min(row[0] for row in everything if row[4] > last)


@pytest.mark.parametrize("option", ["startingEpoch", "endingEpoch"])
def test_an_epoch_beyond_the_files_is_refused(log_files: Files, option: str) -> None:
    path, everything, _, _ = log_files
    newest = everything[-1][4]
    with pytest.raises(ConfigError, match=f"{option} is {newest + 1}; it must be at most {newest}"):
        rows(path, **{option: newest + 1})


def test_pieces_end_at_blocks_and_segments(
    log_files: Files,
) -> None:
    path, _, _, _ = log_files
    with source_of(parse({"path": str(path)})).open() as session:
        pieces = session.pieces_of(1, session.pin().stop)
    for shard in (0, 1):
        mine = [piece for piece in pieces if piece.shard == shard]
        assert len(mine) >= 2
        assert [piece.stop for piece in mine[:-1]] == [piece.start for piece in mine[1:]]
    assert sum(piece.size for piece in pieces) > 3_000_000


def test_a_task_does_not_search_servers_again(
    log_files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, everything, _, _ = log_files
    options = parse({"path": str(path)})
    with source_of(options).open() as session:
        whole = session.pin()
        pieces = session.pieces_of(whole.start, whole.stop)
        source = as_sent(session.for_tasks())
    monkeypatch.setattr(file_source, "load", None)
    with source.open() as session:
        assert session.topic() == whole.topic
        directories = sum(
            b.num_rows for b in session.read(pieces, projection_of(options, DEFAULT, ""))
        )
    assert directories == len(everything)


def test_a_task_with_other_directories_reports_or_uses_them(
    log_files: Files, tmp_path: Path
) -> None:
    path, everything, _, _ = log_files
    copy = tmp_path / "log"
    shutil.copytree(path, copy)
    options = parse({"path": str(copy)})
    for shard in (0, 1):
        (copy / f"shard-{shard}-1").rename(tmp_path / f"shard-{shard}-1")
    with source_of(options).open() as session:
        whole = session.pin()
        pieces = session.pieces_of(whole.start, whole.stop)
        source = as_sent(session.for_tasks())
    # Elsewhere the same path may have the others.
    for shard in (0, 1):
        shutil.rmtree(copy / f"shard-{shard}-0")
        (tmp_path / f"shard-{shard}-1").rename(copy / f"shard-{shard}-1")
    with source.open() as session:
        directories = sum(
            b.num_rows for b in session.read(pieces, projection_of(options, DEFAULT, ""))
        )
    assert directories == len(everything)
    shutil.rmtree(copy)
    with pytest.raises(ConfigError, match=r"path is .* \(no such directory on this machine\)"):
        source.open()


def test_one_server_of_each_shard_is_enough_and_it_may_be_damaged_elsewhere(
    log_files: Files, tmp_path: Path
) -> None:
    path, everything, _, _ = log_files
    copy = tmp_path / "log"
    shutil.copytree(path, copy)
    shutil.rmtree(copy / "shard-0-0")
    for file in (copy / "shard-1-0" / "segments").glob("*.seg"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        break
    assert rows(copy) == everything
    shutil.rmtree(copy / "shard-0-1")
    with pytest.raises(UnavailableError, match="no files of shard 0"):
        rows(copy)


def test_one_server_of_each_shard_is_enough_if_another_directory_cannot_be_listed(
    log_files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, everything, _, _ = log_files
    iterdir = Path.iterdir

    def listing(directory: Path) -> Iterator[Path]:
        if directory == path / "shard-0-0" / "segments":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return iterdir(directory)

    monkeypatch.setattr(Path, "iterdir", listing)
    assert rows(path) == everything


def test_damage_in_all_replicas_is_an_error(log_files: Files, tmp_path: Path) -> None:
    path, _, _, _ = log_files
    copy = tmp_path / "log"
    shutil.copytree(path, copy)
    for server in ("shard-1-0", "shard-1-1"):
        for file in (copy / server / "segments").glob("*.rows"):
            file.unlink()
        file = min((copy / server / "segments").glob("*.seg"))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    with pytest.raises(UnavailableError, match="is damaged at gsn"):
        rows(copy)


def test_a_shard_without_a_readable_file_is_an_error(log_files: Files, tmp_path: Path) -> None:
    """Its records are not left out, as if it had none."""
    path, everything, _, _ = log_files
    copy = tmp_path / "log"
    shutil.copytree(path, copy)
    for server in ("shard-0-0", "shard-0-1"):
        assert rows(copy) == everything
        # The system does not let a program read a directory as a file.
        newest = max((copy / server / "segments").glob("*.seg"))
        newest.unlink()
        newest.mkdir()
    with pytest.raises(UnavailableError, match="no files of shard 0 can be read: "):
        rows(copy)


def test_an_end_after_the_files_is_refused(
    log_files: Files,
) -> None:
    path, _, _, _ = log_files
    with pytest.raises(ConfigError, match=r"endingOffsets is .*; it must be at most"):
        rows(path, endingOffsets=2**62)


def test_a_path_that_is_not_a_data_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the data directory of a cluster"):
        rows(tmp_path)
    with pytest.raises(ConfigError, match=r"the data directory of a cluster.*no such directory"):
        rows(tmp_path / "away")


def await_trim(path: Path, gsn: int) -> None:
    def is_written() -> bool:
        with source_of(parse({"path": str(path)})).open() as session:
            return session.pin().start == gsn

    wait_until(is_written, "the trim was not written down")


def test_a_trimmed_start_is_an_error_or_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with small_cluster(path) as cluster, cluster.connect() as log:
        fill(cluster, 300)
        everything = all_rows(cluster)
        first = everything[len(everything) // 2]
        # There is an epoch after that of the first kept record.
        while log.read_record(log.insert_after(b"later")).epoch == first[4]:
            pass
        everything = all_rows(cluster)
        log.trim(RecordId(*first[:2]))
        await_trim(path, first[0])
    kept = [row for row in everything if row >= first]
    assert rows(path) == kept
    assert rows(path, startingOffsets=1, failOnDataLoss="false") == kept
    with pytest.raises(TrimmedError):
        rows(path, startingOffsets=1)
    epoch = first[4]
    with pytest.raises(TrimmedError):
        rows(path, startingEpoch=epoch)
    assert rows(path, startingEpoch=0, failOnDataLoss="false") == kept
    later = [row for row in kept if row[4] > epoch]
    assert later
    assert rows(path, startingEpoch=epoch + 1) == later


def test_a_trim_during_a_read_is_an_error_or_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with ExitStack() as stack:
        cluster = stack.enter_context(small_cluster(path))
        fill(cluster, 300)
        everything = all_rows(cluster)
        first = everything[len(everything) // 2]
        wait_until(
            lambda: pinned(path) > everything[-1][0], "the files do not show the last stable record"
        )
        opened = []
        for fails in ("true", "false"):
            options = parse({"path": str(path), "failOnDataLoss": fails})
            session = stack.enter_context(source_of(options).open())
            whole = session.pin()
            pieces = session.pieces_of(whole.start, whole.stop)
            opened.append(session.read(pieces, projection_of(options, DEFAULT, whole.topic)))
        servers = sorted(path.glob("shard-0-*/segments"))
        oldest = [min(server.glob("*.seg")) for server in servers]
        with cluster.connect() as log:
            log.trim(RecordId(*first[:2]))
        await_trim(path, first[0])
        wait_until(lambda: not any(map(Path.exists, oldest)), "they were not deleted")
        failing, leaving_out = opened
        with pytest.raises(TrimmedError):
            list(failing)
        offsets = [gsn for batch in leaving_out for gsn in batch.column("offset").to_pylist()]
    assert {row[0] for row in everything if row >= first} <= set(offsets)
    assert everything[0][0] not in offsets
    assert len(set(offsets)) == len(offsets)


def test_a_stream_reads_shards_that_are_added_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Cluster(path, shards=1, f=0) as cluster, cluster.connect() as log:
        source = ZiplogStreamReader(parse({"path": str(path)}, "stream"), DEFAULT)
        offset = source.initialOffset()
        found: list[RecordId] = []

        def reads(shard: int, rid: RecordId) -> bool:
            """Read on; an idle shard would hold back the end, so a shard gets another record."""
            nonlocal offset
            log.set_policy(policy.pin(shard))
            log.insert_after(b"later")
            start, offset = offset, source.latestOffset(offset, ReadAllAvailable())
            for task in source.partitions(start, offset):
                for batch in source.read(task):
                    columns = (batch.column(name).to_pylist() for name in ("offset", "partition"))
                    found.extend(map(RecordId, *columns))
            return rid in found

        first = log.insert_after(b"first")
        wait_until(lambda: reads(0, first), "the first shard's record is missing")
        added = cluster.add_shard()
        log.set_policy(policy.pin(added))
        second = log.insert_after(b"second")
        wait_until(lambda: reads(0, second), "the new shard's record is missing")


def test_the_end_waits_for_the_files_of_an_added_shard(log_files: Files, tmp_path: Path) -> None:
    path, everything, _, _ = log_files
    copy, away = tmp_path / "log", tmp_path / "away"
    shutil.copytree(path, copy)
    away.mkdir()
    added = [copy / "shard-1-0", copy / "shard-1-1"]
    file = copy / "cluster.toml"
    both = file.read_text()
    file.write_text("[[shard]]".join(both.split("[[shard]]")[:2]))
    for server in added:
        server.rename(away / server.name)
    with source_of(parse({"path": str(copy)})).open() as session:
        assert session.latest() > 1
        file.write_text(both)
        assert session.latest() == 1
        for server in added:
            (away / server.name).rename(server)
        stop = session.latest()
        assert stop == pinned(copy)
        pieces = session.pieces_of(1, stop)
        rows = session.read(pieces, projection_of(parse({"path": str(copy)}), DEFAULT, ""))
        assert sum(batch.num_rows for batch in rows) == len(everything)


def test_a_plan_may_name_a_shard_that_left_the_cluster_file(
    log_files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its servers may be deleted once all its positions are trimmed."""
    copy = tmp_path / "log"
    shutil.copytree(log_files[0], copy)
    file = copy / "cluster.toml"
    file.write_text("[[shard]]".join(file.read_text().split("[[shard]]")[:2]))

    def read(**options: str) -> int:
        given = parse({"path": str(copy), **options}, "stream")
        source = ZiplogStreamReader(given, DEFAULT)
        [task] = source.partitions({"gsn": 1}, {"gsn": 5, "tasks": "1:1-5"})
        return sum(batch.num_rows for batch in source.read(task))

    with pytest.raises(UnavailableError, match="no server's files contain gsn 1"):
        read()
    monkeypatch.setattr(file_source.FileSession, "trim", 5)
    with pytest.raises(TrimmedError):
        read()
    assert read(failOnDataLoss="false") == 0
