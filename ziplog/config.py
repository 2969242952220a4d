"""The cluster file: the nodes of a cluster, its settings and their limits.

TOML, in seven tables: `[cluster]`, `[log]`, `[monitor]`, `[limits]`, `[[mms]]`,
`[[failure_handler]]`, and `[[shard]]` with its `replicas`. Every key is defined once, as a field
here or in `config_tables`, with default, unit, range and meaning; the loader, `config_text` and
`ziplog config show` are made from these fields. Rule: unknown keys are refused. Invariant: every
`ClusterConfig` is valid, and `load(dump(config)) == config`.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - `get_type_hints` needs it
from typing import Annotated, Any, Final

from ziplog.config_keys import Key, check_fields, keys_of, refuse_unknown
from ziplog.config_tables import (
    HOST,
    HOST_RULE,
    LimitsConfig,
    LogConfig,
    MonitorConfig,
    is_loopback,
)
from ziplog.errors import ConfigError
from ziplog.types import CLUSTER_ID_DIGITS, Durability

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_NAME_RULE: Final = "1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit"
_TABLES: Final = ("cluster", "log", "monitor", "limits", "mms", "failure_handler", "shard")
_MIB: Final = 1024 * 1024
_TIB: Final = 1024 * 1024 * _MIB
#: Least suspicion timeout, in round trips.
SUSPICION_ROUND_TRIPS: Final = 4


_KEY_OF_NAME: Final = Key("Unique in the cluster.", str, pattern=_NAME, rule=_NAME_RULE)


@dataclass(frozen=True)
class NodeConfig:
    """A process of the cluster and its address."""

    name: Annotated[str, _KEY_OF_NAME]
    host: Annotated[
        str,
        Key(
            "The address that it binds.",
            str,
            pattern=HOST,
            rule=HOST_RULE,
        ),
    ]
    port: Annotated[int, Key("The port of its messages.", int, low=1, high=65535)]
    raft_port: Annotated[
        int | None,
        Key(
            "Raft port; only for membership nodes and failure handlers.",
            int,
            low=1,
            high=65535,
        ),
    ] = None
    advertise_host: Annotated[
        str | None,
        Key(
            "The address that clients and other nodes connect to, if it is not `host`: that of the"
            " machine on which a container runs, for example. The ports stay the same.",
            str,
            pattern=HOST,
            rule=HOST_RULE,
        ),
    ] = None
    region: Annotated[
        str | None,
        Key(
            "The region in which it runs: servers that fail together, a data center for example."
            " Nodes without a region share one region of their own.",
            str,
            pattern=_NAME,
            rule=_NAME_RULE,
        ),
    ] = None
    archive_port: Annotated[
        int | None,
        Key(
            "The port of its archive, for a firewall; without it, a free one that changes. Only for"
            " storage servers.",
            int,
            low=1,
            high=65535,
        ),
    ] = None

    def __post_init__(self) -> None:
        """Refuse values that no node can have."""
        check_fields(self, f" of node {self.name!r}")

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports that it listens on, but for those that the system selects."""
        given = (self.port, self.raft_port, self.archive_port)
        return tuple(port for port in given if port is not None)

    @property
    def endpoint(self) -> str:
        """The address that clients and other nodes connect to: "host:port"."""
        return f"{self.advertise_host or self.host}:{self.port}"

    @property
    def raft_endpoint(self) -> str:
        """The address that the nodes of its Raft group connect to: "host:port"."""
        return f"{self.advertise_host or self.host}:{self.raft_port}"

    @property
    def bind(self) -> str:
        """The address that it binds: "host:port"."""
        return f"{self.host}:{self.port}"

    @property
    def exposed_host(self) -> str | None:
        """Its address that other machines can reach; None: there is none."""
        hosts = (host for host in (self.host, self.advertise_host) if host is not None)
        return next((host for host in hosts if not is_loopback(host)), None)


@dataclass(frozen=True)
class ShardConfig:
    """A shard and its storage servers, the primary first."""

    id: Annotated[int, Key("The shard's number.", int, low=0, high=2**31 - 1)]
    replicas: tuple[NodeConfig, ...]

    def __post_init__(self) -> None:
        """Refuse a number that no shard can have."""
        check_fields(self, " of a shard")

    @property
    def regions(self) -> tuple[str, ...]:
        """The regions of its servers, sorted; "" is that of servers without one."""
        return tuple(sorted({node.region or "" for node in self.replicas}))


@dataclass(frozen=True)
class ClusterConfig:
    """The settings that all processes of one cluster share."""

    name: Annotated[
        str, Key("The cluster's name.", str, pattern=_NAME, rule=_NAME_RULE, change="never")
    ]
    #: Each node keeps its files in `data_dir/NAME`. Relative paths start at the cluster file.
    data_dir: Path
    mms: tuple[NodeConfig, ...]
    shards: tuple[ShardConfig, ...]
    failure_handlers: tuple[NodeConfig, ...] = ()
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    #: None: `ziplog up` runs no monitor.
    monitor: MonitorConfig | None = None
    limits: LimitsConfig = dataclasses.field(default_factory=LimitsConfig)
    id: Annotated[
        str | None,
        Key(
            "The cluster's id, as in the status document. `ziplog up` adds it once the cluster is"
            " live. With it, the membership service creates no other cluster.",
            str,
            pattern=re.compile(f"[0-9a-f]{{{CLUSTER_ID_DIGITS}}}"),
            rule=f"{CLUSTER_ID_DIGITS} hexadecimal digits",
            change="never",
        ),
    ] = None
    durability: Annotated[
        Durability,
        Key(
            "When an insert counts as done. memory: all f+1 servers of the shard have it in memory"
            " (on disk within flush_interval_ms). disk: all f+1 have it on disk. `ziplog config"
            " reload` changes it while the cluster runs.",
            str,
            choices=("memory", "disk"),
            change="reload",
        ),
    ] = "memory"
    f: Annotated[
        int,
        Key(
            "Failures of a shard that acknowledged records survive. A shard has f+1 replicas, and"
            " takes inserts while all of them run.",
            int,
            low=0,
            high=15,
            change="never",
        ),
    ] = 1
    epoch_ms: Annotated[
        int,
        Key("Length of an epoch while there is work.", int, low=1, high=60_000, unit="ms"),
    ] = 10
    flush_interval_ms: Annotated[
        int,
        Key("Maximum time from ack to disk at 'memory'.", int, low=1, high=10_000, unit="ms"),
    ] = 10
    max_payload_bytes: Annotated[
        int, Key("Largest payload of a record.", int, low=1, high=8 * _MIB, unit="bytes")
    ] = _MIB
    max_key_bytes: Annotated[
        int, Key("Largest key of a record.", int, low=1, high=65_536, unit="bytes")
    ] = 4096
    max_unsettled_units: Annotated[
        int,
        Key("Maximum number of inserts of a client in flight at a shard.", int, low=1, high=65_536),
    ] = 1024
    suspicion_ms: Annotated[
        int,
        Key(
            "Silence after which a storage server is suspected to have failed.",
            int,
            low=100,
            high=60_000,
            unit="ms",
            change="reload",
        ),
    ] = 1000
    rtt_ms: Annotated[
        int,
        Key(
            "Longest round trip between two machines of the cluster and its clients. Stretches all"
            " time-outs that assume a local network; suspicion_ms must be at least four times it.",
            int,
            high=1000,
            unit="ms",
        ),
    ] = 0
    min_regions: Annotated[
        int,
        Key(
            "Least number of regions over which the servers of a shard are spread. 0: two, if"
            " storage servers are in more than one region; else one.",
            int,
            high=16,
        ),
    ] = 0
    lag_fix: Annotated[
        bool,
        Key(
            "Whether a shard that runs ahead has the others give up their positions at once, so"
            " that readers need not wait for the end of the epoch.",
            bool,
        ),
    ] = True
    session_timeout_s: Annotated[
        int,
        Key("Silence after which a client's session expires.", int, low=10, high=86_400, unit="s"),
    ] = 900
    segment_bytes: Annotated[
        int,
        Key(
            "Size of a storage server's segment files.",
            int,
            low=_MIB,
            high=4096 * _MIB,
            unit="bytes",
        ),
    ] = 64 * _MIB
    cache_bytes: Annotated[
        int,
        Key(
            "Size of a storage server's record cache.",
            int,
            low=_MIB,
            high=_TIB,
            unit="bytes",
            change="reload",
        ),
    ] = 64 * _MIB
    disk_reserve_bytes: Annotated[
        int,
        Key(
            "Free disk space below which inserts are refused.",
            int,
            high=_TIB,
            unit="bytes",
            change="reload",
        ),
    ] = 256 * _MIB
    insecure: Annotated[
        bool,
        Key(
            "Allow addresses other than loopback. Messages are neither encrypted nor authenticated:"
            " any program that reaches a port can read, insert and trim.",
            bool,
        ),
    ] = False
    raft_password: Annotated[
        str | None,
        Key(
            "Protects the Raft ports; required outside loopback. Keep the file's mode at 0600.",
            str,
            pattern=re.compile(r".{16,256}", re.DOTALL),
            rule="16 to 256 characters",
            secret=True,
            change="stop",
        ),
    ] = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Refuse values that no cluster can have."""
        check_fields(self, " in [cluster]")
        if len(self.mms) not in {1, 3, 5}:
            raise ConfigError("number of [[mms]] nodes", len(self.mms), "1, 3 or 5")
        if len(self.failure_handlers) not in {0, 1, 3, 5}:
            count = len(self.failure_handlers)
            raise ConfigError("number of [[failure_handler]] nodes", count, "0, 1, 3 or 5")
        if not self.shards:
            raise ConfigError("number of [[shard]] tables", 0, "at least 1")
        _check_nodes(self)
        _check_unique("id of [[shard]]", [shard.id for shard in self.shards])
        names = [node.name for node in self.nodes]
        # The monitor keeps its settings in a directory of this name.
        _check_unique("node name", names if self.monitor is None else [*names, "monitor"])
        for hosts in ("host", "advertise_host"):
            _check_unique(
                "port",
                [
                    f"{getattr(node, hosts) or node.host}:{port}"
                    for node in self.nodes
                    for port in node.ports
                ],
            )
        least = SUSPICION_ROUND_TRIPS * self.rtt_ms
        if self.suspicion_ms < least:
            raise ConfigError(
                "suspicion_ms in [cluster]",
                self.suspicion_ms,
                f"at least {SUSPICION_ROUND_TRIPS} x rtt_ms = {least}, or servers far from each"
                " other suspect each other of a failure",
            )
        self._check_exposure()
        for shard in self.shards:
            check_regions(shard, self.required_regions)

    def _check_exposure(self) -> None:
        exposed = [(node.name, host) for node in self.nodes if (host := node.exposed_host)]
        if not exposed:
            return
        name, host = exposed[0]
        require_loopback(
            host,
            insecure=self.insecure,
            name=f"host of node {name!r}",
            unless="you set insecure = true in [cluster], which lets any program that reaches a"
            " port read, insert and trim",
        )
        if self.raft_password is None:
            raise ConfigError(
                "raft_password in [cluster]",
                None,
                "16 to 256 characters outside loopback",
                message="raft_password in [cluster] is required outside loopback; give 16 to 256"
                " characters",
            )

    @property
    def nodes(self) -> tuple[NodeConfig, ...]:
        """All nodes: of the membership service, failure handlers, storage servers."""
        replicas = (node for shard in self.shards for node in shard.replicas)
        return (*self.mms, *self.failure_handlers, *replicas)

    @property
    def required_regions(self) -> int:
        """Least number of regions over which the servers of a shard are spread."""
        if self.min_regions:
            return self.min_regions
        return min(2, len({region for shard in self.shards for region in shard.regions}))

    @property
    def bootstrap(self) -> str:
        """The address for clients: the membership service's endpoints, separated by commas."""
        return ",".join(node.endpoint for node in self.mms)

    def node(self, name: str) -> NodeConfig:
        """Return the node of this name.

        Raises:
            ConfigError: there is no such node.

        """
        found = next((node for node in self.nodes if node.name == name), None)
        if found is None:
            names = ", ".join(node.name for node in self.nodes)
            raise ConfigError("node", name, f"one of {names}")
        return found

    def shard_of(self, name: str) -> tuple[ShardConfig, int]:
        """Return the shard of the storage server `name`, and the server's index in it.

        Raises:
            ConfigError: there is no such storage server.

        """
        for shard in self.shards:
            for index, node in enumerate(shard.replicas):
                if node.name == name:
                    return shard, index
        names = ", ".join(node.name for shard in self.shards for node in shard.replicas)
        raise ConfigError("storage server", name, f"one of {names}")


def require_loopback(host: str, *, insecure: bool, name: str, unless: str) -> None:
    """Refuse an address that other machines can reach, unless `insecure` allows it.

    Args:
        host: where to listen.
        insecure: the operator allowed such addresses.
        name: the name of `host` in its configuration, for messages.
        unless: how to allow it, and what that means.

    Raises:
        ConfigError: it is not a loopback address, and `insecure` is false.

    """
    if not insecure and not is_loopback(host):
        raise ConfigError(name, host, f"a loopback address such as 127.0.0.1, unless {unless}")


def load(path: Path) -> ClusterConfig:
    """Read a cluster file.

    Raises:
        ConfigError: it cannot be read, or a value is not allowed; says what and where.

    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            "cluster file",
            str(path),
            "a readable file",
            message=f"cannot read the cluster file {path}: {reason}",
        ) from error
    config = parse(text, path)
    if config.raft_password is not None and path.stat().st_mode & 0o077:
        mode = f"{path.stat().st_mode & 0o777:04o}"
        raise ConfigError("mode of a file with a password", mode, "0600", str(path))
    return config


def parse(text: str, path: Path) -> ClusterConfig:
    """Parse `text` as the contents of the cluster file `path`.

    Raises:
        ConfigError: a value is not allowed; says what and where.

    """
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also for a number of thousands of digits
        raise ConfigError(
            "cluster file",
            str(path),
            "TOML",
            message=f"the cluster file {path} is not valid TOML: {error}",
        ) from error
    try:
        return _parse(document, path)
    except ConfigError as error:
        raise ConfigError(
            error.name, error.value, error.allowed, str(path), message=error.message
        ) from error


def _parse(document: dict[str, Any], path: Path) -> ClusterConfig:
    refuse_unknown(document, _TABLES, "the file")
    cluster = document.get("cluster")
    if not isinstance(cluster, dict):
        raise ConfigError("[cluster]", cluster, "a table")
    values = _values(cluster, ClusterConfig, "[cluster]", also=("data_dir",))
    directory = cluster.get("data_dir")
    if not isinstance(directory, str) or not directory or "\0" in directory:
        raise ConfigError("data_dir in [cluster]", directory, "the path of a directory")
    return ClusterConfig(
        **values,
        data_dir=path.parent.absolute() / directory,
        log=LogConfig(**_table(document.get("log", {}), LogConfig, "[log]")),
        monitor=_monitor(document.get("monitor")),
        limits=LimitsConfig(**_table(document.get("limits", {}), LimitsConfig, "[limits]")),
        mms=_nodes(document.get("mms"), "[[mms]]"),
        failure_handlers=_nodes(document.get("failure_handler", []), "[[failure_handler]]"),
        shards=tuple(_shard(table) for table in _tables(document.get("shard"), "[[shard]]")),
    )


def _monitor(table: object) -> MonitorConfig | None:
    return None if table is None else MonitorConfig(**_table(table, MonitorConfig, "[monitor]"))


def _table(table: object, kind: type, where: str) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ConfigError(where, table, "a table")
    return _values(table, kind, where)


def _shard(table: dict[str, Any]) -> ShardConfig:
    values = _values(table, ShardConfig, "[[shard]]", also=("replicas",))
    where = f"replicas of shard {values['id']}"
    return ShardConfig(replicas=_nodes(table.get("replicas"), where), **values)


def _nodes(tables: object, where: str) -> tuple[NodeConfig, ...]:
    return tuple(
        NodeConfig(**_values(table, NodeConfig, where)) for table in _tables(tables, where)
    )


def _tables(tables: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(where, tables, "a list of tables")
    return tables


def _values(
    table: dict[str, Any], kind: type, where: str, also: tuple[str, ...] = ()
) -> dict[str, Any]:
    keys = keys_of(kind)
    refuse_unknown(table, (*keys, *also), where)
    for name, (key, default) in keys.items():
        if name not in table and default is dataclasses.MISSING:
            raise ConfigError(
                f"{name} in {where}",
                None,
                key.allowed,
                message=f"{name} is missing in {where}; it must be {key.allowed}",
            )
    return {name: value for name, value in table.items() if name in keys}


def _check_nodes(config: ClusterConfig) -> None:
    for shard in config.shards:
        if len(shard.replicas) != config.f + 1:
            allowed = f"f + 1 = {config.f + 1}"
            raise ConfigError(
                f"number of replicas of shard {shard.id}", len(shard.replicas), allowed
            )
    agreeing = (*config.mms, *config.failure_handlers)
    for node in config.nodes:
        if (node.raft_port is not None) != (node in agreeing):
            name = f"raft_port of node {node.name!r}"
            if node in agreeing:
                raise ConfigError(
                    name, node.raft_port, "given", message=f"{name} is missing; it is required"
                )
            only = "only [[mms]] and [[failure_handler]] nodes have a raft_port"
            raise ConfigError(name, node.raft_port, "left out", message=f"remove {name}: {only}")
    for node in agreeing:
        if node.archive_port is not None:
            name = f"archive_port of node {node.name!r}"
            only = f"remove {name}: only replicas of a [[shard]] have an archive_port"
            raise ConfigError(name, node.archive_port, "left out", message=only)


def check_regions(shard: ShardConfig, required: int) -> None:
    """Refuse a shard whose servers are in fewer regions than `required`.

    Raises:
        ConfigError: it names the shard and its regions.

    """
    found = shard.regions
    if len(found) < required:
        names = ", ".join(region or "(no region)" for region in found)
        sentence = (
            f"the servers of shard {shard.id} are in {len(found)} of the {required} regions that"
            f" min_regions in [cluster] requires ({names}): put servers of the shard in other"
            f" regions, or set min_regions to {len(found)}"
        )
        name = f"regions of shard {shard.id}"
        raise ConfigError(name, list(found), f"{required} or more regions", message=sentence)


def _check_unique(what: str, values: list[Any]) -> None:
    for index, value in enumerate(values):
        if value in values[:index]:
            raise ConfigError(
                what,
                value,
                "used once in the file",
                message=f"{what} {value!r} is used more than once in the file",
            )
