"""Read options: the options of `spark.read.format("ziplog")`, checked and typed.

Rule: an unknown option is refused with the closest name, and contradictory options are refused;
none is ignored. Names are case-insensitive. Invariant: an `Options` object names one source, and at
most one start and one end (docs/spark.md, section 1.1).
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

import msgspec

from spark_reader.suggestions import closest_name
from ziplog.errors import ConfigError
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

#: The kind of read: `spark.read`, or `spark.readStream`.
Mode = Literal["batch", "stream"]

SERVERS: Final = "ziplog.bootstrap.servers"
PATH: Final = "path"
START, STOP = "startingOffsets", "endingOffsets"
FIRST_EPOCH, LAST_EPOCH = "startingEpoch", "endingEpoch"
SINCE, UNTIL = "startingTimestamp", "endingTimestamp"
FAIL_ON_DATA_LOSS: Final = "failOnDataLoss"
MIN_PARTITIONS: Final = "minPartitions"
MAX_BYTES: Final = "maxBytesPerBatch"
TIMEOUT: Final = "timeout"

EARLIEST, LATEST = "earliest", "latest"

#: A driver needs too long to plan more tasks than this.
_MAX_PARTITIONS: Final = 100_000
_MAX_TIMEOUT_S: Final = 86_400
_MAX_GSN: Final = 2**63 - 1
_UNIX_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_WHOLE: Final = re.compile(r"\d{1,19}", re.ASCII)
_MILLISECONDS: Final = re.compile(r"-?\d{1,15}", re.ASCII)
_BYTES: Final = re.compile(r"(\d{1,15})([kmgt]?)b?", re.ASCII | re.IGNORECASE)
#: Options of the Kafka connector that a single log does not have.
_TOPICS: Final = frozenset({"subscribe", "subscribepattern", "assign", "topic"})
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """A load's options. Positions are gsns, `stop` exclusive; times are microseconds since 1970."""

    #: "host:port,..." of the membership service; "" with a `path`.
    servers: str = ""
    #: A cluster's data directory, or a server's; "" with `servers`.
    path: str = ""
    #: None: the first stored position.
    start: int | None = None
    #: The stream starts at the end of the log.
    starts_at_latest: bool = False
    #: None: the end of the log when the load starts.
    stop: int | None = None
    #: Both inclusive.
    first_epoch: int | None = None
    last_epoch: int | None = None
    since_us: int | None = None
    until_us: int | None = None
    fail_on_data_loss: bool = True
    min_partitions: int | None = None
    #: None: no limit.
    max_bytes_per_batch: int | None = None
    timeout_s: float = 10.0


def parse(options: Mapping[str, str], mode: Mode = "batch") -> Options:
    """Return the options of a load.

    Args:
        options: as Spark passes them; all values are text.
        mode: a stream accepts no `ending...`, and a batch cannot start at `latest`.

    Raises:
        ConfigError: an option is unknown, has an invalid value, or contradicts another option.

    """
    known = {name.lower(): name for name in _READERS}
    fields: dict[str, Any] = {}
    for given, text in options.items():
        name = known.get(given.lower())
        if name is None:
            refuse_unknown(given, text, _READERS)
        field, read = _READERS[name]
        fields[field] = read(name, text)
    if fields.get("start") == LATEST:
        fields.update(start=None, starts_at_latest=True)
    found = Options(**fields)
    _check(found, mode)
    return found


def refuse_unknown(given: str, text: str, names: Collection[str]) -> NoReturn:
    """Refuse an unknown option; the error suggests the closest name, or lists all names.

    Raises:
        ConfigError: always.

    """
    near = closest_name(given, names)
    if given.lower() in _TOPICS:
        allowed = "left out, because a cluster is one log without topics"
    elif near:
        allowed = f"left out, or {near!r} is meant"
    else:
        allowed = f"left out; there are {', '.join(names)}"
    raise ConfigError(f"unknown option {given!r}", text, allowed)


# --- values ---


# Each function parses the text of an option, and raises ConfigError if the text is invalid.


def whole_number(low: int, high: int) -> Callable[[str, str], int]:
    """Return a parser for whole numbers from `low` to `high`."""

    def read(name: str, text: str) -> int:
        if _WHOLE.fullmatch(text.strip()) is None or not low <= int(text) <= high:
            raise ConfigError(name, text, f"a whole number, {low} to {high}")
        return int(text)

    return read


def boolean(name: str, text: str) -> bool:
    """Return the value of "true" or "false"."""
    if text.strip().lower() not in {"true", "false"}:
        raise ConfigError(name, text, "true or false")
    return text.strip().lower() == "true"


def _text(name: str, text: str) -> str:
    if not text.strip():
        raise ConfigError(name, text, "not empty")
    return text.strip()


def seconds(name: str, text: str) -> float:
    """Return a number of seconds, above 0 and at most a day."""
    allowed = f"seconds, above 0 and at most {_MAX_TIMEOUT_S}"
    try:
        found = float(text)
    except ValueError:
        raise ConfigError(name, text, allowed) from None
    if not 0 < found <= _MAX_TIMEOUT_S:
        raise ConfigError(name, text, allowed)
    return found


def _size(name: str, text: str) -> int:
    """Return a number of bytes: "64m", "1g", "4096"."""
    found = _BYTES.fullmatch(text.strip())
    count = int(found[1]) * _UNITS[found[2].lower()] if found else 0
    if not 0 < count <= _MAX_GSN:
        raise ConfigError(name, text, "a number of bytes above 0, such as 4096, 64m or 1g")
    return count


def _start(name: str, text: str) -> int | str | None:
    text = text.strip()
    match text.lower():
        case "earliest":
            return None
        case "latest":
            return LATEST
    return _position(name, text, EARLIEST)


def _stop(name: str, text: str) -> int | None:
    text = text.strip()
    return None if text.lower() == LATEST else _position(name, text, LATEST)


def _position(name: str, text: str, word: str) -> int:
    """Return the gsn of "<gsn>" or "<gsn>@<shard>"."""
    if _WHOLE.fullmatch(text) and int(text) <= _MAX_GSN:
        return int(text)
    try:
        gsn = RecordId.parse(text).gsn
    except ConfigError:
        gsn = -1
    if gsn < 0:
        raise ConfigError(name, text, f"{word!r}, a gsn, or '<gsn>@<shard>'")
    return gsn


def _time(name: str, text: str) -> int:
    """Return microseconds since 1970; the text is milliseconds or ISO 8601 (default: UTC)."""
    text = text.strip()
    if _MILLISECONDS.fullmatch(text):
        return int(text) * 1000
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        allowed = "milliseconds since 1970 UTC, or a time such as 2026-01-31T12:00:00Z"
        raise ConfigError(name, text, allowed) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _UNIX_EPOCH) // timedelta(microseconds=1)


#: For each option, its field in `Options` and the parser of its text.
_READERS: Final[dict[str, tuple[str, Callable[[str, str], Any]]]] = {
    SERVERS: ("servers", _text),
    PATH: ("path", _text),
    START: ("start", _start),
    STOP: ("stop", _stop),
    FIRST_EPOCH: ("first_epoch", whole_number(0, _MAX_GSN)),
    LAST_EPOCH: ("last_epoch", whole_number(0, _MAX_GSN)),
    SINCE: ("since_us", _time),
    UNTIL: ("until_us", _time),
    FAIL_ON_DATA_LOSS: ("fail_on_data_loss", boolean),
    MIN_PARTITIONS: ("min_partitions", whole_number(1, _MAX_PARTITIONS)),
    MAX_BYTES: ("max_bytes_per_batch", _size),
    TIMEOUT: ("timeout_s", seconds),
}
#: The names of all options.
NAMES: Final = tuple(_READERS)


# --- contradictions ---


def _check(options: Options, mode: Mode) -> None:
    if not options.servers and not options.path:
        raise ConfigError(
            SERVERS, "", f"the membership service's 'host:port,...', unless {PATH!r} is given"
        )
    if options.servers and options.path:
        raise ConfigError(PATH, options.path, f"left out if {SERVERS!r} is given, or given alone")
    if options.start is not None and options.first_epoch is not None:
        raise ConfigError(START, options.start, f"left out if {FIRST_EPOCH!r} is given")
    if options.stop is not None and options.last_epoch is not None:
        raise ConfigError(STOP, options.stop, f"left out if {LAST_EPOCH!r} is given")
    _check_mode(options, mode)
    for late, early, name, before in (
        (options.stop, options.start, STOP, START),
        (options.last_epoch, options.first_epoch, LAST_EPOCH, FIRST_EPOCH),
        (options.until_us, options.since_us, UNTIL, SINCE),
    ):
        if late is not None and early is not None and late < early:
            if name == UNTIL:
                raise ConfigError(name, late // 1000, f"{before!r}, {early // 1000} ms, or more")
            raise ConfigError(name, late, f"{before!r}, {early}, or more")


def _check_mode(options: Options, mode: Mode) -> None:
    if mode == "batch" and options.starts_at_latest:
        raise ConfigError(
            START, LATEST, "'earliest' or a position, because only a stream can start at the end"
        )
    if mode == "batch":
        return
    for name, value in ((STOP, options.stop), (LAST_EPOCH, options.last_epoch)):
        if value is not None:
            raise ConfigError(name, value, "left out, because a stream has no end")
    if options.starts_at_latest and options.first_epoch is not None:
        raise ConfigError(START, LATEST, f"left out if {FIRST_EPOCH!r} is given")
