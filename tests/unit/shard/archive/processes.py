"""The processes of an archive, started as a storage server starts them."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from shard.archive.shared_state import SharedState
from ziplog.archive.client import ArchiveClient
from ziplog.runtime.child_processes import environment, python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CLUSTER: Final = 77
SHARD: Final = 3


def children(pid: int) -> list[int]:
    """Return the children of a process's threads."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            # A thread may have ended meanwhile.
            with suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Process:
    """An archive's process, and the state shared with its server."""

    def __init__(
        self, directory: Path, reserve_bytes: int = 0, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.shared = SharedState()
        self.shared.cluster, self.shared.stable = CLUSTER, 2**60
        arguments = [
            *("--directory", str(directory), "--node", "shard-3-0", "--host", host),
            *("--shard", str(SHARD), "--shared-fd", str(self.shared.fd)),
            *("--reserve", str(reserve_bytes), "--port", str(port)),
        ]
        self.child = subprocess.Popen(
            python("shard.archive", *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            pass_fds=[self.shared.fd],
        )
        assert self.child.stdout is not None
        #: The port; 0: the process has ended.
        self.port = int(self.child.stdout.readline() or 0)

    def client(self, cluster: int = CLUSTER, shard: int = SHARD) -> ArchiveClient:
        return ArchiveClient("127.0.0.1", self.port, cluster, shard, timeout_s=20)

    def notify(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(b"\n")
        self.child.stdin.flush()

    def halves(self) -> tuple[int, int]:
        """Return the pids of the serving and of the building process."""
        (maker,) = children(self.child.pid)
        return self.child.pid, maker

    def leave(self) -> tuple[int, str]:
        """Close its stdin, as the end of its server does; return the exit code and the log."""
        _, error = self.child.communicate(timeout=60)
        return self.child.returncode, error.decode()

    def close(self) -> None:
        # Otherwise a paused process would not end, and both hold stderr.
        for making in children(self.child.pid):
            os.kill(making, signal.SIGCONT)
        self.child.kill()
        self.child.communicate(timeout=60)
        self.shared.close()


@pytest.fixture
def started() -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def start(directory: Path, **options: Any) -> Process:
        processes.append(Process(directory, **options))
        return processes[-1]

    yield start
    for process in processes:
        process.close()
