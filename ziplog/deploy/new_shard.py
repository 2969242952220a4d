"""Adds a shard to a cluster file: its number, its servers' ports, and the write itself.

The order is file, processes, service: servers start from the file, and only listening servers are
reported to the membership service. Rule: a shard is added at the file's end, in one step, by one
process at a time. That process holds a lock until the service has the shard.

Invariant: so a shard in the file that the service does not know was left by a failed attempt, and
the next attempt resumes with it. See docs/protocol.md, section 13 (joining).
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import time
from typing import TYPE_CHECKING, Final

from ziplog.config import NodeConfig, ShardConfig, load, parse
from ziplog.config_text import dump_shard
from ziplog.deploy import cluster_file
from ziplog.errors import ConfigError, DeadlineError, UnavailableError
from ziplog.runtime.descriptors import shortage_error

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from pathlib import Path

    from ziplog.config import ClusterConfig

#: Range searched for free ports, below the ephemeral ports of Linux, and their number.
_FREE_PORTS: Final = range(10_000, 32_000)
FREE_PORTS: Final = len(_FREE_PORTS)
_LAST_PORT: Final = 65_535
_POLL_S: Final = 0.02
_CONNECT_S: Final = 1.0


def next_shard(path: Path, known: Collection[int], port: int | None = None) -> ShardConfig:
    """Return the shard to add: one that an earlier attempt left, or a new one at the file's end.

    Args:
        path: the cluster file; the caller holds its `exclusive_lock`.
        known: the numbers of all shards that the membership service knows.
        port: the first port to try for a new one; None: the one above all ports of the file.

    Raises:
        ConfigError: the file is not valid, or the shard cannot be added to it.
        UnavailableError: there are no free ports.

    """
    config = load(path)
    left = next((shard for shard in config.shards if shard.id not in known), None)
    if left is not None:
        return left
    added = _new_shard(config, 1 + max(known, default=-1), port)
    _append(path, config, added)
    return added


def await_servers(
    shard: ShardConfig, deadline: float, check: Callable[[], None] = lambda: None
) -> None:
    """Wait until all servers of a shard listen.

    Args:
        shard: the shard.
        deadline: on the monotonic clock, in seconds.
        check: called repeatedly; raises to stop the wait.

    Raises:
        DeadlineError: a server does not listen; the text names it.

    """
    for node in shard.replicas:
        while not _listens(node):
            check()
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{node.name} of shard {shard.id} does not listen at {node.endpoint}; check its"
                    " log, then try again"
                )
            time.sleep(_POLL_S)
    check()


def free_ports(count: int, host: str, taken: Iterable[int] = ()) -> Iterator[int]:
    """Return free ports of `host`.

    Random ones: two clusters may start at the same time.

    Args:
        count: the number of ports.
        host: an address of this machine.
        taken: ports that must not be used, even if they are free now.

    Raises:
        UnavailableError: there are too few, or this machine has no such address.

    """
    candidates = random.sample(_FREE_PORTS, len(_FREE_PORTS))
    return iter(_first_free(candidates, count, host, set(taken)))


def taken_port(nodes: Iterable[NodeConfig]) -> tuple[NodeConfig, int] | None:
    """Return the first port of `nodes` that another process holds, with its node; None: none."""
    for node in nodes:
        for port in node.ports:
            with contextlib.closing(socket.socket()) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((node.host, port))
                except OSError as error:
                    # Nodes report other errors themselves.
                    if error.errno == errno.EADDRINUSE:
                        return node, port
    return None


def _new_shard(config: ClusterConfig, number: int, first: int | None) -> ShardConfig:
    """Return a shard with free ports, on the host of the last shard's primary, in its regions."""
    last = config.shards[-1].replicas
    host = last[0].host
    taken = {port for node in config.nodes for port in node.ports}
    candidates = range(max(taken) + 1 if first is None else first, _LAST_PORT + 1)
    ports = _first_free(candidates, config.f + 1, host, taken)
    replicas = (
        NodeConfig(f"shard-{number}-{index}", host, port, region=node.region)
        for index, (port, node) in enumerate(zip(ports, last, strict=True))
    )
    return ShardConfig(number, tuple(replicas))


def _append(path: Path, config: ClusterConfig, added: ShardConfig) -> None:
    for node in added.replicas:
        if (config.data_dir / node.name).exists():
            sentence = (
                f"the data directory {config.data_dir} already contains {node.name!r}, perhaps"
                " from another cluster; move it away first"
            )
            raise ConfigError(
                "data directory",
                str(config.data_dir),
                f"without {node.name!r}",
                message=sentence,
            )
    text = f"{path.read_text(encoding='utf-8').rstrip()}\n{dump_shard(added)}"
    assert parse(text, path).shards[-1] == added
    cluster_file.replace(path, text)


def _first_free(candidates: Iterable[int], count: int, host: str, taken: set[int]) -> list[int]:
    """Return the first `count` of some ports that are free; errors are those of `free_ports`."""
    with contextlib.ExitStack() as probes:
        ports: list[int] = []
        for port in candidates:
            if len(ports) == count:
                break
            if port not in taken and _bind(probes, host, port):
                ports.append(port)
    if len(ports) < count:
        raise UnavailableError(
            f"cannot find {count} free ports on {host}; stop some programs that use ports, or name"
            " the first port to try"
        )
    return ports


def _bind(probes: contextlib.ExitStack, host: str, port: int) -> bool:
    """Whether a port is free; keeps it bound until the others are found."""
    try:
        probe = socket.socket()
    except OSError as error:
        raise shortage_error(f"cannot look for free ports on {host}", error) from error
    try:
        probe.bind((host, port))
    except OSError as error:
        probe.close()
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise UnavailableError(
                f"cannot start servers at {host}: not an address of this machine"
            ) from error
        return False
    probes.enter_context(probe)
    return True


def _listens(node: NodeConfig) -> bool:
    try:
        with socket.create_connection((node.host, node.port), _CONNECT_S):
            return True
    except OSError:
        return False
