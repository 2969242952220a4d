"""A local cluster of real processes: for tests, for the demo, and for `ziplog up`.

    with ziplog.local.Cluster("/tmp/log") as cluster, cluster.connect() as log:
        log.insert_after(b"hello")

Real processes, real sockets on loopback, real files; `kill` sends SIGKILL. Rule: the cluster file
in the data directory is authoritative; a directory that has one is opened as it is. Invariant: when
the constructor returns, every shard is live and every process up (or it raised, and no process
runs).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ziplog.client import arguments
from ziplog.client.blocking import Log
from ziplog.config_text import dump
from ziplog.deploy import cluster_file, new_cluster, new_shard
from ziplog.deploy.supervisor import CLUSTER_FILE, Supervisor, has_files
from ziplog.deploy.supervisor_thread import SupervisorThread
from ziplog.errors import ConfigError, DeadlineError, UnavailableError, ZiplogError
from ziplog.policy import random as random_policy
from ziplog.runtime import level_file
from ziplog.status_document import needed_shards, services_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from typing import Self

    from ziplog.config import ClusterConfig
    from ziplog.policy import Policy
    from ziplog.types import Durability

log = logging.getLogger(__name__)

_POLL_S: Final = 0.02
#: Longest time limit of one query while a cluster starts, in seconds.
_MAX_PATIENCE_S: Final = 8.0
#: Default time limit for the start of a cluster.
_START_S: Final = 30.0
#: Default time limit for a change of the shards.
_CHANGE_S: Final = 60.0
#: Maximum time for the ports of processes that have just ended to become free.
_PORTS_S: Final = 2.0
#: Time limit for writing the cluster's id to its file.
_ID_S: Final = 2.0
#: States in which a shard needs no more time: one that left stays readable.
_STABLE_STATES: Final = frozenset({"live", "leaving", "finalized"})


class Cluster:
    """A cluster of processes on this machine. Not thread-safe."""

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        shards: int | None = None,
        f: int = 1,
        mms: int = 1,
        failure_handlers: int = 1,
        durability: Durability = "memory",
        *,
        name: str = "local",
        port: int | None = None,
        epoch_ms: int = 10,
        lag_fix: bool = True,
        settings: Mapping[str, Any] | None = None,
        regions: Sequence[str] = (),
        timeout: float = _START_S,
        accept_limbo: bool = False,
        supervise: bool | None = None,
        launcher: Sequence[str] = (),
        found_again: bool = False,
    ) -> None:
        """Start a new cluster in `data_dir`, or restart the existing one.

        Args:
            data_dir: created if it is missing. If it already holds a cluster, that one is started
                as its file says, and the arguments up to `settings` are ignored.
            shards: number of shards, from 1. None: 2, or one for each of `regions`.
            f: failures of a shard that acknowledged records survive, 0 to 15; each shard has f+1
                servers.
            mms: nodes of the membership service: 1, 3 or 5.
            failure_handlers: nodes of the failure handler: 0, 1, 3 or 5. Without one, a shard with
                a killed server stays out of service.
            durability: when an insert counts as done: "memory" or "disk".
            name: the cluster's name.
            port: the first of the ports to use, in order; None: any free ports.
            epoch_ms: length of an epoch while there is work, 1 to 60,000 ms.
            lag_fix: whether a shard that runs ahead has the others give up positions at once.
            settings: other keys of the cluster file's `[cluster]`, as `{"segment_bytes": 2**20}`;
                `ziplog config show` lists them, with their units and limits.
            regions: names of regions that label the servers, for tests, with one shard for each:
                shard number i has its primary in region i, its other servers in the regions after
                that, in turns. The nodes of each service are spread over the regions.
            timeout: seconds until everything must be live.
            accept_limbo: return also when a server that was not shut down cleanly is in limbo: at
                once if there is no failure handler, else when `timeout` was too short for it.
            supervise: restart dead nodes after 0.2 s (more slowly if they keep dying), and kill and
                restart those that the failure handler cannot reach for 2 s. None: if there is a
                failure handler.
            launcher: a script and its first arguments that run each node's module in place of
                `python -m`, for fault injection.
            found_again: create another cluster if the files of the existing one are lost. The
                directories of the storage servers must be gone, too.

        Raises:
            ConfigError: an argument, the directory or its cluster file is not allowed.
            UnavailableError: another process runs this cluster, its files are lost, or it did not
                become live; quotes the log of the failed process.

        """
        timeout = arguments.timeout_s(timeout, _START_S)
        directory = Path(data_dir).absolute()
        is_new = not (directory / CLUSTER_FILE).exists()
        if is_new:
            others = new_cluster.settings(settings)
            shape = new_cluster.shape(shards, f, mms, failure_handlers, regions)
            config = new_cluster.config(
                shape,
                port,
                name=name,
                data_dir=directory,
                durability=durability,
                epoch_ms=epoch_ms,
                lag_fix=lag_fix,
                **others,
            )
            is_new = _create(directory, config, timeout)
        self._supervisor: Final = Supervisor(directory, launcher=launcher)
        self._supervisor_thread: SupervisorThread | None = None
        self._process: Final = os.getpid()
        atexit.register(self.stop)
        try:
            if found_again:
                cluster_file.remove_id(self._supervisor.path)
                self._supervisor.reload()
            self._refuse_lost_files()
            self._refuse_lower_level()
            self._await_ports()
            self._start(self.nodes)
            self._write_id(self._wait_live(timeout, accept_limbo=accept_limbo))
            if bool(self.config.failure_handlers) if supervise is None else supervise:
                self._supervisor_thread = SupervisorThread(self._supervisor)
        except BaseException:
            if is_new:  # The lock keeps another cluster from starting there meanwhile.
                self._supervisor.stop(on_stopped=lambda: _remove_files(directory, self.nodes))
            self.stop()
            raise

    def _refuse_lower_level(self) -> None:
        """Refuse to weaken a log that keeps to `disk`: that needs consent."""
        config = self.config
        servers = [node.name for shard in config.shards for node in shard.replicas]
        levels = {level_file.read(config.data_dir / name) for name in servers}
        if config.durability == "memory" and levels == {"disk"}:
            raise ConfigError(
                "durability",
                "memory",
                "disk",
                message=f"{self._supervisor.path} says durability = 'memory', but the log keeps to"
                " 'disk': a power cut could lose records from now on. Restore 'disk' and start"
                " the cluster; to weaken it, set 'memory' then, and run"
                f" `ziplog config reload {self._supervisor.path} --yes`",
            )

    def __enter__(self) -> Self:
        """Return the cluster."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the cluster."""
        self.stop()

    @property
    def config(self) -> ClusterConfig:
        """The contents of the cluster file."""
        return self._supervisor.config

    @property
    def endpoint(self) -> str:
        """The address for clients: "host:port", several separated by commas."""
        return self.config.bootstrap

    @property
    def nodes(self) -> list[str]:
        """The names of all nodes, as in the status document."""
        return list(self._supervisor.names)

    def connect(
        self,
        *,
        timeout: float | None = None,
        policy: Policy | None = None,
        region: str | None = None,
        min_regions: int | None = None,
    ) -> Log:
        """Return a new client of this cluster; takes options of `ziplog.connect`."""
        return Log(self.endpoint, policy, timeout, region=region, min_regions=min_regions)

    def pid(self, name: str) -> int:
        """Return the process id of a running node."""
        return self._supervisor.pid(name)

    def kill(self, name: str) -> None:
        """Kill a node (SIGKILL); return when it is dead. Does nothing if it was dead.

        A supervised cluster restarts it.

        Raises:
            UnavailableError: it has not ended after 5 s, for example because its disk hangs.

        """
        self._supervisor.kill(name)

    def pause(self, name: str) -> None:
        """Pause a running node (SIGSTOP); return when it has stopped.

        A supervised cluster kills and restarts a paused storage server that its recovery needs.
        """
        self._supervisor.pause(name)

    def resume(self, name: str) -> None:
        """Resume a paused node (SIGCONT)."""
        self._supervisor.resume(name)

    def restart(self, name: str) -> None:
        """Start a dead node again from its data directory; do nothing if it runs.

        A storage server that was killed returns in limbo, and is up again once its shard is
        recovered (docs/protocol.md, sections 9 and 11).
        """
        self._supervisor.start(name)

    def dead(self) -> list[str]:
        """Return the names of the nodes that ran and have ended."""
        return self._supervisor.dead()

    # --- shard changes ---

    def add_shard(self, *, timeout: float = _CHANGE_S) -> int:
        """Add a shard: its f+1 servers start on free ports, and it becomes live.

        The shard is appended to the cluster file. If the call fails half-way, the existing shards
        are unaffected, and the next call resumes with the shard in the file. Inserts and
        subscriptions continue meanwhile, and connected clients discover the new shard (thesis
        4.2.3).

        Args:
            timeout: seconds until it must be live.

        Returns:
            Its number: one above the highest ever used.

        Raises:
            ConfigError: the cluster file is damaged, or a data directory of this name exists; or
                `timeout` is not a number.
            UnavailableError: a server could not be started, or ended at once (quotes its log), or
                there are no free ports.
            DeadlineError: it is not live yet. If the membership service already knows the shard, it
                becomes live once its servers work; `remove_shard` gives it up.

        """
        timeout = arguments.timeout_s(timeout, _CHANGE_S)
        until = time.monotonic() + timeout
        path = self._supervisor.path
        with cluster_file.exclusive_lock(path, timeout), self.connect(timeout=timeout) as client:
            shard = new_shard.next_shard(
                path, [found["id"] for found in client.cluster()["shards"]]
            )
            names = [node.name for node in shard.replicas]
            self._supervisor.reload()
            self._start(names)
            new_shard.await_servers(shard, until, lambda: self._check_alive(names))
            replicas = {node.name: node.endpoint for node in shard.replicas}
            regions = {node.name: node.region for node in shard.replicas if node.region}
            left = max(until - time.monotonic(), _POLL_S)
            try:
                client.add_shard(shard.id, replicas, regions=regions, timeout=left)
            except DeadlineError as error:
                tails = "; ".join(f"{n}: {self._supervisor.log_tail(n)}" for n in names)
                raise DeadlineError(f"{error}; the logs of its servers end: {tails}") from error
        return shard.id

    def remove_shard(self, shard: int, *, timeout: float = _CHANGE_S) -> None:
        """Remove a shard for good; return when it takes no more records.

        Its records stay readable, so its servers keep running and stay supervised. Its number is
        never used again.

        Args:
            shard: its number.
            timeout: seconds.

        Raises:
            ConfigError: there is no such shard, or it is the last one that takes records.
            DeadlineError: it is not removed yet; it will be.

        """
        with self.connect(timeout=timeout) as client:
            client.remove_shard(shard, timeout=timeout)

    def finalize_shard(self, shard: int, *, timeout: float = _CHANGE_S) -> None:
        """Finalize a shard: remove it, if necessary, and return when it cannot change any more.

        That is when all its servers have all of its records on stable storage. It stays readable;
        only trims still change its files. Arguments and errors are those of `remove_shard`.
        """
        with self.connect(timeout=timeout) as client:
            client.finalize_shard(shard, timeout=timeout)

    def stop(self) -> None:
        """Stop all processes cleanly, and kill those that do not stop within 10 s. Idempotent.

        In a forked child it does nothing: the cluster belongs to the process that started it.
        """
        if os.getpid() != self._process:
            return
        if self._supervisor_thread is not None:
            self._supervisor_thread.stop()
        self._supervisor.stop()
        atexit.unregister(self.stop)

    def _refuse_lost_files(self) -> None:
        """Refuse to start a cluster that had data, if a majority of its membership nodes lost it.

        A majority without data would create an empty cluster.
        """
        config = self.config
        lost = [one.name for one in config.mms if not has_files(config.data_dir / one.name)]
        if config.id is not None and 2 * len(lost) > len(config.mms):
            raise UnavailableError(
                f"cluster {config.id} had data, and its files are not here: there is no directory"
                f" with files for {', '.join(lost)} in {config.data_dir}. Put it back, if it"
                " is no old copy; or make it again with `ziplog membership rebuild`; or, to start"
                " without the old records,"
                " remove the directories of all nodes and run `ziplog up --found-again`"
            )

    def _write_id(self, cluster_id: str) -> None:
        """Write the cluster's id to its file: from now on it may have data."""
        if self.config.id is not None:
            return
        path = self._supervisor.path
        try:
            with cluster_file.exclusive_lock(path, _ID_S):
                cluster_file.set_id(path, cluster_id)
            self._supervisor.reload()
        except ZiplogError as error:
            log.warning("the cluster's id is not written to %s: %s", path, error)

    def _await_ports(self) -> None:
        """Refuse ports that other processes hold: their clients would reach another cluster."""
        deadline = time.monotonic() + _PORTS_S
        while (taken := new_shard.taken_port(self.config.nodes)) is not None:
            node, port = taken
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"cannot start {node.name}: port {port} on {node.host} is in use by"
                    f" {_user_of(f'{node.host}:{port}')}; stop it, or choose other ports:"
                    " `--port` of a new cluster, or the cluster file of an old one"
                )
            time.sleep(_POLL_S)

    def _start(self, names: Collection[str]) -> None:
        for name in names:
            try:
                self._supervisor.start(name)
            except OSError as error:
                raise UnavailableError(f"cannot start {name}: {error}") from error

    def _wait_live(self, timeout: float, *, accept_limbo: bool) -> str:
        """Wait until the cluster is live; return its id."""
        deadline, patience_s = time.monotonic() + timeout, 1.0
        with contextlib.ExitStack() as stack:
            client: Log | None = None
            while True:
                self._check_alive(self.nodes)
                status: dict[str, Any] | None = None
                try:
                    client = client or stack.enter_context(self.connect(timeout=patience_s))
                    status = client.cluster(timeout=patience_s)
                except DeadlineError:  # On a slow machine a reply may take longer.
                    patience_s = min(2 * patience_s, _MAX_PATIENCE_S)
                except UnavailableError:
                    pass  # No node of the service listens yet, or none leads.
                missing = self._what_is_missing(status, accept_limbo=accept_limbo)
                if status is not None and not missing:
                    return str(status["cluster_id"])
                if time.monotonic() > deadline:
                    problem = f"not live after {timeout:g} s: {missing}{self._warnings()}"
                    if not (accept_limbo and status is not None and _is_recovering(status)):
                        raise UnavailableError(f"cluster in {self._directory} is {problem}")
                    log.warning("the cluster starts incomplete: %s", problem)
                    return str(status["cluster_id"])
                time.sleep(_POLL_S)

    def _check_alive(self, names: Collection[str]) -> None:
        for name in self._supervisor.dead():
            if name in names:
                why = self._supervisor.why_it_ended(name)
                raise UnavailableError(f"{name} ended during its start: {why}")

    def _warnings(self) -> str:
        """Return the warnings of all nodes since they started, each node after a semicolon."""
        return "".join(
            f"; {name} warns: {'; '.join(warnings)}"
            for name in self.nodes
            if (warnings := self._supervisor.log_warnings(name))
        )

    def _what_is_missing(self, status: dict[str, Any] | None, *, accept_limbo: bool) -> str:
        """Return why the cluster is not live yet, or ""."""
        if status is None:
            return "the membership service does not answer"
        for node in services_of(status):
            if node["state"] != "up":
                return f"{node['name']} is {node['state']}"
            if foreign := self._foreign_process(node):
                return foreign
        if not status["shards"]:
            return "no shard is known yet"
        for shard in needed_shards(status):
            limbo = _servers_in_limbo(shard)
            if limbo and not self.config.failure_handlers:
                if accept_limbo:
                    continue
                raise UnavailableError(
                    f"{' and '.join(limbo)} did not shut down cleanly, or lost files, and may have"
                    " lost acknowledged records. Without a failure handler, shards are not"
                    " recovered: restore missing files, or start with a new data directory"
                )
            foreign = next(filter(None, map(self._foreign_process, shard["replicas"])), "")
            absent = [
                f"{replica['name']} is {replica['state']}"
                for replica in shard["replicas"]
                if replica["state"] not in ("up", "full")
            ]
            if absent or shard["state"] not in _STABLE_STATES:
                why = f" ({shard['obstacle']})" if shard["obstacle"] else ""
                states = f"shard {shard['id']} is {shard['state']}, {', '.join(absent)}"
                return states.rstrip(", ") + why
            if foreign:
                return foreign
        return ""

    def _foreign_process(self, node: Mapping[str, Any]) -> str:
        """Return how a node that answers is not the process that this cluster started, or ""."""
        name, found = node["name"], node["pid"]
        if found is None or name not in self.nodes or not self._supervisor.is_running(name):
            return ""
        started = self._supervisor.pid(name)
        return "" if found == started else f"{name} answers as process {found}, not as {started}"

    @property
    def _directory(self) -> Path:
        return self._supervisor.directory


def _user_of(endpoint: str) -> str:
    """Return in words which program uses a port."""
    try:
        with Log(endpoint, random_policy(), _PORTS_S) as client:
            status = client.cluster()
    except ZiplogError:
        return "another program"
    pid = next((node["pid"] for node in status["mms"] if node["endpoint"] == endpoint), None)
    process = f" (process {pid})" if pid else ""
    return f"cluster {status['cluster']!r}{process}"


def _is_recovering(status: dict[str, Any]) -> bool:
    return any(
        shard["state"] == "recovering" or _servers_in_limbo(shard)
        for shard in needed_shards(status)
    )


def _servers_in_limbo(shard: dict[str, Any]) -> list[str]:
    return [replica["name"] for replica in shard["replicas"] if replica["state"] == "limbo"]


def _create(directory: Path, config: ClusterConfig, timeout_s: float) -> bool:
    """Write the file of a new cluster; return False if another process has just written one."""
    path = directory / CLUSTER_FILE
    with _writing(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with cluster_file.exclusive_lock(path, timeout_s):
        if not path.exists():
            _refuse_nodes(directory, config)
        with _writing(directory):
            # Relative, so that the directory can be moved and copied.
            return cluster_file.create(path, dump(replace(config, data_dir=Path())))


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            "data directory",
            str(directory),
            "a writable directory",
            message=f"cannot write to the data directory {directory}: {error.strerror}",
        ) from error


def _refuse_nodes(directory: Path, config: ClusterConfig) -> None:
    """Refuse a directory that has the files of nodes, but no cluster file."""
    for node in config.nodes:
        if (directory / node.name).exists():
            sentence = (
                f"the data directory {directory} already contains {node.name!r}, perhaps from"
                " another cluster; move it away, or use another directory"
            )
            raise ConfigError(
                "data directory", str(directory), f"without {node.name!r}", message=sentence
            )


def _remove_files(directory: Path, nodes: list[str]) -> None:
    """Remove a new cluster that did not become live: the next attempt may have other arguments."""
    (directory / CLUSTER_FILE).unlink(missing_ok=True)
    for name in nodes:
        shutil.rmtree(directory / name, ignore_errors=True)
