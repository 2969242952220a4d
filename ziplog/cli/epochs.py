"""`ziplog epochs`: the epochs of the log, and what each shard has in them."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import ziplog
from ziplog.cli import moments
from ziplog.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Json, Timeout, connect
from ziplog.cli.tables import cell, stdout, table
from ziplog.cli.terminal import print_json
from ziplog.core.gsn import Schedule
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from ziplog.client.blocking import Log

#: Number of epochs that are shown without `--from`.
_LATEST: Final = 10
_COLUMNS: Final = (
    "epoch", "lease", "begins", "ms", "shard", "weight", "records", "holes", "state", "from"
)  # fmt: skip
_NUMBERS: Final = frozenset(_COLUMNS) - {"begins", "state"}


def epochs(
    *,
    first: Annotated[
        int | None, typer.Option("--from", min=0, metavar="N", help="The first epoch.")
    ] = None,
    last: Annotated[
        int | None, typer.Option("--to", min=0, metavar="N", help="The last epoch.")
    ] = None,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """Print epochs, at most 1000, and for each its shards; without --from, the latest.

    begins: the time of its first record, by the clock of the record's client. ms: its length.
    records: stable records now; the command reads them. holes: positions of the shard before its
    last record of the epoch that hold no record. state: final if all positions of the shard
    in it are decided and stable, else open. from: its first position. Trimmed epochs are omitted.

    Example: ziplog epochs --from 120 --to 130
    """
    with connect(bootstrap, timeout) as log:
        document = log.cluster()
        stop = (document["epoch"] if last is None else last) + 1
        start = max(stop - _LATEST, 0) if first is None else first
        if start >= stop:
            limit = "the last known epoch" if last is None else "--to"
            raise ConfigError("--from", start, f"at most {limit}, which is {stop - 1}")
        found = log.epochs(start, stop)
        _count(log, found, document["trimmed_before"])
    if json:
        for epoch in found:
            print_json(epoch)
    else:
        _print(found)


def _count(log: Log, found: list[dict[str, Any]], trimmed_before: str) -> None:
    """Add to epochs the time of the first record, and to their shards the records and holes."""
    records: Counter[tuple[int, int]] = Counter()
    last: dict[tuple[int, int], int] = {}
    begins: dict[int, int] = {}
    trim = ziplog.RecordId.parse(trimmed_before).gsn
    if found:
        start = max(found[0]["start"], trim)
        with log.subscribe(ziplog.RecordId(start, 0), follow=False) as subscription:
            for record in subscription:
                if record.epoch > found[-1]["epoch"]:
                    break
                records[record.epoch, record.rid.shard] += 1
                last[record.epoch, record.rid.shard] = record.rid.gsn
                begins.setdefault(record.epoch, record.timestamp_us)
    for epoch in found:
        number = epoch["epoch"]
        epoch["begins"] = moments.iso(begins[number]) if number in begins else None
        schedule = _schedule(tuple((one["shard"], one["weight"]) for one in epoch["shards"]))
        base = epoch["start"]
        for shard in epoch["shards"]:
            key = number, shard["shard"]
            shard["records"], shard["holes"] = records[key], 0
            if key in last:
                before = schedule.slot_from(shard["shard"], max(trim - base, 0))
                positions = schedule.slot_from(shard["shard"], last[key] + 1 - base) - before
                shard["holes"] = positions - records[key]


@functools.cache
def _schedule(weights: tuple[tuple[int, int], ...]) -> Schedule:
    return Schedule(weights)


def _print(found: list[dict[str, Any]]) -> None:
    shown = table(*_COLUMNS, right=_NUMBERS)
    for epoch in found:
        head = [epoch["epoch"], epoch["lease"], epoch["begins"], epoch["milliseconds"]]
        for shard in epoch["shards"]:
            own = [shard[key] for key in ("shard", "weight", "records", "holes", "state")]
            shown.add_row(*map(cell, [*head, *own, epoch["start"] if head[0] != "" else ""]))
            head = [""] * len(head)
    stdout().print(shown)
