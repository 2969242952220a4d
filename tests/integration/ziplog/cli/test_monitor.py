"""The monitor that `ziplog up` runs beside a cluster, as `[monitor]` of its file says."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.ports import consecutive_ports
from tests.unit.ziplog.cli.fakes import cluster_file, run
from tests.waiting import wait_until
from ziplog.monitor.nodes import LocalEndpoints
from ziplog.runtime.settings_reload import read_used

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(300)

ZIPLOG = (sys.executable, "-m", "ziplog")


def ziplog_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ZIPLOG, *arguments], check=False, capture_output=True, text=True)


def reply(port: int, token: str = "") -> int:
    """Return the code of the monitor's reply to /readyz; 0: nothing listens."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/readyz")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            code: int = response.status
            return code
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def monitor_pid(directory: Path) -> int:
    """Return the process id of the running monitor; 0: none runs."""
    used = read_used(directory / "monitor", "monitor")
    return used.pid if used is not None else 0


def test_up_keeps_the_monitor_of_the_cluster_file(tmp_path: Path) -> None:
    first = consecutive_ports(8)
    here, there = first + 6, first + 7
    where, file = f"--data-dir={tmp_path}", tmp_path / "cluster.toml"
    up = ("up", where, "--detach", "--timeout=100")
    assert ziplog_cli(*up, "--shards=1", f"--port={first}").returncode == 0
    assert ziplog_cli("down", where).returncode == 0
    before = file.read_text()
    file.write_text(f"{before}\n[monitor]\nport = {here}\n")
    started = ziplog_cli(*up)
    assert started.returncode == 0, started.stderr
    assert f"the monitor is at http://127.0.0.1:{here}/metrics" in started.stderr
    try:
        wait_until(lambda: reply(here) == 200, "the monitor has a snapshot")
        os.kill(former := monitor_pid(tmp_path), signal.SIGKILL)
        wait_until(lambda: monitor_pid(tmp_path) not in {0, former}, "another monitor")
        wait_until(lambda: reply(here) == 200, "it has a snapshot")
        assert "the monitor ended (-9)" in (tmp_path / "logs" / "supervisor.log").read_text()

        (tmp_path / "token").write_text("secret\n")
        file.write_text(f"{before}\n[monitor]\nport = {there}\ntoken_file = 'token'\n")
        done = ziplog_cli("config", "reload", str(file), "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["applied"] == ["monitor.port", "monitor.token_file"]
        assert "monitor" in json.loads(done.stdout)["nodes"]
        assert reply(here) == 0
        assert (reply(there), reply(there, "secret")) == (401, 200)

        file.write_text(f"{before}\n[monitor]\nport = 0\n")
        assert ziplog_cli("config", "reload", str(file)).returncode == 0
        assert reply(there) == 0
    finally:
        assert ziplog_cli("down", where).returncode == 0
    assert monitor_pid(tmp_path) == 0


def test_a_taken_port_stops_the_start_and_is_named(tmp_path: Path) -> None:
    first = consecutive_ports(7)
    where = f"--data-dir={tmp_path}"
    up = ("up", where, "--detach", "--timeout=100")
    assert ziplog_cli(*up, "--shards=1", f"--port={first}").returncode == 0
    assert ziplog_cli("down", where).returncode == 0
    with (tmp_path / "cluster.toml").open("a") as file:
        file.write(f"\n[monitor]\nport = {first}\n")
    started = ziplog_cli(*up)
    assert started.returncode == 1
    assert f"cannot listen at 127.0.0.1:{first}: Address already in use" in started.stderr
    assert started.stderr.count("\n") == 1


def test_options_and_a_file_contradict_each_other(tmp_path: Path) -> None:
    file = str(cluster_file(tmp_path, 3))
    given = run("monitor", "--config", file, "--port", "1")
    assert given.exit_code == 2
    assert "leave out --host, --port and --token-file" in given.stderr
    missing = run("monitor", "--config", file)
    assert missing.exit_code == 2
    assert "no table [monitor] with a port" in missing.stderr
    exposed = run("monitor", "--host", "0.0.0.0")
    assert exposed.exit_code == 2
    assert "--token-file is required, because 0.0.0.0 is not" in exposed.stderr


def test_an_address_of_this_machine_is_local() -> None:
    is_local = LocalEndpoints()
    assert is_local("127.0.0.1:7400")
    wait_until(lambda: is_local("localhost:7400"), "the name resolves")
    assert not is_local("192.0.2.1:7400"), "an address for documentation"
    assert not is_local("no-such-name.invalid:7400")


def test_a_name_service_that_does_not_answer_delays_no_query(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered, real, is_local = threading.Event(), socket.getaddrinfo, LocalEndpoints()

    def late(host: str, *arguments: Any) -> Any:
        answered.wait(10)
        return real("127.0.0.1", *arguments)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    began = time.monotonic()
    assert not is_local("late:7400")
    assert is_local("127.0.0.1:7400")
    assert time.monotonic() - began < 5
    answered.set()
    wait_until(lambda: is_local("late:7400"), "the name resolves")
