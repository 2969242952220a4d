"""Checks of the callers' arguments, and their conversion to requests, for both public APIs.

Rule: an argument that cannot work raises here, before anything is sent.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from ziplog.client.common.requests import (
    ExtentsRequest,
    FinishUpgradeRequest,
    InsertRequest,
    OutlineRequest,
    ReadRequest,
    ScanRequest,
    SealRequest,
    SpeculateRequest,
    SubscribeRequest,
    TrimRequest,
)
from ziplog.client.common.unknown_outcome import ResolveRequest, UnknownOutcome
from ziplog.client.placement_arguments import ENDPOINT, check_shard, min_regions
from ziplog.core.entries import Origin
from ziplog.core.numbers import real, whole, whole_in
from ziplog.core.units import NEVER
from ziplog.errors import (
    ONLY_ITS_CLIENT,
    ClosedError,
    ConfigError,
    ProtocolError,
    RecordTooLargeError,
    UnavailableError,
)
from ziplog.runtime.clock import now_ns
from ziplog.types import CLUSTER_ID_DIGITS, RID_GENESIS, RID_RECENT, RecordId

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ziplog.errors import OutcomeUnknownError
    from ziplog.wire import Limits

#: Default time-out of a call.
DEFAULT_TIMEOUT_S: Final = 10.0
#: Time for which a client that closes waits for the replies to its claims of cursors.
END_CLAIMS_S: Final = 1.0
#: From this many seconds on, a time-out counts as none.
LIMITLESS_S: Final = 1e9
#: Length of a writer's identity, in bytes.
_WRITER: Final = 16
#: Maximum of the deliveries of a speculation that are neither confirmed nor void.
MAX_PENDING: Final = 1_000_000
#: Maximum number of records that iteration fetches at once.
READ_AHEAD: Final = 65_536
_CLUSTER_QUERY: Final = "/?cluster="
_CLUSTER_ID: Final = re.compile(rf"[0-9a-f]{{{CLUSTER_ID_DIGITS}}}", re.ASCII)
#: Messages have room for smaller numbers of clusters only.
_MAX_CLUSTERS: Final = 2**63
_BOOTSTRAP_VARIABLE: Final = "ZIPLOG_BOOTSTRAP"
_CLUSTER_ID_VARIABLE: Final = "ZIPLOG_CLUSTER_ID"
_ADDRESS_RULE: Final = "'ziplog://HOST:PORT[,HOST:PORT...]', optionally with '/?cluster=ID'"
_ENDPOINTS_RULE: Final = (
    "'host:port' of {of}, several separated by commas or in a list, such as"
    " '127.0.0.1:{port},127.0.0.1:{next}'"
)

BytesLike = bytes | bytearray | memoryview


def endpoints(
    bootstrap: str | Sequence[str],
    name: str = "bootstrap",
    of: str = "the membership service",
    port: int = 7400,
    *,
    where: str = "",
) -> list[str]:
    """Return the endpoints of a bootstrap string or list.

    Args:
        bootstrap: the endpoints; a string may begin with "ziplog://".
        name: the argument's name, for errors.
        of: the servers that listen there, for errors.
        port: an example, for errors.
        where: what has the argument, for errors.

    Raises:
        ConfigError: it contains no endpoint, or one that is not "host:port".

    """
    rule = _ENDPOINTS_RULE.format(of=of, port=port, next=port + 1)
    if isinstance(bootstrap, str):
        texts = bootstrap.removeprefix("ziplog://").rstrip("/").split(",")
    elif isinstance(bootstrap, Iterable):
        texts = list(bootstrap)
    else:
        raise ConfigError(name, bootstrap, rule, where)
    found: list[str] = []
    for text in texts:
        match = ENDPOINT.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None or not 0 < int(match[1]) < 2**16:
            raise ConfigError(name, bootstrap, rule, where)
        found.append(text.strip())
    if not found:
        raise ConfigError(name, bootstrap, rule, where)
    return list(dict.fromkeys(found))


def endpoints_of(log: Any) -> list[str]:
    """Return the membership nodes of a log: of a client, or as for `ziplog.connect`.

    Raises:
        TypeError: `log` is neither a client nor addresses.
        ConfigError: an address is invalid.

    """
    if isinstance(log, (str, list, tuple)):
        return endpoints(log, "log")
    try:
        return list(log.endpoints)
    except AttributeError:
        kind = type(log).__name__
        raise TypeError(
            f"log must be a ziplog.Log or 'host:port' of its nodes, not {kind}"
        ) from None


def log_address(
    bootstrap: str | Sequence[str] | None, cluster_id: str | None
) -> tuple[list[str], int]:
    """Return the endpoints of a log, and the number that its cluster must have; 0: any.

    Args:
        bootstrap: the endpoints; a string may be "ziplog://HOST:PORT/?cluster=ID". None: those in
            the environment variable ZIPLOG_BOOTSTRAP.
        cluster_id: the id that the cluster must have; "": any; None: the one in `bootstrap`, or in
            the environment variable ZIPLOG_CLUSTER_ID.

    Raises:
        ConfigError: an argument is invalid.

    """
    wanted = ""
    if bootstrap is None:
        bootstrap = os.environ.get(_BOOTSTRAP_VARIABLE) or None
    if bootstrap is None:
        rule = _ENDPOINTS_RULE.format(of="the membership service", port=7400, next=7401)
        message = f"the log has no address: give bootstrap, or set {_BOOTSTRAP_VARIABLE}, to {rule}"
        raise ConfigError("bootstrap", None, rule, message=message)
    if isinstance(bootstrap, str):
        given = bootstrap
        bootstrap, _, wanted = given.partition(_CLUSTER_QUERY)
        if "?" in bootstrap:
            raise ConfigError("bootstrap", given, _ADDRESS_RULE)
    found = endpoints(bootstrap)
    if cluster_id is None:
        cluster_id = wanted or os.environ.get(_CLUSTER_ID_VARIABLE, "")
    if cluster_id == "":
        return found, 0
    is_id = isinstance(cluster_id, str) and _CLUSTER_ID.fullmatch(cluster_id)
    if not is_id or not 0 < (number := int(cluster_id, 16)) < _MAX_CLUSTERS:
        allowed = (
            f"{CLUSTER_ID_DIGITS} hexadecimal digits, as in the status document: 16 zeros, and the"
            " cluster's number"
        )
        raise ConfigError("cluster_id", cluster_id, allowed)
    return found, number


def timeout_s(timeout: float | None, default: float) -> float:
    """Return a time-out in seconds.

    Raises:
        ConfigError: it is not a number from 0 on.

    """
    if timeout is None:
        return default
    seconds = real(timeout)
    if seconds is None or math.isnan(seconds) or seconds < 0:
        raise ConfigError("timeout", timeout, "seconds from 0 on, or None for the default")
    return seconds


def deadline_ns(timeout: float | None, default: float) -> int:
    """Return the deadline of a call with this time-out, in monotonic nanoseconds."""
    seconds = timeout_s(timeout, default)
    return now_ns() + int(seconds * 1e9) if seconds < LIMITLESS_S else NEVER


def insert(
    payload: BytesLike,
    after: RecordId,
    key: BytesLike | str | None,
    limits: Limits,
    deadline_ns: int,
    shard: int | None = None,
    *,
    sealed: bool = False,
    regions: int | None = None,
) -> InsertRequest:
    """Return a request to insert one record.

    `shard`: at this one; `sealed`: an append; `regions`: least number of the shard's regions.

    Raises:
        TypeError: the payload or key is not bytes-like, or `after` is not a RecordId.
        RecordTooLargeError: the payload or key exceeds the cluster's limit.
        ConfigError: `after` is RID_RECENT, `shard` or `regions` is out of range, or the key is a
            str without a UTF-8 form.

    """
    if type(payload) is not bytes or len(payload) > limits.max_payload_bytes:
        payload = _payload(payload, limits.max_payload_bytes, 0)
    if key is not None:
        key = _key(key, limits.max_key_bytes)
    if after is not RID_GENESIS:
        after = check_rid("after", after)
    if shard is not None:
        shard = check_shard(shard)
    return InsertRequest(
        deadline_ns, [payload], after, key, time.time_ns() // 1000, False, None, shard, sealed,
        None, 0 if regions is None else min_regions(regions),
    )  # fmt: skip


def insert_many(
    payloads: Iterable[BytesLike],
    after: RecordId,
    key: BytesLike | str | None,
    keys: Iterable[BytesLike | str | None] | None,
    limits: Limits,
    deadline_ns: int,
    shard: int | None = None,
    *,
    sealed: bool = False,
    regions: int | None = None,
) -> InsertRequest:
    """Return a request to insert copies of `payloads`; `key`: of all, `keys`: one for each.

    Raises:
        TypeError: a payload or key is not bytes-like, `payloads` or `keys` is one payload or key,
            or `after` is not a RecordId.
        RecordTooLargeError: a payload or key exceeds the cluster's limit.
        ConfigError: `after` is RID_RECENT, `keys` has another length than `payloads`, both `key`
            and `keys` are given, or `shard` or `regions` is out of range.

    """
    if key is not None and keys is not None:
        raise ConfigError("keys", keys, "None", message="give either `key` or `keys`, not both")
    after = check_rid("after", after)
    copies, named = _records(payloads, keys, limits)
    if key is not None:
        with _results_of(copies):
            key = _key(key, limits.max_key_bytes)
    if shard is not None:
        shard = check_shard(shard)
    now_us = time.time_ns() // 1000
    return InsertRequest(
        deadline_ns, copies, after, key, now_us, True, named, shard, sealed,
        None, 0 if regions is None else min_regions(regions),
    )  # fmt: skip


def rows(
    payloads: Iterable[BytesLike],
    keys: Iterable[BytesLike | str | None] | None,
    shard: int,
    origin: tuple[BytesLike, int, int],
    limits: Limits,
    deadline_ns: int,
) -> InsertRequest:
    """Return a request to insert a writer's rows; `origin`: (writer, batch, first row number).

    Raises:
        TypeError: a payload or key is not bytes-like.
        RecordTooLargeError: a payload or key exceeds the cluster's limit.
        ConfigError: the shard, the writer, a number, or the length of `keys` is invalid.

    """
    shard = check_shard(shard)
    writer, batch, row = origin
    if not isinstance(writer, (bytes, bytearray, memoryview)) or len(bytes(writer)) != _WRITER:
        raise ConfigError("writer", writer, f"{_WRITER} bytes that no other writer uses")
    batch, row = _row_number("batch", batch), _row_number("row", row)
    copies, named = _records(payloads, keys, limits)
    now_us = time.time_ns() // 1000
    return InsertRequest(
        deadline_ns, copies, RID_GENESIS, None, now_us, many=True, keys=named, shard=shard,
        origin=Origin(bytes(writer), batch, row),
    )  # fmt: skip


def _row_number(name: str, given: object) -> int:
    number = whole_in(given, 0, 2**62)
    if number is None:
        raise ConfigError(name, given, "a whole number from 0 to 2**62 - 1")
    return number


def _records(
    payloads: Iterable[BytesLike], keys: Iterable[BytesLike | str | None] | None, limits: Limits
) -> tuple[list[bytes], list[bytes | None] | None]:
    """Return the payloads of several records, and the key of each; None: no key is given."""
    copies = _several("payloads", payloads, "insert_after inserts one record")
    largest = limits.max_payload_bytes
    with _results_of(copies):
        for index, payload in enumerate(copies):
            if type(payload) is not bytes or len(payload) > largest:
                copies[index] = _payload(payload, largest, index)
        if keys is None:
            return copies, None
        given = _several("keys", keys, "key is the key of all records")
        return copies, _keys(given, len(copies), limits.max_key_bytes)


def _several(name: str, given: Iterable[Any], advice: str) -> list[Any]:
    """Return a copy of an argument that has an item for each record.

    Raises:
        TypeError: it is one payload or key, or not iterable.

    """
    is_one = isinstance(given, (str, bytes, bytearray, memoryview))
    if is_one or not isinstance(given, Iterable):
        what = f"an iterable, such as a list, not {type(given).__name__}"
        raise TypeError(f"{name} must be {what}; {advice}")
    return list(given)


@contextlib.contextmanager
def _results_of(copies: Sequence[object]) -> Iterator[None]:
    """Give the error of a too large record a result for each record, as those of servers have."""
    try:
        yield
    except RecordTooLargeError as error:
        error.results = [None] * len(copies)
        raise


def _payload(payload: object, limit: int, index: int) -> bytes:
    if not isinstance(payload, (bytes, bytearray, memoryview)):
        kind = type(payload).__name__
        advice = "; encode it first" if kind == "str" else ""
        raise TypeError(f"a payload must be bytes-like, not {kind}{advice}")
    copy = bytes(payload)
    if len(copy) > limit:
        raise RecordTooLargeError(len(copy), limit, index=index)
    return copy


def _keys(keys: Sequence[BytesLike | str | None], count: int, largest: int) -> list[bytes | None]:
    named = [
        key
        if key is None or (type(key) is bytes and len(key) <= largest)
        else _key(key, largest, index)
        for index, key in enumerate(keys)
    ]
    if len(named) != count:
        raise ConfigError(
            "keys",
            f"{len(named)} keys",
            f"one for each of {count} records",
            message=f"keys has length {len(named)}, but the number of records is {count}",
        )
    return named


def _key(key: object, limit: int, index: int | None = None) -> bytes:
    if isinstance(key, str):
        try:
            key = key.encode()
        except UnicodeEncodeError as error:
            allowed = f"bytes, or a str that UTF-8 can carry ({error.reason})"
            raise ConfigError("key", key, allowed) from None
    if not isinstance(key, (bytes, bytearray, memoryview)):
        raise TypeError(f"a key must be bytes-like or str, not {type(key).__name__}")
    copy = bytes(key)
    if len(copy) > limit:
        raise RecordTooLargeError(len(copy), limit, "key", index)
    return copy


def check_rid(name: str, rid: object, *, or_recent: bool = False) -> RecordId:
    """Return a position, its fields as plain ints; `or_recent`: RID_RECENT is allowed.

    Raises:
        TypeError: it is not a RecordId, or a field of it is not a whole number.
        ConfigError: it is RID_RECENT where that is not allowed, or out of range.

    """
    if not isinstance(rid, RecordId):
        advice = "; RecordId.parse reads its text form" if isinstance(rid, str) else ""
        raise TypeError(f"{name} must be a RecordId, not {type(rid).__name__}{advice}")
    if type(rid.gsn) is not int or type(rid.shard) is not int:
        rid = RecordId(_field(name, "gsn", rid.gsn), _field(name, "shard", rid.shard))
    if rid == RID_RECENT:
        if or_recent:
            return RID_RECENT
        text = (
            f"{name} must be a position; RID_RECENT is for subscriptions, speculations and cursors"
        )
        raise ConfigError(name, str(rid), "a position", message=text)
    if not 0 <= rid.gsn < 2**63 or not 0 <= rid.shard < 2**31:
        raise ConfigError(name, rid, "a gsn from 0 to 2**63 - 1, and a shard below 2**31")
    return rid


def _field(name: str, field: str, value: object) -> int:
    number = whole(value)
    if number is None:
        kind = type(value).__name__
        raise TypeError(f"the {field} of {name} must be a whole number, not {kind}: {value!r}")
    return number


def _gsn(name: str, given: object) -> int:
    number = whole_in(given, 0, 2**63)
    if number is None:
        raise ConfigError(name, given, "a gsn, a whole number from 0 to 2**63 - 1")
    return number


def _range(start: object, stop: object) -> tuple[int, int]:
    first, end = _gsn("start", start), _gsn("stop", stop)
    if end < first:
        raise ConfigError("stop", stop, f"no less than the start, {first}")
    return first, end


def extents(start: int, stop: int | None, deadline_ns: int) -> ExtentsRequest:
    """Return a request for the owners of [start, stop)."""
    first, end = _range(start, start if stop is None else stop)
    return ExtentsRequest(deadline_ns, first, None if stop is None else end)


def outline(shard: int, start: int, stop: int, deadline_ns: int) -> OutlineRequest:
    """Return a request for what a shard holds of [start, stop)."""
    return OutlineRequest(deadline_ns, check_shard(shard), *_range(start, stop))


def scan(shard: int, start: int, stop: int, deadline_ns: int) -> ScanRequest:
    """Return a request to read a shard's units of [start, stop)."""
    return ScanRequest(deadline_ns, check_shard(shard), *_range(start, stop))


def resolve(error: OutcomeUnknownError, deadline_ns: int) -> ResolveRequest:
    """Return a request for the outcome of the insert that ended with this error.

    Raises:
        ClosedError: no client raised it.

    """
    if not isinstance(error.doubt, UnknownOutcome):
        raise ClosedError("the client of this error", ONLY_ITS_CLIENT)
    return ResolveRequest(deadline_ns, error.doubt)


def resolved(
    error: OutcomeUnknownError, rids: list[RecordId | None]
) -> RecordId | list[RecordId | None] | None:
    """Return the result of `resolve`, and store it in the error of an `insert_many`."""
    if not cast("UnknownOutcome", error.doubt).many:
        return rids[0]
    error.results = list(rids)
    return rids


def read(rid: RecordId, deadline_ns: int) -> ReadRequest:
    """Return a request to read a record."""
    return ReadRequest(deadline_ns, check_rid("rid", rid))


def seal(rid: RecordId, deadline_ns: int) -> SealRequest:
    """Return a request to seal a position."""
    return SealRequest(deadline_ns, check_rid("rid", rid))


def trim(rid: RecordId, deadline_ns: int, *, force: bool) -> TrimRequest:
    """Return a request to trim before a record."""
    return TrimRequest(deadline_ns, check_rid("rid", rid), bool(force))


def finish_upgrade(wire: int, deadline_ns: int) -> FinishUpgradeRequest:
    """Return a request to use a wire version.

    Raises:
        ConfigError: it is no wire version.

    """
    number = whole_in(wire, 1, 256)
    if number is None:
        raise ConfigError("wire", wire, "a number from 1 to 255")
    return FinishUpgradeRequest(deadline_ns, number)


def subscribe(
    start: RecordId,
    deadline_ns: int,
    *,
    follow: bool,
    shards: Collection[int] | None = None,
    known_rows: bool = False,
) -> SubscribeRequest:
    """Return a request for a subscription; `start` may be RID_RECENT, `shards` None for all.

    Raises:
        TypeError: `start` is not a RecordId.
        ConfigError: `start` is out of range, or `shards` is not a collection of shard numbers.

    """
    start = check_rid("start", start, or_recent=True)
    if shards is None:
        return SubscribeRequest(deadline_ns, start, follow, None, bool(known_rows))
    rule = "a list or set of one or more different shard ids, or None"
    # An array, as of NumPy, has no truth value.
    if not isinstance(shards, Collection) or isinstance(shards, (str, bytes)) or not len(shards):
        raise ConfigError("shards", shards, rule)
    wanted = frozenset(map(check_shard, shards))
    if len(wanted) < len(shards):
        raise ConfigError("shards", shards, rule)
    return SubscribeRequest(deadline_ns, start, follow, wanted, bool(known_rows))


def speculate(
    start: RecordId, deadline_ns: int, *, shards: Collection[int] | None, max_pending: int
) -> SpeculateRequest:
    """Return a request for a speculation; arguments and errors as for `subscribe`.

    Raises:
        ConfigError: `max_pending` is out of range, too.

    """
    plain = subscribe(start, deadline_ns, follow=True, shards=shards)
    number = whole_in(max_pending, 1, MAX_PENDING + 1)
    if number is None:
        rule = f"a whole number from 1 to {MAX_PENDING}"
        raise ConfigError("max_pending", max_pending, rule)
    return SpeculateRequest(deadline_ns, plain.start, True, plain.shards, max_pending=number)


def count(name: str, given: object, least: int = 0) -> int:
    """Return a number of things.

    Raises:
        ConfigError: it is not a whole number, below `least`, or too large.

    """
    number = whole_in(given, least, 2**63)
    if number is None:
        raise ConfigError(name, given, f"a whole number from {least} on")
    return number


def history(document: bytes, part: str) -> list[dict[str, Any]]:
    """Return the items of a part of the cluster's history.

    Raises:
        UnavailableError: the service runs an earlier release, which does not record it.
        ProtocolError: it is not a JSON object.

    """
    found: list[dict[str, Any]] | None = status(document).get(part)
    if found is None:
        text = f"the membership service runs a release without {part}: restart it with a later one"
        raise UnavailableError(text)
    return found


def status(document: bytes) -> dict[str, Any]:
    """Return the contents of a status document.

    Raises:
        ProtocolError: it is not a JSON object.

    """
    try:
        return msgspec.json.decode(document, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ProtocolError(
            f"the membership service sent a status that is not a JSON object: {error}"
        ) from error
