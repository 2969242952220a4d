"""LogPlayer: delivers the records of a log to targets, in order (docs/player.md).

`Player` delivers in a thread of this program, and shares its tasks with other processes of the same
name. `load` returns one from a file. `targets` has the kinds of targets; `Target` is the interface
for others. `Receiver` is the other end of `targets.push`. `aio` has players and receivers with
coroutines.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from logplayer.contract import (
    Batch,
    Fenced,
    Opened,
    Rejected,
    RejectedRecord,
    Retry,
    Target,
    Task,
)

if TYPE_CHECKING:
    from logplayer import aio, targets
    from logplayer.config import load
    from logplayer.player import Player
    from logplayer.receiver import Receiver

__all__ = [
    "Batch",
    "Fenced",
    "Opened",
    "Player",
    "Receiver",
    "Rejected",
    "RejectedRecord",
    "Retry",
    "Target",
    "Task",
    "aio",
    "load",
    "targets",
]


def __getattr__(name: str) -> Any:
    """Import the other names at their first use."""
    if name in {"aio", "targets"}:
        return importlib.import_module(f"logplayer.{name}")
    if name == "load":
        return importlib.import_module("logplayer.config").load
    if name == "Player":
        return importlib.import_module("logplayer.player").Player
    if name == "Receiver":
        return importlib.import_module("logplayer.receiver").Receiver
    raise AttributeError(f"module 'logplayer' has no attribute {name!r}")
