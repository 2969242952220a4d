"""`ziplog insert`, `append` and `read`: records from and to the shell."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final

import typer

from ziplog.cli import known_names
from ziplog.cli.options import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    Json,
    Region,
    Timeout,
    connect,
    is_terminal,
    say,
    stdin,
    typed_bytes,
)
from ziplog.cli.positions import FORMS, parse
from ziplog.cli.progress import bar
from ziplog.cli.rendering import as_json
from ziplog.cli.terminal import print_json, shown
from ziplog.errors import ConfigError, NoSuchRecordError, OutcomeUnknownError, ZiplogError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import ziplog

_STDIN: Final = Path("-")
_RID: Final = re.compile(r"\d+@\d+", re.ASCII)
#: Maximum number of lines that `--lines` inserts in one call ...
_LINES_AT_ONCE: Final = 1024
#: ... and of their bytes.
_BYTES_AT_ONCE: Final = 4 * 1024 * 1024

#: Maximum number of ranges of lines in a message.
_MAX_RANGES: Final = 8

#: How a client's error begins to say what a program can do, which still has the client.
_HINT: Final = "; resolve()"

Position = Annotated[str, typer.Argument(metavar="POSITION", help=f"{FORMS}.")]
Text = Annotated[
    str | None,
    typer.Argument(metavar="TEXT", help="The record; '-': stdin. [default: the content of --file]"),
]
After = Annotated[
    str, typer.Option("--after", metavar="POSITION", help="Insert after this position.")
]
Key = Annotated[str | None, typer.Option("--key", help="The record's key.")]
File = Annotated[
    Path, typer.Option("--file", metavar="F", help="Read the record from this file; '-': stdin.")
]
Shard = Annotated[
    int | None,
    typer.Option(
        "--shard",
        min=0,
        metavar="N",
        help="Insert at this shard.",
        autocompletion=known_names.shards,
    ),
]
MinRegions = Annotated[
    int | None,
    typer.Option(
        "--min-regions",
        min=1,
        max=16,
        metavar="N",
        help="Insert at a shard whose servers are in so many regions. [default: the cluster's]",
    ),
]
Lines = Annotated[
    bool, typer.Option("--lines", help="Insert each line as a record, in this order.")
]
Raw = Annotated[bool, typer.Option("--raw", help="Keep the line end at the end of the input.")]


def insert(
    text: Text = None,
    after: After = "genesis",
    key: Key = None,
    file: File = _STDIN,
    shard: Shard = None,
    min_regions: MinRegions = None,
    region: Region = None,
    *,
    lines: Lines = False,
    raw: Raw = False,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """Insert a record, or one for each line with --lines; print their rids.

    --json: rid, gsn, shard, epoch, and the path: fast (two message delays), slow, or mixed.
    """
    with _connected(after, text, file, bootstrap, timeout, region, lines=lines, raw=raw) as given:
        log, rid, batches = given
        insert_many = partial(
            log.insert_many, key=_bytes_of(key), shard=shard, min_regions=min_regions
        )
        _store(log, batches, rid, insert_many, lines=lines, json=json)


def append(
    text: Text = None,
    after: After = "genesis",
    key: Key = None,
    file: File = _STDIN,
    shard: Shard = None,
    min_regions: MinRegions = None,
    region: Region = None,
    *,
    lines: Lines = False,
    raw: Raw = False,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """Insert as `ziplog insert`; print rids once no later record can get before them.

    When a server fails, it waits until the next view of its shard has begun. Options and output are
    those of `ziplog insert`.
    """
    with _connected(after, text, file, bootstrap, timeout, region, lines=lines, raw=raw) as given:
        log, rid, batches = given
        append_many = partial(
            log.append_many, key=_bytes_of(key), shard=shard, min_regions=min_regions
        )
        try:
            _store(log, batches, rid, append_many, lines=lines, json=json)
        except OutcomeUnknownError as error:
            raise _with_rids(error) from None


def _bytes_of(key: str | None) -> bytes | None:
    return None if key is None else typed_bytes(key)


@contextlib.contextmanager
def _connected(
    after: str,
    text: str | None,
    file: Path,
    bootstrap: str,
    timeout: float,
    region: str | None,
    *,
    lines: bool,
    raw: bool,
) -> Iterator[tuple[ziplog.Log, ziplog.RecordId, Iterable[list[bytes]]]]:
    """Open the input, and connect; yield the client, where to insert, and the records."""
    if text == "-":
        text = None
    if text is not None and (lines or file != _STDIN):
        raise ConfigError(
            "TEXT",
            text,
            "left out with --file or --lines",
            message="give either TEXT, or --file or --lines",
        )
    find = parse(after, "--after", excluded=("recent",))
    with contextlib.ExitStack() as opened:
        given = _open(file) if text is None else io.BytesIO(typed_bytes(text))
        source = opened.enter_context(given)
        log = opened.enter_context(connect(bootstrap, timeout, region))
        rid = find(log)
        # An argument is inserted as it is.
        record = source.read if text is not None else partial(_record, source, keeps=raw)
        yield log, rid, _batches(source, file) if lines else [[record()]]


def _store(
    log: ziplog.Log,
    batches: Iterable[list[bytes]],
    rid: ziplog.RecordId,
    store: Callable[[list[bytes], ziplog.RecordId], list[ziplog.RecordId]],
    *,
    lines: bool,
    json: bool,
) -> None:
    """Store each batch after the one before it, the first one after `rid`; print the rids."""
    before, count = log.stats(), 0
    for batch in batches:
        try:
            rids = store(batch, rid)
        except ZiplogError as error:
            if lines:
                _say_missing(error.results or [None] * len(batch), count)
            raise
        rid = rids[-1]
        count += len(rids)
        if json:
            before = _print_as_json(log, rids, before)
        else:
            sys.stdout.write("".join(f"{rid}\n" for rid in rids))


def _say_missing(results: list[ziplog.RecordId | None], before: int) -> None:
    """Report which lines of a batch are not acknowledged; `before`: number of earlier lines."""
    lines = dict(enumerate(results, before + 1))
    missing = [number for number, rid in lines.items() if rid is None]
    stored = [f"line {number} is at {rid}" for number, rid in lines.items() if rid is not None]
    if missing:
        known = f" ({len(stored)} others are; the last of them, {stored[-1]})" if stored else ""
        say(f"not acknowledged: {_ranges(missing)} of the input{known}")


def _ranges(numbers: list[int]) -> str:
    """Return line numbers, which ascend, as people write them."""
    found = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        first, *others = [number for _, number in run]
        found.append(f"{first} to {others[-1]}" if others else str(first))
    shown_ranges = found if len(found) <= _MAX_RANGES else [*found[:_MAX_RANGES], "others"]
    return f"{'line' if len(numbers) == 1 else 'lines'} {', '.join(shown_ranges)}"


def _with_rids(error: OutcomeUnknownError) -> OutcomeUnknownError:
    """Return the error of an append with the rids, if all records are placed but not sealed."""
    rids = [rid for rid in error.results if rid is not None]
    if not rids or len(rids) < len(error.results):
        return error
    what, _, _ = str(error).partition(_HINT)
    return OutcomeUnknownError(
        f"{what}; do not append again what the log has at {' '.join(map(str, rids))}: once a later"
        f" `ziplog append --after {rids[-1]}` succeeds, no record can get before it",
        shard=error.shard,
        seq=error.seq,
    )


def read(
    position: Position,
    region: Region = None,
    *,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10,
) -> None:
    """Print a record's payload, byte for byte; on a terminal, control characters are escaped.

    A rid names one record, as every other position does the first stable record from there on.
    """
    find = parse(position, "POSITION")
    with connect(bootstrap, timeout, region) as log:
        if _RID.fullmatch(position):
            record = log.read_record(find(log))
        else:
            record = _first_from(log, find(log), position, timeout)
    if json:
        sys.stdout.buffer.write(as_json(record))
    elif sys.stdout.isatty():
        text = shown(record.payload.decode(errors="backslashreplace"))
        sys.stdout.buffer.write(text.encode() + b"\n")
    else:
        sys.stdout.buffer.write(record.payload)


def _first_from(
    log: ziplog.Log, start: ziplog.RecordId, position: str, timeout: float
) -> ziplog.Record:
    """Return the first stable record from a position on."""
    with log.subscribe(start, follow=False, timeout=timeout) as records:
        found = next(iter(records), None)
    if found is None:
        raise NoSuchRecordError(start, f"the log has no stable record from {position} on")
    return found


def _print_as_json(
    log: ziplog.Log, rids: list[ziplog.RecordId], before: dict[str, int]
) -> dict[str, int]:
    """Print a line for each record; return the counters of the client after its insert."""
    known, after = log.extents(rids[0].gsn, rids[-1].gsn + 1), log.stats()
    grown = [name for name in ("fast", "slow") if after[f"{name}_path"] > before[f"{name}_path"]]
    path = grown[0] if len(grown) == 1 else "mixed"
    for rid in rids:
        line = {"rid": str(rid), "gsn": rid.gsn, "shard": rid.shard}
        line |= {"epoch": known.epoch_at(rid.gsn), "path": path}
        print_json(line)
    return after


@contextlib.contextmanager
def _open(file: Path) -> Iterator[BinaryIO]:
    """Open a file, or yield stdin for "-"; report that a terminal is read."""
    if file == _STDIN:
        source = stdin()
        if is_terminal():
            say("reading from the terminal; end the input with Ctrl-D")
        yield source
        return
    with file.open("rb") as opened:
        yield opened


def _record(source: BinaryIO, *, keeps: bool) -> bytes:
    """Return the whole input as a record, without its line end unless it `keeps` it."""
    record = source.read()
    if not record:
        say("the input is empty: inserting an empty record")
    return record if keeps else _chomp(record)


def _chomp(line: bytes) -> bytes:
    """Return `line` without its line end."""
    return line.removesuffix(b"\n").removesuffix(b"\r") if line.endswith(b"\n") else line


def _batches(source: BinaryIO, file: Path) -> Iterator[list[bytes]]:
    """Split the input into lists of lines (without their ends) of bounded count and size."""
    batch: list[bytes] = []
    size = done = 0
    total = file.stat().st_size if file != _STDIN else None
    with bar("inserting", total) as advance:
        for line in source:
            batch.append(_chomp(line))
            size += len(line)
            if len(batch) == _LINES_AT_ONCE or size >= _BYTES_AT_ONCE:
                yield batch
                done += size
                advance(done)
                batch, size = [], 0
        if batch:
            yield batch
