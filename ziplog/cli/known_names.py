"""Completion of the names of nodes and cursors, and of the numbers of shards.

They come from the cluster file or the directory on the command line, else from the cluster. Rule: a
completion takes 0.5 s at most, and reports no error.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import typer  # noqa: TC002 - typer reads the annotations

import ziplog
from ziplog import defaults
from ziplog.config import load
from ziplog.deploy.supervisor import CLUSTER_FILE
from ziplog.errors import ZiplogError
from ziplog.monitor.nodes import endpoints_of

_LIMIT_S: Final = 0.5


def nodes(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the nodes that begin with `incomplete`."""
    try:
        path = _cluster_file(context)
        names = [node.name for node in load(path).nodes] if path else _nodes_of_cluster(context)
    except (ZiplogError, OSError):
        return []
    return [name for name in names if name.startswith(incomplete)]


def shards(context: typer.Context, incomplete: str) -> list[str]:
    """Return the numbers of the shards that begin with `incomplete`."""
    try:
        path = _cluster_file(context)
        known = [shard.id for shard in load(path).shards] if path else _shards_of_cluster(context)
    except (ZiplogError, OSError):
        return []
    return [str(shard) for shard in known if str(shard).startswith(incomplete)]


def cursors(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the cursors that begin with `incomplete`."""
    try:
        with ziplog.connect(_bootstrap(context), timeout=_LIMIT_S) as log:
            return [one.name for one in log.cursors() if one.name.startswith(incomplete)]
    except (ZiplogError, OSError):
        return []


def _cluster_file(context: typer.Context) -> Path | None:
    """Return the cluster file that the command line names so far; None: it names none."""
    if (config := context.params.get("config")) is not None:
        return Path(config)
    directory = context.params.get("data_dir")
    return Path(directory) / CLUSTER_FILE if directory is not None else None


def _nodes_of_cluster(context: typer.Context) -> list[str]:
    return sorted(endpoints_of(_status(context)))


def _shards_of_cluster(context: typer.Context) -> list[int]:
    return [shard["id"] for shard in _status(context)["shards"]]


def _status(context: typer.Context) -> dict[str, Any]:
    until = time.monotonic() + _LIMIT_S
    with ziplog.connect(_bootstrap(context), timeout=_LIMIT_S) as log:
        return log.cluster(timeout=max(until - time.monotonic(), 0.001))


def _bootstrap(context: typer.Context) -> str:
    given: str | None = context.params.get("bootstrap")
    return given or defaults.bootstrap()
