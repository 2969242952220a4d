"""A player's file: TOML with the tables `[player]` and `[[target]]`.

Every key is defined once, as an annotated field of `options`, `kinds` or `targets.settings`, with
its range and meaning; the loader and `ziplog player example` are made from these. Rule: unknown
keys are refused. A secret may be in a file or an environment variable, and is in no error's text.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, cast

from logplayer.kinds import FUNCTIONS, KINDS, PATHS, REFERENCE, REFERENCE_RULE
from logplayer.options import PlayerOptions, check_targets
from logplayer.player import Player
from logplayer.targets import settings
from ziplog.client import arguments
from ziplog.config_keys import Key, check_fields, keys_of, refuse_unknown
from ziplog.defaults import BOOTSTRAP, VARIABLE, bootstrap
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import ziplog
    from logplayer.contract import TargetSpec
    from logplayer.options import OnFailed
    from ziplog.cli.positions import Find

_EXAMPLE: Final = "ziplog player example KIND"
#: Where a secret may be, in place of its value.
_PLACES: Final = ("env", "file")


@dataclass(frozen=True)
class FileOptions(PlayerOptions):
    """The table `[player]`."""

    bootstrap: Annotated[
        str | None,
        Key(
            f"Nodes of the log's membership service; default: ${VARIABLE}, else {BOOTSTRAP}.",
            str,
            rule="'host:port', several separated by commas",
        ),
    ] = None
    region: Annotated[
        str | None,
        Key(
            "The region of this process, so that it reads near; default: $ZIPLOG_REGION,"
            " else none.",
            str,
            pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
            rule="1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit",
        ),
    ] = None
    start: Annotated[
        str,
        Key(
            "The first position of cursors that do not exist yet: genesis, recent, a record's id or"
            " @TIME.",
            str,
            rule="genesis, recent, a record's id or @TIME",
        ),
    ] = "genesis"

    @property
    def endpoints(self) -> list[str]:
        """The nodes of the log's membership service."""
        return arguments.endpoints(self.bootstrap or bootstrap())

    def start_finder(self) -> Find:
        """Return what finds the position of new cursors.

        Raises:
            ConfigError: `start` is no position.

        """
        from ziplog.cli.positions import parse  # noqa: PLC0415 - slow to import

        return parse(self.start, "start in [player]")

    def find_start(self, log: ziplog.Log) -> ziplog.RecordId:
        """Return the position of new cursors."""
        return self.start_finder()(log)


@dataclass(frozen=True)
class TargetHead:
    """The keys of `[[target]]` that are no settings."""

    name: Annotated[str, Key("The target's name.", str, rule=settings.TARGET_NAME_RULE)]
    kind: Annotated[str, Key("The target's kind.", str, choices=tuple(KINDS))]


class PlayerFile(NamedTuple):
    """A player's file that was read."""

    path: Path
    options: FileOptions
    targets: tuple[TargetSpec, ...]
    #: The kind of each target.
    kinds: tuple[str, ...]

    def player(self) -> Player:
        """Return the player."""
        options = self.options
        return Player(
            options.endpoints,
            options.name,
            self.targets,
            start=options.find_start,
            lease_s=options.lease_s,
            memory_bytes=options.memory_bytes,
            commit_ms=options.commit_ms,
            idle_ms=options.idle_ms,
            hold_s=options.hold_s,
            region=options.region,
            on_failed=cast("OnFailed", options.on_failed),
        )


def load(path: str | os.PathLike[str]) -> Player:
    """Return the player of a file; nothing is connected.

    Functions are imported, with the file's directory as the first one that is searched.

    Raises:
        ConfigError: the file cannot be read, or a value is not allowed; says what and where.

    """
    return read(Path(path)).player()


def read(path: Path) -> PlayerFile:
    """Return what a file has; errors are those of `load`."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        sentence = f"the player's file {path} is not valid TOML: {error}"
        raise ConfigError("file", str(path), "TOML", message=sentence) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        sentence = f"cannot read the player's file {path}: {reason}"
        raise ConfigError("file", str(path), "a readable file", message=sentence) from error
    try:
        return _parse(document, path)
    except ConfigError as error:
        where = f"{path}: {error.where}" if error.where else str(path)
        raise ConfigError(
            error.name, error.value, error.allowed, where, message=error.message
        ) from error


def _parse(document: dict[str, Any], path: Path) -> PlayerFile:
    refuse_unknown(document, ("player", "target"), "the file", _EXAMPLE)
    table = document.get("player")
    if not isinstance(table, dict):
        raise ConfigError("[player]", table, "a table", message="the table [player] is missing")
    if "metrics" in table:
        sentence = (
            "metrics in [player] is not implemented: `ziplog monitor` serves the metrics of all"
            " players, and Player.metrics() returns those of one process"
        )
        raise ConfigError("metrics", table["metrics"], "left out", message=sentence)
    options = FileOptions(**_values(table, keys_of(FileOptions), "[player]"))
    options.endpoints  # noqa: B018 - it checks them
    options.start_finder()
    tables = document.get("target", [])
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise ConfigError("[[target]]", tables, "a list of tables")
    found = [_target(one, path.parent.absolute()) for one in tables]
    kinds = tuple(one["kind"] for one in tables)
    return PlayerFile(path, options, check_targets(found), kinds)


def _target(table: dict[str, Any], directory: Path) -> TargetSpec:
    where = f"target {table['name']!r}" if "name" in table else "[[target]]"
    keys = keys_of(TargetHead)
    head = _values({name: table[name] for name in keys if name in table}, keys, where)
    _check_kind(head["kind"], where)
    kind = KINDS[head["kind"]]
    own = keys_of(kind.keys)
    common = {name: (key, None) for name, key in settings.KEYS.items()}
    given = {name: value for name, value in table.items() if name not in head}
    values = _values(given, {**own, **common}, where)
    for name, (key, _) in own.items():
        if key.secret and isinstance(values.get(name), dict):
            values[name] = _secret(values[name], f"{name} in {where}", directory)
    check_fields(
        kind.keys(**{name: values[name] for name in own if name in values}), f" in {where}"
    )
    for name, value in list(values.items()):
        if name in PATHS and isinstance(value, str) and value:
            values[name] = str(directory / value)
        elif name in FUNCTIONS:
            values[name] = _imported(value, f"{name} in {where}", directory)
    try:
        return kind.make(head["name"], **values)
    except ModuleNotFoundError as error:
        raise ConfigError("kind", head["kind"], "installed", where, message=str(error)) from error


def _check_kind(kind: object, where: str) -> None:
    if not isinstance(kind, str) or kind not in KINDS:
        near = difflib.get_close_matches(str(kind), KINDS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(KINDS)}"
        sentence = f"unknown kind {kind!r} of {where}; {hint}"
        raise ConfigError("kind", kind, hint, message=sentence)


def _values(
    table: dict[str, Any], keys: Mapping[str, tuple[Key, Any]], where: str
) -> dict[str, Any]:
    refuse_unknown(table, keys, where, _EXAMPLE)
    for name, (key, default) in keys.items():
        if name not in table and default is dataclasses.MISSING:
            sentence = f"{name} is missing in {where}; it must be {key.allowed}"
            raise ConfigError(f"{name} in {where}", None, key.allowed, message=sentence)
    return dict(table)


def _secret(place: dict[str, Any], name: str, directory: Path) -> str:
    """Return a secret that is in an environment variable or a file."""
    if len(place) != 1 or not set(place) <= set(_PLACES):
        allowed = "a text, { env = 'NAME' } or { file = 'PATH' }"
        raise ConfigError(name, "(not shown)", allowed)
    ((kind, at),) = place.items()
    if not isinstance(at, str) or not at:
        raise ConfigError(f"{kind} of {name}", at, "a name" if kind == "env" else "a path")
    if kind == "env":
        value = os.environ.get(at)
        if value is None:
            sentence = f"the environment variable {at}, which has {name}, is not set"
            raise ConfigError(name, at, "set", message=sentence)
        return value
    try:
        return (directory / at).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        sentence = f"cannot read {directory / at}, which has {name}: {reason}"
        raise ConfigError(name, at, "a readable file", message=sentence) from error


def _imported(reference: object, name: str, directory: Path) -> Any:
    """Return what "module:name" refers to."""
    if not isinstance(reference, str) or REFERENCE.fullmatch(reference) is None:
        raise ConfigError(name, reference, REFERENCE_RULE)
    module, _, path = reference.partition(":")
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    try:
        found: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # the module is foreign code
        sentence = f"cannot import {module}, which {name} names: {type(error).__name__}: {error}"
        raise ConfigError(name, reference, REFERENCE_RULE, message=sentence) from error
    for part in path.split("."):
        if not hasattr(found, part):
            sentence = f"{module} has no {path}, which {name} names"
            raise ConfigError(name, reference, REFERENCE_RULE, message=sentence)
        found = getattr(found, part)
    return found
