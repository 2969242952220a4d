"""`ziplog status`: the cluster as its membership service sees it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Group
from rich.live import Live
from rich.measure import Measurement

from ziplog.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Json, Timeout, connect
from ziplog.cli.tables import cell, stdout, table
from ziplog.cli.terminal import one_line, print_json
from ziplog.cli.upgrade import unfinished
from ziplog.core.nearness import named
from ziplog.status_document import stalled_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, ConsoleOptions
    from rich.table import Table

_WATCH_S: Final = 1.0
#: Maximum number of losses below the table.
_LOSSES_SHOWN: Final = 5
#: What the states of shards mean to a user of the log.
_MEANINGS: Final = {
    "joining": "joining: takes no records until every server has reported",
    "parked": "parked: takes no records until all its servers are up and keep pace; readable",
    "recovering": "recovering: takes no records until all its servers are back",
    "leaving": "leaving: new records go to other shards; stays readable",
    "finalized": "finalized: changes no more, except by trims; stays readable",
}
_COLUMNS: Final = (
    "id", "state", "view", "rate/s", "weight", "epoch", "holes", "read", "stable", "durable",
)  # fmt: skip
#: Minimum number of columns of the shards' table, however narrow the terminal is.
_LEAST_COLUMNS: Final = 4
_WIDE: Final = 1000
_NUMBERS: Final = frozenset(
    {"id", "view", "rate/s", "weight", "epoch", "holes", "stable", "durable", "heard", "pid"}
)


def status(
    *,
    json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat every second.")] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """Show epochs, shards, blocked readers, losses and nodes; --json: the status document.

    weight: the shard's share of positions; 0: none. epoch: the first one in which it still has open
    positions. holes: positions that it gave up because readers waited. read: the shard has readers,
    so it decides its positions at the end of every epoch. stable, durable: its last such record;
    left out on a narrow terminal. heard: age of the node's last heartbeat; a server is up for 2.5 s
    after one, then suspect, and down after 5 s.
    """
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
        print_json(document)
    else:
        stdout().print(_view(document))


def _durability(document: dict[str, Any]) -> str:
    """Return the level in force, and a change under way."""
    change = document.get("durability_change")  # an earlier release has none
    if change is None:
        return str(document["durability"])
    servers = ", ".join(map(one_line, change["waits_for"])) or "the membership service"
    return f"{document['durability']} (changes to {change['to']}: waits for {servers})"


def _view(document: dict[str, Any]) -> Group:
    """Return the document as tables and lines: shards, problems, nodes."""
    return Group(
        f"{one_line(document['cluster'])}: durability {_durability(document)},"
        f" epoch {document['epoch']},"
        f" finalized {document['finalized_epoch']}, trimmed before {document['trimmed_before']}",
        "",
        _shards(document["shards"]),
        *_states(document),
        *_lost_regions(document),
        *_obstacles(document),
        *_stalled(document),
        *full_disks(document),
        *_blocked(document),
        *_losses(document),
        *filter(None, [unfinished(document)]),
        "",
        nodes_table(document),
    )


def _states(document: dict[str, Any]) -> list[str]:
    lines = []
    for state, meaning in _MEANINGS.items():
        ids = [str(shard["id"]) for shard in document["shards"] if shard["state"] == state]
        if ids:
            lines.append(f"shard{_many(ids)} {', '.join(ids)} {_are(ids)} {meaning}")
    return lines


def _lost_regions(document: dict[str, Any]) -> list[str]:
    """Return a line for the regions that an operator gave up, if there are any."""
    lost = document.get("lost_regions") or []  # an earlier release has none
    if not lost:
        return []
    them = one_line(named(lost))
    return [f"given up: region{_many(lost)} {them}; `ziplog region back` ends that"]


def _obstacles(document: dict[str, Any]) -> list[str]:
    """Return a line for each shard that cannot be recovered now: why, and what to do."""
    return [
        f"shard {shard['id']} is not recovered: {one_line(shard['obstacle'])}"
        for shard in document["shards"]
        if shard.get("obstacle")
    ]


def _stalled(document: dict[str, Any]) -> list[str]:
    """Return a line for each live shard that takes no records, because servers are absent."""
    return [
        f"shard {shard['id']} takes no records: {', '.join(map(one_line, absent))}"
        for shard in document["shards"]
        if (absent := stalled_by(shard))
    ]


def full_disks(document: dict[str, Any]) -> list[str]:
    """Return a line for each storage server whose disk is full."""
    return [
        f"{replica['name']} is full: {one_line(replica['full'])}"
        + (f"; shard {shard['id']} refuses records" if shard.get("refusing") else "")
        for shard in document["shards"]
        for replica in shard["replicas"]
        if replica.get("full")
    ]


def _blocked(document: dict[str, Any]) -> list[str]:
    """Return a line for each shard that holds back stable records of other shards."""
    lines = []
    first = document.get("blocked_by")
    for shard in document["shards"]:
        held = [str(other) for other in shard.get("blocks") or ()]
        if held:
            most = ", and most of all" if shard["id"] == first and len(held) > 1 else ""
            lines.append(
                f"readers wait for shard {shard['id']} (epoch {cell(shard.get('epoch'))}){most}:"
                f" it holds back records of shard{_many(held)} {', '.join(held)}"
            )
    return lines


def _losses(document: dict[str, Any]) -> list[str]:
    losses = document["losses"]
    lines = [
        f"shard {loss['shard']} may have lost records: positions {loss['start']} to"
        f" {loss['stop'] - 1}, epochs {loss['epochs'][0]} to {loss['epochs'][1]}"
        for loss in losses[-_LOSSES_SHOWN:]
    ]
    if len(losses) > _LOSSES_SHOWN:
        lines.append(
            f"{len(losses) - _LOSSES_SHOWN} earlier losses are not shown; --json lists all"
        )
    return lines


def _many(ids: list[str]) -> str:
    return "s" if len(ids) > 1 else ""


def _are(ids: list[str]) -> str:
    return "are" if len(ids) > 1 else "is"


class _Fitting:
    """The first of some tables that fits the terminal, so that no cell is cut; else the last."""

    def __init__(self, *tables: Table) -> None:
        self._tables: Final = tables

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """Yield the table."""
        unlimited = options.update(max_width=_WIDE)
        for shown in self._tables:
            if Measurement.get(console, unlimited, shown).maximum <= options.max_width:
                break
        yield shown


def _shards(shards: list[dict[str, Any]]) -> _Fitting:
    """Return the table of shards; on a narrow terminal the last columns are left out."""
    rows = [_row(shard) for shard in shards]
    tables = []
    for columns in range(len(_COLUMNS), _LEAST_COLUMNS - 1, -1):
        shown = table(*_COLUMNS[:columns], right=_NUMBERS)
        for row in rows:
            shown.add_row(*row[:columns])
        tables.append(shown)
    return _Fitting(*tables)


def _row(shard: dict[str, Any]) -> list[str]:
    # A finalized shard has no open positions.
    epoch = None if shard["state"] == "finalized" else shard.get("epoch")
    values = (
        shard["id"], shard["state"], shard["view"], shard["rate_per_s"], shard.get("weight"),
        epoch, shard.get("holes"), "yes" if shard.get("is_watched") else "",
        shard["stable_gsn"], shard["durable_gsn"],
    )  # fmt: skip
    return list(map(cell, values))


def nodes_table(document: dict[str, Any]) -> _Fitting:
    """Return the table of nodes; on a narrow terminal each has two lines."""
    wide = table("node", "role", "state", "heard", "endpoint", "pid", right=_NUMBERS)
    narrow = table("node", "role", "state", "heard", right=_NUMBERS)
    for node, role in with_roles(document):
        heard = _age(node.get("heartbeat_age_ms"))
        values = node["name"], role, node["state"], heard, node["endpoint"], node["pid"]
        name, role_cell, state, heard_cell, endpoint, pid = map(cell, values)
        wide.add_row(name, role_cell, state, heard_cell, endpoint, pid)
        process = f"pid {pid}" if pid else ""
        narrow.add_row(
            f"{name}\n{endpoint}", f"{role_cell}\n{process}", state, heard_cell.removesuffix(" ago")
        )
    return _Fitting(wide, narrow)


def with_roles(document: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return each node of a status document with its role in words."""
    groups = (("mms", document["mms"]), ("handler", document["failure_handlers"]))
    nodes = [
        (node, f"{role} leader" if node["leader"] else role) for role, of in groups for node in of
    ]
    for shard in document["shards"]:
        nodes += [(node, f"{node['role']} of {shard['id']}") for node in shard["replicas"]]
    return nodes


def _age(age_ms: int | None) -> str | None:
    """Return the age of a heartbeat as text."""
    return None if age_ms is None else f"{age_ms / 1000:.1f} s ago"
