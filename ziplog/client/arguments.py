"""What users pass, checked and turned into requests: the same for the blocking and the asyncio API.

Rule: what cannot work is refused here, before anything is sent.
"""

from __future__ import annotations

import math
import re
import time
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from ziplog.client.doubt import Doubt
from ziplog.client.requests import (
    NEVER,
    FetchRequest,
    InsertRequest,
    ReadRequest,
    ResolveRequest,
    SubscribeRequest,
    TrimRequest,
)
from ziplog.errors import ClosedError, ConfigError, ProtocolError, RecordTooLargeError
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ziplog.client.requests import Policy
    from ziplog.errors import OutcomeUnknownError
    from ziplog.wire import Limits

#: How long a call may take unless the user says otherwise.
DEFAULT_TIMEOUT_S: Final = 10.0
#: Records that iteration takes at once.
READ_AHEAD: Final = 65_536
_ENDPOINT: Final = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})", re.ASCII)
_ENDPOINTS_RULE: Final = (
    "'host:port' of the membership service, several separated by commas or in a list,"
    " such as 'ziplog://127.0.0.1:7400,127.0.0.1:7401'"
)

BytesLike = bytes | bytearray | memoryview


def endpoints(bootstrap: str | Sequence[str]) -> list[str]:
    """Return the endpoints that a bootstrap string (or list) names.

    Raises:
        ConfigError: it names none, or one that is no "host:port".

    """
    if not isinstance(bootstrap, str):
        texts = list(bootstrap)
    else:
        texts = bootstrap.removeprefix("ziplog://").rstrip("/").split(",")
    found: list[str] = []
    for text in texts:
        match = _ENDPOINT.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None or not 0 < int(match[1]) < 2**16:
            raise ConfigError("bootstrap", bootstrap, _ENDPOINTS_RULE)
        found.append(text.strip())
    if not found:
        raise ConfigError("bootstrap", bootstrap, _ENDPOINTS_RULE)
    return list(dict.fromkeys(found))


def timeout_s(timeout: float | None, default: float) -> float:
    """Return a time-out in seconds.

    Raises:
        ConfigError: it is no number from 0 on.

    """
    if timeout is None:
        return default
    if not isinstance(timeout, (int, float)) or math.isnan(timeout) or timeout < 0:
        raise ConfigError("timeout", timeout, "seconds from 0 on, or None for the default")
    return timeout


def deadline(timeout: float | None, default: float) -> int:
    """Return when a call with this time-out ends, in monotonic nanoseconds."""
    seconds = timeout_s(timeout, default)
    return time.monotonic_ns() + int(seconds * 1e9) if seconds < 1e9 else NEVER


def insert(
    payloads: Iterable[BytesLike],
    after: RecordId,
    key: BytesLike | str | None,
    limits: Limits,
    until: int,
    *,
    many: bool = False,
) -> InsertRequest:
    """Return a request to insert copies of `payloads`; `many`: the user gave a list.

    Raises:
        TypeError: a payload is not bytes-like, or `after` no RecordId.
        RecordTooLargeError: a payload or the key is larger than the cluster allows.
        ConfigError: `after` is RID_RECENT.

    """
    largest = limits.max_payload_bytes
    copies = [
        payload
        if type(payload) is bytes and len(payload) <= largest
        else _payload(payload, largest)
        for payload in payloads
    ]
    if key is not None:
        key = _key(key, limits.max_key_bytes)
    if after is not RID_GENESIS:
        check_rid("after", after)
    return InsertRequest(until, copies, after, key, time.time_ns() // 1000, many)


def _payload(payload: object, limit: int) -> bytes:
    if not isinstance(payload, (bytes, bytearray, memoryview)):
        kind = type(payload).__name__
        advice = "; encode it first" if kind == "str" else ""
        raise TypeError(f"a payload must be bytes-like, not {kind}{advice}")
    copy = bytes(payload)
    if len(copy) > limit:
        raise RecordTooLargeError(len(copy), limit)
    return copy


def _key(key: object, limit: int) -> bytes:
    if isinstance(key, str):
        key = key.encode()
    if not isinstance(key, (bytes, bytearray, memoryview)):
        raise TypeError(f"a key must be bytes-like or str, not {type(key).__name__}")
    copy = bytes(key)
    if len(copy) > limit:
        raise RecordTooLargeError(len(copy), limit, "key")
    return copy


def check_rid(name: str, rid: object) -> None:
    """Check that `rid` names a position.

    Raises:
        TypeError: it is no RecordId.
        ConfigError: it is RID_RECENT, or out of range.

    """
    if not isinstance(rid, RecordId):
        advice = "; RecordId.parse reads its text form" if isinstance(rid, str) else ""
        raise TypeError(f"{name} must be a RecordId, not {type(rid).__name__}{advice}")
    if rid.gsn < 0:
        raise ConfigError(name, str(rid), "a position: RID_RECENT is for subscribe only")
    if rid.gsn >= 2**63 or not 0 <= rid.shard < 2**31:
        raise ConfigError(name, str(rid), "a gsn below 2**63 and a shard below 2**31")


def resolve(error: OutcomeUnknownError, until: int) -> ResolveRequest:
    """Return a request for what became of the insert that ended with this error.

    Raises:
        ClosedError: no client raised it.

    """
    if not isinstance(error.doubt, Doubt):
        raise ClosedError("the client of this error")
    return ResolveRequest(until, error.doubt)


def resolved(
    error: OutcomeUnknownError, rids: list[RecordId | None]
) -> RecordId | list[RecordId | None] | None:
    """Return what the user gets of the answer, and keep it in the error of an `insert_many`."""
    if not cast("Doubt", error.doubt).many:
        return rids[0]
    error.results = list(rids)
    return rids


def read(rid: RecordId, until: int) -> ReadRequest:
    """Return a request to read a record."""
    check_rid("rid", rid)
    return ReadRequest(until, rid)


def trim(rid: RecordId, until: int) -> TrimRequest:
    """Return a request to trim before a record."""
    check_rid("rid", rid)
    return TrimRequest(until, rid)


def subscribe(start: RecordId, until: int, *, follow: bool) -> SubscribeRequest:
    """Return a request for a subscription; `start` may be RID_RECENT."""
    if not (isinstance(start, RecordId) and start.gsn < 0):
        check_rid("start", start)
    return SubscribeRequest(until, start, follow)


def fetch(subscription: int, max_records: int, until: int) -> FetchRequest:
    """Return a request for records.

    Raises:
        ConfigError: `max_records` is below 1.

    """
    if not isinstance(max_records, int) or max_records < 1:
        raise ConfigError("max_records", max_records, "a whole number from 1 on")
    return FetchRequest(until, subscription, max_records)


def policy(chosen: object) -> Policy:
    """Return a policy as it is.

    Raises:
        ConfigError: it is not callable.

    """
    if not callable(chosen):
        allowed = "a callable (payload, key, live shard ids) -> shard id, as in ziplog.policy"
        raise ConfigError("policy", chosen, allowed)
    return cast("Policy", chosen)


def status(document: bytes) -> dict[str, Any]:
    """Return the contents of a status document.

    Raises:
        ProtocolError: it is none.

    """
    try:
        return msgspec.json.decode(document, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the service sent a status that is no JSON object: {error}") from error
