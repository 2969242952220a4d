"""Starts, signals and stops the processes of one cluster file on this machine.

Rule: no process outlives its supervisor. A clean stop sends SIGTERM to all processes, on which
servers write their checkpoints, repeats it, and kills those that do not stop. If the supervisor
itself is killed, the kernel sends the SIGTERM; a paused process receives it once it is resumed.

Invariant: one supervisor per data directory, guarded by a lock on `supervisor.pid`
(docs/protocol.md, section 9: a killed server is in limbo).
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Final

from ziplog.config import load
from ziplog.config_changes import changes, flatten
from ziplog.deploy import node_logs
from ziplog.deploy.restart_policy import Process
from ziplog.errors import ConfigError, UnavailableError
from ziplog.runtime.child_processes import python, spawn
from ziplog.segments.identity import IDENTITY_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Self

    from ziplog.config import ClusterConfig
    from ziplog.config_keys import Change

_log: Final = logging.getLogger(__name__)
#: The cluster file's name in a data directory.
CLUSTER_FILE: Final = "cluster.toml"
#: Locked by the supervisor of a data directory; holds its process id.
LOCK_FILE: Final = "supervisor.pid"
#: Time limit for a process to stop after SIGSTOP.
_STOP_S: Final = 1.0
#: Time limit for a process to end after SIGKILL: it waits in the kernel if its disk hangs.
_KILL_S: Final = 5.0
#: Time after which a node that has not stopped gets a second SIGTERM.
_SPARED_S: Final = 0.2
#: With less free space a node may be unable to write its log, in bytes.
_FULL_BYTES: Final = 65_536


class Supervisor:
    """The processes of a cluster, one for each node of its file. Thread-safe."""

    def __init__(self, directory: Path, *, launcher: Sequence[str] = ()) -> None:
        """Lock `directory`, which holds a cluster file. Start no process yet.

        Args:
            directory: the cluster's data directory.
            launcher: a script and its first arguments that run a node's module in place of
                `python -m`: it gets the module's name, then the module's own arguments.

        Raises:
            ConfigError: there is no valid cluster file.
            UnavailableError: another supervisor has the lock.

        """
        self.directory: Final = directory.absolute()
        #: The cluster file.
        self.path: Final = self.directory / CLUSTER_FILE
        #: Its contents when it was last read.
        self.config = load(self.path)
        _refuse_other_directories(self.config, self.directory, self.path)
        self._logs: Final = self.directory / node_logs.LOG_DIRECTORY
        self._logs.mkdir(mode=0o700, exist_ok=True)
        self._launcher: Final = tuple(launcher)
        #: Held while processes are inspected or changed, also while a process dies.
        self._guard: Final = threading.RLock()
        self._processes: Final[dict[str, subprocess.Popen[bytes]]] = {}
        #: When each node's present process was started, in monotonic nanoseconds.
        self._started: Final[dict[str, int]] = {}
        #: The start of each node's present process in its log.
        self._log_starts: Final[dict[str, int]] = {}
        self._lock: int | None = _acquire_lock(self.directory)
        #: The parent of the processes. Its forked children must not touch them or the lock.
        self._owner: Final = os.getpid()

    def __enter__(self) -> Self:
        """Return the supervisor."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all processes."""
        self.stop()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all nodes."""
        return tuple(node.name for node in self.config.nodes)

    def reload(self) -> dict[str, Change]:
        """Read the cluster file again, as it may have more shards by now. Start no process.

        Returns:
            The changed settings, which running nodes do not use yet, and when nodes can take each.

        Raises:
            ConfigError: it is not valid, or a node has changed; the former contents stay in use.

        """
        found = load(self.path)
        with self._guard:
            known = self.config
            kept = (known.data_dir, known.mms, known.failure_handlers)
            if kept != (found.data_dir, found.mms, found.failure_handlers) or not set(
                known.shards
            ) <= set(found.shards):
                sentence = (
                    f"{self.path} changes nodes of the running cluster; restore them, or run"
                    " `ziplog down` before you change them"
                )
                raise ConfigError(
                    "cluster file of a running cluster",
                    str(self.path),
                    "one with all nodes unchanged",
                    message=sentence,
                )
            self.config = found
        return changes(flatten(known), found)

    def start(self, name: str) -> None:
        """Start the process of a node, unless it runs.

        Raises:
            ConfigError: there is no such node.
            UnavailableError: the supervisor was stopped, or belongs to this process's parent.
            OSError: the machine cannot start another process now.

        """
        module = self._module(name)
        arguments = ("--config", str(self.path), "--node", name)
        command = python(module, *arguments, launcher=self._launcher)
        if os.getpid() != self._owner:
            raise UnavailableError(
                f"process {self._owner} runs the cluster in {self.directory}; start and stop nodes"
                " in that process, not in its forked child"
            )
        with self._guard:
            if self._lock is None:
                raise UnavailableError(
                    f"the cluster in {self.directory} was stopped; open it again"
                )
            if self.is_running(name):
                return
            self._started[name] = time.monotonic_ns()
            with (self._logs / f"{name}.log").open("ab") as log:
                self._log_starts[name] = log.tell()
                self._processes[name] = spawn(command, log.fileno())

    def replace(self, name: str) -> None:
        """Kill a node (SIGKILL) and start it again; raises what `kill` and `start` raise."""
        with self._guard:
            self.kill(name)
            self.start(name)

    def is_running(self, name: str) -> bool:
        """Whether the node's process was started and has not ended."""
        with self._guard:
            process = self._processes.get(name)
            return process is not None and process.poll() is None

    def processes(self) -> dict[str, Process]:
        """Return each process that was started, by node."""
        with self._guard:
            return {
                name: Process(self._started[name], process.poll() is not None)
                for name, process in self._processes.items()
            }

    def dead(self) -> list[str]:
        """Return the names of the processes that were started and have ended."""
        return [name for name, process in self.processes().items() if process.is_dead]

    def how_it_ended(self, name: str) -> str:
        """Return in words how a dead node's process ended, and why: "ended (signal 9)"."""
        with self._guard:
            code = self._processes[name].poll()
        if code is None:
            return "runs"
        if code < 0:
            return f"ended (signal {-code})"
        return f"ended (exit code {code}; {self.why_it_ended(name)})"

    def why_it_ended(self, name: str) -> str:
        """Return the warnings and the error of a node's last process, or how its log ends.

        A node cannot write its log to a full disk.
        """
        start = self._log_starts.get(name, 0)
        reasons = [*self.log_warnings(name), *node_logs.last_words(self.directory, name, start)]
        why = "; ".join(reasons) if reasons else f"its log ends: {self.log_tail(name)}"
        if shutil.disk_usage(self.directory).free < _FULL_BYTES:
            why += f"; the disk of {self.directory} is full"
        return why

    def pid(self, name: str) -> int:
        """Return the process id of a running node.

        Raises:
            ConfigError: there is no such node.
            UnavailableError: it does not run.

        """
        return self._running(name).pid

    def kill(self, name: str) -> None:
        """Kill a node (SIGKILL). Does nothing if it is dead.

        Raises:
            ConfigError: there is no such node.
            UnavailableError: it has not ended yet, for example because its disk hangs.

        """
        self._module(name)
        with self._guard:
            process = self._processes.get(name)
            if process is not None and not _killed(process, time.monotonic() + _KILL_S):
                raise UnavailableError(
                    f"{name} (process {process.pid}) was killed and does not end: it waits in the"
                    " kernel, for a disk for example"
                )

    def pause(self, name: str) -> None:
        """Pause a running node (SIGSTOP); returns when it has stopped."""
        with self._guard:
            process = self._running(name)
            process.send_signal(signal.SIGSTOP)
            _await_stop(process.pid)

    def resume(self, name: str) -> None:
        """Resume a paused node (SIGCONT)."""
        with self._guard:
            self._running(name).send_signal(signal.SIGCONT)

    def log_tail(self, name: str) -> str:
        """Return the last lines of a node's present process in its log, joined to one."""
        return node_logs.tail(self.directory, name, self._log_starts.get(name, 0))

    def log_warnings(self, name: str) -> list[str]:
        """Return the last warnings and errors of a node's present process."""
        return node_logs.warnings(self.directory, name, self._log_starts.get(name, 0))

    def rotate_logs(self) -> None:
        """Start a new file for each log that has reached the size in the cluster file.

        Raises:
            OSError: a file cannot be copied or renamed.

        """
        for name in (*self.names, *node_logs.COMPANIONS):
            with self._guard:
                path, log = self._logs / f"{name}.log", self.config.log
                if node_logs.rotate(path, log.file_bytes, log.files):
                    self._log_starts[name] = 0

    def stop(
        self, timeout_s: float = 10.0, on_stopped: Callable[[], object] | None = None
    ) -> list[str]:
        """Stop all processes and release the directory. Idempotent; does nothing in a forked child.

        Args:
            timeout_s: time limit of the processes, in seconds.
            on_stopped: called while the directory is still locked, and no process runs any more.

        Returns:
            The names of the processes that had to be killed, `timeout_s` after their SIGTERM.

        """
        if os.getpid() != self._owner:
            return []
        with self._guard:
            killed = self._stop_all(timeout_s)
            try:
                if self._lock is not None and on_stopped is not None:
                    on_stopped()
            finally:
                self._release()
            return killed

    def _release(self) -> None:
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
            # A forked child may still have the descriptor; the lock ends all the same.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def _stop_all(self, timeout_s: float) -> list[str]:
        deadline = time.monotonic() + timeout_s
        self._terminate_all()
        # After one SIGTERM, a storage server waits until others can spare it; here all stop.
        if self._await_ends(min(deadline, time.monotonic() + _SPARED_S)):
            self._terminate_all()
        killed = self._await_ends(deadline)
        deadline = time.monotonic() + _KILL_S
        if left := [name for name in killed if not _killed(self._processes[name], deadline)]:
            _log.warning("killed, but does not end, perhaps because its disk hangs: %s", left)
        self._processes.clear()
        return killed

    def _terminate_all(self) -> None:
        for process in self._processes.values():
            # A paused process receives its SIGTERM only once it is resumed.
            process.terminate()
            process.send_signal(signal.SIGCONT)

    def _await_ends(self, deadline: float) -> list[str]:
        """Return the names of the processes that have not ended by then."""
        running = []
        for name, process in self._processes.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                running.append(name)
        return running

    def _running(self, name: str) -> subprocess.Popen[bytes]:
        self._module(name)
        with self._guard:
            if not self.is_running(name):
                raise UnavailableError(f"{name} is not running; restart it first")
            return self._processes[name]

    def _module(self, name: str) -> str:
        return module_of(self.config, name)


def _killed(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Kill a process; return whether it has ended by then."""
    process.kill()
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def module_of(config: ClusterConfig, name: str) -> str:
    """Return the module that runs a node.

    Raises:
        ConfigError: there is no such node.

    """
    node = config.node(name)
    if node in config.failure_handlers:
        return "failure_handler"
    return "mms" if node in config.mms else "shard"


def _refuse_other_directories(config: ClusterConfig, directory: Path, path: Path) -> None:
    """Refuse a cluster file whose `data_dir` is another cluster's, or lacks the existing data.

    Nodes with a new name, or a new directory for all of them, would start another cluster. A copied
    directory would run on the files of the original.
    """
    data, names = config.data_dir, tuple(node.name for node in config.nodes)
    if data.resolve() != directory.resolve():
        sentence = ""
        if any(_is_of_a_node(directory / name) for name in names):
            sentence = f"the nodes' directories are in {directory}; write data_dir = '.' in {path}"
        elif (data / CLUSTER_FILE).exists():
            sentence = (
                f"the cluster of {data / CLUSTER_FILE} keeps its files there; start that one, or"
                " choose another data_dir"
            )
        if sentence:
            raise ConfigError(
                "data_dir",
                str(data),
                repr(str(directory)),
                str(path),
                message=f"data_dir is {str(data)!r}, but {sentence}",
            )
    missing = [name for name in names if not (data / name).exists()]
    if not missing or not data.is_dir():
        return
    # A directory that was moved away keeps the start of its name.
    unknown = [
        found.name
        for found in sorted(data.iterdir())
        if not found.name.startswith(names) and _is_of_a_node(found)
    ]
    if unknown:
        sentence = (
            f"there is no directory for {', '.join(missing)}, and {', '.join(unknown)} in {data}"
            " belongs to no node of the file; restore the former names in the file, or move unused"
            " directories away"
        )
        raise ConfigError(
            "nodes without a directory",
            ", ".join(missing),
            "unchanged",
            str(path),
            message=sentence,
        )


def has_files(directory: Path) -> bool:
    """Whether a node's directory exists and is not empty."""
    return directory.is_dir() and any(directory.iterdir())


def _is_of_a_node(directory: Path) -> bool:
    return any((directory / name).exists() for name in ("journal", IDENTITY_FILE))


def running_pid(directory: Path) -> int | None:
    """Return the process id of the supervisor that has locked `directory`, or None.

    0: it has just started, and has not written its process id yet.
    """
    try:
        descriptor = os.open(directory / LOCK_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(descriptor, 32).decode(errors="replace").strip()
        return int(text) if text.isdecimal() else 0
    else:
        return None
    finally:
        os.close(descriptor)


def _acquire_lock(directory: Path) -> int:
    descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip()
        os.close(descriptor)
        raise UnavailableError(
            f"{directory} is in use by process {holder}; stop that process"
            f" (ziplog down --data-dir {directory}) or use another directory"
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _await_stop(pid: int) -> None:
    """Wait until a child has stopped or ended, for a limited time: it may be resumed meanwhile."""
    options = os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG
    deadline = time.monotonic() + _STOP_S
    while os.waitid(os.P_PID, pid, options) is None and time.monotonic() < deadline:
        time.sleep(0.001)
