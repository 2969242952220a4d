"""The settings that targets of all kinds have, and their checks.

Rule: a setting that cannot work raises here, before anything is connected.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypedDict, get_args, get_type_hints

from logplayer.contract import (
    MAP_RULE,
    NAME,
    NAME_RULE,
    Map,
    OnRejected,
    Seeks,
    Target,
    TargetSpec,
)
from logplayer.member_mark import MEMBERS
from ziplog.config_keys import Key
from ziplog.errors import ConfigError

TARGET_NAME_RULE: Final = f"{NAME_RULE}; and not {MEMBERS!r}"
_HOUR_MS: Final = 3_600_000
_HOUR_S: Final = 3600

#: What a payload becomes in a LogDB database.
Value = Literal["payload", "text", "json"]
VALUES: Final = get_args(Value)


@dataclass(frozen=True, slots=True)
class TimeoutKey(Key):
    """A time limit in seconds; 0 is none."""

    type: type = float
    unit: str = "seconds"
    high: int = _HOUR_S

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        return f"a number above 0, up to {self.high} {self.unit}"

    def accepts(self, value: object) -> bool:
        """Whether `value` is allowed."""
        return Key.accepts(self, value) and value != 0


def check_timeout(timeout_s: object, where: str) -> None:
    """Raise ConfigError unless a target can have this time limit."""
    key = TimeoutKey("time limit")
    if not key.accepts(timeout_s):
        raise ConfigError("timeout_s", timeout_s, key.allowed, where)


def is_async(function: object) -> bool:
    """Whether a call returns a coroutine."""
    return _is(inspect.iscoroutinefunction, function)


def is_generator(function: object) -> bool:
    """Whether a call returns a generator, so that it does nothing yet."""
    return _is(inspect.isgeneratorfunction, function) or _is(inspect.isasyncgenfunction, function)


def _is(kind: Callable[[Any], bool], function: object) -> bool:
    return kind(function) or kind(getattr(function, "__call__", None))  # noqa: B004


def check_apply(function: object, allowed: str, where: str) -> None:
    """Raise ConfigError unless `apply` is a function that does its work in the call."""
    if not callable(function) or is_async(function) or is_generator(function):
        raise ConfigError("apply", function, f"{allowed}, and no coroutine or generator", where)


class Settings(TypedDict, total=False):
    """Settings of a target; `logplayer.contract.TargetSpec` has their defaults."""

    partitions: Annotated[
        int, Key("number of tasks; fixed once the cursors exist", int, low=1, high=256)
    ]
    keys: Annotated[
        str | Sequence[str],
        Key(
            "patterns of the keys that it receives; left out: all records",
            tuple,
            rule="one or more patterns of keys, such as 'user-*'",
        ),
    ]
    map: Annotated[
        Map | None,
        Key(
            "what it receives in place of a record",
            object,
            rule=MAP_RULE,
        ),
    ]
    batch_records: Annotated[
        int, Key("maximum number of records of a batch", int, low=1, high=100_000)
    ]
    batch_bytes: Annotated[
        int, Key("maximum size of a batch with several records", int, "bytes", 1, 64 * 1024 * 1024)
    ]
    linger_ms: Annotated[
        int,
        Key(
            "age up to which a batch that is not full waits for more records",
            int,
            "milliseconds",
            0,
            60_000,
        ),
    ]
    retry_first_ms: Annotated[
        int, Key("pause before the second attempt", int, "milliseconds", 1, _HOUR_MS)
    ]
    retry_last_ms: Annotated[
        int, Key("longest pause between attempts", int, "milliseconds", 1, _HOUR_MS)
    ]
    retry_s: Annotated[
        int, Key("time after which a failing task stops; 0: never", int, "seconds", 0, 2**31 - 1)
    ]
    rejected: Annotated[
        OnRejected,
        Key(
            "what happens to a record that the target refuses for good",
            str,
            choices=("stop", "skip", "dead-letter"),
        ),
    ]
    dead_letter: Annotated[
        str | os.PathLike[str],
        Key(
            "file of rejected records", str, rule="the path of a file, with rejected='dead-letter'"
        ),
    ]


#: The common settings by name; a file of a player has them under the same names.
KEYS: Final[Mapping[str, Key]] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Settings, include_extras=True).items()
}


def target_spec(
    name: str,
    connect: Callable[[], Target] | None,
    settings: Mapping[str, object],
    *,
    stores_position: bool,
    keeps_rejected: bool = False,
    skip_writers: tuple[bytes, ...] = (),
    check_source: Callable[[int, float], None] | None = None,
    roll_s: int = 0,
    receiver: str = "",
    seeks: Seeks = "anywhere",
) -> TargetSpec:
    """Return a target with these settings.

    Raises:
        ConfigError: the name or a setting is invalid, or there is no setting of this name.

    """
    if not isinstance(name, str) or not NAME.fullmatch(name) or name == MEMBERS:
        raise ConfigError("the target's name", name, TARGET_NAME_RULE)
    where = f"target {name}"
    if not receiver and not callable(connect):
        raise ConfigError("connect", connect, "a function that returns a target", where)
    checked: dict[str, Any] = {}
    for setting, value in settings.items():
        if setting not in KEYS:
            near = difflib.get_close_matches(setting, KEYS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(KEYS)}"
            problem = f"unknown setting {setting!r}"
            raise ConfigError(
                setting, value, f"left out ({hint})", where, message=f"{problem}; {hint}"
            )
        checked[setting] = _checked(setting, value, where)
    spec = TargetSpec(
        name=name,
        connect=connect,
        stores_position=stores_position,
        keeps_rejected=keeps_rejected,
        skip_writers=skip_writers,
        check_source=check_source,
        roll_s=roll_s,
        receiver=receiver,
        seeks=seeks,
        **checked,
    )
    _check_together(spec, where)
    return spec


def _checked(setting: str, value: object, where: str) -> object:
    """Return one setting in the type that `TargetSpec` has."""
    key = KEYS[setting]
    if setting == "map":
        is_valid = value is None or callable(value)
    elif setting == "keys":
        patterns = (value,) if isinstance(value, str) else value
        is_valid = isinstance(patterns, Sequence) and bool(patterns)
        if is_valid and isinstance(patterns, Sequence):
            is_valid = all(isinstance(pattern, str) and pattern for pattern in patterns)
            value = tuple(patterns)
    else:
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        is_valid = key.accepts(value)
    if not is_valid:
        raise ConfigError(setting, value, key.allowed, where)
    return value


def _check_together(spec: TargetSpec, where: str) -> None:
    if spec.retry_last_ms < spec.retry_first_ms:
        allowed = f"at least retry_first_ms, which is {spec.retry_first_ms}"
        raise ConfigError("retry_last_ms", spec.retry_last_ms, allowed, where)
    needs_file = spec.rejected == "dead-letter" and not spec.keeps_rejected
    if needs_file and not spec.dead_letter:
        text = "dead_letter is missing: rejected='dead-letter' needs the path of a file"
        raise ConfigError("dead_letter", None, KEYS["dead_letter"].allowed, where, message=text)
    if spec.dead_letter and not needs_file:
        reason = (
            "left out: this target keeps rejected records itself"
            if spec.keeps_rejected
            else f"left out with rejected={spec.rejected!r}"
        )
        raise ConfigError("dead_letter", spec.dead_letter, reason, where)
