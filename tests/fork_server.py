"""A process that has imported the nodes' modules, and forks the nodes of the tests' clusters.

A node that is started by `python -m` spends most of its start on imports; a forked one has them. It
runs the same `main` in a session of its own, with its own files, environment, directory and limits,
default signals, and no other descriptor. It is a child of the process of the tests, as if that had
started it: its parent exits, and the next ancestor that is a "subreaper" adopts it. Tests of starts
use `python -m`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ziplog.runtime import child_processes

if TYPE_CHECKING:
    from collections.abc import Callable

#: The modules of nodes.
MODULES: Final = ("failure_handler", "mms", "shard")
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
#: What Python sets when it starts.
_START_OF_PYTHON: Final = ["-P", "-m"]
_LIMIT_BYTES: Final = 200_000
#: An argument of the server; a node writes its own command line in this place.
_ROOM: Final = 4096 * "-"
_prctl: Final[Callable[..., int]] = ctypes.CDLL(None).prctl


class ForkServer:
    """The process, started at the first fork."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        #: Held from a request to its reply; supervisors restart nodes in threads.
        self._lock: Final = threading.Lock()

    def spawn(self, command: list[str], log: int, stdout: int) -> subprocess.Popen[bytes]:
        """Start a process as `ziplog.runtime.child_processes` does, and fork it if it is a node."""
        if command[1:3] != _START_OF_PYTHON or command[3] not in MODULES:
            return _spawn(command, log, stdout)
        return _Forked(self._fork, command, log, stdout)

    def _start(self) -> None:
        self._socket, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = [sys.executable, "-m", "tests.fork_server", str(remote.fileno()), _ROOM]
        self._process = subprocess.Popen(
            program,
            stdin=subprocess.DEVNULL,
            pass_fds=[remote.fileno()],
            env=child_processes.environment(),
        )
        remote.close()

    def _fork(self, request: dict[str, Any], files: list[int]) -> int:
        """Fork a node; return its process id."""
        with self._lock:
            if self._process is None:
                self._start()
            _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], files)
                return int(self._socket.recv(32))
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._socket.close()
            self._process.wait()


class _Forked(subprocess.Popen[bytes]):
    """A node that the fork server has forked."""

    def __init__(self, fork: Callable[..., int], command: list[str], log: int, stdout: int) -> None:
        self._fork = fork
        super().__init__(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=log)

    def _execute_child(self, *values: Any) -> None:
        """Fork; values 10 to 15 are the files that `Popen.__init__` has opened."""
        command, pipes = values[0], values[10:16]
        request = {
            "command": command,
            "environment": child_processes.environment(),
            "directory": str(Path.cwd()),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "parent": os.getpid(),
        }
        self.pid = self._fork(request, [pipes[0], pipes[3], pipes[5]])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


_spawn: Final = child_processes._spawn


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Fork a node for each request; return the request in the node."""
    while True:
        data, files, _, _ = socket.recv_fds(requests, _LIMIT_BYTES, 3)
        if not data:
            sys.exit()
        request: dict[str, Any] = json.loads(data)
        orphaned, waiting = os.pipe()
        middle = os.fork()
        if middle:
            os.waitpid(middle, 0)
            for file in (*files, orphaned, waiting):
                os.close(file)
            continue
        if os.fork():
            os._exit(0)
        os.close(waiting)
        os.read(orphaned, 1)  # Ends after the end of the middle process, so of the adoption.
        _become_child_of(request["parent"])
        requests.send(b"%d" % os.getpid())
        _take_over(request, files)
        return request


def _become_child_of(parent: int) -> None:
    """End with the process that has adopted this one, if it is still there."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _take_over(request: dict[str, Any], files: list[int]) -> None:
    """Take over what a node inherits from the process that starts it."""
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    resource.setrlimit(resource.RLIMIT_NOFILE, request["files"])
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _, _, _, *sys.argv = request["command"]
    _show(b"\0".join(map(os.fsencode, request["command"])))


def _show(command: bytes) -> None:
    """Write this process's command line, as others read it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[45:47])
    assert len(command) < end - start
    ctypes.memmove(start, command.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    _mains = {module: importlib.import_module(f"{module}.__main__").main for module in MODULES}
    # The pages of these objects stay shared, as no collection writes to them.
    gc.collect()
    gc.freeze()
    _request = _serve(socket.socket(fileno=int(sys.argv[1])))
    _, _, _, _module, *_arguments = _request["command"]
    sys.exit(_mains[_module](_arguments))
