"""`ziplog insert`, `append` and `read`: their input, output and exit codes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import ziplog
from tests.unit.ziplog.cli.fakes import FakeLog, run
from ziplog.errors import OutcomeUnknownError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def test_insert_prints_the_rid(log: FakeLog) -> None:
    result = run("insert", "--after", "5@1", "--key", "k", stdin=b"one\ntwo\n")
    assert (result.exit_code, result.stdout) == (0, "1@0\n")
    assert log.records[0].payload == b"one\ntwo"
    assert log.records[0].key == b"k"
    assert log.calls[-1] == ("insert", [b"one\ntwo"], ziplog.RecordId(5, 1))


def test_arguments_keep_their_bytes(log: FakeLog) -> None:
    typed = b"\xff\xc3".decode(errors="surrogateescape")
    assert run("insert", typed, "--key", typed).exit_code == 0
    assert run("append", typed, "--key", typed).exit_code == 0
    assert run("insert", "other").exit_code == 0
    assert [record.payload for record in log.records] == [b"\xff\xc3", b"\xff\xc3", b"other"]
    assert [record.key for record in log.records] == [b"\xff\xc3", b"\xff\xc3", None]
    for option in ("--key", "--key-prefix", "--grep"):
        found = run("tail", option, typed, "--format", "%g")
        assert (found.exit_code, found.stdout) == (0, "1\n2\n")


@pytest.mark.parametrize(
    ("typed", "stored"),
    [(b"a", b"a"), (b"a\n\n", b"a\n"), (b"a\r\n", b"a"), (b"a\r", b"a\r"), (b"", b"")],
)
def test_one_line_end_is_removed_unless_the_input_is_raw(
    log: FakeLog, typed: bytes, stored: bytes
) -> None:
    for arguments in ((), ("-",), ("--raw",), ("-", "--raw")):
        assert run("insert", *arguments, stdin=typed).exit_code == 0
    assert [record.payload for record in log.records] == [stored, stored, typed, typed]


def test_an_empty_input_is_a_record_and_is_reported(log: FakeLog) -> None:
    assert "the input is empty" in run("insert", stdin=b"").stderr
    assert run("insert", "", stdin=b"").stderr == ""
    assert run("insert", stdin=b"\n").stderr == ""
    assert [record.payload for record in log.records] == [b"", b"", b""]


def test_insert_takes_a_file_or_an_argument(log: FakeLog, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\x00\xff")
    assert run("insert", "--file", str(tmp_path / "f")).exit_code == 0
    assert run("insert", "héllo").exit_code == 0
    assert [record.payload for record in log.records] == [b"\x00\xff", "héllo".encode()]


def test_lines_are_records_in_their_order_each_batch_after_the_one_before(log: FakeLog) -> None:
    lines = [str(number).encode() for number in range(2500)]
    result = run("insert", "--lines", stdin=b"\r\n".join(lines))
    assert result.exit_code == 0
    assert [record.payload for record in log.records] == lines
    assert result.stdout.splitlines() == [f"{number}@0" for number in range(1, 2501)]
    afters = [call[2].gsn for call in log.calls if call[0] == "insert"]
    assert afters == [0, 1024, 2048]


def test_insert_reports_positions_as_json(log: FakeLog) -> None:
    done = run("insert", "one", "--json")
    assert json.loads(done.stdout) == {
        "rid": "1@0", "gsn": 1, "shard": 0, "epoch": 0, "path": "fast",
    }  # fmt: skip
    log.insert_many([b"x"] * 200, ziplog.RID_GENESIS)
    lines = run("insert", "--lines", "--json", stdin=b"a\nb\n").stdout.splitlines()
    assert [json.loads(line)["rid"] for line in lines] == ["202@0", "203@0"]
    assert {json.loads(line)["epoch"] for line in lines} == {2}
    assert log.records[-1].payload == b"b"


def test_insert_keeps_the_line_end_of_an_argument(log: FakeLog) -> None:
    assert run("insert", "one\n").exit_code == 0
    assert log.records[0].payload == b"one\n"


def test_insert_opens_its_file_before_it_connects(log: FakeLog) -> None:
    assert run("insert", "--file", "/nowhere/x").exit_code == 1
    assert log.calls == []


def test_insert_follows_any_position(log: FakeLog) -> None:
    log.insert_many([b"x"] * 9, ziplog.RID_GENESIS)
    for after, gsn in (("-2", 8), ("epoch:0", 1), ("@1h", 12)):
        assert run("insert", "y", "--after", after).exit_code == 0
        assert log.calls[-1][2].gsn == gsn
        assert run("insert", "z", "--after", "nowhere").exit_code == 2


def test_append_takes_the_options_of_insert(log: FakeLog, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"one\ntwo\n")
    options = ("--after", "5@1", "--key", "k", "--shard", "3", "--file", str(tmp_path / "f"))
    for verb in ("insert", "append"):
        assert run(verb, *options).stdout.endswith("@3\n")
        assert log.calls[-1] == (verb, [b"one\ntwo"], ziplog.RecordId(5, 1))
        done = run(verb, *options, "--lines", "--raw", "--json")
        assert [json.loads(line)["shard"] for line in done.stdout.splitlines()] == [3, 3]
        assert log.calls[-1] == (verb, [b"one", b"two"], ziplog.RecordId(5, 1))
        assert run(verb, "héllo").stdout == f"{len(log.records)}@0\n"
        assert run(verb, "word", "--lines").exit_code == 2
    inserted, appended = log.records[:4], log.records[4:]
    assert [(r.payload, r.key) for r in inserted] == [(r.payload, r.key) for r in appended]


def not_sealed(rids: list[ziplog.RecordId | None]) -> OutcomeUnknownError:
    text = f"the record is at {rids[-1]}, but shard 2 (recovering) has not passed it"
    error = OutcomeUnknownError(f"{text}; resolve() waits until that is over", shard=0, seq=0)
    error.results = rids
    return error


def test_an_append_that_is_not_sealed_names_the_rids_and_what_to_do(log: FakeLog) -> None:
    log.append_error = not_sealed
    result = run("append", "--lines", stdin=b"a\nb\n")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert "at 2@0, but shard 2 (recovering) has not passed it; do not append" in result.stderr
    assert "the log has at 1@0 2@0: once a later `ziplog append --after 2@0`" in result.stderr
    assert "resolve()" not in result.stderr


def test_an_append_that_may_be_nowhere_fails_as_an_insert_does(log: FakeLog) -> None:
    log.append_error = lambda rids: not_sealed([*rids[1:], None])
    result = run("append", "--lines", stdin=b"a\nb\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "do not append" not in result.stderr


@pytest.mark.parametrize(
    ("lost", "reported"),
    [
        (range(1024, 2048), "not acknowledged: lines 1025 to 2048 of the input\n"),
        (
            [1030, 1031, 1040],
            "lines 1031 to 1032, 1041 of the input (1021 others are; the last of them, line 2048",
        ),
        (
            [2047],
            "line 2048 of the input (1023 others are; the last of them, line 2047 is at 2047@0)",
        ),
        (range(1024, 2048, 2), "1033, 1035, 1037, 1039, others of the input (512 others are;"),
    ],
)
def test_a_failed_batch_of_lines_names_those_without_an_ack(
    log: FakeLog, lost: Sequence[int], reported: str
) -> None:
    def fail(rids: list[ziplog.RecordId | None]) -> OutcomeUnknownError | None:
        first = len(log.records) - len(rids)
        found = [None if first + index in lost else rid for index, rid in enumerate(rids)]
        return not_sealed(found) if None in found else None

    log.append_error = fail
    result = run("append", "--lines", stdin=b"x\n" * 3000)
    assert (result.exit_code, result.stdout.count("\n")) == (1, 1024)
    assert reported in result.stderr


def test_read_prints_the_payload_and_nothing_else(log: FakeLog) -> None:
    log.insert_after(b"\x00\xffraw", ziplog.RID_GENESIS)
    assert run("read", "1@0").stdout_bytes == b"\x00\xffraw"


def test_read_takes_all_forms_of_a_position(log: FakeLog) -> None:
    log.insert_many([b"first", b"next", b"last"], ziplog.RID_GENESIS)
    for position, payload in (
        ("genesis", "first"), ("2", "next"), ("-1", "last"), ("end", "last"), ("epoch:0", "first"),
        ("@2020-01-01", "first"),
    ):  # fmt: skip
        assert run("read", position).stdout == payload
    result = run("read", "1000")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no stable record from 1000 on" in result.stderr


def test_a_missing_record_is_reported_in_one_line(log: FakeLog) -> None:
    result = run("read", "9@0")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("ziplog: error: no record at 9@0")
    assert result.stderr.count("\n") == 1
