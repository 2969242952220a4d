"""A rolling restart: one node after the other, while the cluster serves its clients.

Rules: the backups of a shard come before its primary, and the membership leader comes last. A node
is stopped only while all nodes are up and all shards are live. The supervisor starts it again. One
restart runs at a time: two of them would not see the node that the other one is about to stop.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ziplog.config import load
from ziplog.deploy.supervisor import CLUSTER_FILE, running_pid
from ziplog.errors import ConfigError, DeadlineError, UnavailableError
from ziplog.status_document import WELL, needed_shards, nodes_of, replicas_of, services_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ziplog.client.blocking import Log

_POLL_S: Final = 0.1
#: Time limit of one status: a service that is far away, or busy, may take over a second.
_STATUS_TIMEOUT_S: Final = 5.0
_PROC: Final = Path("/proc")
#: In the cluster's directory: locked while a restart runs.
_LOCK_FILE: Final = "restart.lock"


def order(status: dict[str, Any]) -> list[str]:
    """Return the names of all nodes in the order of their restarts, from the status document."""
    running = {replica["name"] for replica in replicas_of(status)}
    shards = [
        replica["name"]
        for shard in status["shards"]
        for replica in sorted(shard["replicas"], key=lambda one: one["role"] == "primary")
        if replica["name"] in running
    ]
    services = [
        node["name"]
        for nodes in (status["failure_handlers"], status["mms"])
        for node in sorted(nodes, key=lambda one: one["leader"])
    ]
    return shards + services


def obstacle(status: dict[str, Any]) -> str:
    """Return why no node may be stopped now; "": all nodes are up, and all shards are live."""
    for node in services_of(status):
        if node["state"] != "up":
            return f"{node['name']} is {node['state']}"
    for shard in needed_shards(status):
        if shard["state"] not in WELL:
            return f"shard {shard['id']} is {shard['state']}"
        for replica in shard["replicas"]:
            if replica["state"] != "up":
                return f"{replica['name']} is {replica['state']}"
    return ""


class RollingRestart:
    """The rolling restart of a cluster that a supervisor on this machine runs."""

    def __init__(self, data_dir: Path, log: Log, timeout_s: float) -> None:
        """Prepare.

        Args:
            data_dir: the cluster's directory.
            log: a client of the cluster.
            timeout_s: time limit of each node, in seconds.

        Raises:
            ConfigError: the cluster file is not valid, or its durability is lower than the log's.
            UnavailableError: no supervisor runs there, or the cluster does not reply.

        """
        supervisor = running_pid(data_dir)
        if not supervisor:
            raise UnavailableError(
                f"no supervisor is running in {data_dir}, so nothing would start the nodes again;"
                " run this command on the machine of `ziplog up`, with its --data-dir"
            )
        self._data_dir: Final = data_dir
        self._supervisor: Final = supervisor
        self._log: Final = log
        self._timeout_s: Final = timeout_s
        status = log.cluster()
        _refuse_lower_level(status, data_dir / CLUSTER_FILE)
        self._order: Final = order(status)

    def run(self, names: Sequence[str], on_done: Callable[[str, float], object]) -> None:
        """Restart the nodes `names`, or all if there are none, one after the other.

        `on_done` is called with each node and the seconds that its restart took.

        Raises:
            ConfigError: there is no such node.
            DeadlineError: a node is not back in time; the others keep running.
            UnavailableError: another restart runs.

        """
        unknown = sorted(set(names) - set(self._order))
        if unknown:
            raise ConfigError("--node", ", ".join(unknown), f"among {', '.join(self._order)}")
        with _exclusive_lock(self._data_dir):
            for name in self._order:
                if not names or name in names:
                    started_at = time.monotonic()
                    self._restart(name)
                    on_done(name, time.monotonic() - started_at)

    def _restart(self, name: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        self._await(self._obstacle, deadline, f"{name} is not restarted")
        former = self._process(name)
        if former is not None:
            with contextlib.suppress(ProcessLookupError):  # It has just died by itself.
                os.kill(former, signal.SIGTERM)
        self._await(lambda: self._obstacle(name, former), deadline, f"{name} was restarted")

    def _await(self, problem: Callable[[], str], deadline: float, what: str) -> None:
        while found := problem():
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{what}, but after {self._timeout_s:g} s {found}; the nodes after it keep"
                    " running as they are. See `ziplog check` and the node's log"
                )
            time.sleep(_POLL_S)

    def _obstacle(self, name: str = "", former: int | None = None) -> str:
        """Return why the next step must wait; `former`: the process that `name` had before."""
        if name:
            process = self._process(name)
            if process is None or process == former:
                return f"{name} has no new process"
        try:
            status = self._log.cluster(timeout=_STATUS_TIMEOUT_S)
        except UnavailableError as error:
            return str(error)
        if name and _reported_pid(status, name) not in {None, process}:
            return f"the new process of {name} has not reported yet"
        return obstacle(status)

    def _process(self, name: str) -> int | None:
        """Return the process of a node below the supervisor."""
        for entry in _PROC.iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
                parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[1]
            except OSError:  # The process has ended.
                continue
            is_node = (
                b"--node" in arguments[:-1]
                and name.encode() == arguments[arguments.index(b"--node") + 1]
            )
            if is_node and int(parent) == self._supervisor:
                return int(entry.name)
        return None


@contextlib.contextmanager
def _exclusive_lock(data_dir: Path) -> Iterator[None]:
    """Hold the lock on restarts of a cluster's nodes.

    Raises:
        UnavailableError: another process holds it, or its file cannot be opened.

    """
    path = data_dir / _LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UnavailableError(f"cannot open {path}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UnavailableError(
                f"another restart of nodes in {data_dir} is under way; no node was stopped. Try"
                " again when it has finished"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _refuse_lower_level(status: dict[str, Any], path: Path) -> None:
    """Refuse to weaken a log that keeps to `disk`, node by node: that needs consent."""
    if status["durability"] == "disk" and load(path).durability == "memory":
        sentence = (
            f"no node was stopped: {path} says durability = 'memory', but the log keeps to 'disk':"
            " a power cut could lose records from now on. Restore 'disk' and restart the nodes; to"
            f" weaken it, set 'memory' then, and run `ziplog config reload {path} --yes`"
        )
        raise ConfigError("durability", "memory", "disk", message=sentence)


def _reported_pid(status: dict[str, Any], name: str) -> int | None:
    for node in nodes_of(status):
        if node["name"] == name:
            pid: int | None = node["pid"]
            return pid
    return None
