"""Records as lines: text for people, JSON for programs, and `ziplog tail --format`."""

from __future__ import annotations

import re
from binascii import b2a_base64
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ziplog.cli.terminal import one_line, shown_json
from ziplog.errors import ConfigError
from ziplog.types import Confirmed, Delivery

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.types import Event, Record

#: Fields of a format.
_FIELDS: Final[dict[str, Callable[[Record], str]]] = {
    "r": lambda record: str(record.rid),
    "g": lambda record: str(record.rid.gsn),
    "s": lambda record: str(record.rid.shard),
    "e": lambda record: str(record.epoch),
    "T": lambda record: record.timestamp.isoformat(),
    "k": lambda record: _escaped(record.key or b""),
    "v": lambda record: _escaped(record.payload),
    "%": lambda _: "%",
}
_FORMAT: Final = re.compile(r"%(.?)|\\([nt])|([^%\\]+|\\)", re.DOTALL)
_ESCAPES: Final = {"n": "\n", "t": "\t"}
_UNIX_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - UTC; the zone is added as text
_encode: Final = msgspec.json.Encoder().encode


def as_text(record: Record) -> bytes:
    """Return a record as one line for people; `as_json` is the exact form."""
    return f"{record.rid}\t{_escaped(record.payload)}\n".encode(errors="backslashreplace")


def key_as_text(record: Record) -> bytes:
    """Return a record's key as one line, which is empty for a record without a key."""
    return f"{_escaped(record.key or b'')}\n".encode(errors="backslashreplace")


def as_json(record: Record) -> bytes:
    """Return a record as --json prints it: one line, with a line feed."""
    return _json_line(fields_of_record(record))


def fields_of_record(record: Record) -> dict[str, Any]:
    """Return what the line of a record holds."""
    return fields_of(*record.rid, record.epoch, record.timestamp_us, record.key, record.payload)


def fields_as_json(
    gsn: int, shard: int, epoch: int, timestamp_us: int, key: bytes | None, payload: bytes
) -> bytes:
    """Return the line of a record with these fields."""
    return _json_line(fields_of(gsn, shard, epoch, timestamp_us, key, payload))


def fields_of(
    gsn: int, shard: int, epoch: int, timestamp_us: int, key: bytes | None, payload: bytes
) -> dict[str, Any]:
    """Return what the line of a record with these fields holds."""
    fields = _head(gsn, shard, epoch, timestamp_us, key)
    add_bytes(fields, "payload", payload)
    return fields


def key_as_json(record: Record) -> bytes:
    """Return the same without the payload."""
    head = _head(*record.rid, record.epoch, record.timestamp_us, record.key)
    return _json_line(head)


def event_as_text(event: Event) -> bytes:
    """Return an event of a speculation as one line for people."""
    if isinstance(event, Delivery):
        return (b"? " if event.speculative else b"+ ") + as_text(event.record)
    if isinstance(event, Confirmed):
        return f"= {event.upto}\n".encode()
    return f"! {event.after}\n".encode()


def event_as_json(event: Event) -> bytes:
    """Return an event of a speculation as --json prints it."""
    if isinstance(event, Delivery):
        kind = {"event": "deliver", "speculative": event.speculative}
        record = event.record
        return _json_line(kind | fields_of_record(record))
    if isinstance(event, Confirmed):
        return _json_line({"event": "confirm", "upto": str(event.upto)})
    return _json_line({"event": "fail", "after": str(event.after)})


def formatted(pattern: str) -> Callable[[Record], bytes]:
    r"""Return the renderer of a format: %r, %g, %s, %e, %T, %k, %v, %%, and \n, \t.

    Raises:
        ConfigError: there is no such field, or the format has none.

    """
    names = ", ".join(f"%{name}" for name in _FIELDS)
    parts: list[str | Callable[[Record], str]] = []
    for field, escape, text in _FORMAT.findall(pattern):
        if not (escape or text) and field not in _FIELDS:
            sentence = f"--format has no field '%{field}'; its fields are {names}"
            raise ConfigError("--format", pattern, f"text with {names}", message=sentence)
        parts.append(text or _ESCAPES.get(escape) or _FIELDS[field])
    if not {field for field, *_ in _FORMAT.findall(pattern)} & (_FIELDS.keys() - {"%"}):
        sentence = f"--format {pattern!r} has no field; its fields are {names}"
        raise ConfigError("--format", pattern, f"text with {names}", message=sentence)

    def render(record: Record) -> bytes:
        line = "".join(part if isinstance(part, str) else part(record) for part in parts)
        # Fields have no surrogates; those of the pattern are bytes that were typed.
        return f"{line}\n".encode(errors="surrogateescape")

    return render


def _head(gsn: int, shard: int, epoch: int, timestamp_us: int, key: bytes | None) -> dict[str, Any]:
    fields = {
        "rid": f"{gsn}@{shard}",
        "gsn": gsn,
        "shard": shard,
        "epoch": epoch,
        "timestamp": _isoformat(timestamp_us),
    }
    add_bytes(fields, "key", key)
    return fields


def _isoformat(timestamp_us: int) -> str:
    """Return `Record.timestamp.isoformat()`; records of one second share most of the work."""
    second, fraction_us = divmod(timestamp_us, 1_000_000)
    start = _isoformat_of_second(second)
    return f"{start}.{fraction_us:06}+00:00" if fraction_us else f"{start}+00:00"


@lru_cache(maxsize=64)
def _isoformat_of_second(second: int) -> str:
    return (_UNIX_EPOCH + timedelta(seconds=second)).isoformat()


def _json_line(fields: dict[str, Any]) -> bytes:
    line = _encode(fields)
    # The encoder escapes C0, so only these may have something else to escape.
    if not line.isascii() or b"\x7f" in line:
        line = shown_json(line.decode()).encode()
    return line + b"\n"


def _escaped(text: bytes) -> str:
    return one_line(text.decode(errors="backslashreplace"))


def add_bytes(fields: dict[str, Any], name: str, value: bytes | None) -> None:
    """Add bytes as text, or in base64 under another name if they are no UTF-8."""
    try:
        fields[name] = None if value is None else value.decode()
    except UnicodeDecodeError:
        fields[f"{name}_b64"] = b2a_base64(value or b"", newline=False).decode()
