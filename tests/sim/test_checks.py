"""Each check accepts correct data, and reports each violation."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.checks import (
    Deliveries,
    Entry,
    Expired,
    Placed,
    Row,
    Skipped,
    StableLogs,
    check_exactly_once,
    check_insert_order,
    check_replicas_agree,
    unfinished,
)
from tests.sim.history import History
from tests.sim.test_history import inserting
from tests.sim.test_ownership import LEASE, owned
from ziplog.client.common.requests import FetchRequest, SubscribeRequest, TailRequest
from ziplog.core.units import NEVER
from ziplog.types import RID_GENESIS

if TYPE_CHECKING:
    from collections.abc import Sequence


def logs() -> StableLogs:
    return StableLogs(owned())


def placed(fseq: int, *gsns: int, client: bytes = b"c", seq: int = 0, epoch: int = 0) -> Placed:
    payloads = tuple(b"%d" % gsn for gsn in gsns)
    return Placed(fseq, 1, epoch, client, seq or fseq, gsns, b"".join(payloads), payloads)


#: A log of shard 0, with positions 1, 2, 4, 5, 7, 8, 10, 11 | 13, 14, ...
ENTRIES: list[Entry] = [
    placed(1, 1, 2),
    Skipped(2, 1, 4, 7),
    Expired(3, 1, b"d"),
    placed(4, 7),
    Skipped(5, 1, 8, 13),
    placed(6, 13, epoch=1),
]


# --- stable entries ------------------------------------------------------------------------------


def test_a_log_as_it_should_be() -> None:
    known = logs()
    log = known.shard(0)
    log.observe("a", 2, ENTRIES, frontier=7)
    assert (log.observed("a"), log.observed("b")) == (2, 0)
    log.observe("b", 6, ENTRIES, frontier=14)
    log.observe("a", 6, ENTRIES[2:], frontier=14)
    log.observe("a", 6, [])
    known.shard(1).observe("c", 2, [placed(1, 3, seq=1), Skipped(2, 1, 4, 10)], frontier=11)
    assert sorted(known.records) == [1, 2, 3, 7, 13]
    assert known.records[2] == Row(2, 0, b"2")
    assert (log.closed, known.shard(1).closed) == (14, 11)
    log.restarted("a")
    log.observe("a", 4, ENTRIES[:4], frontier=8)
    assert log.closed == 14


def test_a_finalized_log_stays_as_it_is() -> None:
    log = logs().shard(0)
    log.observe("a", 5, ENTRIES, frontier=13)
    assert not log.is_complete
    ending: list[Entry] = [*ENTRIES[:5], Skipped(6, 1, 13, LEASE.stop)]
    log.observe("a", 6, ending, frontier=LEASE.stop)
    assert log.is_complete
    log.seal()
    log.restarted("a")
    log.observe("b", 6, ending, frontier=LEASE.stop)
    with pytest.raises(AssertionError, match="may be lost, and the shard was finalized"):
        log.allow_loss(7, 9)
    with pytest.raises(AssertionError, match="finalized with 6 entries"):
        log.observe("b", 7, [Expired(7, 2, b"e")])


def changed(index: int, **fields: Any) -> list[Entry]:
    entries = list(ENTRIES)
    entries[index] = replace(entries[index], **fields)
    return entries


WRONG_LOGS: list[tuple[list[Entry], str]] = [
    ([placed(1, 1, 3)], "belongs to shard 1"),
    ([placed(1, 1, epoch=1)], "is of epoch 0"),
    ([placed(1, 1, 4)], "not next to each other"),
    ([placed(1, 1), placed(2, 1)], "begins before"),
    ([placed(1, 1), Skipped(2, 1, 1, 9)], "begins before"),
    ([placed(1, 1), placed(2, 4)], "leaves position 2 undecided"),
    ([placed(1, 2)], "leaves position 1 undecided"),
    ([placed(1, 1), placed(2, 2, seq=1)], "is placed twice"),
    ([placed(1, 1), placed(3, 2)], "has no entry between"),
    ([Skipped(1, 1, 4, 4)], "decides nothing"),
    ([Skipped(1, 1, 1, LEASE.stop), placed(2, LEASE.stop)], "no lease has position"),
]


@pytest.mark.parametrize(("entries", "text"), WRONG_LOGS, ids=[text for _, text in WRONG_LOGS])
def test_a_log_as_it_may_not_be(entries: list[Entry], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        logs().shard(0).observe("a", entries[-1].fseq, entries)


@pytest.mark.parametrize(
    "entries",
    [
        changed(0, body=b"1x"),
        changed(0, payloads=(b"x", b"2")),
        changed(0, seq=9),
        changed(0, client=b"e"),
        changed(0, view=2),
        changed(1, stop=8),
        changed(2, client=b"e"),
        [placed(1, 1), Skipped(2, 1, 2, 7)],
    ],
)
@pytest.mark.parametrize("server", ["a", "b"])
def test_stable_entries_stay_at_every_server_and_after_every_start(
    entries: Sequence[Entry], server: str
) -> None:
    log = logs().shard(0)
    log.observe("a", 6, ENTRIES)
    log.restarted("a")
    with pytest.raises(AssertionError, match="was stable as"):
        log.observe(server, entries[-1].fseq, entries)


def test_unstable_entries_may_change() -> None:
    log = logs().shard(0)
    log.observe("a", 1, ENTRIES)
    log.observe("b", 2, [ENTRIES[0], placed(2, 4)])


def test_a_running_server_never_takes_back_stable_entries() -> None:
    log = logs().shard(0)
    log.observe("a", 4, ENTRIES)
    with pytest.raises(AssertionError, match="went back"):
        log.observe("a", 3, ENTRIES)


def test_entries_reported_as_stable_are_passed() -> None:
    with pytest.raises(AssertionError, match="was not passed"):
        logs().shard(0).observe("a", 6, ENTRIES[:4])


def test_one_position_has_one_unit_over_all_shards() -> None:
    known = logs()
    known.shard(0).observe("a", 1, [placed(1, 1)])
    known.records[2] = Row(2, 1, b"another shard's")
    with pytest.raises(AssertionError, match=r"position 2 holds .*another shard"):
        known.shard(0).observe("a", 2, [placed(2, 2)])


@pytest.mark.parametrize(("stable", "frontier"), [(0, 2), (1, 5), (2, 8), (3, 8), (4, 9), (5, 14)])
def test_a_frontier_passes_no_hole(stable: int, frontier: int) -> None:
    logs().shard(0).observe("a", stable, ENTRIES, frontier - 1)
    with pytest.raises(AssertionError, match=f"position {frontier - 1} of shard 0 is not decided"):
        logs().shard(0).observe("a", stable, ENTRIES, frontier)


def test_entries_trimmed_at_one_server_may_come_from_another() -> None:
    known = logs()
    log = known.shard(0)
    log.observe("a", 2, ENTRIES[1:], frontier=7)
    with pytest.raises(AssertionError, match=r"Placed\(fseq=1.* reaches into "):
        log.observe("b", 1, [placed(1, 6)])
    log.restarted("b")
    log.observe("b", 1, ENTRIES[:1])
    assert log.entries[1] == ENTRIES[0]


def test_nothing_appears_below_a_frontier() -> None:
    known = logs()
    log = known.shard(0)
    log.observe("a", 2, ENTRIES, frontier=7)
    log.entries.clear()  # as after a reset of the log
    log.observe("b", 11, [placed(11, 7)])
    with pytest.raises(AssertionError, match="all positions below 7 were decided"):
        log.observe("c", 12, [placed(12, 5)])


def test_only_entries_reported_as_lost_may_be_missing() -> None:
    known = logs()
    log = known.shard(0)
    log.observe("a", 6, ENTRIES, frontier=14)
    log.allow_loss(4, 40)
    assert sorted(known.records) == [1, 2]
    assert log.closed == 4
    anew = [ENTRIES[0], Skipped(2, 2, 4, 40), placed(3, 40, epoch=3, seq=4)]
    log.observe("a", 3, anew, frontier=41)
    log.observe("b", 3, anew)
    with pytest.raises(AssertionError, match="was stable as"):
        log.observe("c", 2, ENTRIES)
    other = logs().shard(0)
    other.observe("a", 6, ENTRIES)
    other.allow_loss(4, 40)
    with pytest.raises(AssertionError, match="was stable as"):
        other.observe("a", 1, [placed(1, 1)])
    other.allow_loss(40, 90)
    assert len(other.entries) == 1, "none of it was present"


def test_replicas_agree() -> None:
    check_replicas_agree(0, {"a": (6, ENTRIES), "b": (4, ENTRIES[:5]), "c": (2, ENTRIES[1:])})
    wrong = changed(4, stop=12)
    check_replicas_agree(0, {"a": (6, ENTRIES), "b": (4, wrong)})
    with pytest.raises(AssertionError, match="replicas of shard 0 differ at 5"):
        check_replicas_agree(0, {"a": (6, ENTRIES), "b": (5, wrong)})


def test_a_unit_is_in_a_shard_once() -> None:
    check_exactly_once(0, [*ENTRIES, placed(7, 15, client=b"e", seq=6)])
    with pytest.raises(AssertionError, match="a unit is twice in shard 0"):
        check_exactly_once(0, [*ENTRIES, placed(7, 15, seq=6)])


# --- readers -------------------------------------------------------------------------------------

SEQUENCE = [Row(gsn, gsn % 2, b"%d" % gsn) for gsn in (2, 3, 5, 8, 9, 12, 20)]


@given(st.integers(0, 2**32))
def test_parts_of_one_sequence_are_never_blamed(seed: int) -> None:
    random = Random(seed)
    deliveries = Deliveries()
    readers = {}
    for number in range(4):
        start = random.choice((None, random.randrange(1, 15)))
        first = random.randrange(7) if start is None else 0
        rows = [row for row in SEQUENCE[first:] if start is None or row.gsn >= start]
        readers[f"reader-{number}"] = (start, rows)
    while readers:
        name = random.choice(sorted(readers))
        start, rows = readers[name]
        count = random.randint(0, 3)
        deliveries.add(name, start, rows[:count])
        readers[name] = (start, rows[count:])
        if not rows[count:]:
            del readers[name]
    deliveries.check_against({row.gsn: row for row in SEQUENCE})


def test_a_reader_that_begins_in_the_middle_sees_the_same() -> None:
    deliveries = Deliveries()
    deliveries.add("b", 4, SEQUENCE[2:5])
    deliveries.add("a", 1, SEQUENCE[:4])
    deliveries.add("a", 1, SEQUENCE[4:])
    deliveries.add("c", None, SEQUENCE[5:])
    for reader, start, rows, text in (
        ("d", 1, SEQUENCE[1:2], "passed Row(gsn=2,"),
        ("d", 5, SEQUENCE[3:4], "passed Row(gsn=5,"),
        ("d", None, [SEQUENCE[0], SEQUENCE[2]], "passed Row(gsn=3,"),
        ("a", 1, SEQUENCE[6:], "a is at 21"),
        ("d", 3, SEQUENCE[:2], "d is at 3"),
        ("d", 1, [*SEQUENCE[:2], Row(4, 0, b"4")], "passed before without it"),
        ("d", 1, [SEQUENCE[0], Row(3, 1, b"else")], "received"),
        ("d", 1, [SEQUENCE[0], Row(3, 0, b"3")], "received"),
        ("d", 2, [SEQUENCE[0], SEQUENCE[0]], "d is at 3"),
    ):
        with pytest.raises(AssertionError, match=re.escape(text)):
            deliveries.add(reader, start, rows)


def test_positions_that_no_reader_passed_are_open() -> None:
    deliveries = Deliveries()
    deliveries.add("a", 3, SEQUENCE[1:3])
    deliveries.add("b", 8, SEQUENCE[3:5])
    deliveries.add("c", None, [Row(6, 0, b"between")])
    with pytest.raises(AssertionError, match="passed before"):
        deliveries.add("d", None, [Row(4, 0, b"within")])


def test_readers_receive_exactly_the_stable_records() -> None:
    log = {row.gsn: row for row in SEQUENCE}
    deliveries = Deliveries()
    deliveries.add("a", 3, SEQUENCE[1:4])
    deliveries.check_against(log)
    for gsn in (3, 5, 8):
        with pytest.raises(AssertionError, match="and the log holds"):
            deliveries.check_against({**log, gsn: Row(gsn, 0, b"else")})
        with pytest.raises(AssertionError, match="and the log holds None"):
            deliveries.check_against({k: row for k, row in log.items() if k != gsn})
    for gsn in (4, 7):
        with pytest.raises(AssertionError, match="no reader received it"):
            deliveries.check_against({**log, gsn: Row(gsn, 0, b"else")})
    deliveries.check_against({**log, 1: Row(1, 1, b"before"), 10: Row(10, 0, b"behind")})


def test_lost_positions_are_not_checked_at_readers() -> None:
    for is_known_first in (True, False):
        deliveries = Deliveries()
        if is_known_first:
            deliveries.allow_loss(1, 4, 8)
        deliveries.add("a", 1, SEQUENCE[:5])
        if not is_known_first:
            deliveries.allow_loss(1, 4, 8)
        deliveries.add("b", 1, [row for row in SEQUENCE[:4] if row.gsn != 5])
        deliveries.add("c", 5, SEQUENCE[2:4])
        with pytest.raises(AssertionError, match=re.escape("passed Row(gsn=8,")):
            deliveries.add("d", 5, SEQUENCE[4:5])
        with pytest.raises(AssertionError, match="passed before"):
            deliveries.add("e", None, [Row(4, 0, b"another shard's")])
        log = {row.gsn: row for row in SEQUENCE}
        deliveries.check_against(log)
        del log[5]
        deliveries.check_against(log)
        del log[8]
        with pytest.raises(AssertionError, match="and the log holds None"):
            deliveries.check_against(log)


# --- calls ---------------------------------------------------------------------------------------


def test_inserts_are_where_they_had_to_be() -> None:
    history = History()
    for request in (inserting(b"a", b"b", after=4), inserting(b"c", after=5), inserting(b"never")):
        history.call("client", 1, request)
    good = [Row(5, 0, b"a"), Row(8, 0, b"b"), Row(6, 1, b"c"), Row(1, 1, b"not of these")]
    check_insert_order(history.operations, good)
    for index, row, text in (
        (0, Row(4, 0, b"a"), "is not after 4@0"),
        (2, Row(5, 1, b"c"), "is not after 5@0"),
        (0, Row(9, 0, b"a"), "is not after Row"),
        (1, Row(8, 1, b"b"), "is not with"),
        (2, Row(9, 0, b"a"), "in the log twice"),
    ):
        rows = [*good[:index], row, *good[index + 1 :]]
        with pytest.raises(AssertionError, match=text):
            check_insert_order(history.operations, rows)


def test_operations_that_do_not_end_are_listed() -> None:
    history = History()
    tail = TailRequest(NEVER)
    late, slow, killed, later = (
        history.call(client, at, tail)
        for client, at in (("a", 100), ("b", 101), ("d", 102), ("c", 900))
    )
    history.returned(history.call("a", 1000, SubscribeRequest(NEVER, RID_GENESIS, True)), 1001, 7)
    history.call("a", 1002, FetchRequest(NEVER, 7, 1))
    waits = history.call("a", 1003, FetchRequest(5000, 7, 1))
    history.returned(slow, 1600, RID_GENESIS)

    def found(now: int, bound: int, healed: int = 0) -> list[int]:
        rows = unfinished(history, now, bound, healed=healed, dead={"d"})
        return [operation.number for operation in rows]

    assert found(1600, 1000) == [late, slow]
    assert found(1600, 1000, healed=700) == []
    assert found(1601, 1000, healed=600) == [late]
    assert found(2004, 1000) == [late, slow, later, waits]
    assert killed in [operation.number for operation in unfinished(history, 1600, 1000)]
    assert found(9000, 9000) == []
