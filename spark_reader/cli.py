"""`ziplog export`: writes a range of the log to a file, without Spark.

As everywhere in `ziplog.cli`, stdout carries only data. JSON lines need no pyarrow; the other
formats import it when the verb runs.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from spark_reader import options
from spark_reader.export import STDOUT
from spark_reader.export import export as write
from spark_reader.files import COMPRESSIONS, Compression, Format
from spark_reader.optional_dependencies import require
from ziplog.cli.moments import is_ago, moment_us
from ziplog.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Json, Timeout, connect, say
from ziplog.cli.positions import FORMS, is_fixed, parse, parse_stop
from ziplog.cli.terminal import print_json
from ziplog.errors import RID_RECENT, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ziplog.client.blocking import Log
    from ziplog.errors import RecordId

#: The command-line option of each option of a load.
_NAMES: Final = {
    options.START: "--from",
    options.STOP: "--to",
    options.FIRST_EPOCH: "--from-epoch",
    options.LAST_EPOCH: "--to-epoch",
    options.SINCE: "--since",
    options.UNTIL: "--until",
    options.PATH: "--path",
    options.SERVERS: "--bootstrap",
    options.TIMEOUT: "--timeout",
}
#: The format of a file, by the end of its name.
_KINDS: Final[dict[str, Format]] = {".arrow": "arrow", ".jsonl": "jsonl", ".parquet": "parquet"}
#: Endings of formats that no export has.
_OTHER_KINDS: Final = frozenset({".avro", ".csv", ".feather", ".json", ".orc", ".tsv", ".txt"})
#: The command line's word for `earliest` of `startingOffsets`.
_BEGINNING: Final = "genesis"
#: The same for `latest` of `endingOffsets`, and the word that Spark's users know.
_END: Final = "end"
_ENDS: Final = frozenset({_END, options.LATEST})

Since = Annotated[
    str | None,
    typer.Option("--since", metavar="TIME", help="Only records created at TIME or later."),
]
Until = Annotated[
    str | None, typer.Option("--until", metavar="TIME", help="Only records created before TIME.")
]
Packing = Annotated[
    Compression | None,
    typer.Option("--compression", help="[default: snappy for parquet, else none]"),
]

app: Final = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def export(
    context: typer.Context,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Output file; '-': stdout.")
    ],
    given_kind: Annotated[
        Format | None,
        typer.Option(
            "--format",
            help="jsonl: as `ziplog tail --json`. [default: by the end of FILE, or parquet]",
        ),
    ] = None,
    start: Annotated[
        str, typer.Option("--from", metavar=FORMS, help="Start (inclusive).")
    ] = _BEGINNING,
    stop: Annotated[str, typer.Option("--to", metavar="POSITION", help="End (exclusive).")] = _END,
    from_epoch: Annotated[
        int | None, typer.Option("--from-epoch", metavar="N", help="Instead of --from.")
    ] = None,
    to_epoch: Annotated[
        int | None, typer.Option("--to-epoch", metavar="N", help="Instead of --to; inclusive.")
    ] = None,
    since: Since = None,
    until: Until = None,
    allow_trimmed: Annotated[
        bool,
        typer.Option("--allow-trimmed", help="Start at the trim point if it is after --from."),
    ] = False,
    path: Annotated[
        Path | None,
        typer.Option("--path", metavar="D", help="Read a data directory's files, not servers."),
    ] = None,
    compression: Packing = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
    *,
    json: Json = False,
) -> None:
    """Write a range of the log to a file: every record once, in the order of the log.

    The file gets its name when it is complete. docs/spark.md lists the columns. Positions are
    those of `ziplog tail`; `end` is the end of the log when the command starts. A TIME is ISO 8601
    (UTC by default), milliseconds since 1970, or ago (10m, 2h, 1d); it filters records, and does
    not make the command read less. --json prints what was written.
    """
    if json and output == STDOUT:
        raise ConfigError("--json", None, "left out, because stdout gets the records")
    if given_kind is None and output.suffix in _OTHER_KINDS:
        raise ConfigError("--output", str(output), f"a name with {', '.join(_KINDS)}, or --format")
    kind = given_kind or _KINDS.get(output.suffix, "parquet")
    if kind != "jsonl":
        require(f"ziplog export --format {kind}", "arrow", "pyarrow")
    packed = _compression(kind, compression)
    if output == STDOUT and kind != "jsonl" and sys.stdout.isatty():
        raise ConfigError("--output", "-", f"a file or a pipe, because {kind} is binary")
    first, last = _bounds(start, stop, path, bootstrap, timeout)
    asked: dict[str, Any] = {
        options.START: first,
        options.STOP: last,
        options.FIRST_EPOCH: from_epoch,
        options.LAST_EPOCH: to_epoch,
        options.SINCE: _time(since, "--since"),
        options.UNTIL: _time(until, "--until"),
        options.FAIL_ON_DATA_LOSS: "false" if allow_trimmed else None,
        options.PATH: path,
        options.SERVERS: bootstrap if path is None or _is_given(context, "bootstrap") else None,
        options.TIMEOUT: timeout,
    }
    given = {name: str(value) for name, value in asked.items() if value is not None}
    with _with_option_names(), _ended_by_sigterm(), _progress() as progress:
        done = write(given, output, kind, packed, progress, sys.stdout.buffer)
    if json:
        written = {"file": str(output), "format": kind, "records": done.rows}
        written |= {"from": done.start, "to": done.stop}
        print_json(written)
    range_ = f"positions {done.start} to {done.stop - 1}"
    say(f"{done.rows} records of {range_ if done.start < done.stop else 'no position'}: {output}")


def _bounds(
    start: str, stop: str, path: Path | None, bootstrap: str, timeout: float
) -> tuple[str, str]:
    """Return a range's start and end as the options of a load have them.

    Positions that depend on the log are found first, which needs a running cluster.
    """
    find, find_stop = parse(start, "--from"), None if stop in _ENDS else parse_stop(stop)
    is_ready = is_fixed(start), find_stop is None or is_fixed(stop)
    if path is not None and not all(is_ready):
        name, text = ("--to", stop) if is_ready[0] else ("--from", start)
        raise ConfigError(name, text, "a gsn or '<gsn>@<shard>' with --path")
    if not all(is_ready):
        with connect(bootstrap, timeout) as log:
            start = start if is_ready[0] else str(_begin(log, find(log)).gsn)
            stop = stop if find_stop is None else str(find_stop(log).gsn)
    return (
        options.EARLIEST if start == _BEGINNING else start,
        options.LATEST if stop in _ENDS else stop,
    )


def _begin(log: Log, rid: RecordId) -> RecordId:
    """Return where a reader that starts at a position begins: `RID_RECENT` depends on the log."""
    if rid != RID_RECENT:
        return rid
    with log.subscribe(rid, follow=False) as subscription:
        return subscription.position


def _time(text: str | None, name: str) -> str | None:
    """Return a time as the options of a load have it: how long ago becomes milliseconds."""
    if text is None or not is_ago(text):
        return text
    return str(moment_us(name, text, time.time_ns() // 1000) // 1000)


def _compression(kind: Format, asked: Compression | None) -> Compression:
    allowed = COMPRESSIONS[kind]
    if asked is not None and asked not in allowed:
        raise ConfigError("--compression", asked, f"{' or '.join(allowed)} for {kind}")
    return asked or allowed[0]


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


@contextlib.contextmanager
def _with_option_names() -> Iterator[None]:
    """Replace the names of load options in errors by those of the command line."""
    try:
        yield
    except ConfigError as error:
        allowed = error.allowed.replace(repr(options.EARLIEST), repr(_BEGINNING))
        for theirs, ours in _NAMES.items():
            allowed = allowed.replace(repr(theirs), ours)
        name = _NAMES.get(error.name, error.name)
        raise ConfigError(name, error.value, allowed, error.where) from None


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise, as Ctrl-C does, so that the temporary file is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _end(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar if stderr is a terminal."""
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
