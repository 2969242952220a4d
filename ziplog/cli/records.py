"""`ziplog insert`, `read`, `tail` and `trim`: records from and to the shell."""

from __future__ import annotations

import base64
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final

import msgspec
import typer

import ziplog
from ziplog.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Json, Timeout, connect, say, stdin
from ziplog.cli.positions import FORMS, position
from ziplog.cli.terminal import one_line, shown, shown_json
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Maximum number of lines that `--lines` inserts in one call ...
_LINES_AT_ONCE: Final = 1024
#: ... and of their bytes.
_BYTES_AT_ONCE: Final = 4 * 1024 * 1024

Rid = Annotated[str, typer.Argument(metavar="RID", help="<gsn>@<shard>")]


def insert(
    text: Annotated[
        str | None,
        typer.Argument(metavar="TEXT", help="The record; '-': stdin. [default: read --file]"),
    ] = None,
    after: Annotated[
        str, typer.Option("--after", metavar="POSITION", help="Insert after this position.")
    ] = "genesis",
    key: Annotated[str | None, typer.Option("--key", help="The record's key, as UTF-8.")] = None,
    file: Annotated[
        Path,
        typer.Option("--file", metavar="F", help="Read the record from this file; '-': stdin."),
    ] = Path("-"),
    *,
    lines: Annotated[
        bool, typer.Option("--lines", help="Insert each line as a record, in this order.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Keep the line end at the end of the input.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """Insert a record, or one for each line with --lines; print their rids."""
    if text == "-":
        text = None
    if text is not None and (lines or file != Path("-")):
        raise ConfigError(
            "TEXT",
            text,
            "left out with --file or --lines",
            message="give either TEXT, or --file or --lines",
        )
    with connect(bootstrap, timeout) as log:
        rid = position(after, log)
        if text is not None:
            _print_rids([log.insert_after(text.encode(), rid, key=key)])
            return
        with _opened(file) as source:
            if not lines:
                record = source.read()
                _print_rids([log.insert_after(record if raw else _chomp(record), rid, key=key)])
                return
            for batch in _batches(source):
                rids = log.insert_many(batch, rid, key=key)
                _print_rids(rids)
                rid = rids[-1]


def read(
    rid: Rid, *, json: Json = False, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP, timeout: Timeout = 10
) -> None:
    """Print a record's payload, byte for byte; on a terminal, control characters are escaped."""
    wanted = ziplog.RecordId.parse(rid)
    with connect(bootstrap, timeout) as log:
        record = log.read_record(wanted)
    if json:
        sys.stdout.buffer.write(as_json(record))
    elif sys.stdout.isatty():
        text = shown(record.payload.decode(errors="backslashreplace"))
        sys.stdout.buffer.write(text.encode() + b"\n")
    else:
        sys.stdout.buffer.write(record.payload)


def tail(
    start: Annotated[
        str, typer.Option("--from", metavar=FORMS, help="Start here (inclusive).")
    ] = "genesis",
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, metavar="N", help="Stop after N records.")
    ] = None,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for new records until Ctrl-C.")
    ] = False,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """Print records in log order: rid, a tab, the payload as text.

    Control characters are escaped; --json is exact.
    """
    with connect(bootstrap, timeout) as log:
        first = position(start, log)
        subscription = log.subscribe(first, follow=follow, timeout=None if follow else timeout)
        with subscription:
            _print_records(subscription, limit, json=json, follow=follow)


def trim(
    before: Annotated[str, typer.Argument(metavar="POSITION", help="end|GSN|RID")],
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 30.0,
) -> None:
    """Delete every record before a position, on all servers, for good; ask on a terminal."""
    with connect(bootstrap, timeout) as log:
        rid = position(before, log)
        if rid.gsn <= 0:
            raise ConfigError("POSITION", before, "'end', a gsn, or '<gsn>@<shard>'")
        if not yes and is_terminal():
            question = f"Delete all records before {rid} of the log at {bootstrap}, for good?"
            typer.confirm(question, abort=True, err=True)
        log.trim(rid)
    say(f"deleted all records before {rid}")


def is_terminal() -> bool:
    """Whether a person can answer a question."""
    return sys.stdin is not None and sys.stdin.isatty()


def _print_records(
    subscription: ziplog.Subscription, limit: int | None, *, json: bool, follow: bool
) -> None:
    render = as_json if json else _as_text
    out = sys.stdout.buffer
    for record in itertools.islice(subscription, limit):
        out.write(render(record))
        if follow and subscription.caught_up:
            out.flush()


def _print_rids(rids: list[ziplog.RecordId]) -> None:
    sys.stdout.write("".join(f"{rid}\n" for rid in rids))


def _opened(file: Path) -> BinaryIO:
    """Open a file, or return stdin for "-"; report that a terminal is read."""
    if file != Path("-"):
        return file.open("rb")
    source = stdin()
    if is_terminal():
        say("reading from the terminal; end the input with Ctrl-D")
    return source


def _chomp(line: bytes) -> bytes:
    """Return `line` without its line end."""
    return line.removesuffix(b"\n").removesuffix(b"\r") if line.endswith(b"\n") else line


def _batches(source: BinaryIO) -> Iterator[list[bytes]]:
    """Split the input into lists of lines (without their ends) of bounded count and size."""
    batch: list[bytes] = []
    size = 0
    for line in source:
        batch.append(_chomp(line))
        size += len(line)
        if len(batch) == _LINES_AT_ONCE or size >= _BYTES_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _as_text(record: ziplog.Record) -> bytes:
    # One line for each record, whatever its payload; --json is the exact form.
    text = one_line(record.payload.decode(errors="backslashreplace"))
    return f"{record.rid}\t{text}\n".encode(errors="backslashreplace")


def as_json(record: ziplog.Record) -> bytes:
    """Return a record as --json prints it: one line, with a line feed."""
    fields: dict[str, Any] = {
        "rid": str(record.rid),
        "gsn": record.rid.gsn,
        "shard": record.rid.shard,
        "epoch": record.epoch,
        "timestamp": record.timestamp.isoformat(),
    }
    fields |= _bytes_field("key", record.key)
    fields |= _bytes_field("payload", record.payload)
    return shown_json(msgspec.json.encode(fields).decode()).encode() + b"\n"


def _bytes_field(name: str, value: bytes | None) -> dict[str, str | None]:
    try:
        return {name: None if value is None else value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_b64": base64.b64encode(value or b"").decode()}
