"""Starts, signals and stops the processes of one cluster file on this machine.

Rule: no process outlives its supervisor. A clean stop asks everybody to stop (SIGTERM: servers
write their checkpoint and start again without harm) and kills who does not; should the supervisor
itself be killed, the kernel sends the SIGTERM (a frozen process takes it once it goes on).
Invariant: one supervisor per data directory, guarded by a lock on `supervisor.pid`
(docs/protocol.md, section 9: a killed server is in limbo).
"""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ziplog.config import load
from ziplog.deploy.restart_policy import Process
from ziplog.errors import ConfigError, UnavailableError
from ziplog.segments.identity import IDENTITY_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from ziplog.config import ClusterConfig

#: The cluster file's name in a data directory.
CLUSTER_FILE: Final = "cluster.toml"
_LOCK_FILE: Final = "supervisor.pid"
#: A process that was told to stop (SIGSTOP) does so much sooner.
_STOP_S: Final = 1.0
_PACKAGE_ROOT: Final = Path(__file__).resolve().parents[2]
_LOG_TAIL_BYTES: Final = 32_768
_LOG_TAIL_LINES: Final = 5
#: Of each line; a server that halts tells its reason first, and then its whole state.
_LOG_LINE_LENGTH: Final = 400

#: What a child does before it becomes what it is to be: it asks to be told (PR_SET_PDEATHSIG,
#: SIGTERM) when this process ends, and ends if that was before. Not by a function between fork and
#: exec: for that, Python clears in the child what other threads have of their own, and who shuts a
#: connection down when it is cleared (Spark's client does) shuts down this process's, too.
_DIE_WITH_PARENT: Final = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class Supervisor:
    """The processes of a cluster, one for each node of its file. For any thread."""

    def __init__(self, directory: Path, *, launcher: Sequence[str] = ()) -> None:
        """Take charge of `directory`, which holds a cluster file. Nothing is started yet.

        Args:
            directory: the cluster's data directory.
            launcher: a script and its first arguments that run a node's module in place of
                `python -m`: it gets the module's name, then the module's own arguments.

        Raises:
            ConfigError: there is no valid cluster file.
            UnavailableError: another supervisor is in charge.

        """
        self.directory: Final = directory.absolute()
        #: The cluster file.
        self.path: Final = self.directory / CLUSTER_FILE
        #: What it said when it was read last.
        self.config = load(self.path)
        _refuse_other_directories(self.config, self.directory, self.path)
        self._logs: Final = self.directory / "logs"
        self._logs.mkdir(mode=0o700, exist_ok=True)
        self._launcher: Final = tuple(launcher)
        #: Held by whoever looks at the processes or changes them, also while a process dies.
        self._guard: Final = threading.RLock()
        self._processes: Final[dict[str, subprocess.Popen[bytes]]] = {}
        #: When each node's present process was started, in monotonic nanoseconds.
        self._started: Final[dict[str, int]] = {}
        #: Where the log of each node's present process begins.
        self._log_starts: Final[dict[str, int]] = {}
        self._lock: int | None = _take_lock(self.directory)
        #: The parent of the processes. Its forked children leave them, and the lock, alone.
        self._owner: Final = os.getpid()

    def __enter__(self) -> Self:
        """Do nothing more."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop everything."""
        self.stop()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all nodes."""
        return tuple(node.name for node in self.config.nodes)

    def reload(self) -> None:
        """Read the cluster file again: it may have more shards by now. Starts nothing.

        Raises:
            ConfigError: it is not valid, or has not all nodes as they were; what was read before
                goes on to count.

        """
        found = load(self.path)
        with self._guard:
            known = self.config
            kept = (known.data_dir, known.mms, known.failure_handlers)
            if kept != (found.data_dir, found.mms, found.failure_handlers) or not set(
                known.shards
            ) <= set(found.shards):
                allowed = "one with all nodes as they were; `ziplog down` before they change"
                raise ConfigError("cluster file of a running cluster", str(self.path), allowed)
            self.config = found

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
                " there, not in its forked child"
            )
        with self._guard:
            if self._lock is None:
                raise UnavailableError(f"the cluster in {self.directory} was stopped; open it anew")
            if self.is_running(name):
                return
            self._started[name] = time.monotonic_ns()
            with (self._logs / f"{name}.log").open("ab") as log:
                self._log_starts[name] = log.tell()
                self._processes[name] = _starter.call(lambda: _spawn(command, log.fileno()))

    def replace(self, name: str) -> None:
        """Kill a node (SIGKILL) and start it again; raises what `start` raises."""
        with self._guard:
            self.kill(name)
            self.start(name)

    def is_running(self, name: str) -> bool:
        """Whether the node's process was started and has not ended."""
        with self._guard:
            process = self._processes.get(name)
            return process is not None and process.poll() is None

    def processes(self) -> dict[str, Process]:
        """Return what is known of each process that was started, by node."""
        with self._guard:
            return {
                name: Process(self._started[name], process.poll() is not None)
                for name, process in self._processes.items()
            }

    def dead(self) -> list[str]:
        """Return the names of the processes that were started and have ended."""
        return [name for name, process in self.processes().items() if process.is_dead]

    def how_it_ended(self, name: str) -> str:
        """Return in words how a dead node's process ended: "ended (signal 9)"."""
        with self._guard:
            code = self._processes[name].poll()
        if code is None:
            return "runs"
        if code < 0:
            return f"ended (signal {-code})"
        return f"ended (exit code {code}; its log ends: {self.log_tail(name)})"

    def pid(self, name: str) -> int:
        """Return the process id of a running node.

        Raises:
            ConfigError: there is no such node.
            UnavailableError: it does not run.

        """
        return self._running(name).pid

    def kill(self, name: str) -> None:
        """End a node without a chance to say goodbye (SIGKILL). Nothing happens if it is dead."""
        self._module(name)
        with self._guard:
            process = self._processes.get(name)
            if process is not None:
                process.kill()
                process.wait()

    def pause(self, name: str) -> None:
        """Freeze a running node (SIGSTOP); returns when it stands still."""
        with self._guard:
            process = self._running(name)
            process.send_signal(signal.SIGSTOP)
            _await_stop(process.pid)

    def resume(self, name: str) -> None:
        """Let a frozen node go on (SIGCONT)."""
        with self._guard:
            self._running(name).send_signal(signal.SIGCONT)

    def log_tail(self, name: str) -> str:
        """Return the last lines that a node's process wrote, joined to one."""
        return log_tail(self.directory, name, self._log_starts.get(name, 0))

    def stop(self, timeout_s: float = 10.0) -> list[str]:
        """Stop everything and give up the directory. Idempotent; in a forked child, nothing.

        Returns:
            The names of those that had to be killed, `timeout_s` after they were asked to stop.

        """
        if os.getpid() != self._owner:
            return []
        with self._guard:
            killed = self._end_all(timeout_s)
            if self._lock is not None:
                os.ftruncate(self._lock, 0)
                # A forked child may still have the descriptor; the lock ends all the same.
                fcntl.flock(self._lock, fcntl.LOCK_UN)
                os.close(self._lock)
                self._lock = None
            return killed

    def _end_all(self, timeout_s: float) -> list[str]:
        killed = []
        for process in self._processes.values():
            # A frozen process takes its SIGTERM only once it goes on.
            process.terminate()
            process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + timeout_s
        for name, process in self._processes.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                killed.append(name)
                process.kill()
                process.wait()
        self._processes.clear()
        return killed

    def _running(self, name: str) -> subprocess.Popen[bytes]:
        self._module(name)
        with self._guard:
            if not self.is_running(name):
                raise UnavailableError(f"{name} does not run; restart it first")
            return self._processes[name]

    def _module(self, name: str) -> str:
        node = self.config.node(name)
        if node in self.config.failure_handlers:
            return "failure_handler"
        return "mms" if node in self.config.mms else "shard"


def _refuse_other_directories(config: ClusterConfig, directory: Path, path: Path) -> None:
    """Refuse a cluster file that leads away from the data that is there.

    Nodes with a new name, or a new directory for all of them, would begin another cluster.
    """
    data, names = config.data_dir, tuple(node.name for node in config.nodes)
    missing = [name for name in names if not (data / name).exists()]
    if len(missing) == len(names) and any(_is_of_a_node(directory / name) for name in names):
        allowed = f"{str(directory)!r}, where the directories of the nodes are"
        raise ConfigError("data_dir", str(data), allowed, str(path))
    if not missing or not data.is_dir():
        return
    # A directory that was moved away keeps the start of its name.
    strangers = [
        found.name
        for found in sorted(data.iterdir())
        if not found.name.startswith(names) and _is_of_a_node(found)
    ]
    if strangers:
        allowed = (
            f"as they were: {', '.join(strangers)} in {data} belongs to no node of the file; write"
            " the former names there again, or move what is not needed away"
        )
        raise ConfigError("nodes without a directory", ", ".join(missing), allowed, str(path))


def _is_of_a_node(directory: Path) -> bool:
    return any((directory / name).exists() for name in ("journal", IDENTITY_FILE))


def python(module: str, *arguments: str, launcher: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a module of ours, with `environment()`, from any directory."""
    return [sys.executable, *(launcher or ("-P", "-m")), module, *arguments]


def environment() -> dict[str, str]:
    """Return this process's environment, such that Python finds our packages."""
    paths = [str(_PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def log_tail(directory: Path, name: str, start: int = 0) -> str:
    """Return the last lines of the log of `name`, from byte `start` on, joined to one."""
    try:
        with (directory / "logs" / f"{name}.log").open("rb") as log:
            log.seek(max(start, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return "(no log)"
    last = (line[:_LOG_LINE_LENGTH] for line in lines[-_LOG_TAIL_LINES:] if line)
    return " | ".join(last) or "(empty log)"


def running_pid(directory: Path) -> int | None:
    """Return the process id of the supervisor in charge of `directory`, or None.

    0: it has only just begun, and has not written its number yet.
    """
    try:
        descriptor = os.open(directory / _LOCK_FILE, os.O_RDONLY)
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


def _take_lock(directory: Path) -> int:
    descriptor = os.open(directory / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip()
        os.close(descriptor)
        raise UnavailableError(
            f"{directory} is in use by process {holder}; stop it"
            f" (ziplog down --data-dir {directory}) or take another directory"
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _spawn(command: list[str], log: int) -> subprocess.Popen[bytes]:
    prelude = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
    return subprocess.Popen(  # noqa: S603 - our own interpreter and modules
        prelude + command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment(),
        start_new_session=True,  # the terminal's Ctrl-C is for the supervisor, which tells the rest
    )


def _await_stop(pid: int) -> None:
    """Wait until a child stands still or has ended; not for ever: somebody may let it go on."""
    options = os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG
    deadline = time.monotonic() + _STOP_S
    while os.waitid(os.P_PID, pid, options) is None and time.monotonic() < deadline:
        time.sleep(0.001)


class _Starter:
    """A thread that lives as long as this process and starts all others.

    The kernel sends the death signal when the *thread* that started a process ends.
    """

    def __init__(self) -> None:
        self._calls: Final[
            queue.SimpleQueue[tuple[Callable[[], subprocess.Popen[bytes]], _Started]]
        ] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._guard: Final = threading.Lock()

    def call(self, spawn: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """Run `spawn` in the thread and return what it returns."""
        with self._guard:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="ziplog-starter", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise OSError(errno.EAGAIN, str(error)) from error
                self._thread = thread
        started: _Started = Future()
        self._calls.put((spawn, started))
        return started.result()

    def _run(self) -> None:
        while True:
            spawn, started = self._calls.get()
            try:
                started.set_result(spawn())
            except BaseException as error:  # noqa: BLE001 - raised again in `call`
                started.set_exception(error)


_Started = Future[subprocess.Popen[bytes]]
_starter: Final = _Starter()
