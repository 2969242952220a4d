"""`ziplog up` and `ziplog down`: a cluster's processes on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import ziplog
from ziplog import defaults, event_log
from ziplog.cli.options import (
    DataDir,
    Json,
    Timeout,
    connect,
    say,
)
from ziplog.cli.progress import waiting
from ziplog.cli.status import full_disks
from ziplog.cli.terminal import counted, print_json
from ziplog.config import ClusterConfig, load
from ziplog.config_tables import LogConfig
from ziplog.deploy import cluster_file, companion, node_logs
from ziplog.deploy.supervisor import CLUSTER_FILE, LOCK_FILE, running_pid
from ziplog.errors import ConfigError, UnavailableError, ZiplogError
from ziplog.local import Cluster
from ziplog.regions import config_warnings
from ziplog.runtime import process_logging
from ziplog.runtime.child_processes import environment, python
from ziplog.runtime.waiting import Latch
from ziplog.types import Durability

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FIRST_PORT: Final = 7400
#: Time in which the cluster must return its status after it is live.
_STATUS_TIMEOUT_S: Final = 2.0
#: Least time for a coordinator or the monitor to start, also if the cluster took all of the limit.
_COMPANION_S: Final = 5.0
#: Maximum length of an error of a cluster in the background: it quotes warnings of nodes.
_ERROR_LENGTH: Final = 8_192
#: Left by a start that failed, or by the file system.
_NO_DATA: Final = frozenset(
    {LOCK_FILE, CLUSTER_FILE + cluster_file.NEW, node_logs.LOG_DIRECTORY, "lost+found"}
)
_FILES_SHOWN: Final = 3
_LEVELS: Final = {
    "memory": "an insert is done when all {n} servers of its shard have it in memory;"
    " it is on disk within {flush} ms",
    "disk": "an insert is done when all {n} servers of its shard have it on disk",
}
#: LogDB's clients try it by default.
_COORDINATOR_PORT: Final = 7500
#: The event that says why a cluster in the background was not started.
_NOT_STARTED: Final = "not started"
#: The exit code of a command whose options, or whose cluster file, are not allowed.
_BAD_USAGE: Final = 2

Shards = Annotated[int | None, typer.Option("--shards", min=1, help="Shards. [default: 2]")]
Failures = Annotated[
    int | None,
    typer.Option(
        "--f", min=0, max=15, help="Failures that a shard's records survive. [default: 1]"
    ),
]
MmsNodes = Annotated[
    int | None, typer.Option("--mms", help="Membership nodes: 1, 3 or 5. [default: 1]")
]
FailureHandlers = Annotated[
    int | None,
    typer.Option("--failure-handlers", help="Failure handlers: 0, 1, 3 or 5. [default: 1]"),
]
FirstPort = Annotated[
    int | None,
    typer.Option("--port", min=1, max=65535, help="First of the ports. [default: 7400]"),
]
Level = Annotated[
    Durability | None,
    typer.Option("--durability", help="When an insert counts as done. [default: memory]"),
]
EpochMs = Annotated[
    int | None,
    typer.Option("--epoch-ms", min=1, max=60_000, help="Length of an epoch. [default: 10]"),
]


def up(
    data_dir: DataDir,
    shards: Shards = None,
    f: Failures = None,
    mms: MmsNodes = None,
    failure_handlers: FailureHandlers = None,
    port: FirstPort = None,
    durability: Level = None,
    epoch_ms: EpochMs = None,
    timeout: Timeout = 30.0,
    *,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once the cluster is live.")
    ] = False,
    found_again: Annotated[
        bool, typer.Option("--found-again", help="Create another cluster if the files are lost.")
    ] = False,
    logdb: Annotated[
        bool, typer.Option("--logdb", help="Run a coordinator of LogDB as well.")
    ] = False,
    logdb_port: Annotated[
        int, typer.Option("--logdb-port", min=1, max=65535, help="The coordinator's port.")
    ] = _COORDINATOR_PORT,
    json: Json = False,
    background: Annotated[bool, typer.Option("--background", hidden=True)] = False,
) -> None:
    """Start a cluster on this machine: a new one, or the existing one of the directory.

    Restarts dead processes, and kills and restarts storage servers that the failure handler cannot
    reach. Runs until Ctrl-C or `ziplog down`; prints the endpoint once the cluster is live.
    """
    requested = {
        "shards": shards,
        "f": f,
        "mms": mms,
        "failure_handlers": failure_handlers,
        "port": port,
        "durability": durability,
        "epoch_ms": epoch_ms,
    }
    given: dict[str, Any] = {name: value for name, value in requested.items() if value is not None}
    _refuse_other_files(data_dir)
    _refuse_contradictions(data_dir, given)
    if detach:
        flags = ["--found-again"] if found_again else []
        flags += ["--logdb", f"--logdb-port={logdb_port}"] if logdb else []
        _detach(data_dir, given, timeout, flags, json=json)
        _say_coordinator(logdb_port if logdb else None)
        return
    # Until the cluster is live, a SIGTERM interrupts the start like a Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = {"port": _FIRST_PORT, **given}
    if background:
        path = data_dir / CLUSTER_FILE
        log = load(path).log if path.exists() else LogConfig()
        process_logging.configure(node_logs.SUPERVISOR, log)
    else:
        logging.getLogger("ziplog").addHandler(_LogToStderr(logging.WARNING))
    port = logdb_port if logdb else None
    with _started(data_dir, timeout, options | {"found_again": found_again}, port) as cluster:
        stopped = Latch()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopped.set())
        if background:
            _log_ready(cluster)
        else:
            _announce(cluster)
            _say_coordinator(port)
        _print_endpoint(cluster.config, cluster.endpoint, os.getpid(), json=json)
        stopped.wait()
        if background:
            event_log.info("stopping")
        else:
            say("stopping")


@contextlib.contextmanager
def _started(
    data_dir: Path, timeout: float, options: dict[str, Any], logdb_port: int | None
) -> Iterator[Cluster]:
    """Run a cluster, its monitor if the file has one, and a coordinator if it has a port.

    If this process has a log, the reason for a failed start is logged there.
    """
    with contextlib.ExitStack() as stack:
        yield _start(stack, data_dir, timeout, options, logdb_port)


def _start(
    stack: contextlib.ExitStack,
    data_dir: Path,
    timeout: float,
    options: dict[str, Any],
    logdb_port: int | None,
) -> Cluster:
    until = time.monotonic() + timeout
    try:
        with waiting("the cluster is starting"):
            cluster = stack.enter_context(
                Cluster(data_dir, timeout=timeout, accept_limbo=True, supervise=True, **options)
            )
            if logdb_port is not None:
                left = max(until - time.monotonic(), _COMPANION_S)
                stack.enter_context(
                    companion.coordinator(data_dir, cluster.config, logdb_port, left)
                )
            if (settings := cluster.config.monitor) is not None and settings.port:
                left = max(until - time.monotonic(), _COMPANION_S)
                stack.enter_context(companion.monitor(data_dir, data_dir / CLUSTER_FILE, left))
            for warning in config_warnings(cluster.config):
                say(f"warning: {warning}")
            return cluster
    except ZiplogError as error:
        if not process_logging.is_configured():
            raise
        event_log.critical(_NOT_STARTED, reason=str(error))
        raise typer.Exit(_BAD_USAGE if isinstance(error, ConfigError) else 1) from None


def _log_ready(cluster: Cluster) -> None:
    config = cluster.config
    event_log.info(
        "ready",
        endpoint=cluster.endpoint,
        cluster=config.name,
        cluster_id=config.id,
        pid=os.getpid(),
        version=ziplog.__version__,
    )


def down(data_dir: DataDir, timeout: Timeout = 30.0, *, json: Json = False) -> None:
    """Stop the cluster that runs in a directory, cleanly; do nothing if none runs."""
    pid = _stop(data_dir, timeout)
    if json:
        document = {"data_dir": str(data_dir), "stopped_pid": pid}
        print_json(document)
    if pid is None:
        say(f"no cluster is running in {data_dir}")


def _stop(data_dir: Path, timeout: float) -> int | None:
    """Stop a cluster; return the process id of its supervisor, or None if none runs."""
    deadline = time.monotonic() + timeout
    while (pid := running_pid(data_dir)) == 0:
        if time.monotonic() > deadline:
            raise UnavailableError(f"a cluster is starting in {data_dir}; try again")
        time.sleep(0.05)
    if pid is None:
        return None
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        pass  # It has just ended.
    except PermissionError as error:
        raise UnavailableError(
            f"the cluster in {data_dir} belongs to another user: process {pid} cannot be stopped"
        ) from error
    with waiting(f"waiting until process {pid} has stopped all nodes"):
        while running_pid(data_dir) is not None:
            if time.monotonic() > deadline:
                late = f"process {pid} is still running after {timeout:g} s"
                raise UnavailableError(f"{late}; wait, or: kill -KILL {pid}")
            time.sleep(0.05)
    return pid


def _refuse_other_files(data_dir: Path) -> None:
    """Refuse a directory without a cluster file that holds the files of something else."""
    if not data_dir.is_dir() or (data_dir / CLUSTER_FILE).exists():
        return
    found = sorted(file.name for file in data_dir.iterdir() if file.name not in _NO_DATA)
    if found:
        raise ConfigError(
            "--data-dir",
            str(data_dir),
            "an empty directory, or a cluster's",
            message=f"--data-dir {data_dir} has no {CLUSTER_FILE}, but other files"
            f" ({', '.join(found[:_FILES_SHOWN])}{', ...' if len(found) > _FILES_SHOWN else ''});"
            f" restore {CLUSTER_FILE}, or use an empty or new directory",
        )


def _refuse_contradictions(data_dir: Path, given: dict[str, Any]) -> None:
    """Refuse options that contradict an existing cluster.

    Fewer shards are allowed: the command that created the cluster can start it again, even if
    shards were added since.
    """
    path = data_dir / CLUSTER_FILE
    if not path.exists():
        return
    config = load(path)
    existing = {
        "shards": len(config.shards),
        "f": config.f,
        "mms": len(config.mms),
        "failure_handlers": len(config.failure_handlers),
        "port": config.mms[0].port,
        "durability": config.durability,
        "epoch_ms": config.epoch_ms,
    }
    for name, value in given.items():
        if value != existing.get(name, value) and not (name == "shards" and value < existing[name]):
            option = f"--{name.replace('_', '-')}"
            allowed = f"left out or {existing[name]!r}, as in the existing cluster"
            sentence = (
                f"{option} is {value!r}, but the existing cluster has {existing[name]!r};"
                " leave the option out, or use another --data-dir"
            )
            if name in {"durability", "epoch_ms"}:
                sentence += f", or set {name} in the file"
            raise ConfigError(option, value, allowed, str(path), message=sentence)


class _LogToStderr(logging.Handler):
    """Prints log records with their times on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record, if stderr takes it: its reader may have ended, its disk be full."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        with contextlib.suppress(OSError):
            say(f"{at} {record.getMessage()}")


def _announce(cluster: Cluster) -> None:
    config = cluster.config
    say(
        f"cluster {config.name!r} is live at {cluster.endpoint}:"
        f" {counted(len(config.shards), 'shard')} x {counted(config.f + 1, 'replica')},"
        f" {_durability(config)}."
        " Press Ctrl-C to stop it."
    )
    _say_bootstrap(config)
    _say_monitor(config)
    _warn_of_full_disks(cluster.endpoint)


def _print_endpoint(config: ClusterConfig, endpoint: str, pid: int, *, json: bool) -> None:
    if json:
        document = {"cluster": config.name, "endpoint": endpoint, "pid": pid}
        print_json(document)
    else:
        sys.stdout.write(f"{endpoint}\n")
    sys.stdout.flush()


def _warn_of_full_disks(endpoint: str) -> None:
    with contextlib.suppress(ZiplogError), connect(endpoint, _STATUS_TIMEOUT_S) as log:
        for line in full_disks(log.cluster()):
            say(f"warning: {line}")


def _say_bootstrap(config: ClusterConfig) -> None:
    """Print how to set the bootstrap variable, if the other verbs need it to find the cluster."""
    sought = defaults.bootstrap()
    if not {node.endpoint for node in config.mms} & set(sought.split(",")):
        say(f"not at {sought}, so run: export {defaults.VARIABLE}={config.bootstrap}")


def _say_monitor(config: ClusterConfig) -> None:
    if (settings := config.monitor) is not None and settings.port:
        say(f"the monitor is at http://{settings.host}:{settings.port}/metrics")


def _say_coordinator(port: int | None) -> None:
    if port is not None:
        endpoint = f"{companion.COORDINATOR_HOST}:{port}"
        say(f"LogDB's coordinator is at {endpoint}; its commands are `ziplog kv`")


def _durability(config: ClusterConfig) -> str:
    """Return the durability level and its meaning."""
    level = _LEVELS[config.durability]
    means = level.format(n=config.f + 1, flush=config.flush_interval_ms)
    return f"durability {config.durability}: {means}"


def _detach(
    data_dir: Path, given: dict[str, Any], timeout: float, flags: list[str], *, json: bool
) -> None:
    """Run `ziplog up` in a process of its own and wait until it prints the endpoint."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    logs = data_dir / node_logs.LOG_DIRECTORY
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    arguments = (
        *("--data-dir", str(data_dir), f"--timeout={timeout}", "--background"), *options, *flags,
    )  # fmt: skip
    with (logs / f"{node_logs.SUPERVISOR}.log").open("ab") as log:
        start = log.tell()
        process = subprocess.Popen(  # noqa: S603 - ourselves
            python("ziplog", "up", *arguments),
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        with process.stdout, waiting("the cluster is starting"):
            endpoint = process.stdout.readline().decode()
    except BaseException:
        process.terminate()
        raise
    if not endpoint:
        code = process.wait()
        found = node_logs.warnings(data_dir, node_logs.SUPERVISOR, start)
        reason = next((line for line in found if line.startswith(_NOT_STARTED)), None)
        said = node_logs.tail(data_dir, node_logs.SUPERVISOR, start, line_length=_ERROR_LENGTH)
        text = (reason or said).removeprefix(f"{_NOT_STARTED}: ")
        if code == _BAD_USAGE:
            raise ConfigError("ziplog up", " ".join(options), "other options", message=text)
        raise UnavailableError(text)
    config = load(data_dir / CLUSTER_FILE)
    say(
        f"cluster {config.name!r} is running in the background (process {process.pid}),"
        f" {_durability(config)}; to stop it, run: ziplog down --data-dir {quote(str(data_dir))}"
    )
    _say_bootstrap(config)
    _say_monitor(config)
    for warning in node_logs.warnings(data_dir, node_logs.SUPERVISOR, start):
        if not warning.startswith(_NOT_STARTED):  # of another `ziplog up`, in the same log
            say(f"warning: {warning}")
    _warn_of_full_disks(endpoint.strip())
    _print_endpoint(config, endpoint.strip(), process.pid, json=json)
