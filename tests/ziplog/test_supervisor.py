"""The supervisor over processes that do nothing: one for each node, none left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ziplog import supervisor
from ziplog.config import ClusterConfig, NodeConfig, ShardConfig, dump
from ziplog.errors import ConfigError, UnavailableError
from ziplog.supervisor import CLUSTER_FILE, Supervisor, log_tail, running_pid

if TYPE_CHECKING:
    from collections.abc import Callable

IDLE = """
import signal, sys
print("ready", *sys.argv[1:], flush=True)
while True:
    signal.pause()
"""
STUBBORN = f"""
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
{IDLE}
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data directory with a cluster file, and servers that only wait."""
    for package, source in (("mms", IDLE), ("failure_handler", IDLE), ("shard", STUBBORN)):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / "__main__.py").write_text(source)
    monkeypatch.setattr(supervisor, "_PACKAGE_ROOT", tmp_path)
    config = ClusterConfig(
        name="demo",
        data_dir=tmp_path,
        f=0,
        mms=(NodeConfig("mms-0", "127.0.0.1", 7400, 7401),),
        failure_handlers=(NodeConfig("fh-0", "127.0.0.1", 7403, 7404),),
        shards=(ShardConfig(0, (NodeConfig("shard-0-0", "127.0.0.1", 7402),)),),
    )
    (tmp_path / CLUSTER_FILE).write_text(dump(config))
    return tmp_path


def wait_until(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def ready(running: Supervisor, name: str) -> int:
    running.start(name)
    wait_until(lambda: "ready" in running.log_tail(name))
    return running.pid(name)


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_node_is_told_its_file_and_name(directory: Path) -> None:
    with Supervisor(directory) as running:
        ready(running, "mms-0")
        said = f"ready --config {directory / CLUSTER_FILE} --node mms-0"
        assert running.log_tail("mms-0") == said == log_tail(directory, "mms-0")


def test_a_launcher_stands_in_for_the_interpreters_own_way_to_run_a_module(
    directory: Path,
) -> None:
    launcher = directory / "launcher.py"
    launcher.write_text(IDLE)
    with Supervisor(directory, launcher=(str(launcher), "slowly")) as running:
        for name, module in (("fh-0", "failure_handler"), ("shard-0-0", "shard")):
            ready(running, name)
            said = f"ready slowly {module} --config {directory / CLUSTER_FILE} --node {name}"
            assert running.log_tail(name) == said


def test_a_running_node_is_not_started_twice(directory: Path) -> None:
    with Supervisor(directory) as running:
        pid = ready(running, "mms-0")
        running.start("mms-0")
        assert running.pid("mms-0") == pid


def test_the_log_of_an_earlier_process_is_not_blamed_on_this_one(directory: Path) -> None:
    with Supervisor(directory) as running:
        ready(running, "mms-0")
    (directory / "mms" / "__main__.py").write_text("raise SystemExit(3)")
    with Supervisor(directory) as running:
        running.start("mms-0")
        wait_until(lambda: running.dead() == ["mms-0"])
        assert running.log_tail("mms-0") == "(empty log)"


def test_a_killed_node_is_dead_until_it_is_started(directory: Path) -> None:
    with Supervisor(directory) as running:
        pid = ready(running, "mms-0")
        assert running.dead() == []
        running.kill("mms-0")
        running.kill("mms-0")
        assert not exists(pid)
        assert running.dead() == ["mms-0"]
        for act in (running.pid, running.pause, running.resume):
            with pytest.raises(UnavailableError, match="mms-0 does not run"):
                act("mms-0")
        running.start("mms-0")
        assert running.dead() == []


def test_stop_ends_the_frozen_and_kills_the_stubborn(directory: Path) -> None:
    running = Supervisor(directory)
    pids = [ready(running, "mms-0"), ready(running, "shard-0-0")]
    running.pause("mms-0")
    assert running.stop(timeout_s=0.5) == ["shard-0-0"]
    assert not any(exists(pid) for pid in pids)
    assert running.stop() == []


def test_the_kernel_ends_the_servers_of_a_dead_supervisor(directory: Path) -> None:
    child = os.fork()
    if child == 0:
        # What a real supervisor would do, up to the moment when it is killed.
        supervisor._starter = supervisor._Starter()
        running = Supervisor(directory)
        pid = ready(running, "mms-0")
        (directory / "pid").write_text(str(pid))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    pid = int((directory / "pid").read_text())
    wait_until(lambda: not exists(pid) or "Z" in Path(f"/proc/{pid}/stat").read_text())


def test_a_directory_has_one_supervisor_at_a_time(directory: Path) -> None:
    assert running_pid(directory) is None
    first = Supervisor(directory)
    assert running_pid(directory) == os.getpid()
    with pytest.raises(UnavailableError, match=f"in use by process {os.getpid()}"):
        Supervisor(directory)
    first.stop()
    assert running_pid(directory) is None
    Supervisor(directory).stop()


def test_a_directory_without_a_cluster_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.toml"):
        Supervisor(tmp_path)


def test_the_end_of_a_log_is_short(directory: Path) -> None:
    assert log_tail(directory, "nobody") == "(no log)"
    logs = directory / "logs"
    logs.mkdir()
    (logs / "x.log").write_text("".join(f"line {number}\n" for number in range(10_000)))
    assert log_tail(directory, "x") == " | ".join(f"line {n}" for n in range(9995, 10_000))
