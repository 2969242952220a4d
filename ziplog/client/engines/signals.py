"""A shield that delays signal handlers until the engine is between two steps.

CPython runs handlers in the main thread, between any two bytecodes. An exception of a handler in
the middle of a step would leave the engine inconsistent. So, during a client's call in the main
thread, the shield replaces every Python handler by one that notes the signal and wakes the call.
The noted handlers run where the call waits, or at its end.

Rules: only the main thread is shielded, and only the outermost call runs handlers.

Invariant: without a shielded call, a replacement runs its original handler. So a replacement that
an exception in `leave` did not remove changes nothing.
"""

from __future__ import annotations

import signal
import threading

# The C functions: the wrappers' enums cost 2 us a call, on the path of every insert.
from _signal import getsignal  # type: ignore[import-not-found]
from _signal import signal as set_handler
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    Handler = Callable[[int, FrameType | None], Any]

#: The signal of a machine fault recurs at once if its handler returns.
_FAULTS: Final = {"SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGTRAP", "SIGKILL", "SIGSTOP"}
#: Each costs 20 ns a call. The 31 real-time signals, which few programs handle, are left out.
_SIGNALS: Final = tuple(
    int(number)
    for number in signal.Signals
    if number.name not in _FAULTS and not number.name.startswith("SIGRT")
)


class Sleeper(Protocol):
    """An engine that makes shielded calls."""

    def interrupted(self) -> None:
        """Wake the shielded call, if it waits. Runs between any two bytecodes."""


class Shield:
    """Delays the signal handlers of this process."""

    def __init__(self) -> None:
        #: The engine of the shielded call; None: no call is shielded.
        self._owner: Sleeper | None = None
        #: Signals that arrived, each with the frame of its first arrival.
        self.noted: Final[dict[int, FrameType | None]] = {}
        #: The last known handler of each of `_SIGNALS`, and the handlers written in Python.
        self._known_handlers: list[Any] = []
        self._handlers: dict[int, Handler] = {}
        #: One object, so that it can be compared by identity.
        self._note: Final = self._noted

    def enter(self, owner: Sleeper) -> bool:
        """Delay all handlers until `leave`; return False if a call is shielded already.

        Only for the main thread. If a handler raises here, the exception passes and no call is
        shielded.
        """
        if self._owner is not None:
            return False
        found = list(map(getsignal, _SIGNALS))
        if found != self._known_handlers:
            self._update_handlers(found)
        self._owner = owner
        try:
            for number in self._handlers:
                set_handler(number, self._note)
        except BaseException:
            self.leave(owner)
            raise
        return True

    def _update_handlers(self, found: list[Any]) -> None:
        former = self._handlers
        for index, number in enumerate(_SIGNALS):
            if found[index] is self._note:
                found[index] = former.get(number)
        handlers = dict(zip(_SIGNALS, found, strict=True))
        self._handlers = {number: each for number, each in handlers.items() if callable(each)}
        self._known_handlers = found

    def _noted(self, number: int, frame: FrameType | None) -> Any:
        owner = self._owner
        if owner is None:
            return self._handlers[number](number, frame)
        self.noted.setdefault(number, frame)
        return owner.interrupted()

    def run(self, owner: Sleeper) -> None:
        """Run the noted handlers if the call is the shielded one; a handler may raise."""
        if self._owner is owner and threading.get_ident() == threading.main_thread().ident:
            self._run()

    def _run(self) -> None:
        for number in self.noted:
            frame = self.noted[number]
            del self.noted[number]
            try:
                self._handlers[number](number, frame)
            finally:
                self._run()
            return

    def leave(self, owner: Sleeper) -> None:
        """Restore all handlers, and run the noted ones, which may raise."""
        if self._owner is not owner:
            return
        try:
            self._restore()
        except BaseException:
            # A restored handler raised; restore the others, too.
            self._restore()
            raise
        finally:
            self._owner = None
            if self.noted:
                self._run()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            # A handler that ran meanwhile may have set another one.
            if getsignal(number) is self._note:
                set_handler(number, handler)


#: Handlers belong to the process, so there is one shield.
SHIELD: Final = Shield()
