"""The writer table, compared with the whole history, and beyond its maximum size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from ziplog.core.entries import Origin
from ziplog.core.writer_table import WriterTable

if TYPE_CHECKING:
    import pytest

WRITERS = [bytes([index]) * 16 for index in range(4)]

written = st.lists(
    st.tuples(st.sampled_from(WRITERS), st.integers(0, 3), st.integers(0, 12), st.integers(1, 5)),
    max_size=40,
)


def repeated(history: list[Any], writer: bytes, batch: int, row: int, count: int) -> int:
    """The reference: a row counts if it is later than all rows before it."""
    seen = {(b, r + i) for w, b, r, n in history for i in range(n) if w == writer}
    last = max(seen, default=(-1, -1))
    return sum((batch, row + index) <= last for index in range(count))


@given(written, st.integers(0, 40))
def test_table_equals_a_check_of_the_whole_history(history: list[Any], at: int) -> None:
    writers = WriterTable()
    for index, (writer, batch, row, count) in enumerate(history):
        if index == at:  # a table goes on like the one that it was made of
            writers = WriterTable(writers.export())
        expected = repeated(history[:index], writer, batch, row, count)
        assert writers.first_new_row(Origin(writer, batch, row), count) == expected


@given(written)
def test_consecutive_units_count_as_one(history: list[Any]) -> None:
    one, parts = WriterTable(), WriterTable()
    for writer, batch, row, count in history:
        whole = one.first_new_row(Origin(writer, batch, row), count)
        assert whole == sum(
            parts.first_new_row(Origin(writer, batch, row + i), 1) for i in range(count)
        )
    assert one.export() == parts.export()


def test_least_recent_writer_is_removed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ziplog.core.writer_table.MAX_WRITERS", 3)
    writers = WriterTable()
    for writer in (*WRITERS[:3], WRITERS[0], WRITERS[3]):
        writers.first_new_row(Origin(writer, 1, 1), 1)
    assert [writer for writer, _, _ in writers.export()] == [WRITERS[2], WRITERS[0], WRITERS[3]]
    assert writers.first_new_row(Origin(WRITERS[0], 1, 0), 3) == 2
    assert writers.first_new_row(Origin(WRITERS[1], 1, 1), 1) == 0
