"""Files: a directory holds each record below its position once; docs/player.md, section 7."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from logplayer import targets
from logplayer.contract import Fenced, Opened, Retry
from logplayer.targets.staged_records import Stage
from spark_reader import optional_dependencies
from spark_reader.batches import arrow_schema
from spark_reader.schema import DEFAULT
from tests.unit.logplayer.targets.databases import CLUSTER, batch, record, task
from tests.unit.logplayer.targets.files_directory import files, names, opened, stored
from ziplog.cli.rendering import as_json
from ziplog.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from logplayer.targets.file_formats import Format


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here cuts the power of the real disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)


# --- batches ---


def test_each_batch_is_a_file_named_by_its_first_record(tmp_path: Path) -> None:
    target, of = opened(tmp_path / "out")
    target.deliver(batch(of, 1, 6))
    target.deliver(batch(of, 6, 9))
    assert names(tmp_path / "out") == [
        ".ziplog-0000000000000000001",
        "0000000000000000001.jsonl",
        "0000000000000000008.jsonl",
    ]
    (first, second) = sorted((tmp_path / "out").rglob("*.jsonl"))
    assert first.read_bytes() == b"".join(as_json(record(gsn)) for gsn in (1, 2, 3, 5))
    assert second.read_bytes() == as_json(record(8))
    assert files(tmp_path / "out").open(task(2, position=6, has_moved=True)) == Opened(9)


def test_partitions_are_directories(tmp_path: Path) -> None:
    for partition in (0, 3):
        target, of = opened(tmp_path, partition=partition, partitions=4)
        target.deliver(batch(of, 1, 4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part-000", "part-003"]


def test_idle_steps_keep_the_position(tmp_path: Path) -> None:
    target, of = opened(tmp_path)
    target.deliver(batch(of, 1, 4))
    target.deliver(batch(of, 4, 5, []))
    assert files(tmp_path).open(task(2, position=5, has_moved=True)) == Opened(5)
    target, of = opened(tmp_path, 3, position=5, has_moved=True)
    target.deliver(batch(of, 5, 21, [record(5), record(8)]))  # it stops after its last record
    assert files(tmp_path).open(task(4, position=21, has_moved=True)) == Opened(21)
    assert not list(tmp_path.rglob("*.part"))


def test_what_a_map_makes_of_a_record_is_in_one_file(tmp_path: Path) -> None:
    target, of = opened(tmp_path)
    target.deliver(batch(of, 1, 3, [record(1), record(2), record(2)]))
    assert files(tmp_path).open(task(2, position=1)) == Opened(3)
    assert stored(tmp_path) == [1, 2, 2]


@pytest.mark.parametrize("gsns", [(3, 2), (0, 1), (2, 4)])
def test_map_that_changes_positions_is_refused(tmp_path: Path, gsns: tuple[int, ...]) -> None:
    target, of = opened(tmp_path)
    with pytest.raises(ConfigError, match="target warehouse: map is"):
        target.deliver(batch(of, 1, 4, [record(gsn) for gsn in gsns]))
    assert stored(tmp_path) == []


def test_last_line_may_be_long(tmp_path: Path) -> None:
    target, of = opened(tmp_path)
    target.deliver(batch(of, 1, 4, [record(1), record(2, b"\n" * 300_000)]))
    assert files(tmp_path).open(task(2)) == Opened(4)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE])
def test_file_system_that_is_full_or_gone_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    target, of = opened(tmp_path)

    def fail(_: int) -> None:
        raise OSError(number, "not now")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(Retry, match="not now"):
            target.deliver(batch(of, 1, 4))
        with pytest.raises(Retry, match="not now"):
            target.open(of)
    assert target.open(of) == Opened(1)
    target.deliver(batch(of, 1, 4))
    assert stored(tmp_path) == [1, 2, 3]
    assert not list(tmp_path.rglob("*.part"))


def test_file_system_without_links_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.EPERM, "not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(ConfigError, match="cannot link files"):
        files(tmp_path).open(task())
    assert names(tmp_path) == []


# --- files of several batches ---


def test_batches_become_one_file_when_they_are_large(tmp_path: Path) -> None:
    target, of = files(tmp_path, roll_bytes=110), task()
    target.open(of)
    target.deliver(batch(of, 1, 4))
    assert stored(tmp_path) == []
    target.deliver(batch(of, 4, 9))
    assert stored(tmp_path) == [1, 2, 3, 5, 8]
    assert names(tmp_path) == [".ziplog-0000000000000000001", "0000000000000000001.jsonl"]


@pytest.mark.parametrize("end", ["roll", "close", "open", "successor"])
def test_batches_become_one_file_when_they_are_old_or_a_task_begins_or_ends(
    tmp_path: Path, end: str
) -> None:
    target, of = files(tmp_path, roll_bytes=10_000), task()
    target.open(of)
    for start, stop in ((1, 4), (4, 9), (9, 12)):
        target.deliver(batch(of, start, stop))
    assert stored(tmp_path) == []
    if end == "roll":
        target.deliver(batch(of, 12, 12, []))
    elif end == "close":
        target.close()
    elif end == "open":
        assert target.open(of) == Opened(12)
    else:
        assert files(tmp_path).open(task(2)) == Opened(12)
    assert stored(tmp_path) == [1, 2, 3, 5, 8]
    assert files(tmp_path).open(task(3, position=12, has_moved=True)) == Opened(12)
    assert len(list(tmp_path.rglob("*.jsonl"))) == 1


def test_finishing_nothing_adds_no_file(tmp_path: Path) -> None:
    target, of = opened(tmp_path)
    target.deliver(batch(of, 1, 1, []))
    target.close()
    assert names(tmp_path) == [".ziplog-0000000000000000001"]


@pytest.mark.parametrize("damage", [b"", b"x", b"\0", b"x" * 100])
def test_frame_that_a_crash_cut_does_not_count(tmp_path: Path, damage: bytes) -> None:
    target, of = files(tmp_path, roll_bytes=10_000), task()
    target.open(of)
    target.deliver(batch(of, 1, 4))
    target.deliver(batch(of, 4, 9))
    (stage,) = tmp_path.rglob("*.stage")
    stage.write_bytes(stage.read_bytes()[:-1] + damage)
    assert files(tmp_path).open(task(2)) == Opened(4)
    assert stored(tmp_path) == [1, 2, 3]


def test_frames_after_a_gap_do_not_count(tmp_path: Path) -> None:
    target, of = files(tmp_path, roll_bytes=10_000), task()
    target.open(of)
    target.deliver(batch(of, 1, 4))
    of_another_owner = Stage(tmp_path / "part-000" / ".1.77.0.stage")
    for start, stop in ((2, 6), (8, 15)):
        of_another_owner.append(batch(of, start, stop))
    of_another_owner.close()
    assert files(tmp_path).open(task(2)) == Opened(6)
    assert stored(tmp_path) == [1, 2, 3, 5]
    assert not list(tmp_path.rglob("*.stage"))


def test_former_owner_with_a_staged_file_is_fenced(tmp_path: Path) -> None:
    former, of = files(tmp_path, roll_bytes=10_000), task()
    former.open(of)
    former.deliver(batch(of, 1, 4))
    assert files(tmp_path).open(task(2)) == Opened(4)
    with pytest.raises(Fenced, match="a later term than 1"):
        former.deliver(batch(of, 4, 9))
    former.close()
    assert stored(tmp_path) == [1, 2, 3]


def test_staged_files_without_an_identity_are_refused(tmp_path: Path) -> None:
    (tmp_path / "part-000").mkdir()
    (tmp_path / "part-000" / ".1.5.0.stage").write_bytes(b"")
    with pytest.raises(ConfigError, match="no file that says of which target"):
        files(tmp_path).open(task())


def test_memory_holds_one_staged_batch(tmp_path: Path) -> None:
    target, of = files(tmp_path, roll_bytes=10**9), task()
    target.open(of)
    for gsn in range(1, 41):
        target.deliver(batch(of, gsn, gsn + 1, [record(gsn, b"x" * 100_000)]))
    tracemalloc.start()
    target.close()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1_500_000
    assert stored(tmp_path) == list(range(1, 41))


# --- formats ---


def table_of(path: Path) -> pa.Table:
    if path.suffix == ".parquet":
        return parquet.read_table(path)
    with ipc.open_file(path) as reader:
        return reader.read_all()


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_files_have_the_columns_of_an_export(tmp_path: Path, kind: Format) -> None:
    target, of = files(tmp_path, kind, 10_000), task()
    target.open(of)
    target.deliver(batch(of, 1, 4))
    target.deliver(batch(of, 4, 6, [record(5, b"\xff", None)]))
    target.deliver(batch(of, 6, 6, []))
    (path,) = tmp_path.rglob(f"*.{kind}")
    table = table_of(path)
    assert table.schema.equals(arrow_schema(DEFAULT))
    assert table.slice(3).to_pylist() == [{
        "key": None, "value": b"\xff", "topic": f"{CLUSTER:032x}", "partition": 1, "offset": 5,
        "timestamp": record(5).timestamp, "timestampType": 0, "epoch": 0,
    }]  # fmt: skip
    assert table.column("offset").to_pylist() == [1, 2, 3, 5]
    assert files(tmp_path, kind).open(task(2, position=4, has_moved=True)) == Opened(6)
    path.write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="has no gsn"):
        files(tmp_path, kind).open(task(3, position=6, has_moved=True))


def test_format_of_a_directory_is_fixed(tmp_path: Path) -> None:
    opened(tmp_path)
    with pytest.raises(ConfigError, match="are jsonl, not parquet; the format is fixed"):
        files(tmp_path, "parquet").open(task(2))


def test_identity_of_a_former_release_is_of_json_lines(tmp_path: Path) -> None:
    opened(tmp_path)
    (identity,) = tmp_path.rglob(".ziplog-*")
    fields = json.loads(identity.read_bytes())
    del fields["format"]
    identity.write_text(json.dumps(fields))
    assert files(tmp_path).open(task(2)) == Opened(1)


def test_missing_package_is_an_error_that_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(optional_dependencies, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"target t needs pyarrow.*'ziplog\[arrow\]'"):
        targets.files("t", "out", format="parquet")
    targets.files("t", "out")


@pytest.mark.parametrize(
    ("name", "value"),
    [("format", "csv"), ("roll_bytes", 0), ("roll_bytes", 2**40), ("roll_s", 0), ("roll_s", True)],
)
def test_arguments_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"target t: {name} is"):
        targets.files("t", "out", **{name: value})


# --- whose directory it is ---


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"cluster": 8}, "the player's cluster is"),
        ({"player": "other"}, "belongs to the target warehouse of the player orders"),
        ({"target": "other"}, "belongs to the target warehouse"),
        ({"partitions": 2}, "has 2 partitions, but 1 in"),
        ({"birth": 2}, "a former cursor"),
    ],
)
def test_directory_of_another_task_is_refused(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    opened(tmp_path)
    with pytest.raises(ConfigError, match=problem):
        files(tmp_path).open(task(2, **change))


def test_other_partitions_of_another_target_are_found(tmp_path: Path) -> None:
    opened(tmp_path)
    with pytest.raises(ConfigError, match="has 4 partitions, but 1 in"):
        files(tmp_path).open(task(partition=3, partitions=4))


def test_foreign_files_of_similar_names_are_passed_over(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    foreign = [directory / "part-00000-a1b2.parquet", directory / "part-list.txt"]
    for path in foreign:
        path.write_text("of another program")
    (directory / "part-000").mkdir()
    strange = directory / "part-000" / "1.jsonl"
    strange.write_text("of another program")
    target, of = opened(directory)
    target.deliver(batch(of, 1, 3))
    target.close()
    assert all(path.exists() for path in (*foreign, strange))


def test_absent_directory_fails_the_task_until_a_seek(tmp_path: Path) -> None:
    target, of = opened(tmp_path / "out")
    target.deliver(batch(of, 1, 4))
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(ConfigError, match="ziplog cursor seek orders/warehouse/0 genesis"):
        files(tmp_path / "out").open(task(2, position=4, has_moved=True))
    assert files(tmp_path / "out").open(task(3, position=2, seek=1)) == Opened(2)


def test_older_copy_of_the_directory_is_played_on_from_there(tmp_path: Path) -> None:
    """The copy has a staged batch, and the last file after it is not there."""
    current, copy = tmp_path / "out", tmp_path / "copy"
    target, of = files(current, roll_bytes=110), task()
    target.open(of)
    for start, stop in ((1, 4), (4, 6)):
        target.deliver(batch(of, start, stop))
    shutil.copytree(current, copy)
    target.deliver(batch(of, 6, 9))
    target.close()
    before = stored(current)
    shutil.rmtree(current)
    copy.rename(current)
    later = task(2, position=9, has_moved=True)
    target = files(current)
    assert target.open(later) == Opened(6)
    target.deliver(batch(later, 6, 9))
    assert stored(current) == before == [1, 2, 3, 5, 8]


def test_files_without_an_identity_are_refused(tmp_path: Path) -> None:
    target, of = opened(tmp_path)
    target.deliver(batch(of, 1, 4))
    (tmp_path / "part-000" / ".ziplog-0000000000000000001").unlink()
    with pytest.raises(ConfigError, match="no file that says of which target"):
        files(tmp_path).open(task(2))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    target, of = opened(tmp_path)
    target.deliver(batch(of, 1, 4))
    (tmp_path / "part-000" / "0000000000000000001.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="has no gsn"):
        files(tmp_path).open(task(2))
    for path in (tmp_path / "part-000").glob(".ziplog-*"):
        path.write_text("{}")
    with pytest.raises(ConfigError, match="missing required field"):
        files(tmp_path).open(task(2))


def test_check_changes_nothing(tmp_path: Path) -> None:
    files(tmp_path / "out").check()
    assert not list(tmp_path.iterdir())
    with pytest.raises(UnavailableError, match="its directory is absent"):
        files(tmp_path / "absent" / "out").check()
    with pytest.raises(Retry, match="absent"):
        files(tmp_path / "absent" / "out").open(task())


def test_check_finds_a_directory_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match="file is no directory"):
        files(tmp_path / "file").check()
    files(tmp_path / "out").open(task())
    part = tmp_path / "out" / "part-000"
    files(tmp_path / "out").check()
    for refused in (part, part.parent):
        monkeypatch.setattr("os.access", lambda path, _, refused=refused: path != refused)
        with pytest.raises(UnavailableError, match=f"cannot write in {refused};"):
            files(tmp_path / "out").check()


@pytest.mark.parametrize("directory", ["", b"out", 5])
def test_directory_must_be_a_path(directory: Any) -> None:
    with pytest.raises(ConfigError, match="target t: directory is"):
        targets.files("t", directory)


def test_batches_are_large_by_default() -> None:
    spec = targets.files("t", "out")
    assert (spec.batch_records, spec.batch_bytes) == (10_000, 8 * 1024 * 1024)
    assert spec.roll_s == 60
    assert spec.stores_position
    assert targets.files("t", Path("out"), batch_records=5).batch_records == 5


# --- seeks ---


def test_seek_behind_the_last_record_is_refused(tmp_path: Path) -> None:
    target, of = opened(tmp_path)
    target.deliver(batch(of, 1, 6))
    for position in (1, 5):
        with pytest.raises(ConfigError, match="has records up to 5"):
            files(tmp_path).open(task(2, position=position, seek=1))
    assert files(tmp_path).open(task(3, position=6, seek=2)) == Opened(6)


def test_seek_forward_counts_once(tmp_path: Path) -> None:
    former, of = opened(tmp_path)
    former.deliver(batch(of, 1, 4))
    sought, later = files(tmp_path), task(2, position=10, seek=1)
    assert sought.open(later) == Opened(10)
    sought.deliver(batch(later, 10, 14))
    assert files(tmp_path).open(task(3, position=10, seek=1)) == Opened(14)
    with pytest.raises(Fenced):  # else records that were passed over would follow
        former.deliver(batch(of, 4, 15))
    assert stored(tmp_path) == [1, 2, 3, 13]


def test_older_state_from_before_a_seek_fails_the_task_until_a_seek(tmp_path: Path) -> None:
    """The cursor was sought to 8, and moved to 15; then a copy from before that came back."""
    target, of = opened(tmp_path)
    target.deliver(batch(of, 1, 4))
    for term in (3, 4):
        with pytest.raises(ConfigError, match=r"position 4 .*from before the last seek.* 15"):
            files(tmp_path).open(task(term, position=15, seek=1, has_moved=True))
    assert files(tmp_path).open(task(5, position=4, seek=2)) == Opened(4)
    assert files(tmp_path).open(task(6, position=15, seek=2, has_moved=True)) == Opened(4)


def test_seek_back_over_positions_without_records_counts(tmp_path: Path) -> None:
    target, of = opened(tmp_path)
    target.deliver(batch(of, 1, 10, []))
    assert files(tmp_path).open(task(2, position=4, seek=1)) == Opened(4)
