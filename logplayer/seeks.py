"""Which seeks of its cursors a target can follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logplayer.contract import cursor_name
from ziplog.errors import ConfigError
from ziplog.types import RID_RECENT

if TYPE_CHECKING:
    from collections.abc import Mapping

    import ziplog
    from logplayer.contract import TargetSpec
    from ziplog.types import RecordId


def check_seek(
    player: str, log: ziplog.Log, spec: TargetSpec, reached: Mapping[str, int], position: RecordId
) -> None:
    """Raise ConfigError if a target whose seeks are limited cannot begin at a position.

    Args:
        player: the player's name.
        log: the player's.
        spec: the target.
        reached: positions of the target that its cursors may be behind, by their names.
        position: that of the seek.

    """
    if spec.seeks == "nowhere":
        name = cursor_name(player, spec.name, 0)
        text = (
            f"the target {spec.name} is a mirror, whose rows have numbers from its cursor's start:"
            f" it follows no seek; stop the player, delete each cursor (`ziplog cursor delete"
            f" {name}`) and create it (`ziplog cursor create {name} --start POSITION`)"
        )
        raise ConfigError("position", str(position), "that of the mirror", message=text)
    if position == RID_RECENT:
        return
    at = {one.name: one.position.gsn for one in log.cursors(f"{player}/{spec.name}/*")}
    for partition in range(spec.partitions):
        name = cursor_name(player, spec.name, partition)
        least = max(at.get(name, 0), reached.get(name, 0))
        if position.gsn < least:
            text = (
                f"the cursor {name} is at gsn {least}, and the target {spec.name} may have records"
                f" from {position} on: files are not written twice; remove those from the position"
                f" on and seek with `ziplog cursor seek {name} {position}`, or add a target of"
                " another name and directory"
            )
            raise ConfigError("position", str(position), f"gsn {least} or above", message=text)
