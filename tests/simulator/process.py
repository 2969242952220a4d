"""Simulated process: runs the production loop of a server or client, turn by turn.

It can be started, killed, paused and resumed; its clock may run fast or slow. Its work takes time:
a turn takes a fixed time, a disk sync the disk's latency, and frames leave that much later. Rule: a
process that stopped itself (`Halted`) is as dead as a killed one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn, Protocol

from tests.simulator.kernel import US
from tests.simulator.network import SimTransport
from ziplog.errors import ZiplogError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulator.kernel import Kernel
    from tests.simulator.network import Network

#: Duration of one turn of a process.
_TURN_NS: Final = 2 * US


class Halted(BaseException):
    """A process stopped itself, because it cannot continue safely."""


class Program(Protocol):
    """The program of a process, from its start to its end."""

    def turn(self) -> None:
        """Process pending work, then let the transport wait."""
        ...

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        ...

    def end(self) -> None:
        """Release resources held for this program: the process is dead."""
        ...


class Process:
    """One process, dead or alive.

    Args:
        network: the simulated network.
        name: for faults and the trace.
        endpoint: the address to listen on ("host:port"); None: none.
        start: creates a new program at every start.

    """

    def __init__(
        self,
        network: Network,
        name: str,
        endpoint: str | None,
        start: Callable[[Process], Program],
    ) -> None:
        self.kernel: Final[Kernel] = network.kernel
        self.name: Final = name
        self.endpoint: Final = endpoint
        #: The program while the process runs.
        self.program: Program | None = None
        self.transport: SimTransport | None = None
        self.is_paused = False
        #: A turn waits until the time of the last one is over. Otherwise only its frames wait.
        self.is_one_at_a_time = False
        self._free_at = 0
        #: Number of starts.
        self.starts = 0
        #: The reason of each self-stop.
        self.halts: list[str] = []
        #: Called when the process stopped itself.
        self.on_halt: Callable[[Process], object] = lambda _process: None
        self._network: Final = network
        self._start: Final = start
        self._due: int | None = None
        self._spent_ns = 0
        self._is_busy = self._is_woken = self._is_asleep = False
        self._sleep_ns: int | None = None
        # Local time: `_local` at `_since`, and from there on at `_rate`.
        self._rate, self._local, self._since = 1.0, self.kernel.now, self.kernel.now

    # --- life and death ---

    @property
    def is_up(self) -> bool:
        """Whether it is alive: running or paused."""
        return self.program is not None

    def start(self) -> None:
        """Start it (again)."""
        assert self.program is None, f"{self.name} runs already"
        self.starts += 1
        self.is_paused = False
        self.kernel.record(b"start " + self.name.encode())
        self.transport = SimTransport(self._network, self)
        try:
            self.program = self._start(self)
        except Halted as halted:
            self._halted(halted)
        except (OSError, ZiplogError) as error:
            self._halted(Halted(f"it cannot start: {error}"))
        else:
            self._schedule(self.kernel.now)

    def kill(self) -> None:
        """End the process immediately; its memory is lost."""
        if self.transport is not None:
            self.transport.close()
        program, self.program, self.transport = self.program, None, None
        self._due = None
        self._spent_ns = 0
        self.is_paused = False
        self.kernel.record(b"end " + self.name.encode())
        if program is not None:
            program.end()

    def pause(self) -> None:
        """Pause the process; frames to it wait."""
        self.is_paused = True

    def resume(self) -> None:
        """Resume the process."""
        if self.is_paused:
            self.is_paused = False
            self._schedule(self.kernel.now)

    def halt(self, reason: str, _state: str = "") -> NoReturn:
        """End the process from inside, as production does when it must not continue."""
        raise Halted(reason)

    def stop_itself(self, reason: str) -> None:
        """End the process from inside, between turns."""
        self._halted(Halted(reason))

    def _halted(self, halted: Halted) -> None:
        self.halts.append(str(halted))
        self.kernel.trace(f"{self.name} stopped itself: {halted}")
        self.kill()
        self.on_halt(self)

    def from_inside(self, action: Callable[[], object]) -> None:
        """Run an action as another thread of this process."""
        try:
            action()
        except Halted as halted:
            self._halted(halted)
        except OSError as error:
            self._halted(Halted(str(error)))

    # --- time ---

    def clock(self) -> int:
        """Return this machine's monotonic time, in nanoseconds."""
        now = self.kernel.now + self._spent_ns
        return self._local + int((now - self._since) * self._rate)

    def skew(self, rate: float) -> None:
        """Change the rate of its clock (1.0: exact)."""
        self._local, self._since, self._rate = self.clock(), self.kernel.now, rate

    def spend(self, duration_ns: int) -> None:
        """Add time to the current turn."""
        self._spent_ns += duration_ns

    @property
    def spent_ns(self) -> int:
        """The time spent in the current turn so far."""
        return self._spent_ns

    # --- turns ---

    def wake(self) -> None:
        """End its sleep: work is pending."""
        self._is_woken = True
        if not self._is_busy:
            self._schedule(max(self.kernel.now, self._free_at))

    def sleep(self, timeout_ns: int | None) -> None:
        """Record, at the end of a turn, how long to sleep (None: until woken)."""
        self._sleep_ns, self._is_asleep = timeout_ns, True

    def _schedule(self, at: int) -> None:
        if self._due is None or at < self._due:
            self._due = at
            self.kernel.at(at, lambda: self._turn(at))

    def _turn(self, at: int) -> None:
        if self._due != at:
            return  # It had an earlier turn.
        self._due = None
        if self.program is None or self.is_paused:
            return
        self._is_busy, self._is_woken, self._is_asleep = True, False, False
        self._spent_ns = _TURN_NS
        try:
            self.program.turn()
            self.program.check()
        except Halted as halted:
            self._halted(halted)
            return
        except OSError as error:  # the driver's loop stops on these; other errors fail the run
            self._halted(Halted(str(error)))
            return
        finally:
            self._is_busy = False
        self._end_turn()

    def _end_turn(self) -> None:
        """Schedule the next turn; not before the time of this one is over."""
        next_turn = self.kernel.now + self._spent_ns
        self._spent_ns = 0
        assert self.transport is not None
        if self.is_one_at_a_time:
            self._free_at = next_turn
        if self._is_asleep and not self._is_woken and not self.transport.is_waiting:
            if self._sleep_ns is None:
                return
            next_turn += int(self._sleep_ns / self._rate) + 1
        self._schedule(next_turn)
