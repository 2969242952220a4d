"""Scans: one shard's units of a range, by its stream (docs/protocol.md, sections 7 and 14)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tests.unit.ziplog.client.fakes import (
    CLUSTER,
    MS,
    ClientHarness,
    FakeCluster,
    S,
    placement,
    refused,
)
from tests.unit.ziplog.client.reader import unit
from ziplog import wire
from ziplog.client.common.requests import (
    InsertRequest,
    ScanCloseRequest,
    ScanFetchRequest,
    Scanned,
    ScanRequest,
)
from ziplog.client.reads.shard_stream import FIRST_CREDIT_BYTES
from ziplog.core.entries import Unit, decode_body
from ziplog.core.node import BatchEnd
from ziplog.core.units import NEVER
from ziplog.errors import ClosedError, ConfigError, DeadlineError, TrimmedError
from ziplog.types import RID_GENESIS


class Scanner(ClientHarness):
    """A client node that scans shard 0, which owns odd gsns."""

    def __init__(self, start: int = 1, stop: int = 100) -> None:
        super().__init__()
        self.connect(placement(0), placement(1))
        self.scan = self.call(ScanRequest(self.until(), 0, start, stop))
        assert self.answers.pop(self.scan) == self.scan
        self.opened: Any = None
        #: The place of the first stream.
        self.where = self.look()

    def look(self) -> list[str]:
        """Record the streams that were opened; return their places."""
        opened = self.take(wire.Subscribe)
        if opened:
            self.opened = opened[-1][1]
        return [name for name, _ in opened]

    def deliver(self, start: int, frontier: int, *units: Any, stable: int = 0) -> None:
        number = self.opened.subscription
        self.give(
            wire.Deliver(
                CLUSTER, 0, 1, 1, number, start, frontier, list(units), [], stable or frontier
            )
        )

    def fetch(self, timeout: int = NEVER) -> int:
        until = timeout if timeout == NEVER else self.until(timeout)
        return self.call(ScanFetchRequest(until, self.scan))

    def result(self) -> tuple[list[list[int]], int]:
        """Return the available positions, and the end of the complete part."""
        call = self.fetch(0)
        self.pass_time(0)
        scanned = self.answers.pop(call)
        assert isinstance(scanned, Scanned), scanned
        return [unit.gsns for unit in scanned.units], scanned.reached


def test_lost_fetch_result_is_returned_again() -> None:
    harness = Scanner(5, 21)

    def fetch(position: int) -> Any:
        return harness.answers.pop(harness.call(ScanFetchRequest(NEVER, harness.scan, position)))

    harness.deliver(5, 11, unit(5), unit(9))
    first = Scanned([unit(5), unit(9)], 11)
    assert fetch(5) == fetch(5) == first
    waiting = harness.call(ScanFetchRequest(NEVER, harness.scan, 11))
    assert not harness.answers, "the reader has all of it"
    harness.deliver(11, 21, unit(13))
    assert harness.answers.pop(waiting) == fetch(11) == fetch(11) == Scanned([unit(13)], 21)
    assert fetch(21) == Scanned([], 21)


def test_units_are_whole_and_in_order_to_the_end_of_the_range() -> None:
    harness = Scanner(5, 21)
    assert harness.where == ["s0r1:1"], "with two replicas, the backup is preferred"
    assert (harness.opened.start, harness.opened.shard) == (5, 0)
    first = unit(3, 5, 7)
    harness.deliver(5, 11, first, unit(9))
    call = harness.fetch()
    assert harness.answers.pop(call) == Scanned([first, unit(9)], 11)
    call = harness.fetch()
    assert not harness.answers, "no unit is available"
    harness.deliver(11, 29, unit(13, 15), unit(19, 21, 23), unit(25))
    assert harness.answers.pop(call) == Scanned([unit(13, 15), unit(19, 21, 23)], 21)
    assert [m.subscription for _, m in harness.take(wire.Unsubscribe)] == [
        harness.opened.subscription
    ]
    assert harness.result() == ([], 21)
    harness.sent.clear()
    harness.pass_time(5 * S)
    assert not harness.sent, "the scan has ended"


def test_several_messages_of_one_batch_are_one_step() -> None:
    harness = Scanner()
    call = harness.fetch()
    number = harness.opened.subscription
    harness.give(
        wire.Deliver(CLUSTER, 0, 1, 1, number, 1, 3, [unit(1)], [], 3),
        wire.Deliver(CLUSTER, 0, 1, 1, number, 3, 5, [unit(3)], [], 5),
    )
    assert harness.answers.pop(call) == Scanned([unit(1), unit(3)], 5)


def test_no_ops_advance_a_scan() -> None:
    harness = Scanner()
    harness.deliver(1, 51)
    assert harness.result() == ([], 51)


def test_a_gap_is_never_passed() -> None:
    harness = Scanner()
    harness.deliver(1, 3, unit(1))
    harness.deliver(5, 7, unit(5))
    assert harness.look() == ["s0r1:1"]
    assert harness.opened.start == 3
    assert harness.result() == ([[1]], 3)
    harness.deliver(3, 7, unit(3), unit(5))
    assert harness.result() == ([[3], [5]], 7)


def test_scan_sends_want_for_undecided_positions() -> None:
    harness = Scanner(1, 50)
    harness.pass_time(600 * MS)
    assert harness.take(wire.Credit), "time has passed"
    assert not harness.take(wire.Want), "the first reply may contain everything"
    harness.deliver(1, 5, unit(1), stable=99)
    assert not harness.take(wire.Want)
    harness.deliver(5, 9, stable=9)
    wants = harness.take(wire.Want)
    assert [(name, m.gsn, m.shard) for name, m in wants] == [("s0r0:1", 49, 0)]
    harness.pass_time(60 * MS)
    assert len(harness.take(wire.Want)) == 1, "again"
    harness.deliver(9, 50)
    harness.take(wire.Want)
    harness.pass_time(60 * MS)
    assert not harness.take(wire.Want)


def test_credit_is_granted_as_units_are_returned() -> None:
    harness = Scanner(1, 1_000)
    big = Unit(0, [1], bytes(FIRST_CREDIT_BYTES // 2))
    harness.deliver(1, 3, big)
    assert not [m for _, m in harness.take(wire.Credit) if m.credit > harness.opened.credit]
    harness.result()
    harness.pass_time(0)
    (credit,) = [m.credit for _, m in harness.take(wire.Credit)]
    assert credit == 2 * FIRST_CREDIT_BYTES + FIRST_CREDIT_BYTES // 2 + 64


def test_scan_changes_to_the_next_replica_after_silence_or_refusal() -> None:
    harness = Scanner()
    harness.deliver(1, 3, unit(1))
    harness.pass_time(2 * S)
    assert harness.look() == ["s0r0:1"]
    assert harness.opened.start == 3
    harness.give(refused(harness.opened, 0, "not-ready", harness.opened.subscription))
    harness.pass_time(100 * MS)
    assert harness.look() == ["s0r1:1"]
    harness.give(refused(harness.opened, 1, "unknown-subscription", harness.opened.subscription))
    assert harness.look() == ["s0r1:1"], "at once, at the same server"


def test_scan_reopens_its_stream_in_another_view() -> None:
    harness = Scanner()
    harness.deliver(1, 3, unit(1))
    harness.core._routing.update_placements([placement(1, view=2)])
    harness.step(BatchEnd())
    assert not harness.look()
    harness.core._routing.update_placements([placement(0, view=2)])
    harness.step(BatchEnd())
    assert harness.look() == ["s0r1:1"]
    assert (harness.opened.view, harness.opened.start) == (2, 3)


def test_trimmed_position_ends_a_scan() -> None:
    harness = Scanner()
    call = harness.fetch()
    harness.give(wire.Trimmed(CLUSTER, 0, 1, harness.opened.subscription, 40))
    question = harness.take(wire.LeaseQuery)[-1][1]
    harness.give(wire.LeaseHistory(CLUSTER, question.request, [], [placement(0)], 40))
    error = harness.answers.pop(call)
    assert isinstance(error, TrimmedError)
    assert error.first.gsn == 40
    call = harness.fetch()
    assert isinstance(harness.answers.pop(call), TrimmedError)


def test_scan_continues_after_the_deadline_of_a_step() -> None:
    harness = Scanner()
    call = harness.fetch(300 * MS)
    harness.pass_time(300 * MS)
    assert harness.answers.pop(call) == Scanned([], 1)
    harness.deliver(1, 3, unit(1))
    assert harness.result() == ([[1]], 3)


def test_an_empty_range_is_read_without_a_stream() -> None:
    harness = Scanner(7, 7)
    assert not harness.where
    assert harness.result() == ([], 7)


def test_unknown_shard_is_looked_up() -> None:
    harness = ClientHarness()
    harness.connect(placement(0))
    calls = [harness.call(ScanRequest(harness.until(), shard, 1, 9)) for shard in (1, 2)]
    harness.list_shards(placement(0), placement(1))
    assert harness.answers.pop(calls[0]) == calls[0]
    assert len(harness.take(wire.Subscribe)) == 1
    assert isinstance(harness.answers.pop(calls[1]), ConfigError)


def test_the_deadline_of_opening() -> None:
    harness = ClientHarness()
    harness.connect(placement(0))
    call = harness.call(ScanRequest(harness.until(1 * S), 1, 1, 9))
    harness.pass_time(1 * S)
    assert isinstance(harness.answers.pop(call), DeadlineError)
    harness.list_shards(placement(0), placement(1))
    assert not harness.take(wire.Subscribe)


def test_closing_a_scan_ends_its_stream_and_fetches() -> None:
    harness = Scanner()
    call = harness.fetch()
    end = harness.call(ScanCloseRequest(NEVER, harness.scan))
    assert harness.answers.pop(end) is None
    assert isinstance(harness.answers.pop(call), ClosedError)
    assert harness.take(wire.Unsubscribe)
    assert isinstance(harness.answers.pop(harness.fetch()), ClosedError)


def test_cancelled_fetch_consumes_nothing() -> None:
    harness = Scanner()
    harness.cancel(harness.fetch())
    harness.deliver(1, 3, unit(1))
    assert harness.result() == ([[1]], 3)


def test_scan_and_subscription_are_independent() -> None:
    harness = ClientHarness()
    cluster = FakeCluster(harness, seed=3)
    harness.connect(*cluster.placements())
    for count in range(20):
        cluster.result(harness.insert(b"%d" % count))
    subscription = cluster.subscribe()
    scanned = scan_all(cluster, 0, 1, 30)
    records = cluster.fetch_all(subscription)
    assert [(r.rid.gsn, r.payload) for r in records] == cluster.log
    assert scanned == [row for row in cluster.log if row[0] < 30 and row[0] % 2 == 1]


def scan_all(cluster: FakeCluster, shard: int, start: int, stop: int) -> list[tuple[int, bytes]]:
    """Scan to the end; return the positions inside the range."""
    harness = cluster.harness
    scan = cluster.result(harness.call(ScanRequest(harness.until(), shard, start, stop)))
    rows: list[tuple[int, bytes]] = []
    reached = start
    while reached < stop:
        step = cluster.result(harness.call(ScanFetchRequest(NEVER, scan)))
        assert isinstance(step, Scanned), step
        assert reached < step.reached <= stop
        for one in step.units:
            payloads = decode_body(one.body, len(one.gsns)).payloads
            rows += zip(one.gsns, payloads, strict=True)
        assert all(gsn < step.reached or gsn >= stop for gsn, _ in rows)
        reached = step.reached
    return [row for row in rows if start <= row[0] < stop]


@examples(40)
@given(
    st.integers(0, 2**32), st.integers(1, 150), st.integers(1, 150),
    st.sampled_from([0.0, 0.2]), st.sampled_from([0.0, 0.3]),
)  # fmt: skip
def test_scan_returns_the_whole_range_despite_network_faults(
    seed: int, start: int, length: int, loss: float, repetition: float
) -> None:
    harness = ClientHarness(lambda payload, _k, live: live[len(payload) % len(live)])
    cluster = FakeCluster(harness, seed)
    harness.connect(*cluster.placements())
    for count in range(30):
        payloads = [b"x" * (count % 7)] * (1 + count % 3)
        cluster.result(harness.call(InsertRequest(NEVER, payloads, RID_GENESIS, None, 0)))
    cluster.loss, cluster.repetition = loss, repetition
    stop = start + length
    for shard in range(2):
        mine = [row for row in cluster.log if row[0] % 2 != shard and start <= row[0] < stop]
        assert scan_all(cluster, shard, start, stop) == mine


@pytest.mark.parametrize("stop", [3, 4])
def test_the_range_ends_between_two_positions_of_the_shard(stop: int) -> None:
    harness = Scanner(1, stop)
    harness.deliver(1, 5, unit(1), unit(3))
    units, reached = harness.result()
    assert (units, reached) == ([[1]] if stop == 3 else [[1], [3]], stop)
