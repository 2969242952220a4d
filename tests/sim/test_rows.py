"""Rewritten rows and bulk reads in complete clusters (docs/protocol.md, 14.3)."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.sim.plan import server_name
from tests.sim.script import Client, Reader, stage
from tests.simulator.kernel import MS, US, S
from ziplog.client.common.requests import (
    ExtentsRequest,
    InsertRequest,
    ScanFetchRequest,
    ScanRequest,
    TailRequest,
)
from ziplog.client.inserts import insert_calls
from ziplog.core.entries import Origin, Unit, decode_body
from ziplog.core.writer_table import WriterTable
from ziplog.errors import OutcomeUnknownError, UnavailableError
from ziplog.types import RID_GENESIS
from ziplog.wire import Insert

if TYPE_CHECKING:
    from tests.sim.script import Call, Stage

WRITER: Final = b"w" * 16
ROWS: Final = [b"row %d" % number for number in range(24)]
KEYS: Final = [b"%d" % number if number % 3 else None for number in range(24)]


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split the rows into twelve units."""
    for limit in ("UNIT_RECORDS", "ROW_UNIT_RECORDS"):
        monkeypatch.setattr(insert_calls, limit, 2)


def write(client: Client, shard: int = 0) -> Call:
    """Start to write the rows."""
    request = InsertRequest(
        client.process.clock() + 60 * S, ROWS, RID_GENESIS, None, 0, many=True, keys=KEYS,
        shard=shard, origin=Origin(WRITER, 0, 0),
    )  # fmt: skip
    return client.begin(request)


def scan(client: Client, shard: int, start: int, stop: int) -> list[Unit]:
    """Scan to the end."""
    deadline = client.process.clock() + 60 * S
    number = client.wait(client.begin(ScanRequest(deadline, shard, start, stop))).result
    units: list[Unit] = []
    reached = start
    while reached < stop:
        step = client.wait(client.begin(ScanFetchRequest(deadline, number))).result
        assert step.reached > reached, "no result within a minute"
        units, reached = units + step.units, step.reached
    return units


def scan_everything(client: Client) -> dict[int, bytes]:
    """Scan all records, shard by shard, without duplicates."""
    deadline = client.process.clock() + 60 * S
    tail = client.wait(client.begin(TailRequest(deadline))).result
    found = client.wait(client.begin(ExtentsRequest(deadline, 1, tail.gsn + 1))).result
    records: dict[int, bytes] = {}
    writers: dict[int, WriterTable] = {}
    for extent in found.shards:
        table = writers.setdefault(extent.shard, WriterTable())
        for unit in scan(client, extent.shard, extent.start, extent.stop):
            body = decode_body(unit.body, len(unit.gsns))
            old = table.first_new_row(body.origin, len(unit.gsns)) if body.origin is not None else 0
            records |= dict(zip(unit.gsns[old:], body.payloads[old:], strict=True))
    return dict(sorted(records.items()))


def test_a_recovery_never_puts_a_row_before_one_that_it_loses() -> None:
    """The backup's guesses and the primary's decisions differ in order, and both die."""
    with stage() as s:
        writer, other = Client(s, "writer"), Client(s, "other")
        s.fresh_epoch()
        s.delay("writer", "shard-0-0", Insert, 60 * S)
        s.delay("other", "shard-0-1", Insert, 5 * MS)
        call = write(writer)
        s.run(50 * US)
        other.insert(b"x")
        s.until(lambda: b"x" in s.log("shard-0-1").values())
        s.cluster.nodes["shard-0-0"].kill()
        writer.process.kill()
        log = s.settle()
        assert not call.ended
        rows = [payload for payload in log.values() if payload != b"x"]
        assert rows == ROWS[: len(rows)], "the remaining rows are a prefix"


def test_a_recovery_never_puts_a_record_behind_those_that_follow_it_in_its_call() -> None:
    """The recovery keeps all of a call's twelve units except the first, which lost its slots."""
    with stage() as s:
        writer, other = Client(s, "writer"), Client(s, "other")
        s.fresh_epoch()
        s.delay("writer", "shard-0-0", Insert, 60 * S, 12)
        s.delay("other", "shard-0-1", Insert, 5 * MS, 1)
        call = writer.insert(*ROWS)
        s.run(50 * US)
        single = other.insert(b"x")
        s.until(lambda: b"x" in s.log("shard-0-1").values())
        s.cluster.nodes["shard-0-0"].kill()
        log = s.settle()
        s.until(lambda: call.ended)
        other.wait(single)
        rows = {payload: gsn for gsn, payload in log.items() if payload != b"x"}
        assert list(rows) == ROWS[2:], "the first unit's slots were taken, the others' are kept"
        assert s.settle() == log, "nothing was retransmitted"
        error = call.result
        assert isinstance(error, UnavailableError)
        assert not error.retriable
        assert [rid and rid.gsn for rid in error.results] == [rows.get(row) for row in ROWS]
        writer.wait(writer.insert(b"later"))


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_writers_that_die_are_read_once_and_in_order(seed: int) -> None:
    chance = random.Random(seed)
    with stage(shards=2, seed=seed + 1, epoch_ms=20) as s:
        reader, other = Reader(s, "reader", 1), Client(s, "other", None)
        singles = []
        for life in range(4):
            writer = Client(s, f"writer-{life}")
            write(writer)
            singles.append(other.insert(b"single %d" % life))
            s.run(chance.randrange(6 * MS))
            if chance.random() < 0.7:
                s.cluster.nodes[server_name(0, chance.randrange(2))].kill()
                s.run(chance.randrange(6 * MS))
            writer.process.kill()
            s.run(chance.choice((0, 20 * MS, 2 * S)))
        last = Client(s, "last")
        complete(s, last)
        for single in singles:
            other.wait(single)
        s.settle()
        delivered = reader.until(len(ROWS) + len(singles))
        rows = [payload for _, payload in delivered if payload in ROWS]
        assert rows == ROWS
        assert sorted(payload for _, payload in delivered if payload not in ROWS) == [
            b"single %d" % life for life in range(4)
        ]
        assert list(scan_everything(last).items()) == delivered


def complete(s: Stage, client: Client) -> None:
    """Write the rows until a call reports all of them as stored."""
    while True:
        call = write(client)
        s.until(lambda: call.ended, 120 * S)  # noqa: B023 - run at once
        result: Any = call.result
        if not isinstance(result, BaseException):
            assert [rid.gsn for rid in result] == sorted(rid.gsn for rid in result)
            return
        assert isinstance(result, UnavailableError | OutcomeUnknownError), repr(result)
        assert result.retriable


def test_a_scan_goes_on_when_a_server_dies() -> None:
    with stage() as s:
        writer, other = Client(s, "writer"), Client(s, "other")
        writer.wait(write(writer))
        deadline = other.process.clock() + 60 * S
        end = other.wait(other.begin(TailRequest(deadline))).result.gsn + 1
        far = s.lease_at(end).stop
        number = other.wait(other.begin(ScanRequest(deadline, 0, 1, far))).result
        step = other.wait(other.begin(ScanFetchRequest(deadline, number))).result
        s.cluster.nodes["shard-0-1"].kill()
        later = other.insert(b"later")
        units, reached = step.units, step.reached
        while reached < far:
            step = other.wait(other.begin(ScanFetchRequest(deadline, number))).result
            assert step.reached > reached
            units, reached = units + step.units, step.reached
        other.wait(later)
        gsns = [gsn for unit in units for gsn in unit.gsns]
        assert gsns == sorted(gsns)
        payloads = [p for u in units for p in decode_body(u.body, len(u.gsns)).payloads]
        assert payloads[: len(ROWS)] == ROWS


def test_a_shard_that_has_left_is_scanned_to_the_end_of_its_membership() -> None:
    with stage(shards=2, epoch_ms=20) as s:
        writer = Client(s, "writer")
        for shard in (0, 1):
            writer.wait(write(writer, shard=shard))
        change = s.operator.change("finalize", 1)
        s.until(lambda: change.ended)
        assert change.refused is None
        writer.wait(Client(s, "other", None).insert(b"later"))
        deadline = writer.process.clock() + 60 * S
        tail = writer.wait(writer.begin(TailRequest(deadline))).result
        extents = writer.wait(writer.begin(ExtentsRequest(deadline, 1, tail.gsn + 1))).result.shards
        (of_it,) = [extent for extent in extents if extent.shard == 1]
        assert of_it.stop < tail.gsn, "it left before"
        units = scan(writer, 1, of_it.start, of_it.stop)
        bodies = [decode_body(unit.body, len(unit.gsns)) for unit in units]
        assert [payload for body in bodies for payload in body.payloads] == ROWS
