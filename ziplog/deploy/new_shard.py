"""One shard more in a cluster file: its number, its servers' ports, and how it gets in there.

The order is file, processes, service: servers start from the file, and the membership service is
told of servers that listen. Rule: a file only grows at its end, in one step (a new file takes the
old one's name), by one process at a time, which keeps the others out until the service has the
shard; what people wrote stays. Invariant: so a shard that the file has and the service does not
know was left by an attempt that failed, and the next one goes on with it.
See docs/protocol.md, section 13 (joining).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import socket
import stat
import time
from typing import TYPE_CHECKING, Final

from ziplog.config import NodeConfig, ShardConfig, dump_shard, load, parse
from ziplog.errors import ConfigError, DeadlineError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from pathlib import Path

    from ziplog.config import ClusterConfig

#: Free ports are looked for here: below the range from which Linux takes those of connections.
_FREE_PORTS: Final = range(10_000, 32_000)
_POLL_S: Final = 0.02
_CONNECT_S: Final = 1.0


@contextlib.contextmanager
def exclusive_lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Keep other processes from adding shards to the cluster file `path` meanwhile.

    Raises:
        ConfigError: its directory cannot be opened.
        DeadlineError: another process does so all along.

    """
    try:
        # The directory is locked: the file itself is another one after a change.
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        allowed = f"in a directory that can be read ({error.strerror})"
        raise ConfigError("cluster file", str(path), allowed) from error
    try:
        _lock(descriptor, path, time.monotonic() + timeout_s)
        yield
    finally:
        os.close(descriptor)


def next_shard(path: Path, known: Collection[int]) -> ShardConfig:
    """Return the shard to add: one that an earlier attempt left, or a new one at the file's end.

    Args:
        path: the cluster file; nobody else may add to it meanwhile (`exclusive_lock`).
        known: the numbers of all shards that the membership service knows.

    Raises:
        ConfigError: the file is not valid, or the shard cannot be added to it.
        UnavailableError: there are no free ports.

    """
    config = load(path)
    left = next((shard for shard in config.shards if shard.id not in known), None)
    if left is not None:
        return left
    added = _new_shard(config, 1 + max(known, default=-1))
    _append(path, config, added)
    return added


def await_servers(
    shard: ShardConfig, deadline: float, check: Callable[[], None] = lambda: None
) -> None:
    """Wait until all servers of a shard listen.

    Args:
        shard: whose servers.
        deadline: until when, on the monotonic clock, in seconds.
        check: is called again and again; raises if there is no hope.

    Raises:
        DeadlineError: one does not; names it.

    """
    for node in shard.replicas:
        while not _listens(node):
            check()
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{node.name} of shard {shard.id} does not listen at {node.endpoint}; see its"
                    " log, then try again"
                )
            time.sleep(_POLL_S)
    check()


def free_ports(count: int, host: str, taken: Iterable[int] = ()) -> Iterator[int]:
    """Return ports of `host` that nobody listens on.

    Random ones: two clusters may start at the same time.

    Args:
        count: how many.
        host: an address of this machine.
        taken: ports that may not be used, though nobody listens there now.

    Raises:
        UnavailableError: there are not so many, or this machine has no such address.

    """
    taken = set(taken)
    with contextlib.ExitStack() as probes:
        ports: list[int] = []
        for port in random.sample(_FREE_PORTS, len(_FREE_PORTS)):
            if len(ports) == count:
                break
            if port not in taken and _bind(probes, host, port):
                ports.append(port)
    if len(ports) < count:
        raise UnavailableError(f"{count} free ports were not found on {host}; close some programs")
    return iter(ports)


def _lock(descriptor: int, path: Path, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"another process adds a shard to {path}; wait until it has, then try again"
                ) from None
            time.sleep(_POLL_S)
        else:
            return


def _new_shard(config: ClusterConfig, number: int) -> ShardConfig:
    """Return a shard whose servers listen where the last shard's primary does, on free ports."""
    host = config.shards[-1].replicas[0].host
    taken = {port for node in config.nodes for port in (node.port, node.raft_port) if port}
    ports = free_ports(config.f + 1, host, taken)
    replicas = (
        NodeConfig(f"shard-{number}-{index}", host, port) for index, port in enumerate(ports)
    )
    return ShardConfig(number, tuple(replicas))


def _append(path: Path, config: ClusterConfig, added: ShardConfig) -> None:
    for node in added.replicas:
        if (config.data_dir / node.name).exists():
            allowed = f"without {node.name!r}, which another cluster may have left there"
            raise ConfigError("data directory", str(config.data_dir), allowed)
    text = f"{path.read_text(encoding='utf-8').rstrip()}\n{dump_shard(added)}"
    assert parse(text, path).shards[-1] == added
    try:
        # Where the name leads to: a link stays a link.
        _replace(path.resolve(), text)
    except OSError as error:
        allowed = f"a file that can be replaced ({error.strerror})"
        raise ConfigError("cluster file", str(path), allowed) from error


def _replace(path: Path, text: str) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:  # noqa: PTH123 - a descriptor
        os.fchmod(file.fileno(), mode)
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    # The service will remember the shard for ever: so must the file.
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _bind(probes: contextlib.ExitStack, host: str, port: int) -> bool:
    """Whether nobody listens on a port; keeps it until the others are found."""
    probe = socket.socket()
    try:
        probe.bind((host, port))
    except OSError as error:
        probe.close()
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise UnavailableError(f"this machine has no address {host} for a server") from error
        return False
    probes.enter_context(probe)
    return True


def _listens(node: NodeConfig) -> bool:
    try:
        with socket.create_connection((node.host, node.port), _CONNECT_S):
            return True
    except OSError:
        return False
