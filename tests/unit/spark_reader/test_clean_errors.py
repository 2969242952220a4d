"""Library errors reach Spark without tracebacks; bugs keep theirs."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

import pytest

from spark_reader.clean_errors import without_traceback
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


def fail(error: Exception) -> None:
    raise error


@without_traceback
def calls(error: Exception) -> None:
    fail(error)


@without_traceback
def generates(error: Exception) -> Iterator[int]:
    yield 1
    fail(error)


def trace(error: Exception) -> list[str]:
    """Return the names of the functions in this file and beyond that the trace names."""
    with pytest.raises(type(error)) as caught:
        calls(error)
    called = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    rows = generates(error)
    assert next(rows) == 1
    with pytest.raises(type(error)) as caught:
        next(rows)
    assert caught.value is error
    generated = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert called == generated
    return called


def test_a_library_error_has_one_traceback_entry_after_its_caller() -> None:
    assert trace(ConfigError("a", 1, "2")) == ["trace", "wrapper"]


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(AssertionError, match="ours") as caught:
        calls(AssertionError("ours"))
    assert "fail" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
