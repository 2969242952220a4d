"""The command line against a client that answers from memory: what is printed, and which code."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

import ziplog
from ziplog.cli import app
from ziplog.demo.run import Summary
from ziplog.errors import NoSuchRecordError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Self

    from typer.testing import Result

STATUS = {
    "cluster": "demo",
    "durability": "memory",
    "epoch": 812,
    "finalized_epoch": 808,
    "trimmed_before": "0@0",
    "mms": [
        {
            "name": "mms-0",
            "endpoint": "127.0.0.1:7400",
            "pid": 4194304,
            "leader": True,
            "state": "up",
        },
    ],
    "failure_handlers": [
        {"name": "fh-0", "endpoint": "127.0.0.1:5", "pid": 5, "leader": True, "state": "up"},
        {"name": "fh-1", "endpoint": "127.0.0.1:6", "pid": 6, "leader": False, "state": "down"},
    ],
    "losses": [],
    "shards": [
        {
            "id": 0,
            "view": 1,
            "state": "live",
            "rate_per_s": 1200,
            "stable_gsn": 3487,
            "durable_gsn": 3100,
            "replicas": [
                {
                    "name": "shard-0-0",
                    "endpoint": "127.0.0.1:2",
                    "role": "primary",
                    "pid": 3,
                    "state": "up",
                }
            ],
        }
    ],
}


class FakeSubscription(list[ziplog.Record]):
    caught_up = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class FakeLog:
    """A log in a list; record i has gsn i + 1 and shard 0."""

    def __init__(self) -> None:
        self.records: list[ziplog.Record] = []
        self.calls: list[tuple[Any, ...]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def insert_after(
        self, payload: bytes, after: ziplog.RecordId, *, key: str | None = None
    ) -> ziplog.RecordId:
        return self.insert_many([payload], after, key=key)[0]

    def insert_many(
        self, payloads: Sequence[bytes], after: ziplog.RecordId, *, key: str | None = None
    ) -> list[ziplog.RecordId]:
        self.calls.append(("insert", list(payloads), after))
        first = len(self.records)
        for payload in payloads:
            rid = ziplog.RecordId(len(self.records) + 1, 0)
            encoded = None if key is None else key.encode()
            self.records.append(ziplog.Record(rid, payload, encoded, 1_700_000_000_000_000, 7))
        return [record.rid for record in self.records[first:]]

    def read_record(self, rid: ziplog.RecordId) -> ziplog.Record:
        for record in self.records:
            if record.rid == rid:
                return record
        raise NoSuchRecordError(rid, "nothing was inserted there")

    def subscribe(
        self, start: ziplog.RecordId, *, follow: bool, timeout: float | None
    ) -> FakeSubscription:
        self.calls.append(("subscribe", start, follow, timeout))
        return FakeSubscription(record for record in self.records if record.rid.gsn >= start.gsn)

    def trim(self, rid: ziplog.RecordId) -> None:
        self.calls.append(("trim", rid))

    def cluster(self) -> dict[str, Any]:
        return STATUS


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> FakeLog:
    fake = FakeLog()

    def connect(bootstrap: str, *, timeout: float) -> FakeLog:
        fake.calls.append(("connect", bootstrap, timeout))
        return fake

    monkeypatch.setattr(ziplog, "connect", connect)
    return fake


def run(*arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> Result:
    return CliRunner(env=env).invoke(app, list(arguments), input=stdin, prog_name="ziplog")


def test_insert_prints_the_rid(log: FakeLog) -> None:
    result = run("insert", "--after", "5@1", "--key", "k", stdin=b"one\ntwo\n")
    assert (result.exit_code, result.stdout) == (0, "1@0\n")
    assert log.records[0].payload == b"one\ntwo\n"
    assert log.records[0].key == b"k"
    assert log.calls[-1] == ("insert", [b"one\ntwo\n"], ziplog.RecordId(5, 1))


def test_insert_takes_a_file_or_a_word(log: FakeLog, tmp_path: Path) -> None:
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


def test_read_prints_the_payload_and_nothing_else(log: FakeLog) -> None:
    log.insert_after(b"\x00\xffraw", ziplog.RID_GENESIS)
    assert run("read", "1@0").stdout_bytes == b"\x00\xffraw"


def test_what_is_not_there_is_said_in_one_line(log: FakeLog) -> None:
    result = run("read", "9@0")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("ziplog: error: no record at 9@0")
    assert result.stderr.count("\n") == 1


def test_tail_json_has_the_fields_of_the_contract(log: FakeLog) -> None:
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


def test_tail_begins_and_ends_where_it_is_told(log: FakeLog) -> None:
    log.insert_many([b"a", b"b\xff\n", b"c"], ziplog.RID_GENESIS)
    result = run("tail", "--from", "2@0", "--limit", "1")
    assert result.stdout == "2@0\tb\\xff\\n\n"
    assert log.calls[-1] == ("subscribe", ziplog.RecordId(2, 0), False, 10.0)
    assert run("tail", "--from", "recent", "--follow").exit_code == 0
    assert log.calls[-1] == ("subscribe", ziplog.RID_RECENT, True, None)


def test_trim(log: FakeLog) -> None:
    result = run("trim", "4@1")
    assert (result.exit_code, result.stdout) == (0, "")
    assert log.calls[-1] == ("trim", ziplog.RecordId(4, 1))


def test_status_json_is_the_document(log: FakeLog) -> None:
    assert json.loads(run("status", "--json").stdout) == STATUS


def test_status_is_a_table_for_people(log: FakeLog) -> None:
    result = run("status")
    assert (result.exit_code, result.stderr) == (0, "")
    first, *rows = result.stdout.splitlines()
    assert "demo: durability memory, epoch 812" in first
    for name, role in (("fh-0", "handler leader"), ("fh-1", "handler"), ("shard-0-0", "primary")):
        assert [cell.strip() for row in rows if name in row for cell in row.split("│")[1:3]] == [
            name,
            role,
        ]
    assert all(node["endpoint"] in result.stdout for node in STATUS["mms"])  # type: ignore[attr-defined]
    assert "0 live, view" in result.stdout
    assert "lost" not in result.stdout
    assert "recovering" not in result.stdout


def test_status_says_what_recovers_and_what_may_be_lost(
    log: FakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    recovering = {**STATUS["shards"][0], "state": "recovering", "view": 4}  # type: ignore[index]
    losses = [{"shard": n, "start": 10, "stop": 20, "epochs": [n, 9]} for n in range(7)]
    monkeypatch.setattr(
        log, "cluster", lambda: {**STATUS, "shards": [recovering], "losses": losses}
    )
    told = run("status").stdout
    assert "shard 0 is recovering" in told
    assert "shard 6 may have lost records: positions 10 to 19, epochs 6 to 9\n" in told
    assert [n for n in range(7) if f"shard {n} may have lost" in told] == [2, 3, 4, 5, 6]
    assert "and 2 earlier losses" in told


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
        ("config", "check", "/nowhere/cluster.toml"),
    ],
    ids=" ".join,
)
def test_bad_usage_is_2(log: FakeLog, arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr


def test_a_cluster_that_is_not_there_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(bootstrap: str, *, timeout: float) -> FakeLog:
        raise UnavailableError(f"nobody answers at {bootstrap}")

    monkeypatch.setattr(ziplog, "connect", connect)
    result = run("status")
    assert result.exit_code == 1
    assert result.stderr == "ziplog: error: nobody answers at 127.0.0.1:7400\n"


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


def test_up_refuses_to_change_a_cluster_that_exists(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(run("config", "show").stdout)
    result = run("up", "--data-dir", str(tmp_path), "--shards", "3")
    assert result.exit_code == 2
    assert "--shards is 3; it must be left out or 1" in result.stderr


def test_down_where_nothing_runs_is_done(tmp_path: Path) -> None:
    assert run("down", "--data-dir", str(tmp_path)).exit_code == 0


@pytest.mark.parametrize(
    ("spoilt", "code"),
    [({}, 0), ({"delivered": 99}, 1), ({"same_contents": False}, 1), ({"fault": "twice"}, 1)],
    ids=["right", "one is missing", "other contents", "a fault in the order"],
)
def test_the_demo_fails_unless_everything_came_back(
    monkeypatch: pytest.MonkeyPatch, spoilt: dict[str, Any], code: int
) -> None:
    right: dict[str, Any] = {
        "inserted": 100, "delivered": 100, "same_contents": True, "fault": "", "first": "1@0",
        "last": "100@1", "aircraft": 4, "shards": 2, "replicas": 2, "durability": "memory",
        "clients": 2, "insert_s": 2.0, "total_s": 3.0, "batched": 90, "p50_us": 150.0,
        "p99_us": 900.0, "singles": 10, "fast_path_share": 0.9, "retries": 0,
    }  # fmt: skip

    def run_demo(
        _: Path, events: int, clients: int, on_progress: Callable[[str, int], None]
    ) -> Summary:
        on_progress("insert", events // clients)
        return Summary(**{**right, **spoilt})

    monkeypatch.setattr("ziplog.cli.demo.run", run_demo)
    result = run("demo", "--events", "100")
    assert result.exit_code == code
    assert ("WRONG" in result.stdout) == bool(code)
    assert result.stderr == ""


def test_help_names_every_verb() -> None:
    result = run("--help")
    verbs = ("up", "down", "status", "insert", "read", "tail", "trim", "demo", "config")
    assert all(f"  {verb} " in result.stdout for verb in verbs)
