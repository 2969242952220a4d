"""`ziplog status`: the cluster as its membership service sees it."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from ziplog.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Json, Timeout, connect

_WATCH_S: Final = 1.0
#: So many of the last losses stand below the table.
_LOSSES_SHOWN: Final = 5


def status(
    *,
    json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again every second.")] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """Show durability, epoch, nodes, shards and possible losses; --json: the status document."""
    with connect(bootstrap, timeout) as log:
        if not watch:
            _print(log.cluster(), json=json)
            return
        if json or not sys.stdout.isatty():
            while True:
                _print(log.cluster(), json=json)
                sys.stdout.flush()
                time.sleep(_WATCH_S)
        with Live(_view(log.cluster()), auto_refresh=False) as live:
            while True:
                time.sleep(_WATCH_S)
                live.update(_view(log.cluster()), refresh=True)


def _print(document: dict[str, Any], *, json: bool) -> None:
    if json:
        sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
    else:
        Console(file=sys.stdout, highlight=False).print(_view(document))


def _view(document: dict[str, Any]) -> Group:
    """Return the document for people: a table, and what needs attention."""
    lines = [
        f"shard {shard['id']} is recovering: it takes no records until all its servers are back"
        for shard in document["shards"]
        if shard["state"] == "recovering"
    ]
    losses = document["losses"]
    for loss in losses[-_LOSSES_SHOWN:]:
        first, last = loss["epochs"]
        lines.append(
            f"shard {loss['shard']} may have lost records: positions {loss['start']} to"
            f" {loss['stop'] - 1}, epochs {first} to {last}"
        )
    if len(losses) > _LOSSES_SHOWN:
        lines.append(f"and {len(losses) - _LOSSES_SHOWN} earlier losses: --json shows all")
    return Group(_table(document), *lines)


def _table(document: dict[str, Any]) -> Table:
    title = (
        f"{document['cluster']}: durability {document['durability']}, epoch {document['epoch']},"
        f" finalized {document['finalized_epoch']}, trimmed before {document['trimmed_before']}"
    )
    table = Table(title=title)
    for name in ("node", "role", "state", "endpoint", "pid"):
        table.add_column(name, no_wrap=True)
    table.add_column("shard")
    for node in document["mms"]:
        role = "mms leader" if node["leader"] else "mms"
        table.add_row(node["name"], role, node["state"], node["endpoint"], str(node["pid"]), "")
    for node in document["failure_handlers"]:
        role = "handler leader" if node["leader"] else "handler"
        table.add_row(node["name"], role, node["state"], node["endpoint"], str(node["pid"]), "")
    for shard in document["shards"]:
        about = (
            f"{shard['id']} {shard['state']}, view {shard['view']}, {shard['rate_per_s']}/s,"
            f" stable {shard['stable_gsn']}, durable {shard['durable_gsn']}"
        )
        for node in shard["replicas"]:
            row = (node["name"], node["role"], node["state"], node["endpoint"], str(node["pid"]))
            table.add_row(*row, about)
            about = ""
    return table
