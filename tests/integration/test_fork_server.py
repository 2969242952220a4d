"""A forked node differs from one that `python -m` has started in nothing that tests rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import fork_server as forking
from tests.waiting import wait_until
from ziplog.local import Cluster
from ziplog.runtime import child_processes

if TYPE_CHECKING:
    from tests.fork_server import ForkServer

ORPHAN = """
import os, signal, sys
from tests.fork_server import ForkServer
from ziplog.runtime.child_processes import python
command = python("mms", "--config", sys.argv[1], "--node", "mms-0")
print(ForkServer().spawn(command, 2, 2).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def open_files(process: Path) -> dict[str, str]:
    """Return the open files of a process, without those that it closes while they are listed."""
    files = {}
    for link in (process / "fd").iterdir():
        with suppress(FileNotFoundError):
            files[link.name] = str(link.readlink())
    return files


def traits(pid: int, directory: Path) -> dict[str, Any]:
    """Return what a process has from its parent, and what it does about signals.

    It opens files in `directory` itself, sooner or later.
    """
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
    files = open_files(process)
    return {
        **{name: status[name] for name in ("PPid", "SigBlk", "SigIgn", "SigCgt", "Umask")},
        "files": [files[number] for number in "012"],
        "other files": {
            file
            for file in files.values()
            if file.startswith("/") and not file.startswith(f"{directory}/")
        },
        "command": (process / "cmdline").read_bytes().rstrip(b"\0"),
        "directory": (process / "cwd").readlink(),
        "groups": (os.getsid(pid) == pid, os.getpgid(pid) == pid),
        "limits": (process / "limits").read_text(),
    }


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of a signal."""
    return bool(int(traits(pid, Path("/"))["SigCgt"], 16) >> (number - 1) & 1)


def has_ended(stat: Path) -> bool:
    """Whether a process is gone, or a zombie."""
    try:
        return ") Z" in stat.read_text()
    except OSError:
        return True


@pytest.mark.parametrize("node", ["mms-0", "shard-0-0"])
def test_both_have_the_same_traits(node: str, tmp_path: Path) -> None:
    found = []
    for name in ("forked", "started"):
        with pytest.MonkeyPatch.context() as patch:
            if name == "started":
                patch.setattr(child_processes, "_spawn", forking._spawn)
            with Cluster(tmp_path, shards=1, f=0, failure_handlers=0) as cluster:
                found.append(traits(cluster.pid(node), tmp_path))
    forked, started = found
    assert forked == started


def test_the_exit_code_and_the_log_are_those_of_main(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    command = child_processes.python("shard", "--config", str(tmp_path / "absent"), "--node", "x")
    with (tmp_path / "log").open("wb") as log:
        assert fork_server.spawn(command, log.fileno(), subprocess.DEVNULL).wait(60) == 2
    assert (tmp_path / "log").read_text().startswith("shard: ")


def test_a_signal_ends_a_node(fork_server: ForkServer, tmp_path: Path) -> None:
    with Cluster(tmp_path, shards=1, f=0, failure_handlers=0):
        pass
    command = child_processes.python(
        "mms", "--config", str(tmp_path / "cluster.toml"), "--node", "mms-0"
    )
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)):
        with (tmp_path / "log").open("wb") as log:
            node = fork_server.spawn(command, log.fileno(), subprocess.DEVNULL)
            wait_until(lambda: "started" in (tmp_path / "log").read_text(), "the start of a node")
            is_ready = partial(catches, node.pid, signal.SIGTERM)
            wait_until(is_ready, "its handler of signals")
            node.send_signal(number)
            assert node.wait(60) == code


def test_a_node_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    with Cluster(tmp_path, shards=1, f=0, failure_handlers=0):
        pass
    program = [sys.executable, "-c", ORPHAN, str(tmp_path / "cluster.toml")]
    done = subprocess.run(
        program, check=False, capture_output=True, text=True, env=child_processes.environment()
    )
    assert done.returncode == -signal.SIGKILL
    stat = Path(f"/proc/{int(done.stdout)}/stat")
    wait_until(lambda: has_ended(stat), "the end of the node")
