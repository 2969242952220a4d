"""The supervisor with idle processes: one for each node, and none is left over."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.unit.shard.archive.processes import is_running
from tests.unit.ziplog.nodes import IDLE, PATIENT, exists, make, ready, rewrite
from tests.waiting import wait_until
from ziplog.config import load
from ziplog.config_text import dump
from ziplog.deploy import new_shard, supervisor
from ziplog.deploy.supervisor import CLUSTER_FILE, Supervisor, running_pid
from ziplog.errors import ConfigError, UnavailableError
from ziplog.runtime import child_processes

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make(tmp_path)
    monkeypatch.setattr(child_processes, "_PACKAGE_ROOT", tmp_path)
    return tmp_path


def test_a_node_gets_its_file_and_name(directory: Path) -> None:
    with Supervisor(directory) as running:
        ready(running, "mms-0")
        said = f"ready --config {directory / CLUSTER_FILE} --node mms-0"
        assert running.log_tail("mms-0") == said


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
    rewrite(directory, "mms", "raise SystemExit(3)")
    with Supervisor(directory) as running:
        running.start("mms-0")
        wait_until(lambda: running.dead() == ["mms-0"], "it is dead")
        assert running.log_tail("mms-0") == "(empty log)"
        said = "ended (exit code 3; its log ends: (empty log))"
        assert running.how_it_ended("mms-0") == said


def test_a_full_disk_is_named_beside_a_log_that_could_not_be_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(directory, "mms", "raise SystemExit(3)")
    usage = shutil.disk_usage(directory)
    with Supervisor(directory) as running:
        running.start("mms-0")
        wait_until(lambda: running.dead() == ["mms-0"], "it is dead")
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
        why = f"its log ends: (empty log); the disk of {directory} is full"
        assert running.why_it_ended("mms-0") == why


def test_the_end_of_a_process_is_described_by_its_warnings(directory: Path) -> None:
    reason = "level=critical event=halted reason='the disk is gone' state='none'"
    rewrite(directory, "mms", f"import sys\nprint({reason!r}, file=sys.stderr)\nsys.exit(70)")
    with Supervisor(directory) as running:
        running.start("mms-0")
        wait_until(lambda: running.dead() == ["mms-0"], "it is dead")
        assert running.log_warnings("mms-0") == ["halted: the disk is gone"]
        assert running.how_it_ended("mms-0") == "ended (exit code 70; halted: the disk is gone)"


def test_the_error_of_a_start_follows_the_warnings(directory: Path) -> None:
    said = "level=warning event='few files'\\nmms: mms-0: cannot open a port"
    rewrite(directory, "mms", f'import sys\nprint("{said}", file=sys.stderr)\nsys.exit(1)')
    with Supervisor(directory) as running:
        running.start("mms-0")
        wait_until(lambda: running.dead() == ["mms-0"], "it is dead")
        why = "few files; mms: mms-0: cannot open a port"
        assert running.how_it_ended("mms-0") == f"ended (exit code 1; {why})"


def test_a_killed_node_is_dead_until_it_is_started(directory: Path) -> None:
    with Supervisor(directory) as running:
        pid = ready(running, "mms-0")
        assert running.dead() == []
        running.kill("mms-0")
        running.kill("mms-0")
        assert not exists(pid)
        assert running.dead() == ["mms-0"]
        assert running.how_it_ended("mms-0") == "ended (signal 9)"
        for act in (running.pid, running.pause, running.resume):
            with pytest.raises(UnavailableError, match="mms-0 is not running"):
                act("mms-0")
        running.start("mms-0")
        assert running.dead() == []


def test_a_node_is_replaced_in_one_step_and_its_age_is_known(directory: Path) -> None:
    with Supervisor(directory) as running:
        pid = ready(running, "mms-0")
        before = running.processes()["mms-0"]
        running.pause("mms-0")
        running.replace("mms-0")
        assert not exists(pid)
        after = running.processes()["mms-0"]
        assert (before.is_dead, after.is_dead) == (False, False)
        assert before.started < after.started


def test_nothing_is_started_in_a_directory_that_was_given_up(directory: Path) -> None:
    running = Supervisor(directory)
    running.stop()
    with pytest.raises(UnavailableError, match="was stopped"):
        running.start("mms-0")


def test_stop_ends_paused_processes_and_kills_those_that_ignore_it(directory: Path) -> None:
    running = Supervisor(directory)
    pids = [ready(running, "mms-0"), ready(running, "shard-0-0")]
    running.pause("mms-0")
    assert running.stop(timeout_s=2.0) == ["shard-0-0"]
    assert not any(exists(pid) for pid in pids)
    assert running.stop() == []


def test_a_process_that_a_kill_does_not_end_blocks_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "_KILL_S", 0.1)
    running = Supervisor(directory)
    pid, process = ready(running, "shard-0-0"), running._processes["shard-0-0"]
    kill = process.kill
    monkeypatch.setattr(process, "kill", lambda: None)  # As if it waited for its disk.
    try:
        for act in (running.kill, running.replace):
            with pytest.raises(UnavailableError, match=f"process {pid}. was killed and does not"):
                act("shard-0-0")
        assert running.pid("shard-0-0") == pid
        assert running.stop(timeout_s=0.1) == ["shard-0-0"]
    finally:
        kill()
        process.wait()
    assert "does not end, perhaps because its disk hangs: ['shard-0-0']" in caplog.text
    assert running_pid(directory) is None


def test_stop_repeats_its_sigterm_for_servers_that_wait_for_others(directory: Path) -> None:
    rewrite(directory, "shard", PATIENT)
    running = Supervisor(directory)
    ready(running, "shard-0-0")
    assert running.stop() == []


def test_the_kernel_ends_the_servers_of_a_dead_supervisor(directory: Path) -> None:
    child = os.fork()
    if child == 0:
        # The actions of a real supervisor until it is killed.
        try:
            child_processes._starter = child_processes._Starter()
            running = Supervisor(directory)
            pid = ready(running, "mms-0")
            (directory / "pid").write_text(str(pid))
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    pid = int((directory / "pid").read_text())
    wait_until(lambda: not is_running(pid), "it has ended")


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


def test_a_file_that_renames_a_node_with_data_is_refused(directory: Path) -> None:
    """A new name would be a new node, in a new directory."""
    path = directory / CLUSTER_FILE
    name = load(path).nodes[0].name
    (directory / name).mkdir()
    (directory / name / "journal").touch()
    Supervisor(directory).stop()
    path.write_text(path.read_text().replace(f'"{name}"', '"renamed"'))
    with pytest.raises(ConfigError, match=rf"{name} in .* belongs to no node") as refused:
        Supervisor(directory)
    assert str(path) in str(refused.value)
    (directory / name).rename(directory / f"old-{name}")
    with pytest.raises(ConfigError, match=rf"old-{name} in .* belongs to no node"):
        Supervisor(directory)
    path.write_text(path.read_text().replace('"renamed"', f'"{name}"'))
    (directory / f"old-{name}").rename(directory / f"{name}.damaged")
    Supervisor(directory).stop()  # a replaced server's directory is moved away


def test_a_cluster_file_that_points_away_from_the_data_is_refused(directory: Path) -> None:
    path = directory / CLUSTER_FILE
    config = load(path)
    (directory / config.nodes[0].name).mkdir()
    (directory / config.nodes[0].name / "journal").touch()
    path.write_text(dump(replace(config, data_dir=directory / "elsewhere")))
    with pytest.raises(ConfigError, match="the nodes' directories are in"):
        Supervisor(directory)


def test_a_copied_cluster_file_does_not_run_on_the_files_of_the_original(
    directory: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    config = replace(load(directory / CLUSTER_FILE), data_dir=directory)
    (copy / CLUSTER_FILE).write_text(dump(config))
    with pytest.raises(ConfigError, match="keeps its files there"):
        Supervisor(copy)
    for parent in (directory, copy):
        (parent / config.nodes[0].name).mkdir()
        (parent / config.nodes[0].name / "journal").touch()
    with pytest.raises(ConfigError, match=r"write data_dir = '\.' in"):
        Supervisor(copy)


def test_logs_are_rotated_and_the_present_part_is_reported(directory: Path) -> None:
    path = directory / CLUSTER_FILE
    path.write_text(path.read_text().replace("file_bytes = 16777216", "file_bytes = 65536"))
    with Supervisor(directory) as running:
        ready(running, "mms-0")
        log = directory / "logs" / "mms-0.log"
        with log.open("ab") as appended:
            appended.write(b"x" * 65_536 + b"\n")
        running.rotate_logs()
        assert log.with_name("mms-0.log.1").stat().st_size > 65_536
        with log.open("ab") as appended:
            appended.write(b"level=warning event=later\n")
        running.rotate_logs()
        assert running.log_warnings("mms-0") == ["later"]


def test_a_running_cluster_takes_new_shards_and_no_other_change(directory: Path) -> None:
    with Supervisor(directory) as running:
        added = new_shard.next_shard(running.path, {0})
        assert running.names == ("mms-0", "fh-0", "shard-0-0")
        running.reload()
        assert running.names == ("mms-0", "fh-0", "shard-0-0", "shard-1-0")
        assert running.processes() == {}
        assert exists(ready(running, "shard-1-0"))
        text = running.path.read_text()
        for old, new in (
            ("port = 7400", "port = 7410"),
            ("port = 7403", "port = 7413"),
            ("port = 7402", "port = 7412"),
            (str(added.replicas[0].port), "7499"),
            ("[[shard]]\nid = 0", "[[shard]]\nid = 5"),
            ("data_dir =", "x ="),
        ):
            assert old in text
            running.path.write_text(text.replace(old, new))
            with pytest.raises(ConfigError, match=r"cluster\.toml"):
                running.reload()
            assert running.config.shards[-1] == added
            assert running.config.mms[0].port == 7400
        running.path.write_text(text.replace("lag_fix = true", "lag_fix = false"))
        assert running.reload() == {"lag_fix": "restart"}
        assert running.reload() == {}
        assert not running.config.lag_fix
        assert running.stop(timeout_s=2.0) == ["shard-1-0"]


def test_a_thread_that_is_refused_is_an_error_of_the_machine_and_tried_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(child_processes, "_starter", child_processes._Starter())
    with Supervisor(directory) as running:
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", refuse)
            for _ in range(2):
                with pytest.raises(OSError, match="start new thread"):
                    running.start("mms-0")
        ready(running, "mms-0")


def test_a_forked_child_leaves_the_processes_and_the_lock_alone(directory: Path) -> None:
    with Supervisor(directory) as running:
        pid = ready(running, "mms-0")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with pytest.raises(UnavailableError, match="not in its forked child"):
                    running.start("mms-0")
                code = len(running.stop())
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert running_pid(directory) == os.getpid()
        assert running.pid("mms-0") == pid
        assert exists(pid)
        # A surviving child has the lock's descriptor; the parent releases the lock all the same.
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
    Supervisor(directory).stop()
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)


def test_a_failed_removal_at_the_end_releases_the_directory(directory: Path) -> None:
    held: list[int | None] = []

    def fail() -> None:
        held.append(running_pid(directory))
        raise FileNotFoundError

    with Supervisor(directory) as running:
        with pytest.raises(FileNotFoundError):
            running.stop(on_stopped=fail)
        assert held == [os.getpid()]
        assert running_pid(directory) is None
