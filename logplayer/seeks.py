"""Which seeks of its cursors a target can follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ziplog.errors import ConfigError
from ziplog.types import RID_RECENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    import ziplog
    from logplayer.contract import TargetSpec
    from ziplog.types import RecordId


def check_seek(log: ziplog.Log, spec: TargetSpec, names: Sequence[str], position: RecordId) -> None:
    """Raise ConfigError if a target cannot begin at a position; `names`: those of its cursors."""
    if spec.seeks == "anywhere" or (spec.seeks == "forward" and position == RID_RECENT):
        return
    if spec.seeks == "nowhere":
        text = (
            f"the target {spec.name} is a mirror, whose rows have numbers from its cursor's start:"
            f" it follows no seek; stop the player, delete each cursor (`ziplog cursor delete"
            f" {names[0]}`) and create it (`ziplog cursor create {names[0]} --start POSITION`)"
        )
        raise ConfigError("position", str(position), "that of the mirror", message=text)
    at = {one.name: one.position for one in log.cursors(f"{names[0].rpartition('/')[0]}/*")}
    for name in names:
        if name in at and position.gsn < at[name].gsn:
            text = (
                f"the cursor {name} is at {at[name]}, and the target {spec.name} may have records"
                f" from {position} on: files are not written twice; remove those from the position"
                f" on and seek with `ziplog cursor seek {name} {position}`, or add a target of"
                " another name and directory"
            )
            raise ConfigError("position", str(position), f"{at[name]} or above", message=text)
