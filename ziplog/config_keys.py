"""Keys of files of settings: each is a field with its type, range, unit and meaning.

Rule: unknown keys are refused, with the closest name.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from ziplog.errors import ConfigError

if TYPE_CHECKING:
    import re
    from collections.abc import Iterable, Mapping

#: When the nodes of a cluster take a changed value. reload: while they run (`ziplog config
#: reload`). restart: each when it is restarted. stop: once all were stopped together. never.
Change = Literal["reload", "restart", "stop", "never"]


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a file: its type, range and meaning."""

    about: str
    type: type
    unit: str = ""
    low: int = 0
    high: int = 0
    choices: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    rule: str = ""
    #: Its value never appears in an error's text.
    secret: bool = False
    change: Change = "restart"

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        if self.type is bool:
            return "true or false"
        if self.choices:
            return " or ".join(repr(choice) for choice in self.choices)
        if self.type in {int, float}:
            kind = "a whole number" if self.type is int else "a number"
            return f"{kind}, {self.low} to {self.high}{self.unit and ' ' + self.unit}"
        return self.rule

    def accepts(self, value: object) -> bool:
        """Whether `value` is allowed; a whole number is a number, too."""
        if self.type is float and type(value) in {int, float}:
            return self.low <= value <= self.high  # type: ignore[operator]
        if type(value) is not self.type:
            return False
        if isinstance(value, str):
            return (not self.choices or value in self.choices) and (
                self.pattern is None or self.pattern.fullmatch(value) is not None
            )
        return (
            isinstance(value, bool)
            or not isinstance(value, int)
            or (self.low <= value <= self.high)
        )


@functools.cache
def keys_of(table: type) -> Mapping[str, tuple[Key, Any]]:
    """Return the keys of a table and their defaults (`dataclasses.MISSING` where there is none)."""
    hints = get_type_hints(table, include_extras=True)
    return {
        field.name: (key, field.default)
        for field in dataclasses.fields(table)
        for key in getattr(hints[field.name], "__metadata__", ())
    }


def refuse_unknown(
    table: Mapping[str, object],
    known: Iterable[str],
    where: str,
    command: str = "ziplog config show",
) -> None:
    """Raise `ConfigError` if `table`, called `where`, has an unknown key.

    `command` shows all keys.
    """
    names = tuple(known)
    for name, value in table.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"`{command}` lists all keys"
            problem = f"unknown key {name!r} in {where}"
            raise ConfigError(problem, value, f"left out ({hint})", message=f"{problem}; {hint}")


def check_fields(table: Any, where: str) -> None:
    """Raise `ConfigError` if a field of `table` has a value that its key does not allow."""
    kind: type = type(table)  # as above
    for name, (key, default) in keys_of(kind).items():
        value = getattr(table, name)
        if not key.accepts(value) and not (value is None and default is None):
            shown = "(not shown)" if key.secret else value
            raise ConfigError(f"{name}{where}", shown, key.allowed)
