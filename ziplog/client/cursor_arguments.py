"""Checks of callers' arguments about cursors, and their conversion to requests.

Rule: an argument that cannot work raises here, before anything is sent.
"""

from __future__ import annotations

import os
import socket
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from ziplog.client import arguments
from ziplog.client.common.requests import ClaimRequest, CommitRequest, EditRequest
from ziplog.core.cursors import MAX_HOLD_S, MAX_MARK_BYTES, NAME_RULE, is_name
from ziplog.core.numbers import real, whole_in
from ziplog.errors import ConfigError
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from ziplog.client.common.requests import ClaimState
    from ziplog.core.cursors import Edit
    from ziplog.types import CursorInfo

#: Limits of a lease, in seconds.
_MIN_LEASE_S: Final = 1.0
_MAX_LEASE_S: Final = 300.0
_MAX_OWNER: Final = 200


def check_name(name: object) -> str:
    """Return the name of a cursor as a plain str.

    Raises:
        ConfigError: it is no name.

    """
    if not isinstance(name, str) or not is_name(name):
        raise ConfigError("name", name, NAME_RULE)
    return str.__str__(name)


def check_position(name: str, position: object) -> RecordId:
    """Return a position that may be RID_RECENT; raises as `arguments.check_rid`."""
    return arguments.check_rid(name, position, or_recent=True)


def _hold_s(hold_s: object) -> int:
    seconds = whole_in(hold_s, 0, MAX_HOLD_S + 1)
    if seconds is None:
        raise ConfigError("hold_s", hold_s, f"a whole number of seconds, 0 to {MAX_HOLD_S}")
    return seconds


def claim(
    name: str, start: RecordId, lease_s: float, hold_s: int, deadline_ns: int, *, wait: bool
) -> ClaimRequest:
    """Return a request to claim a cursor.

    Raises:
        TypeError: `start` is not a RecordId.
        ConfigError: an argument is invalid.

    """
    name, start = check_name(name), check_position("start", start)
    seconds = real(lease_s)
    if seconds is None or not _MIN_LEASE_S <= seconds <= _MAX_LEASE_S:
        raise ConfigError("lease_s", lease_s, f"{_MIN_LEASE_S:g} to {_MAX_LEASE_S:g} seconds")
    owner = f"{socket.gethostname()[:_MAX_OWNER]}:{os.getpid()}"
    return ClaimRequest(deadline_ns, name, start, owner, int(seconds * 1000), _hold_s(hold_s), wait)


def commit(
    number: int,
    state: ClaimState,
    reached: RecordId,
    position: RecordId | None,
    mark: arguments.BytesLike | None,
    deadline_ns: int,
    *,
    is_soon: bool = False,
) -> CommitRequest:
    """Return a request to move a cursor forward.

    Args:
        number: the subscription of the claim.
        state: the claim.
        reached: where the next record would be read.
        position: the new position; None: `reached`.
        mark: the new mark; None: the present one.
        deadline_ns: as for every request.
        is_soon: whether the move may wait for later ones.

    Raises:
        TypeError: `mark` is not bytes.
        ConfigError: `mark` is too long, or `position` was not read yet, or is committed.

    """
    if position is None:
        position = max(reached, state.position)
    else:
        position = arguments.check_rid("position", position)
        if not state.position.gsn <= position.gsn <= reached.gsn:
            allowed = f"from {state.position}, which is committed, to {reached}, where it reads on"
            raise ConfigError("position", str(position), allowed)
    if mark is None:
        return CommitRequest(deadline_ns, number, position, state.mark, is_soon)
    if not isinstance(mark, arguments.BytesLike):
        raise TypeError(f"mark must be bytes, not {type(mark).__name__}")
    copy = bytes(mark)
    if len(copy) > MAX_MARK_BYTES:
        allowed = f"at most {MAX_MARK_BYTES} bytes"
        raise ConfigError("mark", f"{len(copy)} bytes", allowed)
    return CommitRequest(deadline_ns, number, position, copy, is_soon)


def edit(
    name: str, what: Edit, deadline_ns: int, position: RecordId = RID_GENESIS, hold_s: int = 0
) -> EditRequest:
    """Return a request to create, change or delete a cursor.

    Raises:
        TypeError: `position` is not a RecordId.
        ConfigError: an argument is invalid.

    """
    name, position = check_name(name), check_position("position", position)
    return EditRequest(deadline_ns, name, what, position, _hold_s(hold_s))


def check_pattern(pattern: object) -> None:
    """Check a pattern of names.

    Raises:
        TypeError: it is not a str.

    """
    if not isinstance(pattern, str):
        kind = type(pattern).__name__
        raise TypeError(f"pattern must be a str, such as 'orders-*', not {kind}")


def matching(cursors: list[CursorInfo], pattern: str) -> list[CursorInfo]:
    """Return the cursors whose names match a pattern of the shell: `*`, `?`, `[...]`."""
    return [cursor for cursor in cursors if fnmatchcase(cursor.name, pattern)]
