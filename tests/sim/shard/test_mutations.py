"""Break each rule once: the storm's checkers must notice.

Each mutant removes one rule from the code. These tests test the checkers: a rule that can be broken
unnoticed has no test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from shard.ordering.backup import Backup
from shard.ordering.primary import Primary
from shard.serving.readers import Readers
from shard.state.decision_log import DecisionLog
from shard.state.guesses import Guesses
from shard.state.sessions import Session
from tests.storm import Storm, Weather
from ziplog import wire
from ziplog.core.entries import Place

if TYPE_CHECKING:
    from shard.state.sessions import HeldUnit

#: The tried seeds, until one notices; the rarest mutant needs ten on average.
SEEDS = range(75)
BAD = Weather(shards=1, steps=50, loss=0.15, delay_us=3000, epoch_size=200)


def assert_noticed(weather: Weather = BAD) -> None:
    for seed in SEEDS:
        try:
            Storm(seed, weather).run()
        except (AssertionError, KeyError):
            return
    pytest.fail(f"the checkers noticed nothing in {len(SEEDS)} storms")


def test_no_mutant_passes_all_storms() -> None:
    for seed in SEEDS[:5]:
        Storm(seed, BAD).run()


def test_displaced_unit_gets_another_slot_from_the_backup(monkeypatch: pytest.MonkeyPatch) -> None:
    """A displaced unit waits without slots for the primary (section 4, rule 2)."""
    displace = Backup._displace

    def mutant(self: Backup, units: list[HeldUnit]) -> None:
        displace(self, units)
        for unit in units:
            if self.guesses.promise(unit, self._state.stream.end):
                self._state.ack(unit)

    monkeypatch.setattr(Backup, "_displace", mutant)
    assert_noticed()


def test_promise_moves_to_the_new_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never because of a new epoch (section 4, rule 1)."""
    arrived = Backup.accept

    def mutant(self: Backup, session: Session, unit: HeldUnit, now: int) -> None:
        floor = self._state.clock.current_epoch_base(now)
        for old in [u for first, u in self.guesses.promised.items() if first < floor]:
            assert old.gsns is not None
            del self.guesses.promised[old.gsns[0]]
            self.guesses._update_promised_end()
            if self.guesses.promise(old, floor):
                self._state.ack(old)
        arrived(self, session, unit, now)

    monkeypatch.setattr(Backup, "accept", mutant)
    assert_noticed()


def test_known_unit_is_placed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known unit is never placed twice (section 4, rule 8)."""

    def mutant(self: Primary, unit: HeldUnit, _since: int) -> None:
        entry = self._state.store.find(unit.gsns[0]) if unit.gsns is not None else None
        gsns = self._state.clock.first_slots(self._state.stream.end, unit.count)
        if entry is not None and isinstance(entry.decision, Place) and gsns:
            epoch = self._state.clock.epoch_at(gsns[0])
            again = replace(entry.decision, gsns=gsns, epoch=epoch)
            self._state.record(again)
            self._forwards.gathered.append(replace(again, body=None))

    monkeypatch.setattr(Primary, "on_copy", mutant)
    assert_noticed()


def test_stable_counts_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup reports its guesses as decided."""
    report = Backup.on_batch_end

    def mutant(self: Backup, now: int) -> None:
        stream, guessed = self._state.stream, len(self.guesses.promised)
        stream.last += guessed
        report(self, now)
        stream.last -= guessed

    monkeypatch.setattr(Backup, "on_batch_end", mutant)
    assert_noticed()


def test_gap_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup applies entries in spite of a gap before them."""
    forwarded = Backup.on_forward

    def mutant(self: Backup, forward: wire.Forward, now: int) -> Any:
        expected = self._state.stream.last + len(self._pending) + 1
        if forward.first > expected:
            forward = wire.Forward(
                forward.cluster, forward.shard, forward.view, forward.incarnation, expected,
                forward.decisions, forward.stable, forward.durable,
            )  # fmt: skip
        return forwarded(self, forward, now)

    monkeypatch.setattr(Backup, "on_forward", mutant)
    assert_noticed()


@pytest.mark.nightly
def test_missing_entries_are_not_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """No NACK: a body that only the primary received never arrives at the backup."""
    monkeypatch.setattr(Backup, "tick", lambda _self, _now: None)
    monkeypatch.setattr(Backup, "next_wakeup", lambda _self, _now: None)
    assert_noticed(Weather(shards=1, steps=40, loss=0.2, abandoned=0.3, restarts=False))


def test_promise_survives_a_no_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """The primary's no-op covers the slot."""
    monkeypatch.setattr(Guesses, "apply_skip", lambda *_: [])
    assert_noticed()


def test_every_older_promise_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The primary places another unit at a slot, and the backup keeps its own."""

    def place(self: Guesses, unit: HeldUnit, _gsns: list[int]) -> list[HeldUnit]:
        if unit.gsns is not None:
            del self.promised[unit.gsns[0]]
        return []

    monkeypatch.setattr(Guesses, "apply_place", place)
    monkeypatch.setattr(Guesses, "apply_skip", lambda *_: [])
    assert_noticed()


def test_promise_is_forgotten_when_its_client_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decision D3: `first_incomplete` may pass a completed unit that the backup only guessed."""
    settle = Session.settle

    def mutant(self: Session, first_incomplete: int) -> Any:
        dropped = settle(self, first_incomplete)
        for seq in [s for s in self.units if s < first_incomplete]:
            dropped.append(self.units.pop(seq))
        return dropped

    monkeypatch.setattr(Session, "settle", mutant)
    assert_noticed(Weather(shards=1, clients=5, steps=80, loss=0.05, abandoned=0, epoch_size=200))


@pytest.mark.nightly
def test_client_copy_after_the_primarys_decision_is_not_acked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The backup does not ack a copy of a unit that it already has."""
    monkeypatch.setattr(Backup, "on_copy", lambda _self, _unit, _since: None)
    assert_noticed()


def test_follower_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 9: a chain that arrives in the wrong order is placed in the wrong order."""
    monkeypatch.setattr(Session, "has_slots", lambda _self, _seq: True)
    assert_noticed()


def test_after_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thesis 4.2.1: a record is placed after the rid in `after`."""
    arrived = Primary.accept

    def mutant(self: Primary, session: Session, unit: HeldUnit, now: int) -> None:
        unit.after = 0
        arrived(self, session, unit, now)

    monkeypatch.setattr(Primary, "accept", mutant)
    assert_noticed()


def test_unstable_records_are_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record on one server only may still change its position."""
    stabilise = DecisionLog.stabilise
    monkeypatch.setattr(DecisionLog, "stabilise", lambda self, _fseq: stabilise(self, self.last))
    assert_noticed()


def test_news_do_not_reach_the_readers_of_a_backup(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frontier moves without its records."""
    stabilised = Readers.on_stable

    def mutant(self: Readers, news: list[Any]) -> None:
        self._stable = self._state.stream.stable
        stabilised(self, [])

    monkeypatch.setattr(Readers, "on_stable", mutant)
    assert_noticed()


def test_restart_forgets_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clean restart keeps the promises."""
    monkeypatch.setattr(Backup, "restore", lambda _self: None)
    assert_noticed()
