"""Whether new cursors of a player can begin at its start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logplayer.contract import cursor_name
from ziplog.errors import NoSuchRecordError, TrimmedError
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Sequence

    import ziplog
    from logplayer.contract import TargetSpec


def check_start(log: ziplog.Log, name: str, targets: Sequence[TargetSpec], start: RecordId) -> None:
    """Check that the log has the records from a start on, if a task has no cursor yet.

    The service would begin the cursor at the first record that is left, so the target would lack
    records.

    Raises:
        TrimmedError: it does not have them.

    """
    if start.gsn <= 0:  # RID_GENESIS or RID_RECENT.
        return
    try:
        first = log.extents(start.gsn).trim
    except NoSuchRecordError:
        return  # No shard owns the start yet.
    if start.gsn >= first:
        return
    known = {cursor.name for cursor in log.cursors(f"{name}/*")}
    for spec in targets:
        for partition in range(spec.partitions):
            if cursor_name(name, spec.name, partition) not in known:
                raise TrimmedError(RecordId(first, 0))
