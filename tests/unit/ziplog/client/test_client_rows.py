"""Rows with an identity for retries: in order, a prefix after any failure (protocol.md, 14.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tests.unit.ziplog.client.fakes import (
    CLIENT,
    MS,
    ClientHarness,
    FakeCluster,
    S,
    ack,
    connected,
    learn,
    lease,
    placement,
    refused,
    resolve,
    sent,
)
from tests.unit.ziplog.client.reader import Reader
from tests.unit.ziplog.client.storms import in_a_storm
from ziplog import wire
from ziplog.client.common.requests import InsertRequest
from ziplog.client.inserts import insert_calls
from ziplog.client.inserts.insert_calls import ROW_UNIT_BYTES, ROW_UNIT_RECORDS
from ziplog.core.entries import Body, Origin, Unit, decode_body, encode_body
from ziplog.core.view import run_of
from ziplog.errors import DeadlineError, OutcomeUnknownError, UnavailableError
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from collections.abc import Iterator

WRITER = b"w" * 16


@pytest.fixture(scope="module", autouse=True)
def single_row_units() -> Iterator[None]:
    """Let each unit have one row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(insert_calls, "ROW_UNIT_RECORDS", 1)
        yield


def rows(
    harness: ClientHarness, *payloads: bytes, keys: Any = None, batch: int = 3, row: int = 0,
    timeout: int = 10 * S, shard: int = 0,
) -> int:  # fmt: skip
    return harness.call(
        InsertRequest(
            harness.until(timeout), list(payloads), RID_GENESIS, None, 77, many=True, keys=keys,
            shard=shard, origin=Origin(WRITER, batch, row),
        )
    )  # fmt: skip


def body(insert: wire.Insert) -> Body:
    return decode_body(insert.body, insert.count)


def done(harness: ClientHarness, insert: wire.Insert, first: int) -> None:
    """Ack a unit from both replicas at these positions."""
    gsns = list(range(first, first + 2 * insert.count, 2))
    harness.give(ack(insert, 0, gsns), ack(insert, 1, gsns))


def test_unit_of_rows_is_sent_after_the_previous_one_is_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(insert_calls, "ROW_UNIT_RECORDS", 2)
    harness = connected()
    keys = [b"k", b"k", None, b"l", None]
    call = rows(harness, b"a", b"b", b"c", b"d", b"e", keys=keys, row=10)
    placed = []
    for expected in (
        Body(77, b"k", [b"a", b"b"], Origin(WRITER, 3, 10)),
        Body(77, None, [b"c", b"d"], Origin(WRITER, 3, 12), [None, b"l"]),
        Body(77, None, [b"e"], Origin(WRITER, 3, 14)),
    ):
        (insert,) = sent(harness)
        assert body(insert) == expected
        assert insert.after == (placed[-1] if placed else 0)
        harness.pass_time(5 * MS)
        harness.give(ack(insert, 0, [insert.after + 2 + 2 * i for i in range(insert.count)]))
        assert not sent(harness), "one ack is not enough"
        gsns = [insert.after + 2 + 2 * i for i in range(insert.count)]
        harness.give(ack(insert, 1, gsns))
        placed += gsns
    assert harness.answers[call] == [RecordId(gsn, 0) for gsn in placed]


def test_a_unit_holds_rows_of_many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(insert_calls, "ROW_UNIT_RECORDS", ROW_UNIT_RECORDS)
    harness = connected()
    keys = [b"%d" % number for number in range(ROW_UNIT_RECORDS + 1)]
    rows(harness, *[b"x"] * (ROW_UNIT_RECORDS + 1), keys=keys)
    (first,) = sent(harness)
    assert (first.count, body(first).origin) == (ROW_UNIT_RECORDS, Origin(WRITER, 3, 0))
    assert body(first).keys == keys[:-1]
    done(harness, first, 2)
    (second,) = sent(harness)
    assert (second.count, body(second).origin) == (1, Origin(WRITER, 3, ROW_UNIT_RECORDS))


def test_a_unit_holds_rows_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(insert_calls, "ROW_UNIT_RECORDS", ROW_UNIT_RECORDS)
    harness = connected()
    rows(harness, *[bytes(ROW_UNIT_BYTES // 4)] * 5)
    (first,) = sent(harness)
    assert first.count == 4


def test_other_calls_do_not_wait_for_rows() -> None:
    harness = connected()
    rows(harness, b"a", b"b")
    call = harness.insert(b"x")
    first, other = sent(harness)
    done(harness, other, 4)
    assert harness.answers[call]
    done(harness, first, 2)
    (second,) = sent(harness)
    assert body(second).payloads == [b"b"]
    assert second.after == 2


def test_unit_of_rows_is_placed_after_the_previous_one() -> None:
    harness = connected()
    call = rows(harness, b"a", b"b")
    done(harness, sent(harness)[0], 6)
    done(harness, sent(harness)[0], 4)
    assert "protocol" in type(harness.answers[call]).__name__.lower()
    assert harness.answers[call].results == [RecordId(6, 0), None]


def test_rows_wait_for_a_silent_shard() -> None:
    harness = connected()
    call = rows(harness, b"a", b"b")
    (insert,) = sent(harness)
    harness.give(refused(insert, 0, "full"), refused(insert, 1, "full"))
    harness.pass_time(100 * MS)
    again = sent(harness)
    assert {m.shard for m in again} == {0}
    done(harness, again[-1], 2)
    assert [m.shard for m in sent(harness)] == [0]
    assert call not in harness.answers
    assert harness.core.counters.moved == 0


@pytest.mark.parametrize("state", ["parked", "recovering"])
def test_rows_never_go_to_another_shard(state: str) -> None:
    harness = connected()
    learn(harness, state=state)
    call = rows(harness, b"a")
    harness.pass_time(10 * S)
    assert not sent(harness)
    error = harness.answers[call]
    assert isinstance(error, DeadlineError)
    assert f"pinned to shard 0 ({state})" in str(error)
    assert error.retriable


@pytest.mark.parametrize("state", ["leaving", "finalized"])
def test_rows_for_a_removed_shard_fail_at_once(state: str) -> None:
    harness = connected()
    learn(harness, state=state)
    call = rows(harness, b"a")
    error = harness.answers[call]
    assert isinstance(error, UnavailableError)
    assert f"shard 0 ({state})" in str(error)
    assert not error.retriable
    assert not sent(harness)


def test_a_redirect_of_the_first_unit_has_it_wait_for_its_shard() -> None:
    harness = connected()
    call = rows(harness, b"a", b"b")
    (insert,) = sent(harness)
    harness.give(refused(insert, 0, "redirect"), refused(insert, 1, "redirect"))
    harness.take(wire.Hello)
    assert not sent(harness)
    harness.pass_time(150 * MS)
    harness.inform(placement(0, state="parked"), placement(1))
    assert not sent(harness)
    harness.pass_time(150 * MS)
    harness.inform(placement(0, view=2), placement(1))
    (again,) = sent(harness)
    assert (again.shard, again.seq, again.view) == (0, 2, 2)
    assert body(again) == body(insert)
    done(harness, again, 2)
    done(harness, sent(harness)[0], 4)
    assert harness.answers[call] == [RecordId(2, 0), RecordId(4, 0)]


def test_a_redirect_of_a_later_unit_by_a_shard_that_left_ends_the_call() -> None:
    harness = connected()
    call = rows(harness, b"a", b"b", b"c")
    done(harness, sent(harness)[0], 2)
    (insert,) = sent(harness)
    harness.give(refused(insert, 0, "redirect"), refused(insert, 1, "redirect"))
    harness.pass_time(200 * MS)
    learn(harness, state="leaving")
    error = harness.answers[call]
    assert isinstance(error, UnavailableError)
    assert error.results == [RecordId(2, 0), None, None]
    assert error.retriable, "the same arguments mean the same rows"
    assert not sent(harness)


def test_a_redirect_of_a_later_unit_by_a_parked_shard_lets_it_wait_there() -> None:
    harness = connected()
    call = rows(harness, b"a", b"b", b"c")
    done(harness, sent(harness)[0], 2)
    (insert,) = sent(harness)
    harness.give(refused(insert, 0, "redirect"), refused(insert, 1, "redirect"))
    harness.pass_time(200 * MS)
    learn(harness, state="parked")
    assert not sent(harness)
    learn(harness, state="live")
    for gsn, after in ((4, 2), (6, 4)):
        (again,) = sent(harness)
        assert again.after == after
        done(harness, again, gsn)
    assert harness.answers[call] == [RecordId(gsn, 0) for gsn in (2, 4, 6)]


def test_deadline_between_two_units_reports_the_placed_rows() -> None:
    harness = connected()
    call = rows(harness, b"a", b"b", timeout=1 * S)
    (insert,) = sent(harness)
    learn(harness, state="recovering")
    done(harness, insert, 2)
    assert not sent(harness)
    harness.pass_time(1 * S)
    error = harness.answers[call]
    assert isinstance(error, UnavailableError)
    assert "accepted 1 of the 2 records" in str(error)
    assert error.results == [RecordId(2, 0), None]
    learn(harness, view=2, state="live")
    harness.pass_time(1 * S)
    assert not sent(harness), "the call has ended"


def test_no_unit_of_rows_follows_one_with_an_unknown_outcome() -> None:
    harness = connected()
    call = rows(harness, b"a", b"b", b"c", timeout=1 * S)
    done(harness, sent(harness)[0], 2)
    (insert,) = sent(harness)
    harness.give(ack(insert, 0, [4]))
    harness.pass_time(1 * S)
    error = harness.answers[call]
    assert isinstance(error, OutcomeUnknownError)
    assert error.results == [RecordId(2, 0), None, None]
    assert error.retriable
    asked = resolve(harness, error)
    harness.give(ack(insert, 1, [4]))
    assert harness.answers[asked] == [RecordId(2, 0), RecordId(4, 0), None]
    assert {m.seq for m in sent(harness)} <= {insert.seq}


def test_a_view_that_changes_between_two_units() -> None:
    harness = connected()
    call = rows(harness, b"a", b"b")
    (first,) = sent(harness)
    learn(harness, view=1, state="recovering")
    harness.pass_time(60 * MS)
    assert not sent(harness)
    (located, *_) = [m for _, m in harness.take(wire.Locate)]
    harness.give(wire.Located(7, 0, 2, 1, CLIENT, located.seq, "present", [2]))
    harness.pass_time(60 * MS)
    assert not sent(harness), "the shard is unavailable"
    learn(harness, view=2, state="live")
    (second,) = sent(harness)
    assert (second.view, second.after) == (2, first.after + 2)
    done(harness, second, 4)
    assert harness.answers[call] == [RecordId(2, 0), RecordId(4, 0)]


class ReorderingCluster(FakeCluster):
    """Primaries that place units in any order, as a recovery may."""

    def insert(self, server: int, message: wire.Insert) -> None:
        super().insert(server, msgspec.structs.replace(message, predecessor=0))


@examples(60)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.1, 0.3]),
    st.lists(st.integers(0, 200), max_size=3),
    st.lists(st.sampled_from([None, b"k", b"l"]), min_size=1, max_size=40),
)
def test_crashed_client_leaves_a_prefix_of_its_rows(
    seed: int, loss: float, lives_ms: list[int], keys: list[bytes | None]
) -> None:
    """One client after another crashes; the last one does not."""
    payloads = [b"%d" % number for number in range(len(keys))]
    cluster = ReorderingCluster(ClientHarness(), seed)
    cluster.loss = cluster.repetition = loss
    for life_ms in [*lives_ms, None]:
        harness = replace_client(cluster)
        before = len(cluster.log)
        call = rows(harness, *payloads, keys=keys, timeout=500 * S)
        if life_ms is None:
            assert len(cluster.result(call)) == len(keys)
        else:
            end = harness.now + life_ms * MS
            cluster.later(life_ms, lambda: None)
            cluster.run(lambda end=end: cluster.harness.now >= end)  # type: ignore[misc]
        left = [payload for _, payload in cluster.log[before:]]
        assert left == payloads[: len(left)]
    cluster.loss = cluster.repetition = 0.0
    replace_client(cluster)
    assert [record.payload for record in cluster.fetch_all(cluster.subscribe())] == payloads


def replace_client(cluster: FakeCluster) -> ClientHarness:
    """Replace the client by a new one; units in flight are dropped."""
    now = cluster.harness.now + 1 * S
    harness = cluster.harness = ClientHarness()
    harness.now = now
    harness.connect(*cluster.placements())
    cluster.in_flight.clear()
    cluster.placed.clear()  # All clients have the same name here, and start with seq 1.
    cluster.streams.clear()
    return harness


@examples(25)
@given(st.integers(0, 2**32))
def test_rows_of_two_shards_with_faults(seed: int) -> None:
    cluster = in_a_storm(ReorderingCluster, seed, 0.2, 0.2, pin=False)
    payloads = [b"%d" % number for number in range(12)]
    calls = [rows(cluster.harness, *payloads, shard=shard, timeout=900 * S) for shard in (0, 1)]
    for shard, call in enumerate(calls):
        rids = cluster.result(call)
        assert rids == sorted(rids)
        assert {rid.shard for rid in rids} == {shard}
        assert [payload for gsn, payload in cluster.log if gsn in {r.gsn for r in rids}] == payloads


# --- readers ---


def written(
    *gsns: int, batch: int = 1, row: int = 0, writer: bytes = WRITER, keys: Any = None
) -> Unit:
    payloads = [b"%d" % (row + index) for index in range(len(gsns))]
    made = Body(0, None, payloads, Origin(writer, batch, row), keys)
    return Unit(0, list(gsns), encode_body(made))


def test_subscribers_skip_duplicate_rows() -> None:
    harness = Reader()
    harness.deliver(
        0, 1, 41,
        written(1, 3, 5), written(7, 9, 11, 13), written(15, row=4),
        written(17, batch=2), written(19, row=9), written(21, writer=b"v" * 16),
        written(23, batch=2, row=1), [25],
    )  # fmt: skip
    harness.deliver(1, 1, 42, written(2, 4))
    assert harness.gsns() == [1, 2, 3, 4, 5, 13, 15, 17, 21, 23, 25]


def test_rows_of_some_writers_are_left_out() -> None:
    """Repetitions of them are, too; and the position passes them."""
    harness = Reader(skip_writers=(b"wwww", b"x" * 8))
    other = b"v" * 16
    harness.deliver(
        0, 1, 41,
        written(1, 3, 5), written(7, 9, 11, writer=other), written(13, 15),
        written(17, 19, row=2, writer=other), written(21, row=7), [23], written(39, row=8),
    )  # fmt: skip
    harness.deliver(1, 1, 42, written(2, 4, writer=b"x" * 16), [6])
    assert harness.gsns() == [6, 7, 9, 11, 19, 23]
    assert harness.progress().position.gsn == 41


def test_records_after_a_duplicate_row_keep_their_keys() -> None:
    harness = Reader()
    harness.deliver(
        0, 1, 21,
        written(1, 3, keys=[b"a", None]), written(5, 7, 9, 11, keys=[b"a", None, b"c", b"d"]),
    )  # fmt: skip
    harness.deliver(1, 1, 22)
    records = harness.batch(harness.fetch(0)).records
    assert [(r.rid.gsn, r.payload, r.key) for r in records] == [
        (1, b"0", b"a"), (3, b"1", None), (9, b"2", b"c"), (11, b"3", b"d"),
    ]  # fmt: skip


def test_fetch_boundary_within_a_unit_changes_nothing() -> None:
    harness = Reader()
    harness.deliver(0, 1, 21, written(1, 3, 5, 7), written(9, 11, 13, 15, 17))
    harness.deliver(1, 1, 4)
    assert harness.gsns() == [1, 3]
    harness.deliver(1, 4, 14)
    assert harness.gsns() == [5, 7]
    harness.deliver(1, 14, 22)
    assert harness.gsns() == [17]


def test_shard_that_rejoins_keeps_its_writer_table() -> None:
    both = lease((0, 1))
    alone = both.following(lease((1,)).members)
    harness = Reader(leases=[run_of(both), run_of(alone)])
    harness.deliver(0, 1, 1001, written(1))
    harness.deliver(1, 1, 1001)
    assert harness.gsns() == [1]
    assert harness.take(wire.Unsubscribe), "the shard is not a member"
    harness.deliver(1, 1001, 2001, leases=[run_of(alone.following(both.members))])
    assert harness.look() == ["s0r1:1"], "the shard is a member again"
    harness.deliver(0, 1001, 3001, written(2001, 2003))
    harness.deliver(1, 2001, 3001)
    assert harness.gsns() == [2003]
