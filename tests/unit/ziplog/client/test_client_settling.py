"""`Settled` reports of an idle client (docs/protocol.md, section 4, rule 8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from tests.unit.ziplog.client.fakes import ClientHarness, S, ack, connected, learn, refused
from ziplog import wire
from ziplog.client.common.requests import Counters
from ziplog.client.engines.engine import Engine
from ziplog.client.inserts.settling import MANY_UNITS
from ziplog.core.node import Closing, Send

if TYPE_CHECKING:
    from ziplog.core.node import Effect, Event
    from ziplog.runtime.transport import Transport


def settle(harness: ClientHarness, *inserts: wire.Insert) -> None:
    for insert in inserts:
        for server in range(2):
            harness.give(
                ack(insert, server, range(insert.seq * 256, insert.seq * 256 + insert.count))
            )


def insert_units(harness: ClientHarness, units: int) -> None:
    """Insert this many units by one call, and complete them."""
    harness.insert(*[b"x"] * (256 * units))
    settle(harness, *(message for name, message in harness.take(wire.Insert) if name == "s0r0:1"))


def reports(harness: ClientHarness) -> list[tuple[str, int]]:
    return [(name, message.first_incomplete) for name, message in harness.take(wire.Settled)]


def test_many_completed_units_are_reported_at_once_when_idle() -> None:
    harness = connected()
    insert_units(harness, MANY_UNITS)
    assert reports(harness) == [("s0r0:1", MANY_UNITS + 1), ("s0r1:1", MANY_UNITS + 1)]


def test_one_insert_after_the_other_reports_nothing() -> None:
    harness = connected()
    for _ in range(2 * MANY_UNITS):
        insert_units(harness, 1)
    assert not reports(harness)


def test_a_silent_client_reports_a_few_times() -> None:
    """A report may be lost; but a thousand idle clients must not cost anything."""
    harness = connected()
    insert_units(harness, 1)
    # The silence begins with the next wakeup.
    harness.pass_time(S // 10)
    start, times = harness.now, []
    for _ in range(400):
        harness.pass_time(S // 10)
        if found := reports(harness):
            assert found == [("s0r0:1", 2), ("s0r1:1", 2)]
            times.append(harness.now - start)
    assert times == [1 * S, 6 * S, 31 * S]
    harness.pass_time(3600 * S)
    assert not reports(harness)
    insert_units(harness, 1)
    harness.pass_time(2 * S)
    assert reports(harness) == [("s0r0:1", 3), ("s0r1:1", 3)]


def test_nothing_is_reported_while_units_are_in_flight() -> None:
    harness = connected()
    insert_units(harness, 1)
    harness.insert(b"x", timeout=60 * S)
    harness.pass_time(30 * S)
    assert not reports(harness)


def test_closing_client_reports_only_completed_units() -> None:
    harness = connected()
    insert_units(harness, 1)
    harness.insert(b"y")
    harness.step(Closing())
    assert reports(harness) == [("s0r0:1", 2), ("s0r1:1", 2)]


def test_a_client_that_inserted_nothing_reports_nothing() -> None:
    harness = connected()
    harness.pass_time(60 * S)
    harness.step(Closing())
    assert not reports(harness)


def test_unavailable_shard_gets_no_report() -> None:
    harness = connected()
    insert_units(harness, 1)
    learn(harness, state="recovering")
    harness.pass_time(60 * S)
    harness.step(Closing())
    assert not reports(harness)


def test_insert_that_all_servers_refuse_as_full_is_rerouted() -> None:
    harness = connected()
    call = harness.insert(b"x")
    ((_, first), _) = harness.take(wire.Insert)
    harness.give(refused(first, 0, "full"))
    assert not harness.take(wire.Insert)
    harness.give(refused(first, 1, "full"))
    harness.pass_time(1 * S)
    moved = next(message for _, message in harness.take(wire.Insert))
    assert moved.shard == 1
    settle(harness, moved)
    assert call in harness.answers


class _Transport:
    """Records the calls of the engine."""

    def __init__(self) -> None:
        self.happened: list[object] = []

    def send(self, dst: bytes, _frame: bytes) -> bool:
        self.happened.append(dst)
        return True

    def close(self) -> None:
        self.happened.append("closed")


class _Core:
    """Has something to send when it closes."""

    counters = Counters()

    def step(self, event: Event, _now: int) -> list[Effect]:
        return [Send(b"a", wire.Settled(1, 0, 1, bytes(16), 2))] if type(event) is Closing else []

    is_batch_open = False

    def step_call(self, _number: int, _request: object, _now: int) -> list[Effect]:
        raise AssertionError("no call was made")

    def step_ack(self, _src: bytes, _ack: wire.InsertAck, _now: int) -> list[Effect]:
        raise AssertionError("no ack was sent")

    def next_wakeup(self) -> int | None:
        return None

    def check(self) -> None:
        pass


def test_last_report_is_sent_once_before_the_connections_close() -> None:
    transport = _Transport()
    ignore = lambda *_: None  # noqa: E731
    engine = Engine(_Core(), ignore, ignore, transport=cast("Transport", transport))
    engine.close()
    engine.close()
    assert transport.happened == [b"a", "closed", "closed"]
