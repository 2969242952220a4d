"""The start of new cursors, where records were trimmed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from logplayer import targets
from logplayer.new_cursors import check_start
from ziplog.errors import NoSuchRecordError, TrimmedError
from ziplog.types import RID_GENESIS, RID_RECENT, RecordId

FIRST, END = 10, 20
TARGETS = [targets.function("a", print, partitions=2), targets.function("b", print)]
ALL = ["orders/a/0", "orders/a/1", "orders/b/0"]


class Log:
    """A log with the positions [FIRST, END), and cursors."""

    def __init__(self, cursors: list[str]) -> None:
        self._cursors = cursors

    def extents(self, start: int) -> Any:
        if start > END:
            raise NoSuchRecordError(RecordId(start, 0), "no shard owns the position yet")
        return SimpleNamespace(trim=FIRST)

    def cursors(self, pattern: str) -> list[Any]:
        assert pattern == "orders/*"
        return [SimpleNamespace(name=name) for name in self._cursors]


def check(start: RecordId, cursors: list[str]) -> None:
    check_start(Log(cursors), "orders", TARGETS, start)  # type: ignore[arg-type]


@pytest.mark.parametrize("missing", ALL)
def test_a_start_that_was_trimmed_is_refused_while_a_cursor_is_missing(missing: str) -> None:
    with pytest.raises(TrimmedError) as caught:
        check(RecordId(FIRST - 1, 0), [name for name in ALL if name != missing])
    assert caught.value.first.gsn == FIRST


def test_a_start_counts_only_for_new_cursors() -> None:
    check(RecordId(FIRST - 1, 0), ALL)


@pytest.mark.parametrize(
    "start", [RID_GENESIS, RID_RECENT, RecordId(FIRST, 0), RecordId(END + 1, 0)]
)
def test_other_starts_are_possible(start: RecordId) -> None:
    check(start, [])
