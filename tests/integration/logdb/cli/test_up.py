"""`ziplog up --logdb`: a coordinator beside the cluster, restarted, and stopped with it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import logdb
from tests.integration.ports import consecutive_ports
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

ZIPLOG = (sys.executable, "-m", "ziplog")


def ziplog_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ZIPLOG, *arguments], check=False, capture_output=True, text=True)


def coordinators(endpoint: str) -> list[int]:
    """Return the processes that run coordinators of a cluster."""
    listed = subprocess.run(
        ["pgrep", "-f", f"logdb --bootstrap {endpoint} "], check=False, capture_output=True
    )
    return [int(pid) for pid in listed.stdout.split()]


def test_a_coordinator_runs_beside_the_cluster(tmp_path: Path) -> None:
    first = consecutive_ports(7)
    where = f"--data-dir={tmp_path}"
    listening = f"127.0.0.1:{first + 6}"
    started = ziplog_cli(
        "up", where, "--shards=1", f"--port={first}", "--detach", "--timeout=100", "--logdb",
        f"--logdb-port={first + 6}", "--json",
    )  # fmt: skip
    assert started.returncode == 0, started.stderr
    endpoint = json.loads(started.stdout)["endpoint"]
    try:
        with logdb.connect(listening) as db:
            db.put("k", 1)
            (former,) = coordinators(endpoint)
            os.kill(former, signal.SIGKILL)
            wait_until(lambda: coordinators(endpoint) not in ([], [former]), "another coordinator")
            assert db.get("k", timeout=30.0) == 1
        log = (tmp_path / "logs" / "supervisor.log").read_text()
        assert "LogDB's coordinator ended (-9); starting again" in log
    finally:
        assert ziplog_cli("down", where).returncode == 0
    assert coordinators(endpoint) == []


def test_a_taken_port_stops_the_start_and_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        started = ziplog_cli(
            "up", f"--data-dir={tmp_path}", "--shards=1", f"--port={consecutive_ports(6)}",
            "--detach", "--timeout=100", "--logdb", f"--logdb-port={port}",
        )  # fmt: skip
    assert started.returncode == 1
    assert f"cannot listen at 127.0.0.1:{port}: it is in use" in started.stderr
    assert started.stderr.count("\n") == 1
    assert ziplog_cli("down", f"--data-dir={tmp_path}").returncode == 0
