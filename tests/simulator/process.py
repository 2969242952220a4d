"""A process: the production loop of a server or client, turn by turn, and the end of it.

It is started, killed, paused and resumed; its clock may run fast or slow. What it does takes time:
a turn a little, a sync of its disk as long as the disk says, and what it sends afterwards leaves
that much later. Rule: a process that stopped itself (`Halted`) is as dead as one that was killed.
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

#: What one turn of a process takes.
_TURN_NS: Final = 2 * US


class Halted(BaseException):
    """A process found that it cannot go on without doing harm."""


class Program(Protocol):
    """What runs in a process, from its start to its end."""

    def turn(self) -> None:
        """Do what there is to do, then let the transport wait."""
        ...

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        ...

    def end(self) -> None:
        """Let go of what others hold on this program's behalf: the process is dead."""
        ...


class Process:
    """One process, dead or alive.

    Args:
        network: the kernel's.
        name: for faults and the trace.
        endpoint: where it listens ("host:port"); None: nowhere.
        start: makes the program, anew at every start.

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
        #: What runs, while it runs.
        self.program: Program | None = None
        self.transport: SimTransport | None = None
        self.is_paused = False
        #: A turn that comes while the time of the last one is not over waits for that. Otherwise,
        #: only what was sent does.
        self.is_one_at_a_time = False
        self._free_at = 0
        #: How often it was started.
        self.starts = 0
        #: Why it stopped itself, each time.
        self.halts: list[str] = []
        #: Told when it stopped itself.
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
        """Whether it runs, or stands still but is alive."""
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
        """End it at once, wherever it is; what is in its memory is gone."""
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
        """Let it stand still; what it is sent waits."""
        self.is_paused = True

    def resume(self) -> None:
        """Let it go on."""
        if self.is_paused:
            self.is_paused = False
            self._schedule(self.kernel.now)

    def halt(self, reason: str, _state: str = "") -> NoReturn:
        """End the process from inside, as production does when it must not go on."""
        raise Halted(reason)

    def stop_itself(self, reason: str) -> None:
        """End the process from inside, but not out of the middle of a turn."""
        self._halted(Halted(reason))

    def _halted(self, halted: Halted) -> None:
        self.halts.append(str(halted))
        self.kernel.tell(f"{self.name} stopped itself: {halted}")
        self.kill()
        self.on_halt(self)

    def from_inside(self, action: Callable[[], object]) -> None:
        """Do something as another thread of this process would."""
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
        """Let its clock run at another rate from now on (1.0: right)."""
        self._local, self._since, self._rate = self.clock(), self.kernel.now, rate

    def spend(self, duration_ns: int) -> None:
        """Let what the process does right now take time."""
        self._spent_ns += duration_ns

    @property
    def spent_ns(self) -> int:
        """What it has spent in this turn so far."""
        return self._spent_ns

    # --- turns ---

    def wake(self) -> None:
        """End its sleep: there is something to do."""
        self._is_woken = True
        if not self._is_busy:
            self._schedule(max(self.kernel.now, self._free_at))

    def sleep(self, timeout_ns: int | None) -> None:
        """Note, at the end of a turn, for how long there is nothing to do (None: for ever)."""
        self._sleep_ns, self._is_asleep = timeout_ns, True

    def _schedule(self, at: int) -> None:
        if self._due is None or at < self._due:
            self._due = at
            self.kernel.at(at, lambda: self._turn(at))

    def _turn(self, at: int) -> None:
        if self._due != at or self.program is None:
            return  # it had an earlier turn, or is another one by now
        self._due = None
        if self.is_paused:
            return
        self._is_busy, self._is_woken, self._is_asleep = True, False, False
        self._spent_ns = _TURN_NS
        try:
            self.program.turn()
            self.program.check()
        except Halted as halted:
            self._halted(halted)
            return
        except OSError as error:  # what the driver's loop stops on; other errors are found here
            self._halted(Halted(str(error)))
            return
        finally:
            self._is_busy = False
        self._end_turn()

    def _end_turn(self) -> None:
        """Have the next turn when it is due; not before what this one did is over."""
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
