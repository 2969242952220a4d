from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard.state.decision_log import DecisionLog, Watermark, end_of
from tests.properties import examples
from ziplog.core.entries import Decision, Expire, Place, Skip
from ziplog.segments.entry import Entry


def place(*gsns: int, body: bytes = b"body") -> Place:
    return Place(b"c" * 16, 1, 1, 0, list(gsns), 7, body)


def entry(fseq: int, decision: Decision) -> Entry:
    return Entry(fseq, 1, decision)


def stream_of(*decisions: Decision) -> DecisionLog:
    stream = DecisionLog()
    for fseq, decision in enumerate(decisions, 1):
        stream.append(entry(fseq, decision))
    stream.check()
    return stream


def test_watermarks_follow_one_another() -> None:
    stream = stream_of(place(1, 3), Skip(4, 9), Expire(b"c" * 16), place(9))
    assert (stream.last, stream.end, stream.last_record) == (4, 10, 9)
    assert (stream.stable_end, stream.window_records, stream.window_bytes) == (1, 3, 8)
    news = stream.stabilise(3)
    assert [e.fseq for e in news] == [1, 2, 3]
    assert stream.stable_mark == Watermark(3, 9, 3)
    assert stream.durable_mark == Watermark(0, 1, 0)
    stream.make_durable(1)
    assert stream.durable_mark == Watermark(1, 4, 3)
    stream.make_durable(4)
    assert stream.durable_mark == Watermark(3, 9, 3), "not more durable than stable"
    assert (stream.window_records, stream.window_bytes) == (1, 4)
    stream.check()


def test_old_watermarks_change_nothing() -> None:
    stream = stream_of(place(1), place(2))
    assert len(stream.stabilise(2)) == 2
    assert stream.stabilise(1) == []
    assert stream.stabilise(9) == []
    assert stream.decisions_after(0) == stream.decisions_after(2) == stream.decisions_after(7) == []


def test_repaired_record_stays_the_last_one_up_to_later_no_ops() -> None:
    stream = DecisionLog()
    stream.restore(Watermark(2, 10, 0), Watermark(1, 5, 0), [])
    stream.append(entry(3, Skip(10, 12)))
    stream.append(entry(4, Skip(12, 14)))
    stream.stabilise(3)
    stream.add_repaired([entry(2, place(7))])
    assert (stream.last_record, stream.stable_record, stream.durable_record) == (7, 7, 0)
    stream.stabilise(4)
    assert stream.stable_mark == Watermark(4, 14, 7)
    stream.make_durable(1)
    assert stream.durable_mark == Watermark(1, 5, 0)
    stream.make_durable(2)
    assert stream.durable_mark == Watermark(2, 10, 7)
    stream.make_durable(3)
    assert stream.durable_mark == Watermark(3, 12, 7)
    stream.check()


@pytest.mark.parametrize(
    "decision", [place(1), place(2), Skip(1, 2)], ids=["same", "lower", "skip backwards"]
)
def test_a_decided_position_is_never_decided_again(decision: Decision) -> None:
    stream = stream_of(place(2))
    with pytest.raises(AssertionError):
        stream.append(entry(2, decision))


def test_gap_is_an_assertion_error() -> None:
    with pytest.raises(AssertionError, match="gap"):
        DecisionLog().append(entry(2, place(1)))


@examples(100, derandomize=True)
@given(
    st.lists(st.sampled_from(["place", "skip", "expire"]), max_size=20),
    st.lists(st.tuples(st.booleans(), st.integers(0, 25)), max_size=10),
    st.integers(0, 10),
)
def test_restart_changes_nothing(
    kinds: list[str], reports: list[tuple[bool, int]], cut: int
) -> None:
    stream, twin = DecisionLog(), DecisionLog()
    for fseq, kind in enumerate(kinds, 1):
        decisions: dict[str, Decision] = {
            "place": place(stream.end),
            "skip": Skip(stream.end, stream.end + 3),
            "expire": Expire(b"c" * 16),
        }
        for each in (stream, twin):
            each.append(entry(fseq, decisions[kind]))
    for index, (is_stable, fseq) in enumerate(reports):
        if index == cut:
            restarted = DecisionLog()
            restarted.restore(twin.stable_mark, twin.durable_mark, list(twin.window))
            twin = restarted
        for each in (stream, twin):
            if is_stable:
                each.stabilise(fseq)
            else:
                each.make_durable(min(fseq, each.last))
            each.check()
        assert twin.stable_mark == stream.stable_mark
        assert twin.decisions_after(twin.stable) == stream.decisions_after(stream.stable)
        assert (twin.last, twin.end, twin.last_record) == (
            stream.last, stream.end, stream.last_record
        )  # fmt: skip
        # Durable entries between the watermarks are known again with the next report at the latest.
        assert twin.durable <= stream.durable
    for each in (stream, twin):
        each.stabilise(each.last)
        each.make_durable(each.last)
    assert twin.durable_mark == stream.durable_mark


def test_where_entries_end() -> None:
    assert end_of(entry(1, place(3, 5)), 1) == 6
    assert end_of(entry(1, Skip(3, 9)), 1) == 9
    assert end_of(entry(1, Expire(b"c" * 16)), 4) == 4
