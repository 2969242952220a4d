"""Mutants of early delivery. See tests/sim/mutation.

A guess is wrong only if a view ends with decisions that no backup holds. So most draws cut primary
and backup from each other and kill the primary soon after, while clients' copies are lost.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, Final

import msgspec

from shard.serving.early_streams import EarlyStreams
from shard.serving.readers import Readers
from shard.serving.subscription import Part
from tests.sim.mutation import LAN, busy, mutant, replaced
from tests.sim.plan import Fault
from tests.simulator.kernel import MS, US
from tests.simulator.network import Conditions
from ziplog.client.reads.comparison import Comparison
from ziplog.client.reads.early_stream import EarlyStream
from ziplog.client.reads.speculation import Speculation
from ziplog.core.entries import Unit
from ziplog.speculation import _Run
from ziplog.types import Confirmed, Event, Failed, Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.sim.plan import Plan
    from ziplog.client.common.requests import Progress
    from ziplog.wire import Subscribe

#: Time from the cut to the death of the primary.
_DECIDES_ALONE_MS: Final = 3


def lost_decisions(seed: int) -> Plan:
    """Return a run in which the primary decides alone for a moment, and dies."""
    at_ms = Random(f"alone {seed}").randrange(10, 100)
    pairs = ("shard-0-0", "shard-0-1", "shard-0-1", "shard-0-0")
    return busy(
        seed,
        Fault(at_ms, "cut", pairs, 2_000),
        Fault(at_ms + _DECIDES_ALONE_MS, "kill", ("shard-0-0",)),
        writers=6, think_us=0, conditions=Conditions(delay_ns=(20 * US, 1 * MS), loss=0.1),
        speculators=1,
    )  # fmt: skip


def pausing_writers(seed: int) -> Plan:
    """Return such a run of few inserts, so that the truth may pass lost positions alone."""
    return lost_decisions(seed)._replace(calls=3, think_us=1_000)


_LOST: Final = "a primary that was cut from its backup is killed; lost frames; one speculator"


@mutant(lost_decisions, _LOST)
def decided_counts_as_confirmed() -> Iterator[None]:
    """Only a record of the truth is final (W2)."""
    on_guess, on_truth = Comparison.on_guess, Comparison.on_truth

    def guessed(self: Comparison, records: Sequence[Record]) -> list[Event]:
        events = on_guess(self, records)
        return [*events, Confirmed(records[-1].rid)] if records else events

    def compared(self: Comparison, records: Sequence[Record], position: int) -> list[Event]:
        end = self.next_gsn
        events = on_truth(self, [r for r in records if r.rid.gsn >= end], max(position, end))
        return [event for event in events if type(event) is not Failed]

    with replaced(Comparison, "on_guess", guessed), replaced(Comparison, "on_truth", compared):
        yield


@mutant(lost_decisions, _LOST)
def positions_alone_are_compared() -> Iterator[None]:
    """An early record is confirmed if the truth has the same record, not another one there (W2)."""
    on_truth = Comparison.on_truth

    def compared(self: Comparison, records: Sequence[Record], position: int) -> list[Event]:
        early = {record.rid.gsn: record for record in self.pending}
        return on_truth(self, [early.get(r.rid.gsn, r) for r in records], position)

    with replaced(Comparison, "on_truth", compared):
        yield


@mutant(lost_decisions, _LOST)
def failure_names_the_last_delivery() -> Iterator[None]:
    """A failure names the first delivery that is wrong (W2, W4)."""
    fail = Comparison._fail

    def failed(self: Comparison, gsn: int) -> Failed:
        last = self.pending[-1].rid
        fail(self, gsn)
        return Failed(RecordId(last.gsn - 1, last.shard))

    with replaced(Comparison, "_fail", failed):
        yield


@mutant(lost_decisions, _LOST)
def position_is_what_was_delivered() -> Iterator[None]:
    """A speculation continues behind what was confirmed, not behind what was delivered."""
    progress = Speculation.progress

    def delivered(self: Speculation, after: int) -> Progress:
        found, comparison = progress(self, after), self._comparison
        if comparison is None:
            return found
        position = RecordId(max(found.position.gsn, comparison.next_gsn), 0)
        return msgspec.structs.replace(found, position=position)

    with replaced(Speculation, "progress", delivered):
        yield


@mutant(lost_decisions, _LOST)
def early_stream_outlives_its_view() -> Iterator[None]:
    """A primary closes its early streams when its view ends (J3)."""
    with replaced(EarlyStreams, "close_all", lambda _self: None):
        yield


@mutant(pausing_writers, "the same; clients that pause")
def missing_record_is_not_noticed() -> Iterator[None]:
    """An early record that the truth passes without a record is wrong, too (W2, J1)."""
    on_truth = Comparison.on_truth

    def compared(self: Comparison, records: Sequence[Record], position: int) -> list[Event]:
        reached = records[-1].rid.gsn + 1 if records else self._position
        events = on_truth(self, records, reached)
        self._position = position
        return events

    with replaced(Comparison, "on_truth", compared):
        yield


@mutant(lost_decisions, _LOST)
def oldest_effect_is_undone_first() -> Iterator[None]:
    """`process` undoes the newest effect first (W6)."""

    def pop_void(self: _Run) -> Iterator[tuple[Record, Any]]:
        while self._void:
            yield self._void.pop(0)

    with replaced(_Run, "pop_void", pop_void):
        yield


@mutant(lost_decisions, _LOST)
def output_leaves_before_it_is_confirmed() -> Iterator[None]:
    """`process` emits only what is confirmed (W6)."""

    def next_final(self: _Run) -> tuple[Record, Any] | None:
        return self._applied[0] if self._applied else None

    with replaced(_Run, "next_final", next_final):
        yield


def crossing_inserts(seed: int) -> Plan:
    """Return a run without faults in which a backup often guesses wrong."""
    return busy(seed, writers=6, think_us=0, conditions=LAN, speculators=1)


@mutant(crossing_inserts, "no faults; six writers without pauses; one speculator")
def early_stream_has_guesses() -> Iterator[None]:
    """An early stream has what the primary decided, not what a backup guesses (J3)."""
    send_early, subscribe = Readers.send_early, EarlyStreams.subscribe

    def subscribed(self: EarlyStreams, route: bytes, message: Subscribe, now: int) -> None:
        with replaced(self._state, "server", 0):
            subscribe(self, route, message, now)

    def sent(self: Readers) -> bool:
        state = self._state
        promised = self._guesses.promised.values() if self._guesses is not None else ()
        send_early(self)
        for stream in self.early.streams.values():
            units = [
                Unit(state.clock.epoch_at(unit.gsns[0]), unit.gsns, unit.body)
                for unit in promised
                if unit.gsns is not None and unit.gsns[0] >= stream.sent
            ]
            if units:
                self.early._send(stream, Part(units, units[-1].gsns[-1] + 1, 0, 0))
        return False

    with (
        replaced(EarlyStream, "_replica", lambda _self, route: route.names[-1]),
        replaced(EarlyStreams, "subscribe", subscribed),
        replaced(EarlyStreams, "check", lambda _self: None),
        replaced(Readers, "send_early", sent),
    ):
        yield
