"""The settings of a player."""

from __future__ import annotations

import msgspec

from logplayer.contract import TargetSpec
from ziplog.types import RID_GENESIS, RecordId


class PlayerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a player; all processes of a player have the same ones."""

    name: str
    targets: tuple[TargetSpec, ...]
    #: Where new cursors begin; RID_RECENT: after the last record.
    start: RecordId = RID_GENESIS
    lease_ms: int = 10_000
    #: Bound of the records that the tasks share, in bytes.
    memory_bytes: int = 64 * 1024 * 1024
    #: Maximum time between a step and the move of its cursor.
    commit_ms: int = 1000
    #: Time without a record of its own after which a task moves past the positions of others.
    idle_ms: int = 10_000
    #: Time without use after which a cursor holds no trims, in seconds; 0: it never holds any.
    hold_s: int = 604_800
