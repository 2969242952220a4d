"""The handlers of signals wait until the engine is between two steps.

CPython runs them in the main thread, between any two bytecodes, and what they raise appears there:
in the middle of a step it would leave the engine torn. So for as long as the main thread is in a
client's call, every handler written in Python is replaced by one that notes the signal, and wakes
the call; the noted handlers run where the call waits, or at its end.

Rules: only the main thread is shielded, and only the outermost call runs handlers. Invariant: while
no call is shielded, the replacement runs the handler that it stands for, so that one left behind
(as another handler raised in the middle of `leave`) changes nothing.
"""

from __future__ import annotations

import signal
import threading

# The functions themselves: the wrappers' enums cost 2 us a call, on the path of every insert.
from _signal import getsignal  # type: ignore[import-not-found]
from _signal import signal as set_handler
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    Handler = Callable[[int, FrameType | None], Any]

#: Those of a machine fault come again at once if their handler returns.
_FAULTS: Final = {"SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGTRAP", "SIGKILL", "SIGSTOP"}
#: Each costs 20 ns a call. The 31 of real time, which hardly any program handles, are left out.
_SIGNALS: Final = tuple(
    int(number)
    for number in signal.Signals
    if number.name not in _FAULTS and not number.name.startswith("SIGRT")
)


class Sleeper(Protocol):
    """What makes shielded calls."""

    def interrupted(self) -> None:
        """End the wait of the shielded call, if it waits. Called between any two bytecodes."""


class Shield:
    """Holds back the handlers of this process."""

    def __init__(self) -> None:
        #: Who makes the shielded call; None: nobody.
        self._owner: Sleeper | None = None
        #: Signals that came, each with the frame of its first coming.
        self.noted: Final[dict[int, FrameType | None]] = {}
        #: What was found last: the handler of each of `_SIGNALS`, and those written in Python.
        self._found: list[Any] = []
        self._handlers: dict[int, Handler] = {}
        #: One object, to be known again.
        self._note: Final = self._noted

    def enter(self, owner: Sleeper) -> bool:
        """Hold back all handlers until `leave`; False if a call is shielded already.

        Only for the main thread. Raises what a handler raises, and then nothing is held back.
        """
        if self._owner is not None:
            return False
        found = list(map(getsignal, _SIGNALS))
        if found != self._found:
            self._learn(found)
        self._owner = owner
        try:
            for number in self._handlers:
                set_handler(number, self._note)
        except BaseException:
            self.leave(owner)
            raise
        return True

    def _learn(self, found: list[Any]) -> None:
        former = self._handlers
        for index, number in enumerate(_SIGNALS):
            if found[index] is self._note:
                found[index] = former.get(number)
        handlers = dict(zip(_SIGNALS, found, strict=True))
        self._handlers = {number: each for number, each in handlers.items() if callable(each)}
        self._found = found

    def _noted(self, number: int, frame: FrameType | None) -> Any:
        owner = self._owner
        if owner is None:
            return self._handlers[number](number, frame)
        self.noted.setdefault(number, frame)
        return owner.interrupted()

    def run(self, owner: Sleeper) -> None:
        """Run the handlers of what was noted, if the call is the shielded one; it may raise."""
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
        """Let handlers run again; first those of what was noted, which may raise."""
        if self._owner is not owner:
            return
        try:
            self._restore()
        except BaseException:
            # A handler that was back already raised; the others must come back, too.
            self._restore()
            raise
        finally:
            self._owner = None
            self._run()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            # A handler that ran meanwhile may have set another one.
            if getsignal(number) is self._note:
                set_handler(number, handler)


#: Handlers belong to the process, so there is one shield.
SHIELD: Final = Shield()
