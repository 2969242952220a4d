"""The options of a player, each with its range and meaning; and the checks of its targets."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

import msgspec

from logplayer.contract import MAP_RULE, NAME, NAME_RULE, TargetSpec
from ziplog.config_keys import Key, check_fields
from ziplog.core.cursors import MAX_HOLD_S
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Maximum number of tasks of a player.
MAX_TASKS: Final = 256
#: What a process does once one of its tasks has failed.
OnFailed = Literal["stay", "exit"]
ON_FAILED: Final = get_args(OnFailed)
_MIB: Final = 1024 * 1024


@dataclass(frozen=True)
class PlayerOptions:
    """The options of a player, besides its log, its targets and where it starts."""

    name: Annotated[
        str,
        Key(
            "The player's name: its cursors are NAME/TARGET/PARTITION.",
            str,
            pattern=NAME,
            rule=NAME_RULE,
        ),
    ]
    lease_s: Annotated[
        float,
        Key(
            "Silence of a process after which others take over its tasks.",
            float,
            unit="seconds",
            low=1,
            high=300,
        ),
    ] = 10.0
    memory_bytes: Annotated[
        int,
        Key(
            "Memory for the records that the tasks share.",
            int,
            unit="bytes",
            low=_MIB,
            high=64 * 1024 * _MIB,
        ),
    ] = 64 * _MIB
    commit_ms: Annotated[
        int,
        Key(
            "Maximum time between a step of a target and the move of its cursor.",
            int,
            unit="ms",
            low=10,
            high=60_000,
        ),
    ] = 1000
    idle_ms: Annotated[
        int,
        Key(
            "Time without a record of its own after which a task passes records of other tasks.",
            int,
            unit="ms",
            low=100,
            high=3_600_000,
        ),
    ] = 10_000
    hold_s: Annotated[
        int,
        Key(
            "Time without use after which the player's cursors no longer keep records from trims;"
            " 0: they keep none.",
            int,
            unit="seconds",
            high=MAX_HOLD_S,
        ),
    ] = 604_800
    on_failed: Annotated[
        str,
        Key(
            "What a process does once a task has failed: it stays, for the other tasks, or ends.",
            str,
            choices=ON_FAILED,
        ),
    ] = "stay"

    def __post_init__(self) -> None:
        """Refuse values that no player can have."""
        check_fields(self, "")


def check_targets(targets: Sequence[Any], map_of_others: Any = None) -> tuple[TargetSpec, ...]:
    """Return the targets of a player; those without a `map` get the other one.

    Raises:
        TypeError: one of them is no target.
        ConfigError: there is none, two have the same name, or they have too many tasks; or the map
            is no function.

    """
    if isinstance(targets, TargetSpec):
        targets = (targets,)
    if not isinstance(targets, (list, tuple)):
        kind = type(targets).__name__
        raise TypeError(f"targets must be a list of targets (logplayer.targets), not {kind}")
    for target in targets:
        if not isinstance(target, TargetSpec):
            kind = type(target).__name__
            raise TypeError(f"a target comes from a function of logplayer.targets, not {kind}")
    names = Counter(target.name for target in targets)
    if not names:
        raise ConfigError("targets", [], "one target or more")
    name, count = names.most_common(1)[0]
    if count > 1:
        sentence = f"{count} targets are named {name!r}; each needs a name of its own"
        raise ConfigError("targets", name, "of different names", message=sentence)
    tasks = sum(target.partitions for target in targets)
    if tasks > MAX_TASKS:
        sentence = f"the targets have {tasks} partitions; a player has at most {MAX_TASKS}"
        raise ConfigError("partitions", tasks, f"at most {MAX_TASKS}", message=sentence)
    if map_of_others is None:
        return tuple(targets)
    if not callable(map_of_others):
        raise ConfigError("map", map_of_others, MAP_RULE)
    return tuple(
        target if target.map is not None else msgspec.structs.replace(target, map=map_of_others)
        for target in targets
    )
