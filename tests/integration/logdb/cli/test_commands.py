"""`ziplog kv` with a real log and a coordinator: output, errors and exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

import logdb
from logdb import defaults
from logdb.cli import bench, commands, transaction_script
from logdb.cli.transaction_script import ABSENT, CheckFailedError, execute, parse
from ziplog.cli import app
from ziplog.errors import ConfigError, UnavailableError
from ziplog.local import Cluster
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from typer.testing import Result


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("cluster") / "log"
    with (
        Cluster(directory, shards=1) as cluster,
        cluster.connect() as log,
        logdb.Coordinator(log) as coordinator,
    ):
        yield coordinator.endpoint


@pytest.fixture
def db(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[logdb.Database]:
    """An empty database, that the command line finds."""
    monkeypatch.setenv("LOGDB_COORDINATOR", endpoint)
    with logdb.connect(endpoint) as db:
        for key, _ in list(db.scan(b"")):
            db.delete(key)
        yield db


def test_the_benchmark_measures_reads_and_writes_and_leaves_no_key(
    endpoint: str, db: logdb.Database
) -> None:
    db.put("mine", 1)
    arguments = ["--coordinator", endpoint, "--seconds", "0.5", "--keys", "5", "--json"]
    done = CliRunner().invoke(bench.app, arguments)
    assert (done.exit_code, done.stderr) == (0, "")
    documents = [json.loads(line) for line in done.stdout.splitlines()]
    assert [document["operation"] for document in documents] == ["get", "put"]
    assert all(document["count"] > 0 for document in documents)
    assert list(db.scan()) == [("mine", 1)]


def test_writes_report_their_positions_as_json(db: logdb.Database) -> None:
    for arguments in (("put", "k", "1", "--json"), ("delete", "k")):
        document = json.loads(kv(*arguments, "--format", "json").stdout)
        assert document["position"] == f"{document['gsn']}@{document['shard']}"
    assert db.get("k", None) is None


def kv(*arguments: str, stdin: bytes = b"") -> Result:
    return CliRunner().invoke(app, ["kv", *arguments], input=stdin, prog_name="ziplog")


def said(result: Result) -> str:
    """Return the one line with which a verb says that it was not done."""
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    return line


def printed(result: Result) -> str:
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


# --- single keys ---


def test_a_value_is_text_unless_json_is_given(db: logdb.Database) -> None:
    assert RecordId.parse(printed(kv("put", "k", "5")).strip()).gsn > 0
    assert db.get("k") == "5"
    assert printed(kv("get", "k")) == "5\n"
    assert printed(kv("get", "k", "--json")) == '"5"\n'
    printed(kv("put", "k", "-5", "--json-values"))
    assert db.get("k") == -5
    assert printed(kv("get", "k")) == printed(kv("get", "k", "--json")) == "-5\n"
    printed(kv("put", "k", '{"$base64": "AP8="}', "--json"))
    assert db.get("k") == b"\x00\xff"
    assert printed(kv("get", "k")) == '{"$base64":"AP8="}\n'


def test_text_is_printed_as_it_is(db: logdb.Database) -> None:
    db.put("k", "two\nlines é")
    assert kv("get", "k").stdout_bytes == "two\nlines é\n".encode()


def test_an_absent_key_differs_from_a_null_value(db: logdb.Database) -> None:
    db.put("k", None)
    assert printed(kv("get", "k")) == "null\n"
    assert RecordId.parse(printed(kv("delete", "k")).strip()).gsn > 0
    assert said(kv("get", "k")) == "ziplog: key 'k' does not exist"
    printed(kv("delete", "k"))


def test_cas_writes_only_if_the_value_matches(db: logdb.Database) -> None:
    absent = said(kv("cas", "k", "5", "6", "--json"))
    assert absent == "ziplog: error: 'k' is absent, not 5; nothing was written"
    assert printed(kv("cas", "k", "null", "5", "--json")) == ""
    assert db.get("k") == 5
    assert "'k' is 5, not \"5\" (words are text; with --json they are JSON); nothing" in said(
        kv("cas", "k", "5", "text")
    )
    assert printed(kv("cas", "k", "5", "[6]", "--json")) == ""
    assert db.get("k") == [6]


# --- several keys ---


def test_scan_prints_one_key_a_line_in_order(db: logdb.Database) -> None:
    db.multi_put({"b": "x\ny", "a\t": [1, b"\xff"], b"c\xff": None, "d": {"e": 1}})
    assert printed(kv("scan")).splitlines() == [
        'a\\t\t[1,{"$base64":"/w=="}]',
        "b\tx\\ny",
        "c\\xff\tnull",
        'd\t{"e":1}',
    ]
    lines = printed(kv("scan", "--json")).splitlines()
    assert list(map(json.loads, lines)) == [
        {"key": "a\t", "value": [1, {"$base64": "/w=="}]},
        {"key": "b", "value": "x\ny"},
        {"key": {"$base64": "Y/8="}, "value": None},
        {"key": "d", "value": {"e": 1}},
    ]
    assert printed(kv("scan", "--start", "b", "--stop", "c")) == "b\tx\\ny\n"
    assert printed(kv("scan", "--prefix", "d")) == 'd\t{"e":1}\n'
    assert len(printed(kv("scan", "--limit", "2")).splitlines()) == 2
    assert printed(kv("scan", "--stop", "a")) == ""


def test_no_control_character_of_a_key_or_value_is_printed_raw(db: logdb.Database) -> None:
    db.multi_put({"k\x1b[2J": "v\x9b0m\x7f", "list": ["\x1b", "\x9b"]})
    assert printed(kv("scan")).splitlines() == [
        "k\\x1b[2J\tv\\x9b0m\\x7f",
        'list\t["\\u001b","\\u009b"]',
    ]
    assert printed(kv("get", "k\x1b[2J")) == "v\x9b0m\x7f\n"  # exact in a pipe
    assert json.loads(printed(kv("get", "k\x1b[2J", "--json"))) == "v\x9b0m\x7f"
    assert "\x9b" not in printed(kv("scan", "--json"))


def test_watch_prints_each_state_as_it_comes(db: logdb.Database) -> None:
    first = db.put("k", 1).gsn
    command = [sys.executable, "-m", "ziplog", "kv", "watch", "k", "--limit", "3"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=buffered, text=True) as watching:
        try:
            assert watching.stdout is not None
            assert watching.stdout.readline() == f"{first}\t1\n"
            db.delete("k")
            assert watching.stdout.readline() == "0\n"
            second = db.put("k", "two").gsn
            assert watching.stdout.readline() == f"{second}\ttwo\n"
            assert watching.wait(20) == 0
        finally:
            watching.kill()


def test_watch_as_json(db: logdb.Database) -> None:
    assert printed(kv("watch", "k", "--limit", "1", "--json")) == '{"version":0}\n'
    version = db.put("k", b"\xff").gsn
    line = f'{{"version":{version},"value":{{"$base64":"/w=="}}}}\n'
    assert printed(kv("watch", "k", "--limit", "1", "--json")) == line


# --- transactions ---


def test_a_script_is_one_transaction(db: logdb.Database, tmp_path: Path) -> None:
    db.multi_put({"a": 1, "b": 2})
    lines = b"""
        {"check": ["a", 1]}
        {"get": "a"}
        {"put": ["a", {"$base64": "/w=="}]}
        {"get": "a"}
        {"delete": "b"}
        {"get": "b"}
        {"check": ["b", null]}
        {"get": {"$base64": "/w=="}}
    """
    (tmp_path / "script").write_bytes(lines)
    assert printed(kv("txn", str(tmp_path / "script"))).splitlines() == [
        "a\t1",
        'a\t{"$base64":"/w=="}',
        "b",
        "\\xff",
    ]
    assert db.multi_get(["a", "b"]) == [b"\xff", None]
    db.multi_put({"a": 1, "b": 2})
    assert list(map(json.loads, printed(kv("txn", "--json", stdin=lines)).splitlines())) == [
        {"key": "a", "value": 1},
        {"key": "a", "value": {"$base64": "/w=="}},
        {"key": "b"},
        {"key": {"$base64": "/w=="}},
    ]


def test_a_check_that_fails_leaves_no_trace(db: logdb.Database) -> None:
    db.put("k", 1)
    commits = db.status()["commits"]
    lines = b'{"put": ["other", 1]}\n{"get": "k"}\n{"check": ["k", 2]}\n{"delete": "k"}'
    assert said(kv("txn", stdin=lines)) == "ziplog: error: 'k' is 1, not 2; nothing was written"
    assert db.multi_get(["k", "other"]) == [1, None]
    assert db.status()["commits"] == commits


def test_a_message_shows_only_the_beginning_of_a_long_value(db: logdb.Database) -> None:
    db.put("k", "x" * 1000)
    line = said(kv("cas", "k", "other", "y"))
    assert line.endswith(f"""'k' is "{"x" * 99}..., not "other"; nothing was written""")


class Stale:
    """A transaction that reads what was so once."""

    def __init__(self, values: dict[bytes, Any]) -> None:
        self.values = values
        self.writes: dict[bytes, Any] = {}

    def get(self, key: bytes, default: Any) -> Any:
        assert key not in self.writes, "it was written before all was checked"
        return self.values.get(key, default)

    def put(self, key: bytes, value: Any) -> None:
        self.writes[key] = value

    def delete(self, key: bytes) -> None:
        self.writes[key] = ABSENT


def test_nothing_is_written_before_all_checks_pass() -> None:
    # A failed check ends a read-only transaction, so its reads are validated again.
    lines = '{"put": ["a", 1]}\n{"check": ["a", 1]}\n{"delete": "b"}\n{"check": ["c", %d]}\n'
    transaction: Any = Stale({b"c": 3})
    assert isinstance(execute(parse(lines % 4, "x"), transaction), CheckFailedError)
    assert transaction.writes == {}
    assert execute(parse(lines % 3, "x"), transaction) == []
    assert transaction.writes == {b"a": 1, b"b": ABSENT}


def test_a_script_is_retried_after_a_conflict(
    db: logdb.Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.put("k", 1)
    real: Callable[..., Any] = transaction_script.execute
    attempts: list[object] = []

    def overtaken(lines: Any, transaction: Any) -> Any:
        result = real(lines, transaction)
        attempts.append(result)
        if len(attempts) == 1:
            db.put("k", 2)
        return result

    monkeypatch.setattr(commands, "execute", overtaken)
    # It fails only in a state that was outdated before it ended.
    lines = b'{"check": ["k", 2]}\n{"put": ["k", 3]}'
    assert printed(kv("txn", stdin=lines)) == ""
    assert isinstance(attempts[0], CheckFailedError)
    assert len(attempts) == 2
    assert db.get("k") == 3


@pytest.mark.parametrize(
    "line",
    [
        "5", "[]", "{}", '{"get": 5}', '{"get": ["a"]}', '{"put": "a"}', '{"put": ["a"]}',
        '{"put": ["a", 1, 2]}', '{"put": [1, 1]}', '{"scan": "a"}', '{"get": "a", "put": ["a", 1]}',
        '{"check": ["a"]}', "{", '{"put": ["a", {"$what": 1}]}',
    ],
)  # fmt: skip
def test_an_invalid_line_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match=r"^file, line 3 is "):
        parse(f'{{"get": "a"}}\n\n{line}\n', "file")


# --- status, and what goes wrong ---


def test_status(db: logdb.Database, endpoint: str) -> None:
    db.put("k", 1)
    document = json.loads(printed(kv("status", "--json")))
    assert document["endpoint"] == endpoint
    first, *rows = printed(kv("status")).splitlines()
    assert first.startswith(f"coordinator {endpoint}: ready")
    assert any(row.startswith("data        1 keys, ") for row in rows)


@pytest.mark.parametrize(
    "arguments",
    [
        ("get",),
        ("put", "k"),
        ("put", "k", "v", "--jsn"),
        ("put", "k", "{", "--json"),
        ("cas", "k", "1", "nan", "--json"),
        ("scan", "--limit", "-1"),
        ("scan", "--prefix", "a", "--stop", "b"),
        ("watch", "k", "--limit", "0"),
        ("get", "k", "--coordinator", "nonsense"),
        ("txn", "--timeout", "soon"),
        ("frobnicate",),
    ],
    ids=" ".join,
)
def test_bad_usage_is_2(db: logdb.Database, arguments: tuple[str, ...]) -> None:
    result = kv(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("put", "k", "\udcff"), "a value of type str cannot be stored"),
        (("put", "k", str(2**64), "--json"), "a value of type int cannot be stored"),
        (("get", "k" * 1025), "1025"),
        (("txn", "/nowhere/script"), "/nowhere/script: No such file"),
    ],
)
def test_a_failure_is_reported_on_one_line(
    db: logdb.Database, arguments: tuple[str, ...], text: str
) -> None:
    assert text in said(kv(*arguments))
    assert list(db.scan()) == []


def test_an_unreachable_coordinator_is_exit_code_1() -> None:
    line = said(kv("get", "k", "--coordinator", "127.0.0.1:1", "--timeout", "0.1"))
    refused = "ziplog: error: no coordinator replied at 127.0.0.1:1 (connection refused)"
    assert line.startswith(refused)
    assert "python -m logdb" in line


def test_the_coordinator_comes_from_the_option_or_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, float]] = []

    def connect(coordinators: str, *, timeout: float) -> logdb.Database:
        asked.append((coordinators, timeout))
        raise UnavailableError("unreachable")

    monkeypatch.setattr(logdb, "connect", connect)
    monkeypatch.delenv("LOGDB_COORDINATOR", raising=False)
    kv("get", "k", "--coordinator", "h:1,h:2", "--timeout", "3")
    kv("get", "k")
    monkeypatch.setenv("LOGDB_COORDINATOR", "h:3")
    kv("status")
    assert asked == [("h:1,h:2", 3.0), ("127.0.0.1:7500", 10.0), ("h:3", 10.0)]


def test_a_program_uses_the_coordinators_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def connect() -> None:
        await logdb.aio.connect(timeout=0.3)

    def asked() -> list[str]:
        with pytest.raises(UnavailableError) as blocking:
            logdb.connect(timeout=0.3)
        with pytest.raises(UnavailableError) as coroutine:
            asyncio.run(connect())
        return [str(blocking.value), str(coroutine.value)]

    monkeypatch.setenv("LOGDB_COORDINATOR", "127.0.0.1:1,127.0.0.1:2")
    tried = r"127\.0\.0\.1:1 \(.*\), 127\.0\.0\.1:2 \(.*\);"
    assert all(re.search(tried, text) for text in asked())
    monkeypatch.setenv("LOGDB_COORDINATOR", "")
    monkeypatch.setattr(defaults, "COORDINATOR", "127.0.0.1:3")
    assert all("127.0.0.1:3" in text for text in asked())


def test_ctrl_c_is_quiet(db: logdb.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: object, key: str, default: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(logdb.Database, "get", interrupted)
    result = kv("get", "k")
    assert (result.exit_code, result.output) == (130, "")
