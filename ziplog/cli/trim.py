"""`ziplog trim`: deletes the front of the log, or reports what it would delete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ziplog.cli.options import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    Json,
    Timeout,
    connect,
    is_terminal,
    say,
)
from ziplog.cli.positions import parse, parse_time
from ziplog.cli.progress import bar, waiting
from ziplog.cli.terminal import counted, print_json
from ziplog.errors import ConfigError
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ziplog.cli.positions import Find
    from ziplog.client.blocking import Log
    from ziplog.client.bulk.extents import Extents
    from ziplog.client.bulk.outline import ShardOutline


def trim(
    before: Annotated[
        str | None,
        typer.Argument(metavar="[POSITION]", help="end|GSN|RID|-N|@TIME|epoch:N"),
    ] = None,
    before_time: Annotated[
        str | None,
        typer.Option("--before", metavar="TIME", help="ISO 8601, or ago: 10m, 2h, 1d."),
    ] = None,
    keep_bytes: Annotated[
        int | None,
        typer.Option("--keep-bytes", min=0, metavar="N", help="Keep N bytes or more of each copy."),
    ] = None,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Report what would be deleted; delete nothing.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Delete also what cursors hold (`ziplog cursor list`).")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 30.0,
) -> None:
    """Delete every record before a position, on all servers, for good; ask on a terminal.

    `-N` keeps the last N records. A time is that of the clients' clocks. --dry-run reads what would
    be deleted, to count it. Servers free the space segment by segment. Bytes are those of one copy
    of the log, one replica of each shard.
    """
    find = _finder(before, before_time, keep_bytes)
    with connect(bootstrap, timeout) as log:
        rid = find(log)
        if rid.gsn <= 0 and before != "end":
            raise ConfigError("POSITION", before, "a position from 1 on")
        # An empty log ends at position 0.
        rid = max(rid, RecordId(1, 0))
        if dry_run:
            _report(log, rid, json=json)
            return
        if not yes and is_terminal():
            question = f"Delete all records before {rid} of the log at {bootstrap}, for good?"
            typer.confirm(question, abort=True, err=True)
        is_new = rid.gsn > max(RecordId.parse(log.cluster()["trimmed_before"]).gsn, 1)
        with waiting(f"trim before {rid}: waiting until all records before it are stable"):
            log.trim(rid, force=force)
    if json:
        print_json({"before": str(rid), "trimmed": True})
    elif is_new:
        say(f"deleted all records before {rid}")
    else:
        say(f"nothing to delete: the log has no record before {rid}")


def _finder(before: str | None, before_time: str | None, keep_bytes: int | None) -> Find:
    """Return a function that finds the position, given exactly one of the three."""
    if [before, before_time, keep_bytes].count(None) != 2:
        raise ConfigError(
            "POSITION", before, "given, or --before, or --keep-bytes",
            message="give one of POSITION, --before and --keep-bytes",
        )  # fmt: skip
    if keep_bytes is not None:
        return lambda log: _before_last_bytes(log, keep_bytes)
    if before_time is not None:
        return parse_time(before_time, "--before")
    assert before is not None, "checked above"
    return parse(before, "POSITION", excluded=("genesis", "recent"))


def _before_last_bytes(log: Log, count: int) -> RecordId:
    """Return the last position from which on a copy of the log has `count` bytes."""
    stop = log.check_tail().gsn + 1
    known = log.extents(1, stop)
    steps = [step for outline in _outlines(log, known) for step in _steps(*outline)]
    kept, position = 0, stop
    for start, size in sorted(steps, reverse=True):
        if kept >= count:
            break
        kept, position = kept + size, start
    return RecordId(max(position if kept >= count else known.trim, known.trim, 1), 0)


def _report(log: Log, rid: RecordId, *, json: bool) -> None:
    """Print how many records, bytes and segments a trim would delete."""
    known = log.extents(1, rid.gsn)
    outlines = _outlines(log, known)
    records = 0
    with bar("counting records", len(known.shards)) as advance:
        for done, extent in enumerate(known.shards, 1):
            with log.scan(extent.shard, extent.start, extent.stop) as scan:
                for units, _ in scan:
                    records += sum(
                        sum(extent.start <= gsn < extent.stop for gsn in unit.gsns)
                        for unit in units
                    )
            advance(done)
    size = sum(size for outline in outlines for _, size in _steps(*outline))
    of_shards: dict[int, int] = {}
    for _, outline in outlines:
        of_shards[outline.shard] = max(of_shards.get(outline.shard, 0), outline.segments)
    segments = sum(of_shards.values())
    if json:
        found = {"records": records, "bytes": size, "segments": segments}
        print_json({"before": str(rid), "trimmed": False} | found)
    else:
        say(
            f"would delete {counted(records, 'record')} before {rid}, about"
            f" {counted(size, 'byte')} of each copy of the log, and free"
            f" {counted(segments, 'segment file')} on all servers; nothing was deleted"
        )


def _outlines(log: Log, known: Extents) -> list[tuple[int, ShardOutline]]:
    """Return the start and the outline of each extent."""
    return [(one.start, log.outline(one.shard, one.start, one.stop)) for one in known.shards]


def _steps(start: int, outline: ShardOutline) -> Iterator[tuple[int, int]]:
    """Yield the start and the stored bytes of each step of an outline."""
    for end, size in outline.steps:
        yield start, size
        start = end
