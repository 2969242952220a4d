"""Conversion of values to JSON and back, for the shell.

`from_json` is the inverse of `to_json`. A value without a JSON form is an object with one key that
begins with "$": {"$base64": text} is bytes; {"$map": [[key, value], ...]} is a dictionary with
other keys than text; {"$float": "nan"}, "inf" or "-inf" is a float that JSON cannot express. A
dictionary that looks like one of these gets an additional "$". Any other stored type is shown as
{"$unknown": text}, which cannot be read back.
"""

from __future__ import annotations

import base64
import math
from typing import Any, Final

import msgspec

from logdb.values import to_hashable
from ziplog.errors import ConfigError

_BYTES: Final = "$base64"
_MAP: Final = "$map"
_FLOAT: Final = "$float"
_UNKNOWN: Final = "$unknown"


def encode(value: Any) -> str:
    """Return a value as one line of JSON."""
    return msgspec.json.encode(to_json(value)).decode()


def decode(text: str, name: str) -> Any:
    """Return the value of a line of JSON.

    Raises:
        ConfigError: the text is not JSON, or not a value; `name` is where it was given.

    """
    try:
        return from_json(msgspec.json.decode(text))
    except RecursionError:
        raise ConfigError(name, text[:40], "JSON with less nesting") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(name, text, f"JSON ({error})") from error


def to_json(value: Any) -> Any:
    """Return a value's JSON form."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: str(value)}
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    # No comprehensions below: they would take two stack frames per level.
    if isinstance(value, dict):
        return _from_dictionary(value)
    if type(value) in {list, tuple}:
        rows = []
        for inner in value:
            rows.append(to_json(inner))  # noqa: PERF401 - see above
        return rows
    return {_UNKNOWN: str(value)}


def _from_dictionary(value: dict[Any, Any]) -> dict[str, Any]:
    if not all(isinstance(key, str) for key in value):
        pairs = []
        for key, inner in value.items():
            pairs.append([to_json(key), to_json(inner)])
        return {_MAP: pairs}
    prefix = "$" if _is_marker(value) else ""
    made = {}
    for key, inner in value.items():
        made[prefix + key] = to_json(inner)
    return made


def _is_marker(value: dict[Any, Any]) -> bool:
    return len(value) == 1 and next(iter(value)).startswith("$")


def from_json(value: Any) -> Any:
    """Return the value of a JSON form.

    Raises:
        ValueError: an object's single key begins with "$" but is unknown.

    """
    if isinstance(value, list):
        return list(map(from_json, value))
    if not isinstance(value, dict):
        return value
    if _is_marker(value):
        return _from_marker(*next(iter(value.items())))
    return dict(zip(value, map(from_json, value.values()), strict=True))


def _from_marker(mark: str, value: Any) -> Any:
    if mark.startswith("$$"):
        return {mark[1:]: from_json(value)}
    try:
        if mark == _BYTES:
            return base64.b64decode(value, validate=True)
        if mark == _FLOAT and value in {"nan", "inf", "-inf"}:
            return float(value)
        if mark == _MAP:
            return {to_hashable(from_json(key)): from_json(inner) for key, inner in value}
    except TypeError as error:
        raise ValueError(f"{mark} with {value!r}: {error}") from error
    raise ValueError(f"unknown marker {mark}; write a key that begins with $ with one more $")
