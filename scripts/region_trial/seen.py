"""What the clients of each region saw, from the files of their histories."""

from __future__ import annotations

from typing import TYPE_CHECKING

from region_trial.clients import region_of
from region_trial.verdict import Seen
from tests.history import events

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def gather(history: Path, regions: Sequence[str]) -> dict[str, Seen]:
    """Read the histories of a trial; return what each region's clients saw."""
    found = {region: Seen() for region in regions}
    for path in events.files_of([history]):
        kind, _, number = path.name.removesuffix(events.SUFFIX).partition("-")
        if kind in {"client", "writer", "reader"}:
            _read(path, kind, found[regions[region_of(int(number))]])
    return found


def _read(path: Path, kind: str, seen: Seen) -> None:
    calls: dict[int, int] = {}
    for _, event in events.read(path):
        if isinstance(event, events.Insert | events.Resolve):
            calls[event.op] = event.at
        elif isinstance(event, events.Inserted | events.Resolved) and any(event.gsns):
            seen.acks.append((calls.pop(event.op), event.at))
            if kind == "writer":
                seen.writer.append(event.at)
        elif isinstance(event, events.Delivered) and kind == "reader":
            seen.reader.append(event.at)
