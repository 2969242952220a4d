"""`ziplog bench kv`: latency and throughput of single reads and writes."""

from __future__ import annotations

import contextlib
from typing import Annotated, Final

import typer

import logdb
from logdb.cli.commands import Coordinators  # noqa: TC001 - as below
from logdb.cli.measuring import PREFIX
from logdb.defaults import COORDINATOR
from ziplog.bench import processes
from ziplog.cli.bench import Clients, Csv, Seconds, Size, print_results, progress
from ziplog.cli.options import Json, Timeout  # noqa: TC001 - typer reads the annotations
from ziplog.errors import ZiplogError

#: Keys that one transaction deletes.
_AT_ONCE: Final = 500

app: Final = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def kv(
    size: Size = 100,
    clients: Clients = 1,
    seconds: Seconds = 10.0,
    keys: Annotated[int, typer.Option("--keys", min=1, help="Number of keys.")] = 1000,
    *,
    csv: Csv = False,
    json: Json = False,
    coordinator: Coordinators = COORDINATOR,
    timeout: Timeout = 10.0,
) -> None:
    """Read and write random keys, each client one after the other; delete the keys at the end."""
    arguments = [
        *("--coordinator", coordinator, "--timeout", f"{timeout}"),
        *("--size", f"{size}", "--seconds", f"{seconds}", "--keys", f"{keys}"),
    ]
    try:
        with progress(seconds) as on_progress:
            found = processes.run("logdb.cli.measuring", arguments, clients, on_progress)
    finally:
        with contextlib.suppress(ZiplogError):
            _delete_keys(coordinator, timeout)
    setting = {"clients": clients, "size_bytes": size, "keys": keys}
    print_results(found, setting, csv=csv, json=json)


def _delete_keys(coordinator: str, timeout: float) -> None:
    with logdb.connect(coordinator, timeout=timeout) as db:
        names = [key for key, _ in db.scan(prefix=PREFIX)]
        for start in range(0, len(names), _AT_ONCE):
            with db.transaction() as transaction:
                for name in names[start : start + _AT_ONCE]:
                    transaction.delete(name)
