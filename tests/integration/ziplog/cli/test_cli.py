"""The command line with a client in memory: its output and exit codes."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pytest

import ziplog
from tests.unit.ziplog.cli.fakes import STATUS, FakeLog, cluster_file, run
from ziplog.cli import servers, trim
from ziplog.config import parse
from ziplog.demo.playing import Played
from ziplog.demo.run import Summary
from ziplog.errors import ConfigError, OutcomeUnknownError, UnavailableError
from ziplog.wire import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ziplog.demo.flights import Flight


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


@pytest.mark.parametrize("spelling", ["--version", "-V", "version"])
def test_the_version_is_printed(spelling: str) -> None:
    result = run(spelling)
    assert result.exit_code == 0
    assert result.stdout.startswith(
        f"ziplog {ziplog.__version__}, wire {VERSION}, files 1, Python 3."
    )


def test_the_version_as_json_has_the_first_and_the_last_wire_version() -> None:
    document = json.loads(run("version", "--json").stdout)
    assert document["version"] == ziplog.__version__
    assert document["wire_versions"] == [VERSION, VERSION]
    assert document["files"] == 1
    assert document["python"].startswith("3.")


def test_a_missing_record_is_reported_in_one_line(log: FakeLog) -> None:
    result = run("read", "9@0")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("ziplog: error: no record at 9@0")
    assert result.stderr.count("\n") == 1


def test_tail_json_has_the_fields_that_scripts_rely_on(log: FakeLog) -> None:
    log.insert_after(b"text", ziplog.RID_GENESIS, key="k")
    log.insert_after(b"\xff", ziplog.RID_GENESIS)
    result = run("tail", "--json")
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert first == {
        "rid": "1@0",
        "gsn": 1,
        "shard": 0,
        "epoch": 7,
        "timestamp": "2023-11-14T22:13:20+00:00",
        "key": "k",
        "payload": "text",
    }
    assert second["payload_b64"] == base64.b64encode(b"\xff").decode()
    assert second["key"] is None
    assert "payload" not in second


def test_tail_starts_and_ends_at_the_given_positions(log: FakeLog) -> None:
    log.insert_many([b"a", b"b\xff\n", b"c"], ziplog.RID_GENESIS)
    result = run("tail", "--from", "2@0", "--limit", "1")
    assert result.stdout == "2@0\tb\\xff\\n\n"
    assert log.calls[-1] == ("subscribe", ziplog.RecordId(2, 0), False, 10.0)
    assert run("tail", "--from", "recent", "--follow").exit_code == 0
    assert log.calls[-1] == ("subscribe", ziplog.RID_RECENT, True, None)


#: The parts of escape sequences, and direction marks.
CONTROLS = "\x00\x07\x08\x1b]0;title\x07\x1b[2J\x7f\x9b31m\u202e\u2028"
ESCAPED = r"\x00\x07\x08\x1b]0;title\x07\x1b[2J\x7f\x9b31m\u202e\u2028"


def test_no_control_character_of_a_payload_is_printed_raw(log: FakeLog) -> None:
    log.insert_many([CONTROLS.encode() + b"\t\xff\r\n"], ziplog.RID_GENESIS)
    assert run("tail").stdout == f"1@0\t{ESCAPED}\t\\xff\\r\\n\n"


def test_json_has_the_same_text_without_a_raw_control_character(log: FakeLog) -> None:
    log.insert_after(CONTROLS.encode(), ziplog.RID_GENESIS, key=CONTROLS)
    for command in (("tail",), ("read", "1@0")):
        printed = run(*command, "--json").stdout
        assert printed.isascii()
        assert not any(ord(char) < 0x20 or ord(char) == 0x7F for char in printed.strip())
        assert json.loads(printed)["payload"] == json.loads(printed)["key"] == CONTROLS


def test_read_is_exact_in_a_pipe_and_escaped_on_a_terminal(
    log: FakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = b"two\nlines\t" + CONTROLS.encode() + b"\xff"
    log.insert_after(payload, ziplog.RID_GENESIS)
    assert run("read", "1@0").stdout_bytes == payload
    monkeypatch.setattr("typer.testing._NamedTextIOWrapper.isatty", lambda _: True, raising=False)
    assert run("read", "1@0").stdout == f"two\nlines\t{ESCAPED}\\xff\n"


def test_errors_and_tables_hold_no_control_character(
    log: FakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {**STATUS, "cluster": "c\x1b[2J"}
    document["failure_handlers"] = [{**STATUS["failure_handlers"][0], "name": "fh\x9b0m"}]  # type: ignore[index]
    monkeypatch.setattr(log, "cluster", lambda: document)
    output = run("status")
    assert "\x1b" not in output.stdout
    assert "\x9b" not in output.stdout
    assert r"c\x1b[2J: durability" in output.stdout
    assert r"fh\x9b0m" in output.stdout
    assert "\x1b" not in run("read", "x\x1b[2J").stderr


def test_trim(log: FakeLog) -> None:
    result = run("trim", "4@1")
    assert (result.exit_code, result.stdout) == (0, "")
    assert log.calls[-1] == ("trim", ziplog.RecordId(4, 1))
    assert "deleted all records before 4@1" in result.stderr
    assert "nothing to delete: the log has no record before 1@0" in run("trim", "1").stderr


def test_tail_without_a_position_starts_at_the_first_record_that_is_left(log: FakeLog) -> None:
    for payload in (b"a", b"b", b"c"):
        log.insert_after(payload, ziplog.RID_GENESIS)
    log.trimmed_to = 2
    result = run("tail", "--format", "%g %v")
    assert (result.exit_code, result.stdout) == (0, "2 b\n3 c\n")
    refused = run("tail", "--from", "genesis")
    assert (refused.exit_code, "before 2@0 were trimmed" in refused.stderr) == (1, True)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("genesis", ziplog.RID_GENESIS),
        ("recent", ziplog.RID_RECENT),
        ("end", ziplog.RecordId(1, 0)),
        ("7", ziplog.RecordId(7, 0)),
        ("7@3", ziplog.RecordId(7, 3)),
    ],
)
def test_a_position_has_one_grammar(log: FakeLog, text: str, found: ziplog.RecordId) -> None:
    log.insert_after(b"x", ziplog.RID_GENESIS)
    assert run("tail", "--from", text).exit_code == 0
    assert log.calls[-1][1] == found
    if found.gsn >= 0:
        assert run("insert", "y", "--after", text).exit_code == 0
        assert log.calls[-1] == ("insert", [b"y"], found)


@pytest.mark.parametrize("text", ["genesis", "recent", "0"])
def test_a_trim_needs_a_position_after_the_first(log: FakeLog, text: str) -> None:
    result = run("trim", text)
    assert result.exit_code == 2
    assert f"POSITION is '{text}'; it must be 'end', a gsn" in result.stderr
    assert "'epoch:N'" in result.stderr
    assert [call[0] for call in log.calls] == ["connect"]


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


def test_a_dry_run_counts_and_deletes_nothing(log: FakeLog) -> None:
    log.insert_many([b"x"] * 95, ziplog.RID_GENESIS)
    result = run("trim", "--dry-run", "-5")
    assert result.exit_code == 0
    assert "would delete 90 records before 91@0, about 10,000 bytes" in result.stderr
    assert "and free 3 segment files on all servers; nothing was deleted" in result.stderr
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


def test_the_bootstrap_comes_from_the_option_or_the_environment(log: FakeLog) -> None:
    run("status", "--bootstrap", "h:1", "--timeout", "3")
    assert log.calls[-1] == ("connect", "h:1", 3.0)
    run("status", env={"ZIPLOG_BOOTSTRAP": "h:2"})
    assert log.calls[-1] == ("connect", "h:2", 10.0)
    run("status")
    assert log.calls[-1] == ("connect", "127.0.0.1:7400", 10.0)


@pytest.mark.parametrize(
    "arguments",
    [
        ("read", "seven"),
        ("read",),
        ("tail", "--from", "1-1"),
        ("tail", "--limit", "0"),
        ("insert", "word", "--lines"),
        ("status", "--timeout", "soon"),
        ("frobnicate",),
        ("up",),
        ("up", "--data-dir", "x", "--durability", "ram"),
        ("shard", "remove"),
        ("shard", "remove", "-1"),
        ("config", "check", "/nowhere/cluster.toml"),
    ],
    ids=" ".join,
)
def test_bad_usage_is_2(log: FakeLog, arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr


def test_a_cluster_that_is_not_there_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(bootstrap: str, **_options: object) -> FakeLog:
        raise UnavailableError(f"no node answered at {bootstrap}")

    monkeypatch.setattr(ziplog, "connect", connect)
    result = run("status")
    assert result.exit_code == 1
    assert result.stderr == "ziplog: error: no node answered at 127.0.0.1:7400\n"


def test_ctrl_c_is_quiet(log: FakeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(log, "cluster", interrupted)
    result = run("status")
    assert (result.exit_code, result.output) == (130, "")


def test_config_show_gives_a_file_that_config_check_accepts(tmp_path: Path) -> None:
    shown = run("config", "show")
    path = tmp_path / "cluster.toml"
    path.write_text(shown.stdout)
    checked = run("config", "check", str(path))
    assert (checked.exit_code, checked.stdout) == (0, "")
    assert run("config", "show", str(path)).stdout == shown.stdout
    path.write_text(shown.stdout.replace("epoch_ms", "epoch"))
    assert run("config", "check", str(path)).exit_code == 2


def test_config_prints_json_without_the_password(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    text = run("config", "show").stdout
    path.write_text(text.replace("[cluster]\n", f"[cluster]\nraft_password = '{'x' * 16}'\n"))
    path.chmod(0o600)
    document = json.loads(run("config", "show", str(path), "--json").stdout)
    assert (document["epoch_ms"], document["mms"][0]["port"]) == (10, 7400)
    assert document["raft_password"] == "(not shown)"


def test_up_refuses_to_change_a_cluster_that_exists(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(run("config", "show").stdout)
    result = run("up", "--data-dir", str(tmp_path), "--shards", "3")
    assert result.exit_code == 2
    assert "--shards is 3, but the existing cluster has 1" in result.stderr


@pytest.mark.parametrize("option", [(), ("--detach",)])
def test_up_refuses_a_directory_with_other_files(tmp_path: Path, option: tuple[str, ...]) -> None:
    for name in ("a.txt", "b.txt", "c.txt", "d.txt"):
        (tmp_path / name).touch()
    result = run("up", "--data-dir", str(tmp_path), *option)
    assert result.exit_code == 2
    assert "has no cluster.toml, but other files (a.txt, b.txt, c.txt, ...)" in result.stderr
    assert len(list(tmp_path.iterdir())) == 4


def test_config_check_needs_the_package_of_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cluster.toml"
    text = run("config", "show").stdout
    path.write_text(text.replace("[cluster]\n", f"[cluster]\nraft_password = '{'x' * 16}'\n"))
    path.chmod(0o600)
    for has_package, code in ((False, 2), (True, 0)):
        monkeypatch.setattr("pysyncobj.syncobj.HAS_CRYPTO", has_package)
        result = run("config", "check", str(path))
        assert result.exit_code == code, result.stderr
        assert ("run `pip install 'ziplog[tls]'`" in result.stderr) is not has_package


def test_the_command_that_created_a_cluster_restarts_it_after_shards_were_added(
    tmp_path: Path,
) -> None:
    cluster_file(tmp_path, 7402)
    servers._refuse_contradictions(tmp_path, {"shards": 1, "f": 0, "port": 7400})
    with pytest.raises(ConfigError, match="--f is 1"):
        servers._refuse_contradictions(tmp_path, {"shards": 1, "f": 1})


@pytest.mark.parametrize(
    ("port", "variable", "said"),
    [
        (7400, "", ""),
        (7400, "127.0.0.1:9", "not at 127.0.0.1:9, so run: export ZIPLOG_BOOTSTRAP="),
        (30000, "", "not at 127.0.0.1:7400, so run: export ZIPLOG_BOOTSTRAP=127.0.0.1:30000"),
        (30000, "127.0.0.1:30000", ""),
    ],
)
def test_up_prints_the_bootstrap_variable_for_another_endpoint(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    port: int,
    variable: str,
    said: str,
) -> None:
    monkeypatch.setenv("ZIPLOG_BOOTSTRAP", variable)
    text = run("config", "show").stdout
    assert "port = 7400" in text
    text = text.replace("port = 7400", f"port = {port}")
    servers._say_bootstrap(parse(text, tmp_path / "cluster.toml"))
    output = capsys.readouterr()
    assert output.out == ""
    assert (said in output.err) if said else (output.err == "")


def test_down_where_nothing_runs_is_done(tmp_path: Path) -> None:
    done = run("down", "--data-dir", str(tmp_path), "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout) == {"data_dir": str(tmp_path), "stopped_pid": None}
    assert "no cluster is running" in done.stderr


def test_down_signals_no_process_while_the_process_id_is_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(servers.os, "kill", lambda pid, _: ended.append(pid))
    numbers = iter([0, 0, 77, 77, None])
    monkeypatch.setattr(servers, "running_pid", lambda _: next(numbers))
    done = run("down", "--data-dir", str(tmp_path), "--json")
    assert json.loads(done.stdout)["stopped_pid"] == 77
    assert ended == [77], "0 would be the whole process group"
    monkeypatch.setattr(servers, "running_pid", lambda _: 0)
    result = run("down", "--data-dir", str(tmp_path), "--timeout", "0.1")
    assert result.exit_code == 1
    assert ended == [77]


@pytest.mark.parametrize(
    ("spoilt", "code"),
    [
        ({}, 0),
        ({"delivered": 99}, 1),
        ({"same_contents": False}, 1),
        ({"fault": "twice"}, 1),
        ({"is_complete": False}, 1),
    ],
    ids=["right", "one is missing", "other contents", "a fault in the order", "another copy"],
)
def test_the_demo_fails_unless_everything_came_back(
    monkeypatch: pytest.MonkeyPatch, spoilt: dict[str, Any], code: int
) -> None:
    right: dict[str, Any] = {
        "inserted": 100, "delivered": 100, "same_contents": True, "fault": "", "first": "1@0",
        "last": "100@1", "aircraft": 4, "shards": 2, "replicas": 2, "durability": "memory",
        "clients": 2, "insert_s": 2.0, "total_s": 3.0, "batched": 90, "p50_us": 150.0,
        "p99_us": 900.0, "singles": 10, "fast_path_share": 0.9, "retries": 0,
        "played": Played(100, 100, 0, 1, 50, 2.0), "is_complete": True,
    }  # fmt: skip

    def run_demo(
        _: Path,
        found: list[Flight],
        events: int,
        clients: int,
        on_progress: Callable[[str, int], None],
    ) -> Summary:
        assert len(found) > events // 3
        on_progress("insert", events // clients)
        return Summary(**{**right, **spoilt})

    monkeypatch.setattr("ziplog.cli.demo.run", run_demo)
    result = run("demo", "--events", "100", "--synthetic")
    assert result.exit_code == code
    assert ("WRONG" in result.stdout) == bool(code)
    assert "the flights are synthetic" in result.stderr
    document = json.loads(run("demo", "--events", "100", "--synthetic", "--json").stdout)
    assert document["passed"] is (code == 0)
    assert document["batched"] == 90


def test_help_names_every_verb() -> None:
    result = run("--help")
    verbs = (
        "up", "down", "status", "insert", "append", "read", "tail", "trim", "demo", "shard",
        "config",
    )  # fmt: skip
    assert all(f"  {verb} " in result.stdout for verb in verbs)
