"""The text of a player's file with every key of a kind of targets, its meaning and default."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from typing import TYPE_CHECKING, Any, Final

import msgspec

from logplayer.config import FileOptions, TargetHead
from logplayer.contract import TargetSpec
from logplayer.kinds import KINDS
from logplayer.targets import settings
from ziplog.config_keys import keys_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ziplog.config_keys import Key

_WIDTH: Final = 98
#: The defaults of the keys that all kinds have.
_DEFAULTS: Final[dict[str, Any]] = {
    field.name: field.default
    for field in msgspec.structs.fields(TargetSpec)
    if field.name in settings.KEYS
}
#: What the commented lines of keys without a default show.
_SHOWN: Final = {
    "apply": "module:function",
    "bootstrap": "127.0.0.1:7400",
    "dead_letter": "dead.jsonl",
    "headers": {"Authorization": "Bearer TOKEN"},
    "keys": ("user-*",),
    "map": "module:function",
    "region": "eu",
    "not_from": ("a3b1c5d7e9f00112233445566778899a/orders/copy",),
    "secret": {"env": "SECRET"},
    "shard": 0,
    "statement": "INSERT INTO events VALUES (:gsn, :key, :text)",
}


def example(kind: str) -> str:
    """Return a file with one target of a kind; `ziplog player run` runs it."""
    found = KINDS[kind]
    defaults = {**_DEFAULTS, **found.defaults}
    common = {name: (key, defaults[name]) for name, key in settings.KEYS.items()}
    lines = [
        "# A player: `ziplog player run FILE` delivers the records of a log to its targets.",
        "# Unknown keys are refused.",
        "",
        "[player]",
        *_rows(keys_of(FileOptions), {"name": kind}),
        "",
        "# One table for each target.",
        "[[target]]",
        *_rows(keys_of(TargetHead), {"name": "copy", "kind": kind}),
        *(f"# {line}" for line in textwrap.wrap(found.about, _WIDTH)),
        *_rows(keys_of(found.keys), found.example),
        *_rows(common, {}),
    ]
    return "\n".join(lines) + "\n"


def _rows(keys: Mapping[str, tuple[Key, Any]], values: Mapping[str, Any]) -> Iterator[str]:
    for name, (key, default) in keys.items():
        about = f"{key.about[0].upper()}{key.about[1:].removesuffix('.')}."
        yield from (f"# {line}" for line in textwrap.wrap(about, _WIDTH))
        is_empty = default is None or default in ((), "")
        if default is dataclasses.MISSING:
            usual = "required"
        else:
            usual = f"default: {'none' if is_empty else _render(default)}"
        allowed = textwrap.wrap(f"{key.allowed}; {usual}", _WIDTH)
        yield from (f"#   {line}" for line in allowed)
        if name in values:
            yield f"{name} = {_render(values[name])}"
        else:
            yield f"# {name} = {_render(_SHOWN[name] if is_empty else default)}"


def _render(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, tuple):
        return f"[{', '.join(_render(one) for one in value)}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{name} = {_render(one)}' for name, one in value.items())} }}"
    # JSON's escapes are valid in TOML.
    return json.dumps(value, ensure_ascii=False)
