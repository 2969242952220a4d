"""Targets that write files, and what is in their directories."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from logplayer.targets.files_target import FilesTarget
from tests.unit.logplayer.targets.databases import task

if TYPE_CHECKING:
    from pathlib import Path

    from logplayer.contract import Task
    from logplayer.targets.file_formats import Format


def files(directory: Path, kind: Format = "jsonl", roll_bytes: int = 1) -> FilesTarget:
    """Return a target of which each batch becomes a file, if not told otherwise."""
    return FilesTarget(directory, kind, roll_bytes)


def opened(directory: Path, term: int = 1, **more: Any) -> tuple[FilesTarget, Task]:
    target, of = files(directory), task(term, **more)
    target.open(of)
    return target, of


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "part-000").iterdir())


def stored(directory: Path) -> list[int]:
    """Return the gsns of all lines, in the order of the names."""
    return [
        json.loads(line)["gsn"]
        for path in sorted((directory / "part-000").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
