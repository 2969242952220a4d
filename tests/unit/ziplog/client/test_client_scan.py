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
    NEVER,
    InsertRequest,
    ScanCloseRequest,
    ScanFetchRequest,
    Scanned,
    ScanRequest,
)
from ziplog.client.reads.shard_stream import FIRST_CREDIT_BYTES
from ziplog.core.entries import Unit, decode_body
from ziplog.core.node import BatchEnd
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
    glass = Scanner(5, 21)

    def fetch(position: int) -> Any:
        return glass.answers.pop(glass.call(ScanFetchRequest(NEVER, glass.scan, position)))

    glass.deliver(5, 11, unit(5), unit(9))
    first = Scanned([unit(5), unit(9)], 11)
    assert fetch(5) == fetch(5) == first
    waiting = glass.call(ScanFetchRequest(NEVER, glass.scan, 11))
    assert not glass.answers, "the reader has all of it"
    glass.deliver(11, 21, unit(13))
    assert glass.answers.pop(waiting) == fetch(11) == fetch(11) == Scanned([unit(13)], 21)
    assert fetch(21) == Scanned([], 21)


def test_units_are_whole_and_in_order_to_the_end_of_the_range() -> None:
    glass = Scanner(5, 21)
    assert glass.where == ["s0r1:1"], "with two replicas, the backup is preferred"
    assert (glass.opened.start, glass.opened.shard) == (5, 0)
    first = unit(3, 5, 7)
    glass.deliver(5, 11, first, unit(9))
    call = glass.fetch()
    assert glass.answers.pop(call) == Scanned([first, unit(9)], 11)
    call = glass.fetch()
    assert not glass.answers, "no unit is available"
    glass.deliver(11, 29, unit(13, 15), unit(19, 21, 23), unit(25))
    assert glass.answers.pop(call) == Scanned([unit(13, 15), unit(19, 21, 23)], 21)
    assert [m.subscription for _, m in glass.take(wire.Unsubscribe)] == [glass.opened.subscription]
    assert glass.result() == ([], 21)
    glass.sent.clear()
    glass.pass_time(5 * S)
    assert not glass.sent, "the scan has ended"


def test_several_messages_of_one_batch_are_one_step() -> None:
    glass = Scanner()
    call = glass.fetch()
    number = glass.opened.subscription
    glass.give(
        wire.Deliver(CLUSTER, 0, 1, 1, number, 1, 3, [unit(1)], [], 3),
        wire.Deliver(CLUSTER, 0, 1, 1, number, 3, 5, [unit(3)], [], 5),
    )
    assert glass.answers.pop(call) == Scanned([unit(1), unit(3)], 5)


def test_no_ops_advance_a_scan() -> None:
    glass = Scanner()
    glass.deliver(1, 51)
    assert glass.result() == ([], 51)


def test_a_gap_is_never_passed() -> None:
    glass = Scanner()
    glass.deliver(1, 3, unit(1))
    glass.deliver(5, 7, unit(5))
    assert glass.look() == ["s0r1:1"]
    assert glass.opened.start == 3
    assert glass.result() == ([[1]], 3)
    glass.deliver(3, 7, unit(3), unit(5))
    assert glass.result() == ([[3], [5]], 7)


def test_scan_sends_want_for_undecided_positions() -> None:
    glass = Scanner(1, 50)
    glass.pass_time(600 * MS)
    assert glass.take(wire.Credit), "time has passed"
    assert not glass.take(wire.Want), "the first reply may contain everything"
    glass.deliver(1, 5, unit(1), stable=99)
    assert not glass.take(wire.Want)
    glass.deliver(5, 9, stable=9)
    wants = glass.take(wire.Want)
    assert [(name, m.gsn, m.shard) for name, m in wants] == [("s0r0:1", 49, 0)]
    glass.pass_time(60 * MS)
    assert len(glass.take(wire.Want)) == 1, "again"
    glass.deliver(9, 50)
    glass.take(wire.Want)
    glass.pass_time(60 * MS)
    assert not glass.take(wire.Want)


def test_credit_is_granted_as_units_are_returned() -> None:
    glass = Scanner(1, 1_000)
    big = Unit(0, [1], bytes(FIRST_CREDIT_BYTES // 2))
    glass.deliver(1, 3, big)
    assert not [m for _, m in glass.take(wire.Credit) if m.credit > glass.opened.credit]
    glass.result()
    glass.pass_time(0)
    (credit,) = [m.credit for _, m in glass.take(wire.Credit)]
    assert credit == 2 * FIRST_CREDIT_BYTES + FIRST_CREDIT_BYTES // 2 + 64


def test_scan_changes_to_the_next_replica_after_silence_or_refusal() -> None:
    glass = Scanner()
    glass.deliver(1, 3, unit(1))
    glass.pass_time(2 * S)
    assert glass.look() == ["s0r0:1"]
    assert glass.opened.start == 3
    glass.give(refused(glass.opened, 0, "not-ready", glass.opened.subscription))
    glass.pass_time(100 * MS)
    assert glass.look() == ["s0r1:1"]
    glass.give(refused(glass.opened, 1, "unknown-subscription", glass.opened.subscription))
    assert glass.look() == ["s0r1:1"], "at once, at the same server"


def test_scan_reopens_its_stream_in_another_view() -> None:
    glass = Scanner()
    glass.deliver(1, 3, unit(1))
    glass.core._routing.update_placements([placement(1, view=2)])
    glass.step(BatchEnd())
    assert not glass.look()
    glass.core._routing.update_placements([placement(0, view=2)])
    glass.step(BatchEnd())
    assert glass.look() == ["s0r1:1"]
    assert (glass.opened.view, glass.opened.start) == (2, 3)


def test_trimmed_position_ends_a_scan() -> None:
    glass = Scanner()
    call = glass.fetch()
    glass.give(wire.Trimmed(CLUSTER, 0, 1, glass.opened.subscription, 40))
    question = glass.take(wire.LeaseQuery)[-1][1]
    glass.give(wire.LeaseHistory(CLUSTER, question.request, [], [placement(0)], 40))
    error = glass.answers.pop(call)
    assert isinstance(error, TrimmedError)
    assert error.first.gsn == 40
    call = glass.fetch()
    assert isinstance(glass.answers.pop(call), TrimmedError)


def test_scan_continues_after_the_deadline_of_a_step() -> None:
    glass = Scanner()
    call = glass.fetch(300 * MS)
    glass.pass_time(300 * MS)
    assert glass.answers.pop(call) == Scanned([], 1)
    glass.deliver(1, 3, unit(1))
    assert glass.result() == ([[1]], 3)


def test_an_empty_range_is_read_without_a_stream() -> None:
    glass = Scanner(7, 7)
    assert not glass.where
    assert glass.result() == ([], 7)


def test_unknown_shard_refreshes_the_placements() -> None:
    glass = ClientHarness()
    glass.connect(placement(0))
    calls = [glass.call(ScanRequest(glass.until(), shard, 1, 9)) for shard in (1, 2)]
    glass.pass_time(100 * MS)
    glass.inform(placement(0), placement(1))
    assert glass.answers.pop(calls[0]) == calls[0]
    assert len(glass.take(wire.Subscribe)) == 1
    assert isinstance(glass.answers.pop(calls[1]), ConfigError)


def test_the_deadline_of_opening() -> None:
    glass = ClientHarness()
    glass.connect(placement(0))
    call = glass.call(ScanRequest(glass.until(1 * S), 1, 1, 9))
    glass.pass_time(1 * S)
    assert isinstance(glass.answers.pop(call), DeadlineError)
    glass.inform(placement(0), placement(1))
    assert not glass.take(wire.Subscribe)


def test_closing_a_scan_ends_its_stream_and_fetches() -> None:
    glass = Scanner()
    call = glass.fetch()
    end = glass.call(ScanCloseRequest(NEVER, glass.scan))
    assert glass.answers.pop(end) is None
    assert isinstance(glass.answers.pop(call), ClosedError)
    assert glass.take(wire.Unsubscribe)
    assert isinstance(glass.answers.pop(glass.fetch()), ClosedError)


def test_cancelled_fetch_consumes_nothing() -> None:
    glass = Scanner()
    glass.cancel(glass.fetch())
    glass.deliver(1, 3, unit(1))
    assert glass.result() == ([[1]], 3)


def test_scan_and_subscription_are_independent() -> None:
    glass = ClientHarness()
    cluster = FakeCluster(glass, seed=3)
    glass.connect(*cluster.placements())
    for count in range(20):
        cluster.result(glass.insert(b"%d" % count))
    subscription = cluster.subscribe()
    scanned = scan_all(cluster, 0, 1, 30)
    records = cluster.fetch_all(subscription)
    assert [(r.rid.gsn, r.payload) for r in records] == cluster.log
    assert scanned == [row for row in cluster.log if row[0] < 30 and row[0] % 2 == 1]


def scan_all(cluster: FakeCluster, shard: int, start: int, stop: int) -> list[tuple[int, bytes]]:
    """Scan to the end; return the positions inside the range."""
    glass = cluster.glass
    scan = cluster.result(glass.call(ScanRequest(glass.until(), shard, start, stop)))
    rows: list[tuple[int, bytes]] = []
    reached = start
    while reached < stop:
        step = cluster.result(glass.call(ScanFetchRequest(NEVER, scan)))
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
    glass = ClientHarness(lambda payload, _k, live: live[len(payload) % len(live)])
    cluster = FakeCluster(glass, seed)
    glass.connect(*cluster.placements())
    for count in range(30):
        payloads = [b"x" * (count % 7)] * (1 + count % 3)
        cluster.result(glass.call(InsertRequest(NEVER, payloads, RID_GENESIS, None, 0)))
    cluster.loss, cluster.repetition = loss, repetition
    stop = start + length
    for shard in range(2):
        mine = [row for row in cluster.log if row[0] % 2 != shard and start <= row[0] < stop]
        assert scan_all(cluster, shard, start, stop) == mine


@pytest.mark.parametrize("stop", [3, 4])
def test_the_range_ends_between_two_positions_of_the_shard(stop: int) -> None:
    glass = Scanner(1, stop)
    glass.deliver(1, 5, unit(1), unit(3))
    units, reached = glass.result()
    assert (units, reached) == ([[1]] if stop == 3 else [[1], [3]], stop)
