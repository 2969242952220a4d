"""`ziplog trim`: what it deletes, counts and asks."""

from __future__ import annotations

import json

import pytest

import ziplog
from tests.unit.ziplog.cli.fakes import FakeExtents, FakeLog, run
from ziplog.cli import trim
from ziplog.client.bulk.extents import Extent


def test_trim(log: FakeLog) -> None:
    result = run("trim", "4@1")
    assert (result.exit_code, result.stdout) == (0, "")
    assert log.calls[-1] == ("trim", ziplog.RecordId(4, 1))
    assert "deleted all records before 4@1" in result.stderr
    assert "nothing to delete: the log has no record before 1@0" in run("trim", "1").stderr


@pytest.mark.parametrize("text", ["genesis", "recent"])
def test_a_trim_refuses_words_that_stand_for_no_end(log: FakeLog, text: str) -> None:
    result = run("trim", text)
    assert result.exit_code == 2
    assert f"POSITION is '{text}'; it must be 'end', a gsn" in result.stderr
    assert "'epoch:N'" in result.stderr
    assert log.calls == []


@pytest.mark.parametrize("text", ["0", "0@3"])
def test_a_trim_needs_a_position_from_the_first_on(log: FakeLog, text: str) -> None:
    result = run("trim", text)
    assert result.exit_code == 2
    assert f"POSITION is '{text}'; it must be a position from 1 on" in result.stderr
    assert [call[0] for call in log.calls] == ["connect"]


@pytest.mark.parametrize("text", ["end", "-5", "@1h", "epoch:0"])
def test_an_empty_log_has_nothing_to_delete(log: FakeLog, text: str) -> None:
    result = run("trim", text)
    assert (result.exit_code, log.calls[-1]) == (0, ("trim", ziplog.RecordId(1, 0)))
    assert "nothing to delete: the log has no record before 1@0" in result.stderr


def test_a_trim_takes_one_of_position_time_and_size(log: FakeLog) -> None:
    log.insert_many([b"x"] * 95, ziplog.RID_GENESIS)
    for arguments, gsn in (
        (["-5"], 91), (["--before", "1h"], 96), (["--before", "2023-01-01"], 1),
        (["--keep-bytes", "3000"], 68), (["--keep-bytes", "0"], 96),
        (["--keep-bytes", "999999"], 1),
    ):  # fmt: skip
        result = run("trim", *arguments, "--json")
        assert (result.exit_code, json.loads(result.stdout)) == (
            0, {"before": f"{gsn}@0", "trimmed": True},
        )  # fmt: skip
        assert log.calls[-1] == ("trim", ziplog.RecordId(gsn, 0))
    for wrong in (
        [],
        ["end", "--before", "1h"],
        ["--before", "soon"],
        ["end", "--keep-bytes", "1"],
    ):
        assert run("trim", *wrong).exit_code == 2
    assert "--before is 'soon'; it must be a time ago" in run("trim", "--before", "soon").stderr


def test_bytes_are_those_of_all_shards_together(
    log: FakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shard has 1,000 bytes in each ten positions; a server stores one shard only."""
    log.insert_many([b"x"] * 100, ziplog.RID_GENESIS)

    def extents(start: int, stop: int) -> FakeExtents:
        found = FakeExtents(0)
        found.shards = [Extent(shard, start, stop) for shard in (0, 1)]
        return found

    monkeypatch.setattr(log, "extents", extents)
    counts = json.loads(run("trim", "--keep-bytes", "8000", "--dry-run", "--json").stdout)
    assert (counts["before"], counts["bytes"]) == ("61@0", 12_000)
    text = run("trim", "--keep-bytes", "8000", "--dry-run").stderr
    assert "12,000 bytes of each copy of the log" in text


def test_a_dry_run_counts_and_deletes_nothing(log: FakeLog) -> None:
    log.insert_many([b"x"] * 95, ziplog.RID_GENESIS)
    result = run("trim", "--dry-run", "-5")
    assert result.exit_code == 0
    assert "would delete 90 records before 91@0, about 10,000 bytes of each copy" in result.stderr
    assert (
        "of the log, and free 3 segment files on all servers; nothing was deleted" in result.stderr
    )
    assert "would delete 1 record before 2@0" in run("trim", "--dry-run", "2").stderr
    assert json.loads(run("trim", "--dry-run", "51", "--json").stdout) == {
        "before": "51@0", "trimmed": False, "records": 50, "bytes": 6000,
        "segments": 2,
    }  # fmt: skip
    log.trimmed_to = 21
    assert json.loads(run("trim", "--dry-run", "51", "--json").stdout)["records"] == 30
    assert "trim" not in [call[0] for call in log.calls]


@pytest.mark.parametrize(("typed", "code"), [(b"y\n", 0), (b"n\n", 1), (b"", 1)])
def test_a_trim_asks_on_a_terminal(
    log: FakeLog, monkeypatch: pytest.MonkeyPatch, typed: bytes, code: int
) -> None:
    monkeypatch.setattr(trim, "is_terminal", lambda: True)
    result = run("trim", "4@1", stdin=typed)
    assert result.exit_code == code
    assert "Delete all records before 4@1 of the log at 127.0.0.1:7400, for good?" in result.stderr
    assert (log.calls[-1] == ("trim", ziplog.RecordId(4, 1))) is (code == 0)
    assert run("trim", "5@1", "--yes").exit_code == 0
    assert log.calls[-1] == ("trim", ziplog.RecordId(5, 1))
