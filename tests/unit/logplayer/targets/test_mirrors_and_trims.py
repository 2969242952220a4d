"""Mirrors whose rows, or whose source's rows, were trimmed between two owners."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from logplayer.contract import Batch
from logplayer.targets.log_target import LogTarget
from tests.unit.logplayer.targets.mirrors import FIRST, Client, Cursor, TargetLog, record, task
from ziplog.core.entries import decode_body
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The first owner has copied these records when it dies; the cursor is behind the first five.
COMMITTED, COPIED, COUNT = 5, 8, 10


class Claim:
    """A claim of the cursor, with its target."""

    def __init__(self, log: TargetLog, cursor: Cursor) -> None:
        self._cursor = cursor
        self._task = cursor.claim()
        self._target = LogTarget(lambda: Client(log), None, has_envelope=False)
        opened = self._target.open(self._task)
        assert opened.position == cursor.position
        self._position = cursor.position
        cursor.commit(self._task.term, cursor.position, opened.mark)
        self._task = task(cursor)

    def copy(self, numbers: Sequence[int], *, commits: bool = True) -> None:
        """Copy the records that the claim gets up to the last one of them."""
        stop = FIRST + 10 * numbers[-1] + 5
        records = [record(number, b"%d" % number) for number in numbers]
        mark = self._target.deliver(Batch(self._task, self._position, stop, records, 1))
        self._position = stop
        if commits:
            self._cursor.commit(self._task.term, stop, mark)


def written(log: TargetLog, after: int = 0) -> list[int]:
    """Return the numbers of all rows behind a position, with repetitions."""
    units = [unit for shard in log.shards.values() for unit in shard.units if unit.gsns[0] > after]
    return [int(one) for unit in units for one in decode_body(unit.body, len(unit.gsns)).payloads]


@pytest.mark.parametrize("trim", range(1, COPIED + 2))
def test_second_owner_of_a_trimmed_mirror_continues_behind_a_row_that_is_left(trim: int) -> None:
    """With no row left the mirror has nothing to continue behind, so rows are repeated."""
    log, cursor = TargetLog(), Cursor()
    first = Claim(log, cursor)
    first.copy(range(COMMITTED))
    first.copy(range(COMMITTED, COPIED), commits=False)
    assert log.tail == COPIED
    log.trim(trim)
    Claim(log, cursor).copy(range(COMMITTED, COUNT))
    is_a_row_left = trim <= COPIED
    assert written(log, after=COPIED) == list(range(COPIED if is_a_row_left else COMMITTED, COUNT))


WITHOUT, WITH = [0, 1, 3, 4, 5], [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("former", "later"), [(WITHOUT, WITH), (WITH, WITHOUT)])
def test_owner_that_counts_other_rows_than_the_former_one_writes_nothing(
    former: list[int], later: list[int]
) -> None:
    """Record 2 of the source repeats a trimmed row; one of the owners knows that, one does not.

    Without the check record 5 would be in the mirror twice, or record 6 would be missing.
    """
    log, cursor = TargetLog(), Cursor()
    Claim(log, cursor).copy(former, commits=False)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"is not the record to which orders/copy/0 gives"):
            Claim(log, cursor).copy([*later, 6, 7])
        assert (written(log), cursor.position) == (former, FIRST)
    Claim(log, cursor).copy([*former, 6, 7])
    assert written(log) == [*former, 6, 7]


def test_batches_before_the_last_row_of_the_mirror_are_passed_over() -> None:
    log, cursor = TargetLog(), Cursor()
    Claim(log, cursor).copy(WITHOUT, commits=False)
    later = Claim(log, cursor)
    later.copy(WITH[:3])
    with pytest.raises(ConfigError, match="row 4 of the target log is not the record"):
        later.copy([3, 4, 5, 6])
    assert written(log) == WITHOUT


def test_rows_of_a_removed_shard_are_compared() -> None:
    log, cursor = TargetLog(), Cursor()
    Claim(log, cursor).copy(WITH, commits=False)
    (shard,) = [number for number, one in log.shards.items() if one.units]
    log.leave(shard)
    log.finalize()
    with pytest.raises(ConfigError, match="is not the record to which"):
        Claim(log, cursor).copy([*WITHOUT, 6, 7])
    assert written(log) == WITH
