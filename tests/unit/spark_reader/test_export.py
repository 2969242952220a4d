"""`ziplog export` with a source in memory: options, output and errors."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from spark_reader import export as exporting
from spark_reader import optional_dependencies
from spark_reader.batches import arrow_schema
from spark_reader.planning import Piece
from spark_reader.reading import Pinned
from spark_reader.schema import DEFAULT
from tests.unit.ziplog.cli.fakes import FakeLog, run
from ziplog.errors import UnavailableError
from ziplog.types import Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from spark_reader.options import Options
    from spark_reader.projection import Projection

SCHEMA = arrow_schema(DEFAULT)
#: The end of the positions, which three shards own in turn.
STOP = 61


class FakeSession:
    """Every third position is of a shard; batches of the shards end at different places."""

    fails_at = STOP

    def __init__(self, options: Options) -> None:
        self._options = options

    @contextlib.contextmanager
    def open(self) -> Iterator[FakeSession]:
        yield self

    def pin(self) -> Pinned:
        return Pinned(self._options.start or 1, self._options.stop or STOP, "fake")

    def pieces_of(self, start: int, stop: int) -> list[Piece]:
        middle = (start + stop) // 2
        ends = [(start, middle), (middle, stop)] if start < stop else []
        return [Piece(shard, low, high, 10) for shard in (0, 1, 2) for low, high in ends]

    def read(
        self, pieces: Iterable[Piece], what: Projection, task_index: int = 0
    ) -> Iterator[pa.RecordBatch]:
        assert (what.fields, what.topic, task_index) == (DEFAULT, "fake", 0)
        for piece in pieces:
            for start in range(piece.start, piece.stop, 8 + piece.shard):
                if start >= self.fails_at:
                    raise UnavailableError("the shard is gone")
                stop = min(start + 8 + piece.shard, piece.stop)
                yield pa.RecordBatch.from_pylist(
                    [row(gsn) for gsn in range(start, stop) if gsn % 3 == piece.shard], SCHEMA
                )

    def records(self, pieces: Iterable[Piece], what: Projection) -> Iterator[Record]:
        for batch in self.read(pieces, what):
            for found in batch.to_pylist():
                rid = RecordId(found["offset"], found["partition"])
                yield Record(rid, found["value"], None, found["offset"] * 1_000_000, 7)


def row(gsn: int) -> dict[str, Any]:
    return {
        "key": None,
        "value": b"%d" % gsn,
        "topic": "fake",
        "partition": gsn % 3,
        "offset": gsn,
        "timestamp": gsn * 1_000_000,
        "timestampType": 0,
        "epoch": 7,
    }


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """Return the options of all exports."""
    seen: list[Options] = []

    def source_of(options: Options) -> FakeSession:
        seen.append(options)
        return FakeSession(options)

    monkeypatch.setattr(exporting, "source_of", source_of)
    return seen


def expected(start: int = 1, stop: int = STOP) -> pa.Table:
    return pa.Table.from_pylist([row(gsn) for gsn in range(start, stop)], SCHEMA)


def test_rows_of_all_shards_are_in_one_order(tmp_path: Path, asked: list[Options]) -> None:
    done = run("export", "--output", str(tmp_path / "all"))
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == f"ziplog: 60 records of positions 1 to 60: {tmp_path / 'all'}\n"
    assert parquet.read_table(tmp_path / "all") == expected()
    assert asked[0].servers == "127.0.0.1:7400"


@pytest.mark.usefixtures("asked")
def test_a_range_without_positions_is_a_file_without_rows(tmp_path: Path) -> None:
    done = run("export", "-o", str(tmp_path / "none"), "--from", "9", "--to", "9@2")
    assert (done.exit_code, done.stderr.partition(":")[2]) == (
        0,
        f" 0 records of no position: {tmp_path / 'none'}\n",
    )
    assert parquet.read_table(tmp_path / "none") == expected(1, 1)


@pytest.mark.usefixtures("asked")
def test_stdout_has_only_data() -> None:
    done = run("export", "-o", "-", "--format", "arrow", "--from", "5@1", "--to", "9")
    with ipc.open_stream(io.BytesIO(done.stdout_bytes)) as reader:
        assert reader.read_all() == expected(5, 9)
    lines = run("export", "-o", "-", "--format", "jsonl", "--from", "59").stdout.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith('{"rid":"59@2","gsn":59,"shard":2,"epoch":7,')


@pytest.mark.usefixtures("asked")
def test_what_was_written_is_printed_as_json(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    done = run("export", "-o", str(path), "--json")
    assert json.loads(done.stdout) == {
        "file": str(path), "format": "parquet", "records": len(expected()), "from": 1, "to": STOP,
    }  # fmt: skip
    refused = run("export", "-o", "-", "--json")
    assert refused.exit_code == 2
    assert "stdout gets the records" in refused.stderr


def test_options_are_those_of_a_load(tmp_path: Path, asked: list[Options]) -> None:
    out = ("export", "-o", str(tmp_path / "x"))
    run(*out, "--from", "3", "--to", "8@1", "--bootstrap", "h:1", "--timeout", "2")
    run(*out, "--from-epoch", "4", "--to-epoch", "6", "--path", "/data")
    run(*out, "--from", "genesis")
    run(*out, "--since", "2026-01-31T12:00:00+01:00", "--until", "1769857200500")
    run(*out, "--from", "3", "--allow-trimmed")
    found = [(each.servers, each.path, each.start, each.stop, each.timeout_s) for each in asked]
    assert found == [
        ("h:1", "", 3, 8, 2),
        ("", "/data", None, None, 10),
        ("127.0.0.1:7400", "", None, None, 10),
        ("127.0.0.1:7400", "", None, None, 10),
        ("127.0.0.1:7400", "", 3, None, 10),
    ]
    times = [(each.since_us, each.until_us) for each in asked]
    assert times == [(None, None)] * 3 + [(1769857200_000000, 1769857200_500000), (None, None)]
    assert [each.fail_on_data_loss for each in asked] == [True] * 4 + [False]
    assert (asked[1].first_epoch, asked[1].last_epoch) == (4, 6)


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--from", "x"], "--from is 'x'; it must be 'genesis', 'recent', 'end', a gsn"),
        (["--from", "3", "--from-epoch", "1"], "--from is 3; it must be left out if --from-epoch"),
        (
            ["--from", "-3", "--path", "/d"],
            "--from is '-3'; it must be a gsn or '<gsn>@<shard>' wi",
        ),
        (["--to", "recent"], "--to is 'recent'; it must be 'genesis', 'end', a gsn"),
        (["--from", "3", "--to", "2"], "--to is 2; it must be --from, 3"),
        (["--since", "noon"], "--since is 'noon'; it must be milliseconds since 1970 UTC, or a ti"),
        (["--since", "5", "--until", "4"], "--until is 4; it must be --since, 5 ms, or more"),
        (["--path", "/d", "--bootstrap", "h:1"], "--path is '/d'; it must be left out if --boot"),
        (["--format", "arrow", "--compression", "gzip"], "it must be none or lz4 or zstd for arr"),
        (["--output", "x.csv"], "--output is 'x.csv'; it must be a name with .arrow, .jsonl, .par"),
        (
            ["--output", "/dev/full"],
            "--output is '/dev/full'; it must be a file, or '-' for stdout",
        ),
    ],
)
def test_errors_use_the_names_of_the_command_line(
    arguments: list[str], line: str, tmp_path: Path
) -> None:
    done = run("export", "-o", str(tmp_path / "x"), *arguments)
    assert done.exit_code == 2
    (said,) = done.stderr.splitlines()
    assert line in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("asked")
def test_a_failed_export_keeps_the_former_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeSession, "fails_at", 40)
    (tmp_path / "x").write_bytes(b"former")
    for kind in ("parquet", "arrow", "jsonl"):
        done = run("export", "-o", str(tmp_path / "x"), "--format", kind)
        assert (done.exit_code, done.stderr) == (1, "ziplog: error: the shard is gone\n")
        assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("x", b"former")]


@pytest.mark.usefixtures("asked")
def test_an_export_that_is_terminated_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def records(*_: object) -> Iterator[Record]:
        signal.raise_signal(signal.SIGTERM)
        return iter(())

    def refuse(*_: object) -> None:
        pytest.fail("the signal would end the process")

    monkeypatch.setattr(FakeSession, "records", records)
    former = signal.signal(signal.SIGTERM, refuse)
    try:
        done = run("export", "-o", str(tmp_path / "x"), "--format", "jsonl")
        assert signal.getsignal(signal.SIGTERM) is refuse
    finally:
        signal.signal(signal.SIGTERM, former)
    assert done.exit_code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("asked")
def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    done = run("export", "-o", str(tmp_path / "away" / "x"))
    assert done.exit_code == 1
    file = tmp_path / "away" / "x"
    assert done.stderr == f"ziplog: error: {file}: No such file or directory\n"


@pytest.mark.usefixtures("asked")
def test_progress_never_decreases_and_ends_at_the_total(tmp_path: Path) -> None:
    reported: list[tuple[int, int]] = []
    exporting.export(
        {"path": "d", "startingOffsets": "4"}, tmp_path / "x", "parquet", "none",
        lambda done, total: reported.append((done, total)), io.BytesIO(),
    )  # fmt: skip
    assert reported == sorted(reported)
    assert {done for done, _ in reported} == {0, 30, 60}
    assert {total for _, total in reported} == {60}
    assert reported[-1] == (60, 60)


def test_missing_pyarrow_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional_dependencies, "find_spec", lambda _: None)
    done = run("export", "-o", "x.arrow")
    assert done.exit_code == 1
    assert done.stderr == (
        "ziplog: error: ziplog export --format arrow needs pyarrow, not installed:"
        " pip install 'ziplog[arrow]'\n"
    )


def test_positions_that_depend_on_the_log_are_found_first(
    tmp_path: Path, asked: list[Options], log: FakeLog
) -> None:
    log.insert_many([b"x"] * 30, RecordId(0, 0))
    done = run("export", "-o", str(tmp_path / "x"), "--from", "-10", "--to", "-2")
    assert done.exit_code == 0, done.stderr
    run("export", "-o", str(tmp_path / "x"), "--from", "@1w", "--to", "end", "--since", "2h")
    assert [(each.start, each.stop) for each in asked] == [(21, 29), (31, None)]
    assert asked[0].since_us is None
    assert abs((asked[1].since_us or 0) / 1e6 + 7200 - time.time()) < 60


def test_json_lines_need_no_pyarrow(
    tmp_path: Path, asked: list[Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optional_dependencies, "find_spec", lambda _: None)
    assert run("export", "-o", str(tmp_path / "x.jsonl"), "--from", "59").exit_code == 0
    lines = (tmp_path / "x.jsonl").read_text().splitlines()
    assert [json.loads(line)["rid"] for line in lines] == ["59@2", "60@0"]
    assert asked[0].start == 59
    program = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "import spark_reader.export, spark_reader.cli, spark_reader.sources"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
