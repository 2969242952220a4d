"""`ziplog top`: rates, latencies, disks and lags, refreshed every second."""

from __future__ import annotations

import contextlib
import select
import sys
import termios
import tty
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Group
from rich.live import Live

from ziplog.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Json, Timeout, connect
from ziplog.cli.tables import cell, stdout, table
from ziplog.cli.terminal import one_line, print_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ziplog.client.blocking import Log

_REFRESH_S: Final = 1.0
_SHARD: Final = (
    "shard", "state", "view", "inserts/s", "sent/s", "ack p50", "p99", "stable p50", "p99 ",
)  # fmt: skip
_NODE: Final = ("node", "role", "state", "cpu", "memory", "stored", "disk free", "flush p99", "lag")
_RIGHT: Final = frozenset({*_SHARD, *_NODE} - {"state", "node", "role"})
_MIB: Final = 1 << 20


def top(
    *,
    count: Annotated[
        int, typer.Option("--count", min=0, metavar="N", help="End after N refreshes; 0: never.")
    ] = 0,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """Show rates, latencies, disks and lags, refreshed every second; `q` ends it.

    inserts/s: placed records; sent/s: records sent to subscriptions. ack: time to ack an insert at
    the primary; stable: time until all replicas hold a record; both are sampled. cpu: share of one
    core. lag: age of the oldest record that the server lacks. Rates are those of the last 10 s.

    Example: ziplog top --count 5 --json
    """
    with connect(bootstrap, timeout) as log:
        documents = _documents(log, count)
        if json or not sys.stdout.isatty():
            for document in documents:
                _print(document, json=json)
            return
        with Live(auto_refresh=False, screen=True) as live:
            for document in documents:
                live.update(_view(document), refresh=True)


def _documents(log: Log, count: int) -> Iterator[dict[str, Any]]:
    """Yield the overview every second, until `q` is typed."""
    from ziplog.monitor.nodes import NodePolls, endpoints_of  # noqa: PLC0415 - slow to import
    from ziplog.monitor.overview import Overview  # noqa: PLC0415

    overview, status = Overview(), log.cluster()
    polls = NodePolls(lambda: endpoints_of(status))
    polls.start()
    shown = 0
    try:
        with _single_keys() as is_terminal:
            while not _is_ended(is_terminal=is_terminal):
                status = log.cluster()
                overview.observe(polls.replies())
                yield overview.document(status)
                shown += 1
                if shown == count:
                    return
    finally:
        polls.stop()


@contextlib.contextmanager
def _single_keys() -> Iterator[bool]:
    """Let a terminal pass each key at once; yield whether stdin is one."""
    if not sys.stdin.isatty():
        yield False
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield True
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _is_ended(*, is_terminal: bool) -> bool:
    """Wait for the next refresh; return whether `q` was typed."""
    readable, _, _ = select.select([sys.stdin] if is_terminal else [], [], [], _REFRESH_S)
    return bool(readable) and sys.stdin.read(1) in {"q", "Q", ""}


def _print(document: dict[str, Any], *, json: bool) -> None:
    if json:
        print_json(document)
    else:
        stdout().print(_view(document))
    sys.stdout.flush()


def _view(document: dict[str, Any]) -> Group:
    shards = table(*_SHARD, right=_RIGHT)
    for one in document["shards"]:
        times = (one[name] for name in ("ack_p50_s", "ack_p99_s", "order_p50_s", "order_p99_s"))
        rates = (_rate(one["inserted_per_s"]), _rate(one["delivered_per_s"]))
        head = (one["id"], one["state"], one["view"])
        shards.add_row(*map(cell, (*head, *rates, *map(_duration, times))))
    nodes = table(*_NODE, right=_RIGHT)
    for one in document["nodes"]:
        cpu = None if one["cpu"] is None else f"{one['cpu']:.0%}"
        sizes = (one[name] for name in ("memory_bytes", "stored_bytes", "disk_free_bytes"))
        tail = (_duration(one["flush_p99_s"]), _duration(one["lag_s"]))
        head = (one["name"], one["role"], one["state"])
        nodes.add_row(*map(cell, (*head, cpu, *map(_size, sizes), *tail)))
    line = (
        f"{one_line(document['cluster'])}: epoch {document['epoch']}, finalized"
        f" {document['finalized_epoch']}, {_rate(document['inserted_per_s']) or '-'} inserts/s,"
        f" {_rate(document['delivered_per_s']) or '-'} sent/s"
    )
    return Group(line, "", shards, "", nodes)


def _rate(per_s: float | None) -> str | None:
    return None if per_s is None else f"{per_s:,.0f}"


def _size(size: float | None) -> str | None:
    return None if size is None else f"{size / _MIB:,.0f} MiB"


def _duration(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"
