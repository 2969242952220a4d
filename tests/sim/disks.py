"""Helpers for tests of simulated disks: writes, syncs, results of power cuts."""

from __future__ import annotations

import fcntl
import os
import secrets
import uuid
from pathlib import Path
from random import Random
from types import ModuleType
from typing import TYPE_CHECKING

from tests.simulator.disk import Disk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.simulator.filesystem import Descriptor, DiskPath

SEEDS = range(300)


def fresh_module() -> ModuleType:
    """Return a module with the names that production modules use."""
    module = ModuleType("module")
    vars(module).update(os=os, fcntl=fcntl, uuid=uuid, secrets=secrets, Path=Path)
    return module


def put(path: DiskPath, *contents: bytes) -> Descriptor:
    """Append to a file in several steps; create the file if needed."""
    fd = path.disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for content in contents:
        path.disk.write(fd, content)
    return fd


def sync(path: DiskPath) -> None:
    """Sync a file or directory."""
    fd = path.disk.open(path, os.O_RDONLY)
    path.disk.sync(fd)
    path.disk.close(fd)


def outcomes(
    prepare: Callable[[Disk], DiskPath], seeds: Iterable[int] = SEEDS
) -> list[bytes | None]:
    """Return a file's content after power cuts, one per seed; None: it is missing."""
    results = []
    for seed in seeds:
        disk = Disk(Random(seed))
        path = prepare(disk)
        disk.power_cut()
        results.append(path.read_bytes() if path.exists() else None)
    return results
