"""Mutants of changes of the durability level. See tests/sim/mutation."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, Final

from shard.ordering.backup import Backup
from shard.ordering.watermarks import Watermarks
from shard.state.ack_level import AckLevel
from tests.sim.mutation import LAN, busy, mutant, replaced
from tests.sim.plan import LOWER, RAISE, Fault, Plan
from ziplog.core.node import FlushBeforeSend, LevelRequested
from ziplog.runtime.driver import Driver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ziplog.core.node import Effect, LevelRecorded
    from ziplog.types import Durability

_SERVERS: Final = ("shard-0-0", "shard-0-1")


def _change_and_cut(seed: int, amount: int, after_ms: tuple[int, int]) -> tuple[Fault, ...]:
    """Return a change of the level of all servers, and a power cut some time after it."""
    random = Random(f"levels {seed}")
    at_ms = random.randrange(20, 100)
    changes = [Fault(at_ms, "set-level", (name,), amount=amount) for name in _SERVERS]
    return (*changes, Fault(at_ms + random.randrange(*after_ms), "power-all"))


def _raise_and_cut(seed: int) -> Plan:
    """The level is raised under load; all machines lose their power a moment later."""
    faults = _change_and_cut(seed, RAISE, (5, 60))
    return busy(seed, *faults, conditions=LAN, think_us=0, lanes=4)


def _cut_and_raise(seed: int) -> Plan:
    """All machines lose their power under load; the level is raised before they are back."""
    random = Random(f"levels {seed}")
    at_ms = random.randrange(20, 100)
    changes = [Fault(at_ms, "set-level", (name,), amount=RAISE) for name in _SERVERS]
    cut = Fault(at_ms, "power-all")
    again = Fault(at_ms + random.randrange(300, 1_500), "power-all")
    return busy(seed, cut, *changes, again, conditions=LAN, think_us=0, lanes=4)


def _lower_and_cut(seed: int) -> Plan:
    """The level is lowered under load; all machines lose their power a moment later."""
    faults = _change_and_cut(seed, LOWER, (0, 3))
    return busy(seed, *faults, durability="disk", conditions=LAN, think_us=0, lanes=4)


def _raise_the_backup(seed: int) -> Plan:
    """The backup raises its level while it hears no decisions; then the power is cut.

    The primary's disk is slow, so the backup's log is the longer one.
    """
    at_ms = Random(f"levels {seed}").randrange(30, 100)
    links = ("shard-0-0", "shard-0-1")
    return busy(
        seed,
        Fault(at_ms - 20, "slow-disk", ("shard-0-0",), 200),
        Fault(at_ms - 5, "cut", links, 100),
        Fault(at_ms, "set-level", ("shard-0-1",), amount=RAISE),
        Fault(at_ms + 3, "power-all"),
        conditions=LAN, think_us=0, lanes=4,
    )  # fmt: skip


def _crashing_primary(seed: int) -> Plan:
    """The primary crashes as it writes, at level `disk`; its backup has readers."""
    random = Random(f"levels {seed}")
    crash = Fault(random.randrange(20, 200), "crash", ("shard-0-0",), 300, random.randrange(1, 4))
    return busy(seed, crash, durability="disk", conditions=LAN, think_us=0, lanes=4, readers=2)


def _full_primary(seed: int) -> Plan:
    """The disk of the primary is full for a while, at level `disk`."""
    at_ms = Random(f"levels {seed}").randrange(20, 100)
    full = Fault(at_ms, "full-disk", ("shard-0-0",), 500)
    return busy(seed, full, durability="disk", conditions=LAN, think_us=0, lanes=4)


@mutant(_raise_and_cut, "the level is raised under load, and then the power is cut")
def raised_level_is_not_flushed() -> Iterator[None]:
    """A server that raises its level flushes before each ack (section 10)."""

    def ignored(_self: Driver, _effect: FlushBeforeSend) -> None:
        return

    with replaced(Driver, "_set_flush", ignored):
        yield


@mutant(_lower_and_cut, "the level is lowered under load, and the power is cut at once")
def lowered_level_is_not_recorded_first() -> Iterator[None]:
    """A server records `memory` before it acks from its memory (section 10)."""

    def on_event(self: AckLevel, event: LevelRequested | LevelRecorded) -> list[Effect]:
        if not isinstance(event, LevelRequested):
            self.recorded = event.level
            return []
        self.requested = event.level
        self.is_memory = event.level == "memory"
        return [FlushBeforeSend(not self.is_memory)]

    with replaced(AckLevel, "on_event", on_event), replaced(AckLevel, "check", lambda _self: None):
        yield


@mutant(_cut_and_raise, "the power is cut, and the level is raised before the servers are back")
def requested_level_counts_as_recorded() -> Iterator[None]:
    """Only the recorded level says what a server that crashed has on its disk (section 11)."""
    create = AckLevel.__init__

    def init(self: AckLevel, requested: Durability, _recorded: Durability) -> None:
        create(self, requested, requested)

    with replaced(AckLevel, "__init__", init):
        yield


@mutant(_raise_the_backup, "the backup raises its level, hears no decisions, and loses its power")
def level_is_recorded_before_all_is_on_the_disk() -> Iterator[None]:
    """A server records `disk` once its disk has all that it acked (section 10)."""
    advance = AckLevel.advance

    def at_once(self: AckLevel, now: int, **_: Any) -> list[Effect]:
        return advance(self, now, is_complete=True)

    with replaced(AckLevel, "advance", at_once):
        yield


@mutant(_crashing_primary, "the primary crashes as it writes, at level `disk`")
def forwarded_counts_as_on_the_primarys_disk() -> Iterator[None]:
    """What a backup of a pair counts as stable is on the primary's disk, too (section 5)."""

    def own(self: Backup) -> int:
        state = self._state
        return state.stream.last if state.level.is_memory else self._durable

    with replaced(Backup, "_held_by_both", property(own)):
        yield


@mutant(_full_primary, "the disk of the primary is full for a while, at level `disk`")
def primary_counts_what_is_not_on_its_disk() -> Iterator[None]:
    """What a primary counts as stable is on its own disk, too (section 5)."""
    with replaced(Watermarks, "held", property(lambda self: self._state.stream.last)):
        yield
