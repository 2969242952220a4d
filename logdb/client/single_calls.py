"""The single calls of both APIs, as steps.

As in `logdb/client/transaction.py`, these are generators of requests, which resume with the result
or with its exception raised at the `yield`. Invalid arguments are rejected before anything is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from logdb.client import arguments
from logdb.client.requests import (
    CompareAndPutRequest,
    GetRequest,
    OpenRequest,
    PutRequest,
    ResolveCommitRequest,
)
from logdb.values import decode_value, encode_key

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping
    from typing import TypeVar

    from logdb.client.requests import SnapshotId, Values
    from logdb.values import UserKey
    from ziplog.client.common.requests import Request
    from ziplog.errors import OutcomeUnknownError
    from ziplog.types import RecordId
    from ziplog.wire import Limits

    T = TypeVar("T")
    Steps = Generator[Request, Any, T]


def open_database(deadline_ns: int) -> Steps[int]:
    """Connect to the database; return the maximum bytes of a record."""
    limits: Limits = yield OpenRequest(deadline_ns)
    return limits.max_payload_bytes


def read(
    deadline_ns: int, snapshot: SnapshotId | None, keys: Iterable[UserKey], default: Any
) -> Steps[list[Any]]:
    """Return the values of keys, in a snapshot or (None) in the present state."""
    encoded = arguments.keys(keys)
    if not encoded:
        return []
    found: Values = yield GetRequest(
        deadline_ns, encoded, fresh=snapshot is None, snapshot=snapshot
    )
    return [default if value is None else decode_value(value) for value in found.values]


def exists(deadline_ns: int, snapshot: SnapshotId | None, key: UserKey) -> Steps[bool]:
    """Return whether a key exists."""
    found: Values = yield GetRequest(
        deadline_ns,
        [encode_key(key)],
        fresh=snapshot is None,
        snapshot=snapshot,
        wants_values=False,
    )
    return found.versions[0] > 0


def put(deadline_ns: int, key: UserKey, value: Any, largest: int) -> Steps[RecordId]:
    """Set a key's value; return the commit's rid."""
    encoded_key, encoded = arguments.write(key, value, largest)
    rid: RecordId = yield PutRequest(deadline_ns, {encoded_key: encoded})
    return rid


def delete(deadline_ns: int, key: UserKey) -> Steps[RecordId]:
    """Delete a key; return the commit's rid."""
    rid: RecordId = yield PutRequest(deadline_ns, {encode_key(key): None})
    return rid


def multi_put(deadline_ns: int, values: Mapping[Any, Any], largest: int) -> Steps[RecordId | None]:
    """Set the values of keys; return the commit's rid, None if there are no keys."""
    writes = arguments.writes(values, largest)
    if not writes:
        return None
    rid: RecordId = yield PutRequest(deadline_ns, writes)
    return rid


def test_and_multi_put(
    deadline_ns: int, expected: Mapping[Any, Any], writes: Mapping[Any, Any], largest: int
) -> Steps[bool]:
    """Write if keys have the expected values; return whether they did."""
    encoded = arguments.expected(expected)
    request = CompareAndPutRequest(deadline_ns, encoded, arguments.writes(writes, largest))
    is_done: bool = yield request
    return is_done


def resolve(deadline_ns: int, error: OutcomeUnknownError) -> Steps[RecordId | None]:
    """Return the outcome of the commit that raised this error."""
    rid: RecordId | None = yield ResolveCommitRequest(deadline_ns, arguments.unknown_commit(error))
    return rid
