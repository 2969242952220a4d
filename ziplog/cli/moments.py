"""Moments as arguments of the command line: ISO 8601, or a time ago."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from ziplog.errors import ConfigError

#: The allowed forms, for help texts.
FORMS: Final = "10m|2h|1d|2026-01-31T12:00"
_SPAN: Final = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)([smhdw])", re.ASCII)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def is_ago(text: str) -> bool:
    """Whether a text is a time ago: "90s", "10m", "1.5h", "1d" or "1w"."""
    return _SPAN.fullmatch(text) is not None


def moment_us(option: str, text: str, now_us: int) -> int:
    """Return the moment that an argument names, in Unix microseconds.

    Args:
        option: its name, for errors.
        text: "90s", "10m", "2h" or "1d" ago, or ISO 8601; without a zone: UTC. It may begin with
            "@".
        now_us: the present time.

    Raises:
        ConfigError: it is none of these.

    """
    given = text.removeprefix("@")
    if found := _SPAN.fullmatch(given):
        return max(now_us - int(float(found[1]) * _SECONDS[found[2]] * 1_000_000), 0)
    try:
        named = datetime.fromisoformat(given)
    except ValueError:
        allowed = "a time ago ('90s', '10m', '2h', '1d') or ISO 8601 ('2026-01-31T12:00')"
        raise ConfigError(option, text, allowed) from None
    return _micros(named if named.tzinfo is not None else named.replace(tzinfo=UTC))


def span_s(option: str, text: str) -> int:
    """Return the whole seconds of a time span: "90s", "10m", "1.5h" or "1d".

    Raises:
        ConfigError: it is none of these.

    """
    found = _SPAN.fullmatch(text)
    seconds = int(float(found[1]) * _SECONDS[found[2]]) if found is not None else 0
    if not seconds:
        raise ConfigError(option, text, "a time span ('90s', '10m', '2h', '1d')")
    return seconds


def iso(at_us: int) -> str:
    """Return Unix microseconds as ISO 8601 in UTC, to the millisecond."""
    at = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=at_us)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _micros(at: datetime) -> int:
    return (at - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)
