"""Plans cover their range exactly, and share it out evenly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spark_reader.planning import MAX_TASK_BYTES, MIN_TASK_BYTES, Piece, cut, joined, pack

MIB = 1024 * 1024

outlines = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 5 * MIB)), max_size=30)


def steps_of(outline: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ends and sizes of stretches, of lengths and sizes."""
    end, steps = 0, []
    for length, size in outline:
        end += length
        steps.append((end, size))
    return steps


def covered(pieces: list[Piece]) -> dict[int, list[tuple[int, int]]]:
    found: dict[int, list[tuple[int, int]]] = {}
    for piece in pieces:
        found.setdefault(piece.shard, []).append((piece.start, piece.stop))
    return found


@given(outlines, st.integers(1, 3000), st.integers(0, 3000))
def test_pieces_cover_the_range_once_and_end_where_entries_do(
    outline: list[tuple[int, int]], start: int, length: int
) -> None:
    steps, stop = steps_of(outline), start + length
    pieces = cut(7, start, stop, steps)
    at = start
    for piece in pieces:
        assert (piece.shard, piece.start) == (7, at)
        assert piece.start < piece.stop
        at = piece.stop
    assert at == stop
    assert {piece.stop for piece in pieces} <= {end for end, _ in steps} | {stop}


shards = st.lists(outlines, min_size=1, max_size=4)


@given(shards, st.none() | st.integers(1, 50), st.integers(1, 8))
def test_a_plan_covers_each_shard_once_in_order(
    outlined: list[list[tuple[int, int]]], at_least: int | None, cores: int
) -> None:
    pieces = [
        piece
        for shard, outline in enumerate(outlined)
        for piece in cut(shard, 1, 5000, steps_of(outline))
    ]
    tasks = pack(pieces, at_least, cores)
    assert all(tasks)
    assert [piece for task in tasks for piece in task] == [
        piece for task in tasks for piece in joined(task)
    ]
    flat = [piece for task in tasks for piece in task]
    assert covered(joined(flat)) == covered(joined(pieces))
    ends = {shard: (min(each)[0], max(each)[1]) for shard, each in covered(flat).items()}
    assert ends == dict.fromkeys(range(len(outlined)), (1, 5000))
    assert len(tasks) >= min(at_least or 1, 4999)


@given(st.lists(st.integers(1, MIB), min_size=40, max_size=200), st.integers(1, 20))
def test_tasks_are_about_equal(sizes: list[int], at_least: int) -> None:
    pieces = [Piece(0, at, at + 1, size) for at, size in enumerate(sizes)]
    tasks = pack(pieces, at_least, 2)
    assert len(tasks) == at_least
    share, largest = sum(sizes) / at_least, max(sizes)
    for task in tasks:
        assert abs(sum(piece.size for piece in task) - share) <= 2 * largest


def test_a_small_range_is_one_task_unless_more_are_requested() -> None:
    pieces = [Piece(0, at, at + 1, 10_000) for at in range(20)]
    assert len(pack(pieces, None, 4)) == 1
    assert len(pack(pieces, 20, 4)) == 20
    # Between two entries nothing is cut for less.
    longer = [Piece(0, 100 * at, 100 * at + 100, 10_000) for at in range(20)]
    assert len(pack(longer, 19, 4)) == 19
    assert len(pack(longer, 100, 4)) == 100
    assert len(pack(pieces, 100, 4)) == 20
    # Those that can be cut make up for those that cannot.
    assert len(pack([*pieces, Piece(1, 1, 1000, 10)], 100, 4)) == 100


def test_larger_ranges_have_one_then_two_tasks_per_core_of_bounded_size() -> None:
    pieces = [Piece(0, at, at + 1, MIN_TASK_BYTES) for at in range(63)]
    assert len(pack(pieces, None, 4)) == 4
    assert len(pack(pieces[:3], None, 4)) == 3
    assert len(pack([*pieces, Piece(0, 63, 64, MIN_TASK_BYTES)], None, 4)) == 8
    huge = [Piece(0, at, at + 1, MAX_TASK_BYTES // 4) for at in range(100)]
    # All cores are busy to the end.
    assert len(pack(huge, None, 4)) == 28


def test_an_empty_range_has_no_task() -> None:
    assert pack([], None, 4) == []
    assert pack([], 5, 4) == []
