"""The checks of arguments about cursors."""

from __future__ import annotations

from typing import Any

import pytest

from ziplog.client import cursor_arguments
from ziplog.client.common.requests import ClaimState
from ziplog.core.units import NEVER
from ziplog.errors import ConfigError
from ziplog.types import RID_GENESIS, RecordId


@pytest.mark.parametrize("name", ["", "-x", "a b", "x" * 129, "ä", 5])
def test_name_must_be_a_name(name: Any) -> None:
    with pytest.raises(ConfigError, match="letter or a digit"):
        cursor_arguments.claim(name, RID_GENESIS, 10, 60, NEVER, wait=True)


@pytest.mark.parametrize("lease_s", [0.5, 301, True, "10", float("nan")])
def test_lease_must_be_in_range(lease_s: Any) -> None:
    with pytest.raises(ConfigError, match="lease_s"):
        cursor_arguments.claim("x", RID_GENESIS, lease_s, 60, NEVER, wait=True)


@pytest.mark.parametrize("hold_s", [-1, 1.5, True, 2**31])
def test_hold_must_be_whole_seconds(hold_s: Any) -> None:
    with pytest.raises(ConfigError, match=r"hold_s is .* whole number of seconds, 0 to 2147483647"):
        cursor_arguments.claim("x", RID_GENESIS, 10, hold_s, NEVER, wait=True)


STATE = ClaimState("x", 1, RecordId(5, 0), b"mark", False, "")


def test_commit_without_arguments_is_of_what_was_read() -> None:
    request = cursor_arguments.commit(1, STATE, RecordId(9, 1), None, None, NEVER)
    assert (request.position, request.mark) == (RecordId(9, 1), b"mark")


@pytest.mark.parametrize("gsn", [4, 10])
def test_committed_position_must_be_read_and_not_below_the_former_one(gsn: int) -> None:
    with pytest.raises(ConfigError, match="position"):
        cursor_arguments.commit(1, STATE, RecordId(9, 1), RecordId(gsn, 0), None, NEVER)


def test_mark_must_be_short_bytes() -> None:
    mark: Any = "text"
    with pytest.raises(TypeError, match="bytes"):
        cursor_arguments.commit(1, STATE, RecordId(9, 1), None, mark, NEVER)
    with pytest.raises(ConfigError, match="512"):
        cursor_arguments.commit(1, STATE, RecordId(9, 1), None, bytes(513), NEVER)
