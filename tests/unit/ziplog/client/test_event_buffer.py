"""The buffer between a speculation's fetches and the caller."""

from __future__ import annotations

from ziplog.client.common.requests import EventBatch
from ziplog.client.reads.event_buffer import EventBuffer
from ziplog.types import Confirmed, Event, RecordId


def events(*gsns: int) -> list[Event]:
    return [Confirmed(RecordId(gsn, 0)) for gsn in gsns]


def test_events_are_returned_once() -> None:
    buffer = EventBuffer(RecordId(0, 0))
    assert buffer.fill(EventBatch(events(1, 2, 3), 0))
    assert buffer.pop(2) == events(1, 2)
    assert (buffer.taken, buffer.left) == (2, 1)
    assert buffer.fill(EventBatch(events(1, 2, 3), 0)), "another task fetched the same"
    assert next(buffer.batch) == events(3)[0]
    assert buffer.taken == 3
    assert buffer.fill(EventBatch(events(3, 4), 2)), "the first one is known"
    assert buffer.pop(9) == events(4)


def test_empty_batch_ends_only_a_closed_speculation() -> None:
    buffer = EventBuffer(RecordId(5, 1))
    assert not buffer.fill(EventBatch([], 0))
    assert not buffer.ended
    assert not buffer.fill(EventBatch([], 0, ended=True))
    assert buffer.ended
    assert buffer.progress.position == RecordId(5, 1)


def test_closing_drops_buffered_events() -> None:
    buffer = EventBuffer(RecordId(0, 0))
    buffer.fill(EventBatch(events(1, 2), 0))
    assert buffer.pop(1) == events(1)
    buffer.close()
    assert (buffer.taken, buffer.left, buffer.pop(5)) == (1, 0, [])
    assert not buffer.fill(EventBatch(events(2), 1))
