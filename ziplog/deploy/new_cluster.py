"""The configuration of a new cluster on this machine: its nodes, their ports and regions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ziplog.config import ClusterConfig, NodeConfig, ShardConfig
from ziplog.config_keys import keys_of, refuse_unknown
from ziplog.core.numbers import whole_in
from ziplog.deploy import new_shard
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

HOST: Final = "127.0.0.1"
#: Keys of the cluster file that have an argument of `ziplog.local.Cluster`.
_ARGUMENTS: Final = frozenset({"name", "durability", "f", "epoch_ms", "lag_fix"})
#: Number of shards without regions, unless it is given.
_SHARDS: Final = 2
_MAX_SHARDS: Final = 4096
_MAX_F: Final = 15
_PORTS: Final = 2**16


@dataclass(frozen=True)
class Shape:
    """The numbers of nodes of a cluster, and the regions that label them."""

    shards: int
    #: Failures of a shard that acknowledged records survive.
    f: int
    mms: int
    failure_handlers: int
    regions: Sequence[str] = ()

    @property
    def ports(self) -> int:
        """The number of ports that the nodes need."""
        return 2 * (self.mms + self.failure_handlers) + self.shards * (self.f + 1)


def shape(
    shards: object, f: object, mms: object, failure_handlers: object, regions: object
) -> Shape:
    """Return the shape of a cluster.

    Args:
        shards: number of shards; None: one for each region, or 2 without regions.
        f: failures of a shard that acknowledged records survive.
        mms: number of nodes of the membership service.
        failure_handlers: number of nodes of the failure handler.
        regions: names of regions; none: no node has one.

    Raises:
        ConfigError: an argument is not allowed.

    """
    names = _regions(regions)
    if shards is None:
        shards = len(names) or _SHARDS
    count = whole_in(shards, 1, _MAX_SHARDS + 1)
    if count is None:
        raise ConfigError("shards", shards, f"a whole number, at least 1, at most {_MAX_SHARDS}")
    if names and count != len(names):
        allowed = (
            f"left out if `regions` is given: each region has the primary of one, here {len(names)}"
        )
        raise ConfigError("shards", shards, allowed)
    failing = whole_in(f, 0, _MAX_F + 1)
    if failing is None:
        raise ConfigError("f", f, f"a whole number from 0 to {_MAX_F}")
    members = _one_of("mms", mms, (1, 3, 5))
    handlers = _one_of("failure_handlers", failure_handlers, (0, 1, 3, 5))
    found = Shape(count, failing, members, handlers, names)
    if found.ports > new_shard.FREE_PORTS:
        text = (
            f"{count} shards of {failing + 1} servers need {found.ports} ports with the services;"
            f" one machine has {new_shard.FREE_PORTS}"
        )
        raise ConfigError("shards", shards, "fewer", message=text)
    return found


def _one_of(name: str, given: object, allowed: tuple[int, ...]) -> int:
    number = whole_in(given, 0, _PORTS)
    if number not in allowed:
        *others, last = map(str, allowed)
        raise ConfigError(name, given, f"{', '.join(others)} or {last}")
    return number


def _regions(given: object) -> list[Any]:
    names = list(given) if isinstance(given, (list, tuple)) else [None]
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ConfigError("regions", given, "a list of different names, such as ('eu', 'us', 'ap')")
    return names


def _ports(shape: Shape, first: object) -> Iterator[int]:
    if first is None:
        return new_shard.free_ports(shape.ports, HOST)
    port = whole_in(first, 1, _PORTS - shape.ports + 1)
    if port is None:
        allowed = (
            f"a whole number from 1 to {_PORTS - shape.ports}: the first of {shape.ports} ports"
        )
        raise ConfigError("port", first, f"{allowed}; None: any free ports")
    return iter(range(port, port + shape.ports))


def settings(given: object) -> Mapping[str, Any]:
    """Return other keys of the cluster file.

    Raises:
        ConfigError: a key is unknown, or has an argument of `ziplog.local.Cluster`.

    """
    found: dict[str, Any]
    try:
        found = dict(given or {})  # type: ignore[call-overload]
    except (TypeError, ValueError):
        allowed = "a dict of keys of [cluster], such as {'segment_bytes': 2**20}"
        raise ConfigError("settings", given, allowed) from None
    names = [name for name in keys_of(ClusterConfig) if name not in _ARGUMENTS]
    refuse_unknown({str(name): value for name, value in found.items()}, names, "settings")
    return found


def config(shape: Shape, port: object, **keys: Any) -> ClusterConfig:
    """Return the configuration of a new cluster.

    Args:
        shape: its nodes.
        port: the first of the ports to use, in order; None: any free ports.
        keys: the other fields of the configuration.

    Raises:
        ConfigError: a value is not allowed.
        UnavailableError: there are too few free ports.

    """
    ports = _ports(shape, port)

    def region(index: int) -> str | None:
        return shape.regions[index % len(shape.regions)] if shape.regions else None

    def service(prefix: str, count: int) -> tuple[NodeConfig, ...]:
        # The ports of clients come first.
        mine = [next(ports) for _ in range(count)]
        return tuple(
            NodeConfig(f"{prefix}-{index}", HOST, port, next(ports), region=region(index))
            for index, port in enumerate(mine)
        )

    def servers(shard: int) -> tuple[NodeConfig, ...]:
        return tuple(
            NodeConfig(f"shard-{shard}-{index}", HOST, next(ports), region=region(shard + index))
            for index in range(shape.f + 1)
        )

    return ClusterConfig(
        **keys,
        f=shape.f,
        mms=service("mms", shape.mms),
        failure_handlers=service("fh", shape.failure_handlers),
        shards=tuple(ShardConfig(shard, servers(shard)) for shard in range(shape.shards)),
    )
