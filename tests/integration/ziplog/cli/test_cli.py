"""The command line with a client in memory: its output and exit codes."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pytest

import ziplog
from tests.unit.ziplog.cli.fakes import STATUS, FakeLog, cluster_file, run
from ziplog.cli import servers
from ziplog.config import parse
from ziplog.demo.playing import Played
from ziplog.demo.run import Summary
from ziplog.errors import ConfigError, UnavailableError
from ziplog.wire import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ziplog.demo.flights import Flight


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
    result = run("up", "--data-dir", str(tmp_path), "--durability", "disk")
    assert result.exit_code == 2
    assert "--durability is 'disk', but the existing cluster has 'memory'" in result.stderr
    assert result.stderr.endswith(", or set durability in the file\n")


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
        remedy = "run `pip install 'ziplog[raft-password]'`"
        assert (remedy in result.stderr) is not has_package


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
