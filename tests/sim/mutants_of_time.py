"""Mutants of session expiry and of clocks (docs/protocol.md, 4, rules 8 and 13)."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from shard.state.sessions import Sessions
from tests.sim.mutation import busy, mutant, replaced
from tests.sim.plan import Fault, Plan
from tests.simulator.process import Process

if TYPE_CHECKING:
    from collections.abc import Iterator


def _away(seed: int, kind: str) -> Plan:
    """Two writers are away for longer than the session expiry, with open inserts."""
    random = Random(f"{kind} {seed}")
    faults = [
        Fault(random.randrange(10, 200), kind, (name,), random.choice((12_000, 16_000)))
        for name in ("writer-0", "writer-1")
    ]
    return busy(seed, *faults, lanes=8, think_us=0)


def _offline(seed: int) -> Plan:
    return _away(seed, "offline")


def _suspended(seed: int) -> Plan:
    return _away(seed, "suspend")


@mutant(_offline, "two of four writers are offline for longer than servers remember them")
def forgotten_units_are_taken() -> Iterator[None]:
    """A server accepts a unit that it may have placed in an expired session (D9)."""
    with replaced(Sessions, "raise_horizon", lambda *_: None):
        yield


@mutant(_suspended, "the machines of two of four writers are suspended for longer than that")
def clock_stands_still_while_suspended() -> Iterator[None]:
    """A node does not count the time during which its machine was suspended (D39)."""
    pause, resume = Process.pause, Process.resume
    since: dict[Process, int] = {}

    def paused(self: Process) -> None:
        since[self] = self.clock()
        pause(self)

    def resumed(self: Process) -> None:
        if self.is_paused:
            self._local, self._since = since.pop(self), self.kernel.now
        resume(self)

    with replaced(Process, "pause", paused), replaced(Process, "resume", resumed):
        yield
