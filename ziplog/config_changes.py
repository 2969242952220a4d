"""What differs between two versions of a cluster file, and when nodes take each difference. Pure.

A node keeps the settings that it uses as a flat table: one value for each key of `[cluster]`,
`[log]`, `[monitor]` and `[limits]`, and one for the nodes of each service and shard. `Key.change`
says when a key may change.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any, Final

from ziplog.config import ClusterConfig
from ziplog.config_keys import keys_of
from ziplog.config_tables import LimitsConfig, LogConfig, MonitorConfig
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ziplog.config import NodeConfig
    from ziplog.config_keys import Change

#: The start of the names of the regions of a service's nodes, and of a shard's.
_REGIONS: Final = "regions of "
#: The start of the names of the ports of a shard's archives.
_ARCHIVE_PORTS: Final = "archive ports of "
_TABLES: Final = {"log": LogConfig, "monitor": MonitorConfig, "limits": LimitsConfig}
#: All nodes have to be stopped before one of these changes.
_STOPPED: Final = frozenset({"mms", "failure_handler", "data_dir"})
#: What each kind of change of some keys needs.
_NEEDS: Final[dict[Change, str]] = {
    "reload": "a change of {keys} needs `ziplog config reload`",
    "restart": "a change of {keys} needs `ziplog restart --rolling`",
    "stop": "a change of {keys} needs `ziplog down` and `ziplog up`",
    "never": "{keys} cannot change in a cluster that exists",
}


def flatten(config: ClusterConfig) -> dict[str, Any]:
    """Return a cluster file's settings by name: "epoch_ms", "log.level", "mms", "shard 0"; JSON."""
    values: dict[str, Any] = {"data_dir": str(config.data_dir)}
    for name, (key, _) in keys_of(ClusterConfig).items():
        value = getattr(config, name)
        if key.secret and value is not None:
            value = hashlib.sha256(value.encode()).hexdigest()
        values[name] = value
    for table, kind in _TABLES.items():
        found = getattr(config, table)
        if found is not None:
            values |= {f"{table}.{name}": getattr(found, name) for name in keys_of(kind)}
    values["mms"] = _nodes(config.mms)
    values["failure_handler"] = _nodes(config.failure_handlers)
    values |= {f"shard {shard.id}": _nodes(shard.replicas) for shard in config.shards}
    groups = [("mms", config.mms), ("failure_handler", config.failure_handlers)]
    groups += [(f"shard {shard.id}", shard.replicas) for shard in config.shards]
    values |= {f"{_REGIONS}{name}": [one.region for one in nodes] for name, nodes in groups}
    for shard in config.shards:
        ports = [node.archive_port for node in shard.replicas]
        if any(ports):  # nodes of earlier releases do not know them
            values[f"{_ARCHIVE_PORTS}shard {shard.id}"] = ports
    return values


def changes(used: Mapping[str, Any], new: ClusterConfig) -> dict[str, Change]:
    """Return the names of the changed settings, and when nodes can take each.

    New shards are no change for the nodes that run, nor is the id that `ziplog up` adds. Nor are
    keys of a later release, which the file cannot have.

    Args:
        used: the settings in use, from `flatten`.
        new: the cluster file now.

    """
    found = flatten(new)
    # A shard's first archive ports have no former value.
    first = ({f"{_ARCHIVE_PORTS}{name}" for name in used} & found.keys()) - used.keys()
    return {
        name: _change_of(name)
        for name in [*used, *sorted(first)]
        if used.get(name) != found.get(name)
        and _is_known(name)
        and not (name == "id" and used[name] is None)
    }


def refuse(found: Mapping[str, Change]) -> None:
    """Raise `ConfigError`, which names all keys, if a running node cannot take some change."""
    others = {name: change for name, change in found.items() if change != "reload"}
    if others:
        sentence = f"no change was applied: {needs_of(others)}"
        raise ConfigError("changed keys", sorted(found), "reloadable", message=sentence)


def needs_of(found: Mapping[str, Change]) -> str:
    """Return what an operator does so that nodes use changed settings, in one line."""
    return "; ".join(
        sentence.format(keys=", ".join(names))
        for change, sentence in _NEEDS.items()
        if (names := names_of(found, change))
    )


def names_of(found: Mapping[str, Change], change: Change) -> list[str]:
    """Return the names of the changes of one kind, sorted."""
    return sorted(name for name, kind in found.items() if kind == change)


def _is_known(name: str) -> bool:
    """Whether this release knows a key of a file, or it is about the nodes of a shard."""
    table, _, key_name = name.rpartition(".")
    if table:
        return table in _TABLES and key_name in keys_of(_TABLES[table])
    return " " in name or name in _STOPPED or name in keys_of(ClusterConfig)


def _change_of(name: str) -> Change:
    table, _, key_name = name.rpartition(".")
    if table:
        return keys_of(_TABLES[table])[key_name][0].change
    if name in _STOPPED:
        return "stop"
    if name.startswith((_REGIONS, _ARCHIVE_PORTS)):
        return "restart"
    key = keys_of(ClusterConfig).get(name)
    return "never" if key is None else key[0].change


def _nodes(nodes: Iterable[NodeConfig]) -> list[dict[str, Any]]:
    documents = [dataclasses.asdict(node) for node in nodes]
    for document in documents:
        del document["region"], document["archive_port"]  # each may change by itself
        if document["advertise_host"] is None:  # nodes of earlier releases do not know it
            del document["advertise_host"]
    return documents
