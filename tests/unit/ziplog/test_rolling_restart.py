"""The order of a rolling restart, and what holds it up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ziplog.deploy import rolling_restart
from ziplog.deploy.rolling_restart import RollingRestart, obstacle, order

if TYPE_CHECKING:
    from pathlib import Path


def node(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "state": "up", "leader": False, "role": "backup"} | fields


def status() -> dict[str, Any]:
    return {
        "durability": "memory",
        "mms": [node("m0", leader=True), node("m1"), node("m2")],
        "failure_handlers": [node("f0", leader=True), node("f1")],
        "shards": [
            {"id": 0, "state": "live", "replicas": [node("a", role="primary"), node("b")]},
            {"id": 1, "state": "finalized", "replicas": [node("c", role="primary"), node("d")]},
        ],
    }


def test_backups_come_before_primaries_and_the_leaders_last() -> None:
    assert order(status()) == ["b", "a", "d", "c", "f1", "f0", "m1", "m2", "m0"]


def test_nothing_holds_up_a_healthy_cluster() -> None:
    assert obstacle(status()) == ""


@pytest.mark.parametrize("where", ["mms", "failure_handlers"])
def test_a_node_that_is_not_up_holds_it_up(where: str) -> None:
    found = status()
    found[where][1]["state"] = "down"
    assert obstacle(found) == f"{found[where][1]['name']} is down"


def test_a_shard_that_is_not_live_holds_it_up() -> None:
    found = status()
    found["shards"][0]["state"] = "recovering"
    assert obstacle(found) == "shard 0 is recovering"
    found = status()
    found["shards"][1]["replicas"][1]["state"] = "suspect"
    assert obstacle(found) == "d is suspect"


def test_a_stopped_server_of_a_shard_that_is_over_holds_up_nothing() -> None:
    found = status()
    found["shards"][1]["is_over"] = True
    found["shards"][1]["replicas"][0]["state"] = "down"
    assert obstacle(found) == ""
    assert order(found) == ["b", "a", "d", "f1", "f0", "m1", "m2", "m0"], "the other one runs"


def test_a_node_that_dies_before_its_sigterm_is_restarted_like_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor starts it again, as it does after a SIGTERM."""

    class Log:
        """A client that knows a cluster which is well."""

        def cluster(self, **_: Any) -> dict[str, Any]:
            found = status()
            for each in (*found["mms"], *found["failure_handlers"]):
                each["pid"] = None
            for shard in found["shards"]:
                for each in shard["replicas"]:
                    each["pid"] = None
            return found

    processes = iter([2**30, 7, 7])

    def kill(pid: int, _: int) -> None:
        raise ProcessLookupError(pid)

    monkeypatch.setattr(rolling_restart, "running_pid", lambda _: 1)
    monkeypatch.setattr(RollingRestart, "_process", lambda *_: next(processes))
    monkeypatch.setattr("os.kill", kill)
    log: Any = Log()
    done: list[str] = []
    RollingRestart(tmp_path, log, 1.0).run(["b"], lambda name, _: done.append(name))
    assert done == ["b"]


def test_processes_with_any_name_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(pid: int, name: bytes, *arguments: bytes) -> None:
        directory = tmp_path / str(pid)
        directory.mkdir()
        (directory / "stat").write_bytes(b"%d (%s) S 7 1" % (pid, name))
        (directory / "cmdline").write_bytes(b"\0".join(arguments) + b"\0")

    class Log:
        """A client that knows a cluster which is well."""

        def cluster(self) -> dict[str, Any]:
            return status()

    add(8, b"caf\xc3", b"caf\xc3")
    add(9, b"python3) (x", b"python3", b"-m", b"shard", b"--node", b"b")
    monkeypatch.setattr(rolling_restart, "_PROC", tmp_path)
    monkeypatch.setattr(rolling_restart, "running_pid", lambda _: 7)
    log: Any = Log()
    restart = RollingRestart(tmp_path, log, 1.0)
    assert (restart._process("b"), restart._process("a")) == (9, None)
