"""Escapes control characters in text from records, so that a terminal can show it.

A payload may hold escape sequences that move the cursor, set the title or imitate keyboard input.
Rule: text for people is always escaped. Exact output (`ziplog read`, a value of `ziplog kv get`) is
escaped on a terminal only; escaped JSON is still the same document.
"""

from __future__ import annotations

import re
import sys
from typing import Any, Final

import msgspec

#: C0 except tab and line feed, DEL, C1; line separators and direction marks.
_CONTROLS: Final = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069"
_LINES: Final = re.compile(f"[{_CONTROLS}]")
_LINE: Final = re.compile(f"[\n{_CONTROLS}]")
_SHORT: Final = {"\n": "\\n", "\r": "\\r"}


def one_line(text: str) -> str:
    """Return text as one line without control characters, except tabs."""
    return _LINE.sub(_escaped, text)


def shown(text: str) -> str:
    """Return text for stdout: as it is in a pipe, without control characters on a terminal."""
    return _LINES.sub(_escaped, text) if sys.stdout.isatty() else text


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: "1 shard", "1,000 shards"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def shown_json(line: str) -> str:
    """Return the same JSON with escapes for what JSON allows raw: DEL, C1 and the like."""
    return _LINES.sub(lambda found: f"\\u{ord(found[0]):04x}", line)


def json_line(document: object) -> str:
    """Return a document as one line of JSON, which a terminal can show, with a line feed.

    The name of a file may hold bytes that are no UTF-8. JSON has no form for them: each
    becomes an escape of six characters.
    """
    try:
        encoded = msgspec.json.encode(document)
    except UnicodeEncodeError:
        encoded = msgspec.json.encode(_utf8(msgspec.to_builtins(document)))
    return shown_json(encoded.decode()) + "\n"


def print_json(document: object) -> None:
    """Print a document as one line of JSON on stdout."""
    sys.stdout.write(json_line(document))


def _utf8(document: Any) -> Any:
    """Return the same document, with escapes in the place of what UTF-8 cannot encode."""
    match document:
        case str():
            return document.encode(errors="backslashreplace").decode()
        case dict():
            return {_utf8(key): _utf8(value) for key, value in document.items()}
        case list() | tuple():
            return [_utf8(value) for value in document]
    return document


def _escaped(found: re.Match[str]) -> str:
    character = found[0]
    number = ord(character)
    return _SHORT.get(character) or (f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}")
