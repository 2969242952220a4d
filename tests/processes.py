"""Nodes of a cluster as separate processes that a test starts, queries and stops."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.waiting import wait_until
from ziplog.config_text import dump
from ziplog.runtime.transport import Transport
from ziplog.wire import decode, encode

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Collection

    from ziplog.config import ClusterConfig
    from ziplog.core.message import Message

_DEADLINE_S = 30.0
_PAUSE_NS = 50_000_000


class Processes:
    """The nodes of one cluster file, beside the data directory; the context exit stops them."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.path = config.data_dir.parent / "cluster.toml"
        self.path.write_text(dump(config))
        self.running: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.running):
            self.kill(name)

    def _begin(self, module: str, name: str) -> subprocess.Popen[str]:
        self.running[name] = subprocess.Popen(
            [sys.executable, "-m", module, "--config", str(self.path), "--node", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.running[name]

    def start(self, module: str, name: str) -> int:
        """Start a node; return its pid once it is ready."""
        process = self._begin(module, name)
        assert process.stdout is not None
        assert "ready" in process.stdout.readline()
        return process.pid

    def refuses(self, module: str, name: str) -> tuple[int, str]:
        """Start a node that cannot run; return its exit code and its one-line error."""
        self._begin(module, name)
        code, stderr = self._end(name)
        assert len(stderr.splitlines()) == 1, stderr
        return code, stderr

    def stop(self, name: str) -> tuple[int, str]:
        """Stop a node; return its exit code and its stderr."""
        self.running[name].terminate()
        return self._end(name)

    def kill(self, name: str) -> None:
        self.running[name].kill()
        self._end(name)

    def _end(self, name: str) -> tuple[int, str]:
        process = self.running[name]
        _, stderr = process.communicate(timeout=_DEADLINE_S)
        del self.running[name]
        return process.returncode, stderr

    def ask(
        self, names: Collection[str], question: Message, fits: Callable[[Message], bool]
    ) -> tuple[str, Message]:
        """Query nodes until one response fits; return the node's name and its response."""
        end = time.monotonic() + _DEADLINE_S
        transport = Transport()
        try:
            for name in names:
                transport.connect(name.encode(), self.config.node(name).endpoint)
            while time.monotonic() < end:
                for name in names:
                    transport.send(name.encode(), encode(question))
                transport.wait(_PAUSE_NS)
                while (received := transport.receive()) is not None:
                    answer = decode(received[1])
                    if fits(answer):
                        return received[0].decode(), answer
        finally:
            transport.close()
        raise AssertionError(f"no such answer from {names} to {question}")


def signal_another_thread(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process whose main thread waits, so that another thread gets it."""
    wait_until(lambda: "\tS (" in Path(f"/proc/{pid}/status").read_text(), "its main thread waits")
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
        is_blocked = int(fields["SigBlk"], 16) >> (number - 1) & 1
        if int(task.name) != pid and not is_blocked:
            os.kill(int(task.name), number)
            return
    raise AssertionError(f"process {pid} has no other thread for {number.name}")
