"""Subscriptions that know the rows before their start (docs/protocol.md, 14.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tests.unit.ziplog.client.fakes import (
    CLUSTER,
    ClientHarness,
    FakeCluster,
    S,
    lease,
    placement,
    refused,
)
from tests.unit.ziplog.client.reader import Reader
from ziplog import wire
from ziplog.client.common.requests import (
    ArchiveReply,
    FetchRequest,
    SubscribeRequest,
    UnsubscribeRequest,
)
from ziplog.core.distance import archive_grace_ns, archive_timeout_ns
from ziplog.core.entries import Body, Origin, Unit, decode_body, decode_origin, encode_body
from ziplog.core.node import AskArchive
from ziplog.core.units import NEVER
from ziplog.core.view import run_of
from ziplog.core.writer_table import WriterTable
from ziplog.errors import ProtocolError, TrimmedError
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Callable

WRITER = b"w" * 16
TIMEOUT_NS, GRACE_NS = archive_timeout_ns(0), archive_grace_ns(0)


def written(*gsns: int, row: int, writer: bytes = WRITER, batch: int = 0) -> Unit:
    payloads = [b"%d" % (row + index) for index in range(len(gsns))]
    return Unit(0, list(gsns), encode_body(Body(0, None, payloads, Origin(writer, batch, row))))


def table(*rows: tuple[bytes, int, int]) -> WriterTable:
    return WriterTable(rows)


class Middle(Reader):
    """A client node with one subscription that begins at gsn 21 and knows the rows before."""

    def __init__(self, *ports: int, trim: int = 0, **more: Any) -> None:
        super().__init__(21, known_rows=True, **more)
        for shard in sorted({asked.shard for _, asked in self.outlines()}):
            self.outlined(shard, trim, *ports)

    def outlines(self) -> list[tuple[str, Any]]:
        return [item for item in self.sent if isinstance(item[1], wire.Outline)]

    def outlined(self, shard: int, trim: int, *ports: int) -> None:
        """Reply to the question of both replicas for their archives, at these ports."""
        both = [m for _, m in self.outlines() if m.shard == shard]
        self.sent = [item for item in self.sent if item[1] not in both]
        for server in (0, 1):
            port = ports[server] if server < len(ports) else 0
            self.give(wire.Outlined(CLUSTER, shard, 1, server, both[-1].request, trim, [], port))
        self.look()

    def answer(self, at: int | None, *rows: tuple[bytes, int, int]) -> AskArchive:
        """Reply to the first request of an archive; None: it does not answer."""
        asked = self.asked.pop(0)
        found = None if at is None else (at, table(*rows))
        call = self.call(ArchiveReply(NEVER, asked.number, found))
        assert self.answers.pop(call) is None
        self.give()
        self.look()
        return asked


def test_stream_without_an_archive_begins_at_the_trim_point() -> None:
    harness = Middle(trim=5, shards=1)
    assert harness.opened[0].start == 5
    waiting = harness.fetch()
    harness.deliver(0, 5, 15, written(5, 7, row=0), written(9, row=2), [11])
    assert not harness.answers, "nothing of it is at or after the start"
    harness.deliver(0, 15, 41, written(15, 17, row=3), written(23, 25, 27, 29, 31, 33, row=0), [35])
    assert [r.rid.gsn for r in harness.batch(waiting).records] == [33, 35]


def test_reader_from_the_first_position_asks_nothing() -> None:
    harness = Reader(1, known_rows=True)
    assert not harness.take(wire.Outline)
    assert {m.shard: m.start for m in harness.opened.values()} == {0: 1, 1: 1}


def test_archive_that_has_the_table_replaces_the_stretch() -> None:
    harness = Middle(9000, 9001, shards=1)
    assert not harness.opened
    asked = harness.answer(21, (WRITER, 0, 2))
    harness.answer(None)
    assert asked == AskArchive(asked.number, "s0r0", 9000, CLUSTER, 0, 21)
    assert harness.opened[0].start == 21
    harness.deliver(0, 21, 41, written(21, 23, 25, 27, row=0))
    assert harness.gsns() == [27]


def test_what_all_archives_know_counts() -> None:
    """The archive with the higher position made its files after a trim."""
    harness = Middle(9000, 9001, trim=3, shards=1)
    harness.answer(17, (b"w" * 16, 0, 0))
    assert harness.answer(9, (WRITER, 0, 3)).port == 9001
    assert harness.opened[0].start == 17
    harness.deliver(0, 17, 41, written(17, row=4), written(21, 23, row=4))
    assert harness.gsns() == [23]


def test_archives_without_a_useful_answer_are_left_out() -> None:
    harness = Middle(9000, 9001, trim=3, shards=1)
    harness.answer(None)
    assert harness.answer(22, (WRITER, 0, 9)).port == 9001, "a position behind the requested one"
    assert harness.opened[0].start == 3


def test_archives_that_do_not_answer_are_left_out_together() -> None:
    harness = Middle(9000, 9001, shards=1)
    late = harness.asked.pop(0)
    assert harness.asked.pop(0).port == 9001, "it does not wait for the first one"
    harness.pass_time(TIMEOUT_NS - 1)
    assert not harness.look()
    harness.pass_time(1)
    assert harness.look()
    assert harness.opened[0].start == 1
    harness.call(ArchiveReply(NEVER, late.number, (21, table())))
    assert not harness.look()


def test_complete_table_of_one_archive_waits_half_a_second_for_another() -> None:
    """The sum of all waits is bounded, whatever the other archives do."""
    harness = Middle(9000, 9001, shards=1)
    silent = harness.asked.pop(0)
    harness.answer(19, (WRITER, 0, 3))
    harness.pass_time(GRACE_NS - 1)
    assert not harness.look()
    harness.pass_time(1)
    assert harness.look()
    assert harness.opened[0].start == 19
    harness.deliver(0, 19, 41, written(21, 23, row=3))
    assert harness.gsns() == [23]
    harness.call(ArchiveReply(NEVER, silent.number, (21, table())))
    assert not harness.look()


def test_archive_that_fails_does_not_shorten_the_wait_for_another() -> None:
    harness = Middle(9000, 9001, shards=1)
    slow = harness.asked.pop(0)
    harness.answer(None)
    harness.pass_time(TIMEOUT_NS - 1)
    assert not harness.look()
    harness.call(ArchiveReply(NEVER, slow.number, (21, table())))
    assert harness.look()
    assert harness.opened[0].start == 21


def test_table_that_may_lack_trimmed_rows_waits_for_all_archives() -> None:
    harness = Middle(9000, 9001, trim=3, shards=1)
    slow = harness.asked.pop(0)
    harness.answer(19, (b"o" * 16, 0, 3))
    harness.pass_time(TIMEOUT_NS - 1)
    assert not harness.look(), "the other archive may have the rows before the trim"
    harness.call(ArchiveReply(NEVER, slow.number, (9, table((WRITER, 0, 3)))))
    assert harness.look()
    harness.deliver(0, 19, 41, written(21, 23, row=3))
    assert harness.gsns() == [23]


def test_stream_begins_at_the_trim_point_behind_a_table() -> None:
    harness = Middle(9000, trim=11, shards=1)
    harness.answer(9, (WRITER, 0, 2))
    assert harness.opened[0].start == 11
    harness.deliver(0, 11, 41, written(21, 23, row=2))
    assert harness.gsns() == [23]


def test_table_at_the_trim_point_has_the_trimmed_rows() -> None:
    harness = Middle(9000, trim=11, shards=1)
    harness.answer(11, (WRITER, 0, 2))
    harness.deliver(0, 11, 41, written(21, 23, row=2))
    assert harness.gsns() == [23]


def test_trim_of_the_stretch_starts_another_search() -> None:
    harness = Middle(9000, shards=1)
    harness.answer(3, (WRITER, 0, 0))
    harness.deliver(0, 3, 9, written(5, row=1))
    stream = harness.opened.pop(0)
    harness.give(wire.Trimmed(CLUSTER, 0, 1, stream.subscription, 15))
    harness.outlined(0, 12, 9000)
    assert not harness.opened
    harness.answer(9, (WRITER, 0, 1))
    assert harness.opened[0].start == 15, (
        "what was reported counts, if a server has not heard of it"
    )
    harness.deliver(0, 15, 41, written(21, 23, 25, row=0))
    assert harness.gsns() == [25], "rows that were seen before the trim stay known"


def test_stretch_that_arrived_before_its_trim_is_not_searched_again() -> None:
    harness = Middle(shards=1)
    stream = harness.opened[0]
    number = stream.subscription
    made = wire.Deliver(CLUSTER, 0, 1, 0, number, 1, 21, [written(5, row=0)], [], 21)
    harness.give(made, wire.Trimmed(CLUSTER, 0, 1, number, 15))
    assert not harness.outlines()
    harness.look()
    assert harness.opened[0].start == 21
    harness.deliver(0, 21, 41, written(21, 23, row=0))
    assert harness.gsns() == [23]


@pytest.mark.parametrize("is_reported_early", [True, False])
def test_trim_behind_the_start_fails_the_reader(is_reported_early: bool) -> None:
    harness = Middle(9000, trim=31 if is_reported_early else 0, shards=1)
    if not is_reported_early:
        harness.answer(3)
    assert not harness.asked
    harness.give(wire.Trimmed(CLUSTER, 0, 1, harness.opened[0].subscription, 31))
    harness.give_leases(run_of(lease([0])))
    call = harness.fetch()
    error = harness.answers.pop(call)
    assert isinstance(error, TrimmedError)
    assert error.first.gsn == 31


def test_each_shard_has_its_own_table() -> None:
    harness = Middle(9000)
    assert harness.answer(21, (WRITER, 0, 0)).shard == 0
    harness.deliver(0, 21, 41, written(21, 23, row=0))
    assert not harness.gsns(), "the other shard may have a record before"
    assert not harness.progress().caught_up
    harness.answer(18)
    assert {m.shard: m.start for m in harness.opened.values()} == {0: 21, 1: 18}
    harness.deliver(1, 18, 42, written(22, row=0))
    assert harness.gsns() == [22, 23]


def test_lost_message_reopens_the_stretch_where_it_was() -> None:
    harness = Middle(shards=1)
    harness.deliver(0, 1, 9, written(5, row=0))
    harness.deliver(0, 11, 21)
    assert harness.look()
    assert harness.opened[0].start == 9
    harness.give(
        refused(harness.opened[0], 0, "unknown-subscription", harness.opened[0].subscription)
    )
    assert harness.look()
    assert harness.opened[0].start == 9
    harness.deliver(0, 9, 41, written(21, 23, row=0))
    assert harness.gsns() == [23]


def test_long_stretch_passes_the_credit_of_a_stream() -> None:
    harness = Middle(shards=1)
    for start in range(1, 21):
        body = encode_body(Body(0, None, [bytes(1_000_000)], Origin(WRITER, 0, start)))
        harness.deliver(0, start, start + 1, Unit(0, [start], body))
    assert harness.take(wire.Credit), "what lies before the start is dropped at once"
    assert harness.stream(0)._buffered == 0
    harness.deliver(0, 21, 41, written(21, 23, row=20))
    assert harness.gsns() == [23]


def test_malformed_unit_before_the_start_fails_the_reader() -> None:
    harness = Middle(shards=1)
    harness.deliver(0, 1, 9, Unit(0, [5], b"\xc1"))
    call = harness.fetch()
    assert isinstance(harness.answers.pop(call), ProtocolError)


def test_shard_that_joins_is_asked_too() -> None:
    first = lease((0,))
    harness = Middle(leases=[run_of(first)], trim=3)
    assert set(harness.opened) == {0}
    harness.deliver(0, 3, 1001, leases=[run_of(first.following(lease((0, 1)).members))])
    harness.gsns()
    harness.outlined(1, 3)
    assert harness.opened[1].start == 3


def test_view_change_while_the_archives_are_queried() -> None:
    harness = Reader(21, known_rows=True, shards=1)
    assert [name for name, _ in harness.take(wire.Outline)] == ["s0r0:1", "s0r1:1"]
    harness.learn(placement(0, view=2))
    harness.pass_time(0)
    again = harness.take(wire.Outline)[-1][1]
    assert again.view == 2
    for server in (0, 1):
        harness.give(wire.Outlined(CLUSTER, 0, 2, server, again.request, 7, []))
    harness.look()
    assert harness.opened[0].start == 7


@pytest.mark.parametrize("has_archive", [True, False])
def test_closed_reader_searches_no_further(has_archive: bool) -> None:
    harness = Reader(21, known_rows=True, shards=1)
    if has_archive:
        asked = harness.take(wire.Outline)[-1][1]
        for server in (0, 1):
            harness.give(wire.Outlined(CLUSTER, 0, 1, server, asked.request, 0, [], 9000))
        assert harness.asked
    harness.call(UnsubscribeRequest(NEVER, harness.subscription))
    harness.sent.clear()
    harness.pass_time(100 * S)
    assert not harness.take(wire.Outline)
    assert not harness.core._subscriptions.table_searches._by_number
    assert len(harness.asked) == 2 * has_archive


@pytest.mark.parametrize(
    "body",
    [
        Body(1, b"key", [b"a"]),
        Body(1, None, [b"a", b"b"], Origin(WRITER, 7, 192)),
        Body(1, None, [b"a", b"b"], Origin(WRITER, 7, 8), [b"k", None]),
        Body(1, None, [b"a", b"b"], None, [b"k", None]),
    ],
)
def test_origin_is_read_without_the_rest(body: Body) -> None:
    assert decode_origin(encode_body(body)) == body.origin
    with pytest.raises(ProtocolError):
        decode_origin(b"\xc1" + encode_body(body))


# --- P2': any start, with faults ---


class RowLog(FakeCluster):
    """Shards that hold rows with repetitions; archives with tables of any earlier position."""

    #: The archive, by shard and port, whose block files were made after the trim: the rows before
    #: it are not in its tables. The others have tables of the trim point and later.
    late: frozenset[tuple[int, int]] = frozenset()

    def write(self, count: int) -> None:
        for _ in range(count):
            shard = self.random.randrange(self.shards)
            gsn, size = self.frontiers[shard], self.random.choice((1, 1, 2, 5))
            gsns = list(range(gsn, gsn + size * self.shards, self.shards))
            writer = bytes([shard, self.random.randrange(3)]) * 8
            origin = Origin(writer, self.random.randrange(2), self.random.randrange(12))
            payloads = [b"%d" % gsn for gsn in gsns]
            has_origin = self.random.random() < 0.8
            body = Body(0, None, payloads, origin if has_origin else None)
            self.units[shard].append((gsns, encode_body(body)))
            self.frontiers[shard] = gsns[-1] + self.shards
            self.push(shard)

    def first_rows(self, after: int = 0) -> dict[int, int]:
        """Return the shard of each record that repeats no row of [after, itself)."""
        found = {}
        for shard in range(self.shards):
            table = WriterTable()
            for gsns, data in self.units[shard]:
                body = decode_body(data, len(gsns))
                kept = [gsn for gsn in gsns if gsn >= after]
                origin = body.origin
                old = 0
                if origin is not None and kept:
                    skipped = len(gsns) - len(kept)
                    origin = Origin(origin.writer, origin.batch, origin.row + skipped)
                    old = table.first_new_row(origin, len(kept))
                found |= dict.fromkeys(kept[old:], shard)
        return found

    def run(self, done: Callable[[], bool], within: int = 300 * S) -> None:
        def answered() -> bool:
            for asked in self.harness.asked:
                self.later(self.random.randrange(5), lambda asked=asked: self.archive(asked))  # type: ignore[misc]
            self.harness.asked.clear()
            return done()

        super().run(answered, within)

    def archive(self, asked: AskArchive) -> None:
        is_late = (asked.shard, asked.port) in self.late
        first = self.trim if is_late else 0
        at = self.random.choice((0, 1, asked.gsn // 2, asked.gsn, asked.gsn))
        if self.late:  # Any of them may have the highest table.
            at = max(at, self.trim)
        table = WriterTable()
        for gsns, data in self.units[asked.shard]:
            origin = decode_body(data, len(gsns)).origin
            kept = [gsn for gsn in gsns if first <= gsn < at]
            if origin is not None and kept:
                row = origin.row + gsns.index(kept[0])
                table.first_new_row(Origin(origin.writer, origin.batch, row), len(kept))
        found = (at, table) if at else None
        self.harness.call(ArchiveReply(NEVER, asked.number, found))


@examples(60, deadline=None)
@given(seed=st.integers(0, 2**32), loss=st.sampled_from([0.0, 0.2]))
def test_any_start_gives_what_the_first_position_gives(seed: int, loss: float) -> None:
    harness = ClientHarness()
    cluster = RowLog(harness, seed)
    harness.connect(*cluster.placements())
    cluster.write(40)
    cluster.loss = cluster.repetition = loss
    end = max(cluster.frontiers.values())
    for _ in range(3):
        start = cluster.random.randrange(1, end)
        number = cluster.subscribe(RecordId(start, 0), follow=True, known_rows=True)
        cluster.write(2)
        expected = {gsn: s for gsn, s in cluster.first_rows().items() if start <= gsn < end}
        got: dict[int, int] = {}
        while not got or max(got) < max(expected, default=0):
            if not expected:
                break
            batch = cluster.result(harness.call(FetchRequest(NEVER, number, 7)))
            got |= {record.rid.gsn: record.rid.shard for record in batch.records}
        assert {gsn: s for gsn, s in got.items() if gsn <= max(expected, default=0)} == expected
        harness.call(UnsubscribeRequest(NEVER, number))


@examples(60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_archives_that_lack_the_rows_before_a_trim_hide_no_others(seed: int) -> None:
    """One of a shard's two archives made its block files after the trim; the other one before."""
    harness = ClientHarness()
    cluster = RowLog(harness, seed)
    harness.connect(*cluster.placements())
    cluster.write(40)
    end = max(cluster.frontiers.values())
    cluster.trim = cluster.random.randrange(1, end)
    cluster.late = frozenset(
        (shard, 9000 + cluster.random.randrange(2)) for shard in range(cluster.shards)
    )
    start = cluster.random.randrange(cluster.trim, end)
    expected = {gsn for gsn in cluster.first_rows() if gsn >= start}
    number = cluster.subscribe(RecordId(start, 0), follow=True, known_rows=True)
    got: set[int] = set()
    while expected and max(got, default=0) < max(expected):
        batch = cluster.result(harness.call(FetchRequest(NEVER, number, 7)))
        got |= {record.rid.gsn for record in batch.records}
    assert {gsn for gsn in got if gsn <= max(expected, default=0)} == expected


@examples(30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_trim_while_a_reader_begins_makes_only_rows_it_has_trimmed_new(seed: int) -> None:
    harness = ClientHarness()
    cluster = RowLog(harness, seed)
    harness.connect(*cluster.placements())
    cluster.write(40)
    end = max(cluster.frontiers.values())
    start = cluster.random.randrange(end // 2, end)
    number = harness.call(
        SubscribeRequest(harness.until(60 * S), RecordId(start, 0), True, None, True)
    )

    def trim() -> None:
        cluster.trim = cluster.random.randrange(start)
        for shard in range(cluster.shards):
            cluster.push(shard)

    cluster.later(cluster.random.randrange(12), trim)
    assert cluster.result(number) == number
    got: set[int] = set()
    surely = {gsn for gsn in cluster.first_rows() if gsn >= start}
    while surely and max(got, default=0) < max(surely):
        batch = cluster.result(harness.call(FetchRequest(NEVER, number, 7)))
        got |= {record.rid.gsn for record in batch.records}
    cluster.run(lambda: cluster.trim > 0 or not cluster.in_flight, 1 * S)
    assert surely <= got <= set(cluster.first_rows(cluster.trim))


def test_a_reader_does_not_wait_for_the_archives_of_a_shard_that_is_over() -> None:
    """Its servers were stopped before they named them; the reader's position was trimmed."""
    harness = Reader(21, known_rows=True)
    call = harness.fetch()
    harness.learn(placement(1, state="finalized"))
    harness.pass_time(S)
    runs = [run_of(lease([0, 1]))]
    for _ in range(2):  # Of the search, then of the stream.
        harness.give_leases(*runs, trim=40)
        harness.pass_time(3 * S)
    error = harness.answers[call]
    assert isinstance(error, TrimmedError)
    assert error.first == RecordId(40, 1)
