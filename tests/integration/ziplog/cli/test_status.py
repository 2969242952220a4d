"""`ziplog status` and `ziplog node`: the tables, and the document."""

from __future__ import annotations

import io
import json
from copy import deepcopy
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from tests.unit.ziplog.cli.fakes import STATUS, FakeLog, run, shard
from ziplog.cli import status

if TYPE_CHECKING:
    from pathlib import Path


def test_status_shows_when_a_node_was_heard(log: FakeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    node = {**STATUS["failure_handlers"][0], "heartbeat_age_ms": 1849}  # type: ignore[index]
    monkeypatch.setattr(log, "cluster", lambda: {**STATUS, "failure_handlers": [node]})
    rows = [row.split() for row in run("status").stdout.splitlines()]
    assert ["fh-0", "handler", "leader", "up", "1.8", "s", "ago", "127.0.0.1:5", "5"] in rows


def test_status_shows_full_disks(log: FakeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = {**STATUS["shards"][0], "refusing": True}  # type: ignore[index]
    shard["replicas"] = [{**shard["replicas"][0], "full": "1.0 MiB\x1b free"}]
    monkeypatch.setattr(log, "cluster", lambda: {**STATUS, "shards": [shard]})
    name = shard["replicas"][0]["name"]
    line = rf"{name} is full: 1.0 MiB\x1b free; shard {shard['id']} refuses records"
    assert line in run("status").stdout.splitlines()


def test_status_shows_a_live_shard_that_takes_no_records(
    log: FakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = deepcopy(STATUS)
    document["shards"][0]["replicas"][0]["state"] = "down"
    monkeypatch.setattr(log, "cluster", lambda: document)
    assert "\nshard 0 takes no records: shard-0-0 is down\n" in run("status").stdout


def test_status_json_is_the_document(log: FakeLog) -> None:
    assert json.loads(run("status", "--json").stdout) == STATUS


def test_status_is_a_table_for_people(log: FakeLog) -> None:
    result = run("status")
    assert (result.exit_code, result.stderr) == (0, "")
    first, *rows = result.stdout.splitlines()
    assert first.startswith("demo: durability memory, epoch 812, finalized 808")
    found = [row.split() for row in rows]
    assert ["fh-0", "handler", "leader", "up", "127.0.0.1:5", "5"] in found
    assert ["fh-1", "handler", "down", "127.0.0.1:6", "6"] in found
    assert ["shard-0-0", "primary", "of", "0", "up", "127.0.0.1:2", "3"] in found
    # Fields that an older membership service does not have stay empty.
    assert ["0", "live", "1", "1200", "3487", "3100"] in found
    assert "lost" not in result.stdout
    assert "recovering" not in result.stdout


def test_status_shows_recoveries_and_possible_losses(
    log: FakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    recovering = {**STATUS["shards"][0], "state": "recovering", "view": 4}  # type: ignore[index]
    losses = [{"shard": n, "start": 10, "stop": 20, "epochs": [n, 9]} for n in range(7)]
    monkeypatch.setattr(
        log, "cluster", lambda: {**STATUS, "shards": [recovering], "losses": losses}
    )
    output = run("status").stdout
    assert "shard 0 is recovering" in output
    assert "shard 6 may have lost records: positions 10 to 19, epochs 6 to 9\n" in output
    assert [n for n in range(7) if f"shard {n} may have lost" in output] == [2, 3, 4, 5, 6]
    assert "2 earlier losses" in output


def test_status_explains_states_and_shows_which_shard_holds_back_which(
    log: FakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        shard(0, state="live", blocks=[2], epoch=7),
        shard(1, state="finalized"),
        shard(2, state="leaving"),
        shard(3, state="finalized"),
        shard(4, state="joining"),
        shard(5, state="live", blocks=[0, 2], epoch=6),
        shard(6, state="parked"),
    ]
    monkeypatch.setattr(log, "cluster", lambda: {**STATUS, "shards": found, "blocked_by": 5})
    output = run("status").stdout
    assert "shards 1, 3 are finalized: changes no more" in output
    rows = [row.split() for row in output.splitlines()]
    assert ["2", "leaving", "12", "123456", "256", "98765432"] in [row[:6] for row in rows]
    assert ["3", "finalized", "12", "123456", "256", "12345678"] in [row[:6] for row in rows]
    assert "shard 2 is leaving: new records go to other shards; stays readable" in output
    assert "shard 4 is joining: takes no records until every server" in output
    assert "shard 6 is parked: takes no records until all its servers" in output
    assert "readers wait for shard 0 (epoch 7): it holds back records of shard 2\n" in output
    first = "readers wait for shard 5 (epoch 6), and most of all: it holds back records of shards"
    assert f"{first} 0, 2\n" in output


def test_status_of_six_busy_shards_fits_a_terminal_of_100_columns(
    log: FakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {**STATUS, "shards": [shard(number) for number in range(6)], "blocked_by": 0}
    narrow = io.StringIO()
    Console(width=100, file=narrow).print(status._view(document))
    monkeypatch.setattr(log, "cluster", lambda: document)
    assert narrow.getvalue() == run("status").stdout
    assert len(narrow.getvalue().splitlines()) <= 32


@pytest.mark.parametrize(("width", "last"), [(100, "durable"), (83, "stable"), (70, "read")])
def test_where_status_is_too_wide_the_last_columns_go_and_no_cell_is_cut(
    width: int, last: str
) -> None:
    document = {**STATUS, "shards": [shard(number) for number in range(2)]}
    narrow = io.StringIO()
    Console(width=width, file=narrow).print(status._view(document))
    rows = [row.split() for row in narrow.getvalue().splitlines()]
    columns = next(row for row in rows if row[:1] == ["id"])
    assert columns[-1] == last
    (first,) = (row for row in rows if row[:2] == ["0", "recovering"])
    assert len(first) == len(columns)
    assert "…" not in narrow.getvalue()


def test_on_50_columns_each_node_has_two_lines_and_no_cell_is_cut() -> None:
    nodes = [{**node, "heartbeat_age_ms": 12_300} for node in STATUS["mms"]]  # type: ignore[attr-defined]
    document = {**STATUS, "mms": nodes, "shards": [shard(number) for number in range(2)]}
    narrow = io.StringIO()
    Console(width=50, file=narrow).print(status._view(document))
    text = narrow.getvalue()
    assert "…" not in text
    assert all(len(line) <= 50 for line in text.splitlines()[1:])
    lines = [line.split() for line in text.splitlines()]
    at = next(index for index, line in enumerate(lines) if line[:1] == ["mms-0"])
    assert lines[at + 1] == ["127.0.0.1:7400", "pid", "4194304"]


def test_nodes_are_listed(log: FakeLog) -> None:
    lines = [json.loads(line) for line in run("node", "list", "--json").stdout.splitlines()]
    assert [(line["name"], line["role"], line["state"]) for line in lines] == [
        ("mms-0", "mms", "up"), ("fh-0", "handler", "up"), ("fh-1", "handler", "down"),
        ("shard-0-0", "primary of 0", "up"),
    ]  # fmt: skip
    rows = [row.split() for row in run("node", "list").stdout.splitlines()]
    assert ["fh-0", "handler", "leader", "up", "127.0.0.1:5", "5"] in rows


def test_a_node_runs_in_place_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(run("config", "show").stdout)
    started: list[list[str]] = []
    monkeypatch.setattr("os.execve", lambda _program, command, _variables: started.append(command))
    for node, module in (("mms-0", "mms"), ("fh-0", "failure_handler"), ("shard-0-1", "shard")):
        assert run("node", "run", "--config", str(path), "--node", node).exit_code == 0
        assert started[-1][-5:] == [module, "--config", str(path), "--node", node]
    assert run("node", "run", "--config", str(path), "--node", "x").exit_code == 2
